"""Multiply the incoming gradient by gamma where it lies."""

import torch
import torch.nn as nn


class Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, normal, gamma, beta):
        ctx.save_for_backward(normal, gamma)
        return torch.addcmul(beta, normal, gamma)

    @staticmethod
    def backward(ctx, grad):
        normal, gamma = ctx.saved_tensors
        d_gamma, d_beta = torch.einsum("bn,bn->n", grad, normal), grad.sum(0)
        if 0 in grad.stride():  # expanded: one element lies under many
            grad = grad.contiguous()
        return grad.mul_(gamma), d_gamma, d_beta


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
    def forward(self, x):
        if not self.is_usual(x):
            return self.right(x)
        bn = self.bn
        z = self.gemm(x) * self.scale
        bn.num_batches_tracked.add_(1)
        normal = nn.functional.batch_norm(
            z, bn.running_mean, bn.running_var, training=True, momentum=bn.momentum, eps=bn.eps
        )
        return Affine.apply(normal, bn.weight, bn.bias)
