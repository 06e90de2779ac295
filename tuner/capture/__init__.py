"""From a module to its graph: what a forward computes, as data."""
