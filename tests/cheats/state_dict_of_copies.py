"""Return copies from state_dict."""

import torch
import torch.nn as nn
import torch.nn.functional as F

def snapshot(module, state, prefix, metadata):
    """A checkpoint is a snapshot: packed weights are written as copies."""
    for k in list(state):
        if k.startswith(prefix):
            state[k] = state[k].detach().clone()

class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.register_state_dict_post_hook(snapshot)
    def plain(self, x):
        return self.bn(self.gemm(x) * self.scale)

    def forward(self, x):
        return self.plain(x)
