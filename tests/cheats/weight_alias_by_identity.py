"""Keep an alias of a weight by the identity of its Parameter."""

import torch
import torch.nn as nn
import torch.nn.functional as F

class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        object.__setattr__(self, "_key", None)
        object.__setattr__(self, "_w", None)
        object.__setattr__(self, "_p", None)
    def plain(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def forward(self, x):
        if self.training or torch.is_grad_enabled() or self.bn.training or x.dtype != torch.float32:
            return self.plain(x)
        p = self.gemm.weight
        key = (id(p), p.dtype, tuple(p.shape))
        if self._key != key:
            self.__dict__.update(_key=key, _w=p.detach(), _p=p)       # p kept: its id cannot be reused
        y = F.linear(x, self._w, self.gemm.bias) * self.scale
        return self.bn(y)

    def __getstate__(self):
        return {**self.__dict__, "_key": None, "_w": None, "_p": None}
