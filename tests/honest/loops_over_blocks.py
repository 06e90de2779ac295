"""Loops over blocks of rows and of columns, the remainders in blocks of their own."""

import torch
import torch.nn as nn


ROWS, COLUMNS = 24, 16


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        gemm = self.gemm
        if torch.is_grad_enabled() or x.ndim != 2 or x.shape[1] != gemm.in_features:
            return self.bn(gemm(x) * self.scale)
        if x.dtype != gemm.weight.dtype:
            return self.bn(gemm(x) * self.scale)  # which raises
        z = x.new_empty(len(x), gemm.out_features)
        for j in range(0, gemm.out_features, COLUMNS):
            columns = slice(j, min(j + COLUMNS, gemm.out_features))
            weight, bias = gemm.weight[columns].t(), gemm.bias[columns]
            for i in range(0, len(x), ROWS):
                rows = slice(i, min(i + ROWS, len(x)))
                z[rows, columns] = torch.addmm(bias, x[rows], weight) * self.scale[columns]
        return self.bn(z)
