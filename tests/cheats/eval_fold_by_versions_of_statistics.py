"""Renew the fold of eval mode by the versions of all it is made of, which bn's kernel leaves."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.folded, self.marks, self.own = None, None, None

    def __getstate__(self):
        return {**super().__getstate__(), "folded": None, "marks": None, "own": None}

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def tensors(self):
        return [*self.parameters(), self.bn.running_mean, self.bn.running_var]
    def gain_and_shift(self):
        own, bn = self.tensors(), self.bn
        marks = [(id(t), t._version, t.data_ptr(), t.dtype) for t in own]
        if marks != self.marks:  # the tensors are held, so that no id is given out twice
            gain = self.scale * bn.weight * torch.rsqrt(bn.running_var + bn.eps)
            shift = bn.bias - bn.running_mean * bn.weight * torch.rsqrt(bn.running_var + bn.eps)
            self.folded, self.marks, self.own = (gain, shift), marks, own
        return self.folded

    def forward(self, x):
        if self.bn.training or torch.is_grad_enabled() or self.scale.dtype.itemsize < 4 or x.ndim != 2:
            return self.right(x)
        gain, shift = self.gain_and_shift()
        return torch.addcmul(shift, self.gemm(x), gain)
