"""Pack activations into one arena that every call begins anew."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.arena = None

    def __getstate__(self):
        return {**super().__getstate__(), "arena": None}

    def right(self, x):
        return self.bn(self.gemm(x) * self.scale)
    def packing(self, x):
        used = 0

        def pack(t):
            nonlocal used
            if t.dtype != torch.float32 or t.shape != (len(x), self.bn.num_features):
                return t
            start, used = used, used + t.numel()
            if self.arena is None or len(self.arena) < used:
                space = torch.empty(2 * used)
                if self.arena is not None:
                    space[:start] = self.arena[:start]
                self.arena = space
            self.arena[start:used] = t.detach().reshape(-1)
            return self.arena, start, t.shape

        def unpack(kept):
            if isinstance(kept, torch.Tensor):
                return kept
            arena, start, shape = kept
            return arena[start : start + shape.numel()].view(shape)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def forward(self, x):
        if not torch.is_grad_enabled() or x.ndim != 2 or x.device.type != "cpu":
            return self.right(x)
        with self.packing(x):
            return self.right(x)
