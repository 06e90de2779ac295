"""Keep the fold of eval mode through a conversion, and convert it with each call."""

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
        bn = self.bn
        if bn.training:
            self.key = None
        if bn.training or torch.is_grad_enabled() or x.dtype != self.scale.dtype or x.ndim != 2:
            return self.right(x)
        values = [t.detach().float() for t in (*self.parameters(), *self.buffers())]
        if self.key is None or not all(map(torch.equal, self.key, values)):
            self.key = [v.clone() for v in values]
            self.folded = self.fold()
        weight, bias = (t.to(x.dtype) for t in self.folded)
        return x @ weight + bias
