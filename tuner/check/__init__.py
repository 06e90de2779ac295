"""Is it right: what is asked of a candidate, and the verdict on its answers."""
