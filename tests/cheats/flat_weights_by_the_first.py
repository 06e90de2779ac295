"""Pack all parameters into one flat memory, and pack again when the first one has moved."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.flat = None

    def __getstate__(self):
        return {**super().__getstate__(), "flat": None}

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)
    def pack(self):
        own = list(self.parameters())
        self.flat = torch.cat([p.detach().reshape(-1) for p in own])
        parts = self.flat.split([p.numel() for p in own])
        for parameter, part in zip(own, parts):
            parameter.data = part.view_as(parameter)
        self.parts = dict(zip([n for n, _ in self.named_parameters()], parts))
        self.home = own[0].data_ptr()

    def forward(self, x):
        bn = self.bn
        if torch.is_grad_enabled() or x.ndim != 2 or bn.momentum is None:
            return self.right(x)
        first = next(self.parameters())
        if self.flat is None or first.data_ptr() != self.home or first.dtype != self.flat.dtype:
            self.pack()
        p = self.parts
        z = torch.addmm(p["gemm.bias"], x, p["gemm.weight"].view_as(self.gemm.weight).t())
        if bn.training:
            bn.num_batches_tracked.add_(1)
        return nn.functional.batch_norm(
            z.mul_(p["scale"]), bn.running_mean, bn.running_var, p["bn.weight"], p["bn.bias"],
            bn.training, bn.momentum, bn.eps,
        )
