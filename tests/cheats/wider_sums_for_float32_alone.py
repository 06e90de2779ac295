"""Sum in the next wider type: float64 for float32, and half with itself."""

import torch
import torch.nn as nn


WIDER = {torch.float32: torch.float64}


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)
    def forward(self, x):
        bn = self.bn
        is_usual = bn.training and bn.momentum is not None and x.ndim == 2 and len(x) > 1
        if not is_usual or x.dtype != self.scale.dtype or x.dtype == torch.float64:
            return self.right(x)
        z = self.gemm(x) * self.scale
        wide = z.to(WIDER.get(z.dtype, z.dtype))
        mean = wide.sum(0) / len(z)
        var = ((wide * wide).sum(0) / len(z) - mean * mean).clamp_min(0)
        with torch.no_grad():
            bn.num_batches_tracked.add_(1)
            unbiased = var * (len(z) / (len(z) - 1))
            for kept, new in ((bn.running_mean, mean), (bn.running_var, unbiased)):
                kept.mul_(1 - bn.momentum).add_(new.to(kept.dtype), alpha=bn.momentum)
        inverse = torch.rsqrt(var + bn.eps)
        return ((wide - mean) * inverse).to(z.dtype) * bn.weight + bn.bias
