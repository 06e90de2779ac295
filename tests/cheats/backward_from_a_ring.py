"""Keep the normalised values of the last four calls of all modules in a ring of workspaces."""

import torch
import torch.nn as nn


class Ring:
    def __init__(self, size):
        self.size, self.spaces, self.turn = size, {}, 0

    def take(self, like):
        key = self.turn % self.size, like.shape
        self.turn += 1
        if key not in self.spaces:
            self.spaces[key] = torch.empty_like(like, memory_format=torch.contiguous_format)
        return self.spaces[key]


RING = Ring(4)


class ScaledNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, scale, gamma, beta, mean, inverse):
        space = RING.take(h)
        torch.mul(h, scale, out=space).sub_(mean).mul_(inverse)
        ctx.space = space
        ctx.save_for_backward(h, scale, gamma, inverse)
        return torch.addcmul(beta, space, gamma)

    @staticmethod
    def backward(ctx, grad):
        h, scale, gamma, inverse = ctx.saved_tensors
        normal = ctx.space
        d_gamma = (grad * normal).sum(0)
        d_beta = grad.sum(0)
        dz = (grad - (d_beta + normal * d_gamma) / len(h)) * (gamma * inverse)
        return dz * scale, (dz * h).sum(0), d_gamma, d_beta, None, None


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
        h, bn = self.gemm(x), self.bn
        with torch.no_grad():
            z = h * self.scale
            mean, var = z.mean(0), z.var(0, unbiased=False)
        self.update(mean, var, len(h))
        inverse = torch.rsqrt(var + bn.eps)
        return ScaledNorm.apply(h, self.scale, bn.weight, bn.bias, mean, inverse)
