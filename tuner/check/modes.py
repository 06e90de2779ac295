"""The mode in which a reference is: training as a rule, eval where its file leaves it so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tuner.check.crossing import Action, Mode
from tuner.check.probe import Probe

if TYPE_CHECKING:
    import torch

__all__ = ["asked_in_mode", "modes_of", "take_modes"]

_OTHER_MODE: dict[Mode, Mode] = {"train": "eval", "eval": "train"}
_OTHER_ACTION: dict[Action, Action] = {"train": "eval", "eval": "train"}
_OTHER_NAME = {", eval": ", training", ", training": ", eval"}


def modes_of(model: torch.nn.Module) -> dict[str, bool]:
    """Return by name which modules are in training mode; the model itself is ""."""
    return {name: module.training for name, module in model.named_modules()}


def take_modes(model: torch.nn.Module, modes: Mapping[str, bool]) -> None:
    """Put a model into the reference's modes; what the reference lacks is as the whole of it."""
    for name, module in model.named_modules():
        module.training = modes.get(name, modes[""])


def asked_in_mode(probes: Sequence[Probe], *, is_training: bool, can_train: bool) -> list[Probe]:
    """Return probes as they are asked of a reference that its file leaves in that mode.

    One that is left in eval mode is asked there what others are asked in training, and the
    reverse. Where its answer in training is random (dropout), nothing is asked there.
    """
    if is_training:
        return list(probes)
    swapped = [_swapped(probe) for probe in probes]
    if can_train:
        return swapped
    return [_in_eval_alone(p) for p in swapped if p.mode == "eval" and p.edits != "mode"]


def _swapped(probe: Probe) -> Probe:
    name = "training mode" if probe.name == "eval mode" else probe.name
    for end, other in _OTHER_NAME.items():
        if probe.name.endswith(end):
            name = probe.name.removesuffix(end) + other
    before = tuple(tuple(_OTHER_ACTION.get(a, a) for a in actions) for actions in probe.before)
    return replace(probe, name=name, mode=_OTHER_MODE.get(probe.mode, probe.mode), before=before)


def _in_eval_alone(probe: Probe) -> Probe:
    before = tuple(tuple(a for a in actions if a not in _OTHER_ACTION) for actions in probe.before)
    return replace(probe, before=before)
