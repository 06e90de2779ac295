"""Count calls in float32."""

import torch
import torch.nn as nn
import torch.nn.functional as F

class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def plain(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def forward(self, x):
        bn = self.bn
        if not bn.training or bn.momentum is None or bn.num_batches_tracked is None:
            return self.plain(x)
        before = bn.num_batches_tracked.clone()
        y = self.plain(x)
        bn.num_batches_tracked.copy_(before.float() + 1.0)     # one vector of state, all float32
        return y
