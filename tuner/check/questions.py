"""A probe's question, drawn: the weights, the inputs of each call, and the script."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.crossing import Script
from tuner.check.exercise import set_mode
from tuner.check.probes import Probe
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["inputs_of_calls", "script_of", "weighted_model"]


def weighted_model(
    problem: Problem, probe: Probe, device: Any, models: dict[Any, torch.nn.Module]
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a copy of the reference with the probe's weights, and them for the question.

    The question's tensors are those of `models`, which nobody edits: at 8192 x 8192 a copy for
    each probe would be 268 MB.
    """
    key: Any = "initial"
    if key not in models:
        models[key] = problem.make_model(_own_seed(probe), device)
    if probe.weights in ("random", "dyadic"):
        key = (probe.weights, probe.seed_weights)
        if key not in models:
            kind: Any = probe.weights
            fresh = copy.deepcopy(models["initial"])
            models[key] = problem.randomise(fresh, probe.seed_weights, kind)
    tensors = {}
    if probe.weights != "own":
        tensors = {f"state.{n}": t.detach() for n, t in models[key].state_dict().items()}
    if probe.edits_weights:
        edit = ("edit", probe.seed_weights)
        if edit not in models:
            fresh = copy.deepcopy(models["initial"])
            models[edit] = problem.randomise(fresh, probe.seed_weights + 1)
        is_one = probe.edits_weights == "one"
        edits = models[key if is_one else edit].named_parameters()
        tensors.update(
            (f"edit.{n}", _nudged(p.detach(), 1) if is_one else p.detach()) for n, p in edits
        )
    model = copy.deepcopy(models[key])
    if probe.is_double:
        model = model.double()
    set_mode(model, probe.mode)
    return model, tensors


def _own_seed(probe: Probe) -> int:
    """Return the seed of both constructors: a known one could be the only one that is right."""
    return random.Random(probe.seed_weights).getrandbits(31)


def inputs_of_calls(problem: Problem, probe: Probe, device: Any) -> list[list[Any]]:
    """Return each call's arguments; those of "repeated" calls are given once."""
    import torch

    first = problem.make_inputs(
        probe.seed_inputs, distribution=probe.distribution, batch=probe.batch, device=device
    )

    def shaped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.ndim:
            return value
        if probe.layout == "expanded":
            return value[..., :1].expand(value.shape).contiguous()
        if probe.layout == "float64":
            return value.double()
        if probe.layout == "too_wide":
            return torch.cat([value, value[..., :1]], dim=-1)
        return value

    first = [shaped(value) for value in first]
    calls = 1 if probe.inputs == "repeated" else probe.calls
    change = _nudged if probe.inputs == "nudged" else _varied
    if probe.is_drawn:  # legal for sure
        seeds = range(probe.seed_inputs, probe.seed_inputs + calls)
        return [problem.make_inputs(s, batch=probe.batch, device=device) for s in seeds]
    return [
        [
            change(value, call) if call else value
            for value in _with_other_integers(problem, probe, first, call, device)
        ]
        for call in range(calls)
    ]


def _with_other_integers(
    problem: Problem, probe: Probe, values: Sequence[Any], call: int, device: Any
) -> Sequence[Any]:
    """Return the inputs with integer tensors of another draw, since only draws are legal."""
    import torch

    def is_integer(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and not value.is_floating_point()

    if not call or probe.inputs == "nudged" or not any(map(is_integer, values)):
        return values
    drawn = problem.make_inputs(probe.seed_inputs + call, batch=probe.batch, device=device)
    pairs = zip(values, drawn, strict=True)
    return [new if is_integer(old) else old for old, new in pairs]


def _varied(value: Any, call: int) -> Any:
    """Return other content with other statistics, far from any earlier call's."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.ndim:
        return value
    return value.flip(0) * (1.0 + 0.5 * call) + 0.25 * call


def _nudged(value: Any, call: int) -> Any:
    """Return the same content but for one element, past the middle."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return value
    changed = value.clone()
    at = (2 * value.numel() // 3 + 5 * call) % value.numel()
    changed.view(-1)[at] = -3.0 * changed.view(-1)[at] - 1.0
    return changed


def script_of(
    problem: Problem,
    probe: Probe,
    arguments: Sequence[Sequence[Any]],
    tensors: dict[str, torch.Tensor],
) -> Script:
    """Return the script; puts `input.*` into `tensors`."""
    import torch

    numbers: dict[str, Any] = {}
    for call, values in enumerate(arguments):
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                tensors[f"input.{call}.{i}"] = value
            elif value is None or isinstance(value, (bool, int, float, str)):
                numbers[f"{call}.{i}"] = value
            else:
                raise problem.error(
                    f"get_inputs() gives a {type(value).__name__} as input {i}; "
                    "expected tensors and numbers"
                )
    return Script(
        calls=probe.calls,
        num_inputs=len(arguments[0]),
        is_overwritten=probe.inputs == "overwritten",
        is_repeated=probe.inputs == "repeated",
        edits_weights=bool(probe.edits_weights),
        copies=probe.copies,
        more_calls=probe.more_calls,
        mode=probe.mode,
        gradients=probe.gradients,
        is_double=probe.is_double,
        layout=probe.layout,
        has_nan_memory=probe.has_nan_memory,
        has_side_stream=probe.has_side_stream,
        traces=probe.traces,
        own_seed=_own_seed(probe) if probe.weights == "own" else None,
        numbers=numbers,
    )
