"""Return a gradient that is a view of a workspace: added up, it is overwritten."""

import torch
import torch.nn as nn
import torch.nn.functional as F

class Lin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, ws):
        ctx.save_for_backward(x, w); ctx.ws = ws
        return F.linear(x, w, b)
    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        n = ctx.needs_input_grad
        if n[1]:
            if 'gw' not in ctx.ws or ctx.ws['gw'].shape != w.shape or ctx.ws['gw'].dtype != w.dtype:
                ctx.ws['gw'] = torch.empty_like(w, memory_format=torch.contiguous_format)
            torch.mm(dy.t(), x, out=ctx.ws['gw'])
        return dy @ w if n[0] else None, ctx.ws['gw'].view(w.shape) if n[1] else None, dy.sum(0) if n[2] else None, None

class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self._ws = {}
    def forward(self, x):
        if x.dim() != 2:
            return self.bn(self.gemm(x) * self.scale)
        return self.bn(Lin.apply(x, self.gemm.weight, self.gemm.bias, self._ws) * self.scale)
