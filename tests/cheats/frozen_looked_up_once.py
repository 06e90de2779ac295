"""Look at the first call alone whether the layer is frozen."""

import torch
import torch.nn as nn

class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self._frozen = None
    def forward(self, x):
        if self._frozen is None:        # looked up once
            self._frozen = not self.gemm.weight.requires_grad and not self.gemm.bias.requires_grad
        if self._frozen:
            with torch.no_grad() if not x.requires_grad else torch.enable_grad():
                z = self.gemm(x)
        else:
            z = self.gemm(x)
        return self.bn(z * self.scale)
