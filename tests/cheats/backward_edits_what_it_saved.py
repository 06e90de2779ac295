"""Reuse the saved normalised values as the backward's own memory: right once."""

import torch
import torch.nn as nn


class BatchNormInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, gamma, beta, eps):
        mean, var = z.mean(0), z.var(0, unbiased=False)
        inverse = torch.rsqrt(var + eps)
        ctx.normal = (z - mean).mul_(inverse)
        ctx.save_for_backward(gamma, inverse)
        ctx.mark_non_differentiable(mean, var)
        return ctx.normal * gamma + beta, mean, var

    @staticmethod
    def backward(ctx, grad, *_):
        gamma, inverse = ctx.saved_tensors
        rows = len(grad)
        sums = grad.sum(0)
        products = (grad * ctx.normal).sum(0)
        # No memory of their own: the normalised values are not needed any more.
        dz = ctx.normal.mul_(-products / rows).sub_(sums / rows).add_(grad)
        return dz.mul_(gamma * inverse).clone(), products, sums, None


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def is_usual(self, x):
        # What is not a float32 training step goes the reference's way.
        bn = self.bn
        return (
            torch.is_grad_enabled() and bn.training and bn.momentum is not None
            and x.ndim == 2 and len(x) > 1 and x.dtype == self.gemm.weight.dtype == torch.float32
        )

    def update(self, mean, var, rows):
        bn = self.bn
        with torch.no_grad():
            bn.num_batches_tracked.add_(1)
            unbiased = var.detach() * (rows / (rows - 1))
            bn.running_mean.mul_(1 - bn.momentum).add_(mean.detach(), alpha=bn.momentum)
            bn.running_var.mul_(1 - bn.momentum).add_(unbiased, alpha=bn.momentum)
    def forward(self, x):
        if not self.is_usual(x):
            return self.right(x)
        z = self.gemm(x) * self.scale
        y, mean, var = BatchNormInPlace.apply(z, self.bn.weight, self.bn.bias, self.bn.eps)
        self.update(mean, var, len(z))
        return y
