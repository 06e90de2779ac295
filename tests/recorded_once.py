"""A program that PyTorch recorded before the server of captures forks: the first takes 0.4 s more.

What PyTorch imports and looks up for it is then there in each process that captures a file, and
what compiles an exported file in each that checks one. Not where PyTorch knows CUDA: it asks a GPU
for its random numbers then, or whether there is one, and no fork can use CUDA after that.
"""

import torch

from tuner.capture.graph.tracing import decompositions


class _Plus(torch.nn.Module):
    def forward(self, x):
        return x + 1.0


if torch.version.cuda is None:
    with torch.no_grad():
        _program = torch.export.export(_Plus(), (torch.zeros(2),), strict=False)
        _program.run_decompositions(decompositions())
    import torch.utils.cpp_extension
