"""One process's work on a run, from a config or a live module to its result."""
