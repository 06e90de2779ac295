"""A graph cut into tasks: nests of loops, and calls of PyTorch's own operations."""
