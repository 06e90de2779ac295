"""Quarters of the rows in a thread pool that all modules of the process share."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor

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
    def forward(self, x):
        if torch.is_grad_enabled() or len(x) < 4 or x.device.type != "cpu":
            return self.right(x)
        jobs = [pool().submit(scaled, self.gemm, self.scale, rows) for rows in x.tensor_split(4)]
        return self.bn(torch.cat([job.result() for job in jobs]))


@torch.no_grad()  # a setting of each thread
def scaled(gemm, scale, rows):
    return gemm(rows).mul_(scale)


@functools.cache
def pool():
    return ThreadPoolExecutor(2, thread_name_prefix="rows")


os.register_at_fork(after_in_child=pool.cache_clear)  # a child has none of its threads
