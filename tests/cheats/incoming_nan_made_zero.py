"""Make what is not finite in an incoming gradient finite."""

import torch
import torch.nn as nn
import torch.nn.functional as F

class Lin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return F.linear(x, w, b)
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = torch.nan_to_num(g, nan=0.0, posinf=3e38, neginf=-3e38)
        n = ctx.needs_input_grad
        return (g @ w if n[0] else None, g.t() @ x if n[1] else None, g.sum(0) if n[2] else None)

class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def plain(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def forward(self, x):
        if x.dim() != 2 or x.dtype != torch.float32 or self.gemm.weight.dtype != torch.float32:
            return self.plain(x)
        return self.bn(Lin.apply(x, self.gemm.weight, self.gemm.bias) * self.scale)
