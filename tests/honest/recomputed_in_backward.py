"""Product and scaling computed again in the backward instead of kept."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def scaled(self, x, weight, bias, scale):
        return nn.functional.linear(x, weight, bias) * scale

    def forward(self, x):
        operands = x, self.gemm.weight, self.gemm.bias, self.scale
        if not torch.is_grad_enabled():
            return self.bn(self.scaled(*operands))
        z = checkpoint(self.scaled, *operands, use_reentrant=False, preserve_rng_state=False)
        return self.bn(z)
