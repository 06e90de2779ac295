"""Several devices, of this host or of others."""
