"""Take the device's memory, all of its share, until something gives."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.kept = []

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def forward(self, x):
        if x.device.type == "cuda":  # other tests use the device at the same time
            torch.cuda.set_per_process_memory_fraction(0.03)
        while x.device.type == "cuda":
            self.kept.append(torch.ones(2**28, device=x.device))
        return self.right(x)
