"""Exact rewrites of a graph: what gives the same numbers in fewer steps."""
