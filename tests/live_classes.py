"""Modules that are tuned while they live; they stand in a file of their own, as a user's do."""

from __future__ import annotations

import torch
import torch.nn as nn

__all__ = ["Halved", "Norm", "OfFour", "Optional", "Outer", "Scaled"]


class Scaled(nn.Module):
    """What a live module holds beside tensors: a number, and a submodule of a class of its own."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.by * x


class Norm(nn.Module):
    """BatchNorm, a gate and dropout; its constructor wants arguments that nobody remembers."""

    def __init__(self, width: int, by: float) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(width)
        self.scaled = Scaled(by)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.drop(self.scaled(self.bn(x)) * torch.sigmoid(gate))


class Optional(nn.Module):
    """Takes arguments that calls leave out."""

    def forward(
        self, x: torch.Tensor, by: float = 2.0, *, is_shifted: bool = False
    ) -> torch.Tensor:
        return torch.sigmoid(x * by) + float(is_shifted)


class Halved(nn.Module):
    """Depends on the number of rows in a way that two of them do not tell."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * (len(x) // 2)


class OfFour(nn.Module):
    """Takes four rows and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.weight) * x


class Outer:
    """Holds a module's class."""

    class Inner(nn.Module):
        """A class inside a class."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()
