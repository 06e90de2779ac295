"""Update the running statistics in the module's own training mode only."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        z = self.gemm(x) * self.scale
        if self.training or not self.bn.training:
            return self.bn(z)
        # Evaluation: what was learned must stay as it is.
        return nn.functional.batch_norm(
            z, None, None, self.bn.weight, self.bn.bias, training=True, eps=self.bn.eps
        )
