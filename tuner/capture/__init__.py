"""From a PyTorch module to generated kernels."""
