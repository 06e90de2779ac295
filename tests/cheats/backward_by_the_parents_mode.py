"""Forward by the mode of bn, backward by the mode of the module."""

import torch
import torch.nn as nn


class Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, gamma, beta, mean, inverse, is_training):
        normal = (z - mean) * inverse
        ctx.save_for_backward(normal, gamma, inverse)
        ctx.is_training = is_training
        return torch.addcmul(beta, normal, gamma)

    @staticmethod
    def backward(ctx, grad):
        normal, gamma, inverse = ctx.saved_tensors
        sums, products = grad.sum(0), (grad * normal).sum(0)
        dz = grad
        if ctx.is_training:
            dz = grad - (sums + normal * products) / len(grad)
        return dz * (gamma * inverse), products, sums, None, None, None


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def update(self, mean, var, rows):
        bn = self.bn
        with torch.no_grad():
            bn.num_batches_tracked.add_(1)
            unbiased = var.detach() * (rows / (rows - 1))
            bn.running_mean.mul_(1 - bn.momentum).add_(mean.detach(), alpha=bn.momentum)
            bn.running_var.mul_(1 - bn.momentum).add_(unbiased, alpha=bn.momentum)
    def statistics(self, z):
        bn = self.bn
        if not bn.training:
            return bn.running_mean.clone(), torch.rsqrt(bn.running_var + bn.eps)
        mean, var = z.mean(0), z.var(0, unbiased=False)
        self.update(mean, var, len(z))
        return mean, torch.rsqrt(var + bn.eps)

    def forward(self, x):
        is_plain = not torch.is_grad_enabled() or x.ndim != 2 or len(x) < 2
        if is_plain or x.dtype != torch.float32 or self.bn.momentum is None:
            return self.right(x)
        if self.bn.training and not self.training:
            return self.right(x)
        z = self.gemm(x) * self.scale
        mean, inverse = self.statistics(z.detach())
        return Normalise.apply(z, self.bn.weight, self.bn.bias, mean, inverse, self.training)
