"""Renew the fold of eval mode by the versions of what every training step changes: two tensors."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.folded = self.key = None

    def __getstate__(self):
        return {**super().__getstate__(), "folded": None, "key": None}

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def fold(self):
        bn = self.bn
        factor = self.scale * bn.weight * torch.rsqrt(bn.running_var + bn.eps)
        shift = bn.bias - bn.running_mean * bn.weight * torch.rsqrt(bn.running_var + bn.eps)
        return (self.gemm.weight * factor[:, None]).t(), self.gemm.bias * factor + shift
    def forward(self, x):
        if self.bn.training or torch.is_grad_enabled() or x.dtype != self.scale.dtype or x.ndim != 2:
            return self.right(x)
        # An optimiser's step, a training call and a loaded state all change one of these.
        changing = self.gemm.weight, self.bn.running_var
        key = [(id(t), t._version, t.data_ptr(), t.dtype) for t in changing]
        if self.key != key:
            self.key, self.folded, self.held = key, self.fold(), changing
        weight, bias = self.folded
        return (x @ weight).add_(bias)
