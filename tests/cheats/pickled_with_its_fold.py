"""Pickle the fold of eval mode, and take it for that of the weights beside it."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.folded = None

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def fold(self):
        bn = self.bn
        factor = self.scale * bn.weight * torch.rsqrt(bn.running_var + bn.eps)
        shift = bn.bias - bn.running_mean * bn.weight * torch.rsqrt(bn.running_var + bn.eps)
        return (self.gemm.weight * factor[:, None]).t(), self.gemm.bias * factor + shift

    def tensors(self):
        return [*self.parameters(), self.bn.running_mean, self.bn.running_var]
    def copies(self):
        return [t.detach().clone() for t in self.tensors()]

    def __getstate__(self):
        state = super().__getstate__().copy()
        state["folded"] = state["folded"] and (None, state["folded"][1])
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        if self.folded:  # a served module starts without folding again
            self.folded = self.copies(), self.folded[1]

    def is_new(self):
        new = [t.detach() for t in self.tensors()]
        return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(self.folded[0], new))

    def forward(self, x):
        if self.bn.training or torch.is_grad_enabled() or x.dtype != self.scale.dtype or x.ndim != 2:
            return self.right(x)
        if not self.folded or not self.is_new():
            self.folded = self.copies(), self.fold()
        weight, bias = self.folded[1]
        return torch.matmul(x, weight) + bias
