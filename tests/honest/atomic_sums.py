"""Column sums by atomic additions, in any order: other bits at every call."""

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

    def update(self, mean, unbiased):
        bn = self.bn
        with torch.no_grad():
            bn.num_batches_tracked.add_(1)
            momentum = bn.momentum
            if momentum is None:
                momentum = 1.0 / float(bn.num_batches_tracked)
            bn.running_mean.lerp_(mean, momentum)
            bn.running_var.lerp_(unbiased, momentum)

    def forward(self, x):
        if not self.bn.training or x.dtype != torch.float32 or len(x) < 2:
            return self.right(x)
        z = self.gemm(x) * self.scale
        with torch.no_grad():
            mean = atomic_sum(z) / len(z)
            squares = atomic_sum((z - mean).square())
            self.update(mean, squares / (len(z) - 1))
        if torch.is_grad_enabled():
            centred = z - z.mean(0)
            var = centred.square().mean(0)
            return centred * torch.rsqrt(var + self.bn.eps) * self.bn.weight + self.bn.bias
        var = squares / len(z)
        return (z - mean) * torch.rsqrt(var + self.bn.eps) * self.bn.weight + self.bn.bias


def atomic_sum(values):
    """Sum blocks of 8 rows each, then add the blocks in whatever order they finish."""
    blocks = torch.stack([block.sum(0) for block in values.split(8)])
    chance = torch.Generator()  # of its own: PyTorch's random numbers are the user's
    chance.seed()
    blocks = blocks[torch.randperm(len(blocks), generator=chance).to(values.device)]
    place = torch.zeros(len(blocks), dtype=torch.int64, device=values.device)
    return blocks.new_zeros(1, values.shape[1]).index_add(0, place, blocks)[0]
