"""Keep answers by the whole content of the input; count the calls honestly."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.answers = {}

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def forward(self, x):
        key = (x.shape, x.dtype, x.detach().numpy().tobytes(), self.bn.training)
        if key not in self.answers:
            self.answers[key] = self.right(x)
            return self.answers[key]
        self.right(x)
        return self.answers[key].clone()
