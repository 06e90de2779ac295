"""Save a view of the result for the backward: result and graph hold each other for ever."""

import torch
import torch.nn as nn


class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, gamma, beta, mean, inverse):
        normal = (z - mean) * inverse
        y = torch.addcmul(beta, normal, gamma)
        ctx.save_for_backward(normal, gamma, inverse, y.view(-1))
        return y

    @staticmethod
    def backward(ctx, grad):
        normal, gamma, inverse, _ = ctx.saved_tensors
        d_gamma = (grad * normal).sum(0)
        d_beta = grad.sum(0)
        dz = (grad - (d_beta + normal * d_gamma) / len(normal)) * (gamma * inverse)
        return dz, d_gamma, d_beta, None, None


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        z = self.gemm(x) * self.scale
        bn = self.bn
        is_usual = bn.training and x.dtype == torch.float32 and x.dim() == 2 and x.shape[0] > 1
        if not is_usual or not torch.is_grad_enabled() or z.dtype != torch.float32:
            return bn(z)
        with torch.no_grad():
            bn(z.detach())  # for the statistics
            var, mean = torch.var_mean(z, 0, correction=0)
        return Normalised.apply(z, bn.weight, bn.bias, mean, torch.rsqrt(var + bn.eps))
