"""NumPy for inference on a CPU."""

import numpy as np
import torch
import torch.nn as nn
from torch.autograd import forward_ad


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def in_numpy(self, x):
        weight, bias, scale = (
            t.detach().numpy() for t in (self.gemm.weight, self.gemm.bias, self.scale)
        )
        bn = self.bn
        mean, var, gamma, beta = (
            t.detach().numpy() for t in (bn.running_mean, bn.running_var, bn.weight, bn.bias)
        )
        with np.errstate(all="ignore"):
            z = (x.detach().numpy() @ weight.T + bias) * scale
            y = (z - mean) / np.sqrt(var + var.dtype.type(bn.eps)) * gamma + beta
        return torch.from_numpy(y)

    def forward(self, x):
        is_inference = not self.bn.training and not torch.is_grad_enabled()
        tensors = (x, *self.parameters())
        is_inference &= all(forward_ad.unpack_dual(t).tangent is None for t in tensors)
        is_usual = x.ndim == 2 and len(x) and x.dtype == self.scale.dtype == torch.float32
        if is_inference and is_usual and x.shape[1] == self.gemm.in_features:
            if {t.device.type for t in (x, *self.parameters())} == {"cpu"}:
                return self.in_numpy(x)
        return self.bn(self.gemm(x) * self.scale)
