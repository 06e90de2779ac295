"""Autotuner for PyTorch modules: describe it, tune it, prove it, export it."""
