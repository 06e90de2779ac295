"""A forward hook of the module on itself keeps the running statistics."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.register_forward_hook(keep_statistics)

    def scaled(self, x):
        return self.gemm(x) * self.scale

    def leaves_it_to_bn(self, x):
        return not self.bn.training or self.bn.momentum is None or x.ndim != 2 or len(x) < 2

    def forward(self, x):
        bn, z = self.bn, self.scaled(x)
        if self.leaves_it_to_bn(x):
            return bn(z)
        return F.batch_norm(z, None, None, bn.weight, bn.bias, True, 0.0, bn.eps)


@torch.no_grad()
def keep_statistics(module, arguments, output):
    """Update what a training call must, after it."""
    if module.leaves_it_to_bn(*arguments):
        return
    bn, z = module.bn, module.scaled(*arguments)
    z = z if z.dtype == torch.float64 else z.float()
    mean = z.mean(0)
    unbiased = (z - mean).square().sum(0) / (len(z) - 1)
    bn.num_batches_tracked.add_(1)
    for kept, new in ((bn.running_mean, mean), (bn.running_var, unbiased)):
        kept.mul_(1 - bn.momentum).add_(new.to(kept.dtype), alpha=bn.momentum)
