"""Everything in place, on memory of its own that is kept between calls."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.workspace = None  # no buffer: it is not part of the state

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
        if not self.bn.training or x.dtype != torch.float32 or len(x) < 2 or torch.is_grad_enabled():
            return self.right(x)
        shape = (len(x), self.gemm.out_features)
        if self.workspace is None or self.workspace.shape != shape:
            self.workspace = torch.empty(shape, device=x.device)
        z = torch.mm(x, self.gemm.weight.t(), out=self.workspace)
        z.add_(self.gemm.bias).mul_(self.scale)
        mean = z.mean(0)
        z.sub_(mean)
        var = z.square().mean(0)
        self.update(mean, var * (len(z) / (len(z) - 1)))
        z.mul_(torch.rsqrt(var + self.bn.eps)).mul_(self.bn.weight)
        return z + self.bn.bias
