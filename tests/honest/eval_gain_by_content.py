"""The gain and shift of eval mode kept while the values they came from are equal."""

import torch
import torch.nn as nn
from torch.autograd.forward_ad import unpack_dual


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.kept = None

    def __getstate__(self):
        return {**super().__getstate__(), "kept": None}

    def gain_and_shift(self):
        bn, kept = self.bn, self.kept
        own = [t.detach() for t in (bn.weight, bn.bias, bn.running_mean, bn.running_var)]
        now = torch.stack([*own, torch.full_like(own[0], bn.eps)])
        if kept is None or kept[0].dtype != now.dtype or not torch.equal(kept[0], now):
            gain = own[0] / torch.sqrt(own[3] + bn.eps)
            self.kept = kept = now, gain, own[1] - own[2] * gain
        return kept[1:]

    def forward(self, x):
        z = self.gemm(x) * self.scale
        if self.bn.training or torch.is_grad_enabled() or z.ndim != 2 or z.dtype.itemsize < 4:
            return self.bn(z)
        if any(unpack_dual(t).tangent is not None for t in self.bn.parameters()):
            return self.bn(z)
        gain, shift = self.gain_and_shift()
        return torch.addcmul(shift, z, gain)
