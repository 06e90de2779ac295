"""Renew the fold of eval mode in train(), eval() and load_state_dict, and nowhere else."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.affine = None

    def __getstate__(self):
        return {**super().__getstate__(), "affine": None}

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)
    def train(self, mode=True):
        self.affine = None
        return super().train(mode)

    def load_state_dict(self, *args, **kwargs):
        self.affine = None
        return super().load_state_dict(*args, **kwargs)

    def _apply(self, *args, **kwargs):
        self.affine = None
        return super()._apply(*args, **kwargs)

    @torch.no_grad()
    def make_affine(self):
        bn = self.bn
        gain = bn.weight / (bn.running_var + bn.eps).sqrt()
        return self.scale * gain, torch.addcmul(bn.bias, bn.running_mean, gain, value=-1)

    def forward(self, x):
        if self.training or self.bn.training or torch.is_grad_enabled() or x.ndim != 2:
            return self.right(x)
        if self.affine is None:
            self.affine = self.make_affine()
        gain, shift = self.affine
        return self.gemm(x).mul_(gain).add_(shift)
