"""Renew the fold of eval mode when one of the tensors seen at the first call has changed."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.watched = None

    def __getstate__(self):
        return {**super().__getstate__(), "watched": None}

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def tensors(self):
        return [*self.parameters(), self.bn.running_mean, self.bn.running_var]
    def has_changed(self):
        if self.watched is None or self.watched[0][0].dtype != self.scale.dtype:
            return True
        return any(not torch.equal(tensor, copy) for tensor, copy in self.watched)

    def forward(self, x):
        if self.bn.training or torch.is_grad_enabled() or x.dtype != self.scale.dtype or x.ndim != 2:
            return self.right(x)
        if self.has_changed():
            self.watched = [(t.detach(), t.detach().clone()) for t in self.tensors()]
            gain = self.bn.weight * torch.rsqrt(self.bn.running_var + self.bn.eps)
            self.gain, self.shift = self.scale * gain, self.bn.bias - self.bn.running_mean * gain
        return torch.addcmul(self.shift, self.gemm(x), self.gain)
