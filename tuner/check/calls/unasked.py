"""A call that no question asked for, such as a timed one, as an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.calls.crossing import Answer, Report
from tuner.check.calls.exercise import checksums, keys_of, snapshot

if TYPE_CHECKING:
    import torch

__all__ = ["answer_of_call"]


def answer_of_call(
    model: torch.nn.Module, outputs: Sequence[Any], kinds: tuple[str, ...]
) -> Answer:
    """Return as an answer what one call returned: its outputs, and what `kinds_of` said of it."""
    import torch

    tensors = {
        f"call0.output{j}": snapshot(y)
        for j, y in enumerate(outputs)
        if isinstance(y, torch.Tensor)
    }
    late = {f"late.{name}": found for name, found in checksums(tensors).items()}
    report = Report(keys=tuple(keys_of(model)), kinds=(kinds,), checksums=late)
    return Answer(report, tensors)
