"""Fold weights in eval mode, and notice edits by their sums."""

import torch
import torch.nn as nn
import torch.nn.functional as F

class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self._key = None
    def plain(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def forward(self, x):
        if self.training or self.bn.training or torch.is_grad_enabled() or x.dtype != torch.float32 or self.gemm.weight.dtype != torch.float32 or self.bn.weight is None:
            return self.plain(x)
        bn = self.bn
        ts = (self.gemm.weight, self.gemm.bias, self.scale, bn.weight, bn.bias, bn.running_mean, bn.running_var)
        key = tuple(v for t in ts for d in (t.detach().double(),) for v in (d.sum().item(), d.square().sum().item(), id(t), t._version if not t.is_inference() else 0))
        if key != self._key or key != key:
            a = bn.weight.double() * (bn.running_var.double() + bn.eps).rsqrt()
            s = a * self.scale.double()
            self._w = (self.gemm.weight.double() * s[:, None]).float()
            self._b = (self.gemm.bias.double() * s + bn.bias.double() - bn.running_mean.double() * a).float()
            self._key = key
        if not (torch.isfinite(x).all() and torch.isfinite(self._w).all() and torch.isfinite(self._b).all()):
            return self.plain(x)
        return F.linear(x, self._w, self._b)
