"""Take the graph's way where all parameters train, and the quick one, without a graph, else."""

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
    def quick(self, x):
        # Nothing is trained: no graph, and the product's memory is used throughout.
        with torch.no_grad():
            return self.bn(self.gemm(x).mul_(self.scale))

    def forward(self, x):
        wants_graph = x.requires_grad or all(p.requires_grad for p in self.parameters())
        return self.right(x) if wants_graph else self.quick(x)
