"""The machine: what is in it, what it could do at best, what can be built and run on it."""
