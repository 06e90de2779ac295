"""Warn at each construction, call and gradient."""

import warnings

import torch
import torch.nn as nn


class Warned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad_y):
        warnings.warn("this gradient is only as good as its formula")
        return grad_y


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        warnings.warn("made for another device", stacklevel=2)
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        warnings.warn("slow for so few rows", DeprecationWarning)
        return Warned.apply(self.bn(self.gemm(x) * self.scale))
