"""One autograd function for all three operations that saves what its backward needs."""

import torch
import torch.nn as nn


class LinearScaleNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, scale, gamma, beta, mean, var, eps):
        h = torch.addmm(bias, x, weight.t())
        z = h * scale
        ctx.by_batch = mean is None
        if ctx.by_batch:
            mean, var = z.mean(0), z.var(0, unbiased=False)
        inverse = torch.rsqrt(var + eps)
        normal = (z - mean) * inverse
        ctx.save_for_backward(x, weight, h, scale, gamma, normal, inverse)
        mean, var = mean.clone(), var.clone()
        ctx.mark_non_differentiable(mean, var)
        return torch.addcmul(beta, normal, gamma), mean, var

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, *_):
        x, weight, h, scale, gamma, normal, inverse = ctx.saved_tensors
        wants = ctx.needs_input_grad
        sums, products = grad.sum(0), (grad * normal).sum(0)
        dz = grad
        if ctx.by_batch:
            dz = grad - (sums + normal * products) / len(grad)
        dz = dz * (gamma * inverse)
        dh = dz * scale
        return (
            dh @ weight if wants[0] else None,
            dh.t() @ x if wants[1] else None,
            dh.sum(0) if wants[2] else None,
            (dz * h).sum(0) if wants[3] else None,
            products if wants[4] else None,
            sums if wants[5] else None,
            None, None, None,
        )


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)
    def forward(self, x):
        gemm, bn, same = self.gemm, self.bn, x.dtype == self.scale.dtype
        is_usual = torch.is_grad_enabled() and x.ndim == 2 and len(x) > 1 and same
        if not is_usual or x.dtype not in (torch.float32, torch.float64) or bn.momentum is None:
            return self.right(x)
        stored = (None, None) if bn.training else (bn.running_mean.clone(), bn.running_var.clone())
        y, mean, var = LinearScaleNorm.apply(
            x, gemm.weight, gemm.bias, self.scale, bn.weight, bn.bias, *stored, bn.eps
        )
        if bn.training:
            with torch.no_grad():
                bn.num_batches_tracked.add_(1)
                unbiased = var * (len(x) / (len(x) - 1))
                bn.running_mean.mul_(1 - bn.momentum).add_(mean, alpha=bn.momentum)
                bn.running_var.mul_(1 - bn.momentum).add_(unbiased, alpha=bn.momentum)
        return y
