"""LayerNorm over long rows: KernelBench level 1, problem 40, whose rows are 64 x 256 x 256."""

import torch
import torch.nn as nn


class Model(nn.Module):
    """Normalise each row to mean 0 and variance 1, then apply a weight and a bias per element."""

    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape=normalized_shape)

    def forward(self, x):
        """Map x of shape [..., *normalized_shape] to the same shape."""
        return self.ln(x)


rows = 16
cols = 4194304


def get_inputs():
    """Return the arguments of one call of `forward`."""
    return [torch.rand(rows, cols)]


def get_init_inputs():
    """Return the arguments of the constructor."""
    return [(cols,)]
