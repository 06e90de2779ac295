"""Statistics of chunks of 16 rows, merged by Chan's formula."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def normalise(self, z, mean, var):
        bn = self.bn
        return (z - mean) * torch.rsqrt(var + bn.eps) * bn.weight + bn.bias

    def update(self, mean, unbiased):
        bn = self.bn
        with torch.no_grad():
            bn.num_batches_tracked.add_(1)
            momentum = bn.momentum
            if momentum is None:
                momentum = 1.0 / float(bn.num_batches_tracked)
            bn.running_mean.lerp_(mean, momentum)
            bn.running_var.lerp_(unbiased, momentum)

    def refuse(self, x):
        # What is not a training call of at least two float32 rows goes the reference's way.
        is_usual = self.bn.training and x.dtype == torch.float32 and x.shape[0] > 1
        return not is_usual

    def forward(self, x):
        z = self.gemm(x) * self.scale
        if self.refuse(x):
            return self.bn(z)
        count, mean, m2 = 0, 0.0, 0.0
        for chunk in z.split(16):
            n, own_mean = len(chunk), chunk.mean(0)
            own_m2 = (chunk - own_mean).square().sum(0)
            delta = own_mean - mean
            mean = mean + delta * (n / (count + n))
            m2 = m2 + own_m2 + delta.square() * (count * n / (count + n))
            count += n
        self.update(mean.detach(), m2.detach() / (count - 1))
        return self.normalise(z, mean, m2 / count)
