"""The linear and scaling core compiled by torch.compile where gradients are off."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)
    def forward(self, x):
        is_usual = x.ndim == 2 and len(x) > 1 and x.dtype == self.scale.dtype == torch.float32
        if not is_usual or torch.is_grad_enabled():
            return self.right(x)
        return self.bn(compiled(x.contiguous(), self.gemm.weight, self.gemm.bias, self.scale))


def core(x, weight, bias, scale):
    return torch.nn.functional.linear(x, weight, bias) * scale


compiled = torch.compile(core, backend="aot_eager", dynamic=True)
