"""The mode in which a module is tuned: training, eval, or as its file leaves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

__all__ = ["MODE_WORDS", "TuneMode", "others_in_mode", "put_into"]

TuneMode = Literal["as_given", "train", "eval"]
MODE_WORDS = {"as_given": "", "train": "training mode", "eval": "eval mode"}


def put_into(model: torch.nn.Module, mode: TuneMode) -> torch.nn.Module:
    """Put a module and all of its submodules into a mode; "as_given" is that of the module."""
    return model.train(model.training if mode == "as_given" else mode == "train")


def others_in_mode(model: torch.nn.Module) -> list[str]:
    """Return the names of submodules that are in another mode than the module itself."""
    return [name for name, part in model.named_modules() if part.training != model.training]
