"""The standalone module, the certificate that goes with it, and putting that to the test."""
