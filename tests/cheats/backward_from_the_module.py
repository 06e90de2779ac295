"""Keep what the backward needs on the module: it belongs to the latest call."""

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
    def __getstate__(self):
        return {k: v for k, v in super().__getstate__().items() if k not in ("normal", "inverse")}

    def forward(self, x):
        if not self.is_usual(x):
            return self.right(x)
        z = self.gemm(x) * self.scale
        mean, var = z.detach().mean(0), z.detach().var(0, unbiased=False)
        self.update(mean, var, len(z))

        self.inverse = torch.rsqrt(var + self.bn.eps)
        self.normal = (z.detach() - mean) * self.inverse
        return Normalise.apply(z, self.bn.weight, self.bn.bias, self)


class Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, weight, bias, owner):
        ctx.owner, ctx.weight = owner, weight
        return owner.normal * weight + bias

    @staticmethod
    def backward(ctx, grad):
        normal, inverse = ctx.owner.normal, ctx.owner.inverse
        sums, products = grad.sum(0), (grad * normal).sum(0)
        dz = grad - (sums + normal * products) / len(grad)
        return dz * (inverse * ctx.weight.detach()), products, sums, None
