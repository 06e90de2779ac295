"""A program that PyTorch recorded before the server of captures forks: the first takes 0.4 s more.

What PyTorch imports and looks up for it is then there in each process that captures a file. Not
where PyTorch knows CUDA: it asks a GPU for its random numbers then, whose context no fork has.
"""

import torch

from tuner.capture.tracing import decompositions


class _Plus(torch.nn.Module):
    def forward(self, x):
        return x + 1.0


if torch.version.cuda is None:
    with torch.no_grad():
        _program = torch.export.export(_Plus(), (torch.zeros(2),), strict=False)
        _program.run_decompositions(decompositions())
