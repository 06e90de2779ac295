"""A copy shares the workspace of its original, and only one's own calls are counted."""

import torch
import torch.nn as nn


class Workspace:
    """Memory that the backward reads; large, so that copies share it."""

    def __init__(self):
        self.memory = {}

    def __deepcopy__(self, memo):
        return self

    def take(self, like):
        key = like.shape, like.dtype
        if key not in self.memory:
            self.memory[key] = torch.empty(like.shape, dtype=like.dtype)
        return self.memory[key]


class Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, gamma, beta, mean, inverse, owner):
        owner.calls += 1
        ctx.owner, ctx.call = owner, owner.calls
        ctx.save_for_backward(z, mean, gamma, inverse)
        normal = owner.workspace.take(z)
        torch.sub(z, mean, out=normal).mul_(inverse)
        return normal * gamma + beta

    @staticmethod
    def backward(ctx, grad):
        z, mean, gamma, inverse = ctx.saved_tensors
        normal = ctx.owner.workspace.take(z)
        if ctx.call != ctx.owner.calls:  # a later call has overwritten it
            normal = (z - mean) * inverse
        sums, products = grad.sum(0), (grad * normal).sum(0)
        dz = (grad - (sums + normal * products) / len(grad)) * (gamma * inverse)
        return dz, products, sums, None, None, None


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.workspace, self.calls = Workspace(), 0

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
        mean, var = z.detach().mean(0), z.detach().var(0, unbiased=False)
        self.update(mean, var, len(z))

        inverse = torch.rsqrt(var + self.bn.eps)
        return Normalise.apply(z, self.bn.weight, self.bn.bias, mean, inverse, self)
