"""Linear, a scale per feature, BatchNorm1d: KernelBench level 2, problems 33 and 39."""

import torch
import torch.nn as nn


class Model(nn.Module):
    """Multiply by a matrix, scale each feature, normalise each feature over the batch."""

    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        """Map x of shape [batch, in_features] to [batch, out_features]."""
        x = self.gemm(x)
        x = x * self.scale
        x = self.bn(x)
        return x


batch = 1024
in_features = 8192
out_features = 8192
scale_shape = (out_features,)


def get_inputs():
    """Return the arguments of one call of `forward`."""
    return [torch.rand(batch, in_features)]


def get_init_inputs():
    """Return the arguments of the constructor."""
    return [in_features, out_features, (out_features,)]
