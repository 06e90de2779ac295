"""A probe's question, drawn: the weights, the inputs of each call, and the script."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.crossing import Script
from tuner.check.history import set_mode
from tuner.check.layouts import fitted
from tuner.check.probe import Probe
from tuner.errors import ProblemError
from tuner.problem.draws import WeightKind
from tuner.problem.reference import Options, Problem

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
    if "initial" not in models:
        models["initial"] = problem.make_model(_own_seed(probe), device)
    held: Any = "initial"
    if probe.weights not in ("own", "initial"):
        kind: Any = probe.weights
        held = _randomised(problem, probe.seed_weights, kind, models)
    tensors = {}
    if probe.weights != "own":
        tensors = {f"state.{n}": t.detach() for n, t in models[held].state_dict().items()}
    if probe.gives_weights and probe.other_weights != "random":
        other = {"nudged": _nudged, "reordered": _reordered}[probe.other_weights]
        weights = models[held].named_parameters()
        tensors |= {f"other.{n}": other(p.detach(), 1) for n, p in weights}
    elif probe.gives_weights:
        others = models[_randomised(problem, probe.seed_weights + 1, "random", models)]
        tensors |= {f"other.{n}": t.detach() for n, t in others.state_dict().items()}
    if probe.has_options:  # what is made otherwise may have other weights
        options = _options_of(problem, probe.has_options, models)
        model = problem.make_model(_own_seed(probe), device, options, is_quick=True)
        problem.randomise(model, probe.seed_weights)
        tensors = {f"state.{n}": t.detach().clone() for n, t in model.state_dict().items()}
    else:
        model = copy.deepcopy(models[held])
    set_mode(model, probe.mode)
    return model, tensors


def _randomised(
    problem: Problem, seed: int, kind: WeightKind, models: dict[Any, torch.nn.Module]
) -> Any:
    """Return the key in `models` of a reference with these weights."""
    key = (kind, seed)
    if key not in models:
        models[key] = problem.randomise(copy.deepcopy(models["initial"]), seed, kind)
    return key


def _options_of(problem: Problem, kind: Options, models: dict[Any, Any]) -> dict[str, float]:
    """Return other options that the reference's constructor takes; none where it refuses them."""
    if not kind:
        return {}
    key = ("options", kind)
    if key not in models:
        options = problem.options(kind)
        try:
            held = next(models["initial"].parameters(), None)
            device = "cpu" if held is None else held.device
            problem.make_model(0, device, options, is_quick=True)
        except ProblemError:
            options = {}
        models[key] = options
    found: dict[str, float] = models[key]
    return found


def _makes_another(probe: Probe) -> bool:
    return any("another" in actions for actions in probe.before)


def _own_seed(probe: Probe) -> int:
    """Return the seed of both constructors: a known one could be the only one that is right."""
    return random.Random(probe.seed_weights).getrandbits(31)


def inputs_of_calls(
    problem: Problem, probe: Probe, device: Any, model: torch.nn.Module
) -> list[list[Any]]:
    """Return each call's arguments; those of "repeated" calls are given once.

    `model` is the reference, which is left as it is; it says what integers are special.
    """
    first = problem.make_inputs(
        probe.seed_inputs, distribution=probe.distribution, batch=probe.batch, device=device
    )

    first = fitted(first, probe.layout)
    if probe.distribution == "special":
        first = _with_special_values(problem, model, first)
    calls = 1 if probe.inputs == "repeated" else probe.calls
    changes = {"nudged": _nudged, "reordered": _reordered, "exchanged": _exchanged}
    change = changes.get(probe.inputs, _varied)
    if probe.is_drawn:  # legal for sure
        seeds = range(probe.seed_inputs, probe.seed_inputs + calls)
        return [problem.make_inputs(s, batch=probe.batch, device=device) for s in seeds]
    made = [
        [
            change(value, call) if call else value
            for value in _with_other_integers(problem, probe, first, call, device)
        ]
        for call in range(calls)
    ]
    return [_converted(values, probe, call) for call, values in enumerate(made)]


def _with_special_values(
    problem: Problem, model: torch.nn.Module, values: Sequence[Any]
) -> list[Any]:
    """Return integers with those that mean something else, and bools that are alike in a row.

    Special are the least and the largest that were given, a `padding_idx` of a submodule, and
    -100, which losses ignore, where the reference takes it.
    """
    import torch

    padding = [getattr(part, "padding_idx", None) for part in model.modules()]
    result = list(values)
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or not value.numel():
            continue
        if value.dtype == torch.bool and value.ndim:
            result[i] = value.clone()
            result[i][0], result[i][-1] = False, True
        if value.dtype != torch.int64:
            continue
        special = [int(value.min()), int(value.max()), *(p for p in padding if p is not None)]
        for extra in ([-100], []):
            marked = value.clone().reshape(-1)
            for at, number in enumerate([*extra, *special]):
                marked[at::8][: max(1, len(marked) // 16)] = number
            result[i] = marked.view(value.shape)
            try:
                with torch.no_grad():
                    problem.call(copy.deepcopy(model), result)
                break
            except ProblemError:
                result[i] = value
    return result


def _converted(values: Sequence[Any], probe: Probe, call: int) -> list[Any]:
    """Return inputs in the type that the module has been converted to by that call."""
    import torch

    if not any("convert" in actions for actions in probe.before[: call + 1]):
        return list(values)
    dtype = getattr(torch, probe.dtype)
    return [
        value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in values
    ]


def _with_other_integers(
    problem: Problem, probe: Probe, values: Sequence[Any], call: int, device: Any
) -> Sequence[Any]:
    """Return the inputs with integer tensors of another draw, since only draws are legal."""
    import torch

    def is_integer(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and not value.is_floating_point()

    if (
        not call
        or probe.inputs in ("nudged", "reordered", "exchanged")
        or not any(map(is_integer, values))
    ):
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


def _reordered(value: Any, call: int) -> Any:
    """Return the same rows, last first: no sum over all of them tells."""
    import torch

    return value.flip(0) if isinstance(value, torch.Tensor) and value.ndim else value


def _exchanged(value: Any, call: int) -> Any:
    """Return the same rows, two in the middle exchanged: sums, ends and norms are the same."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.ndim or len(value) < 4:
        return value
    order = list(range(len(value)))
    at = len(order) // 3
    order[at], order[at + 1] = order[at + 1], order[at]
    return value[order]


def script_of(
    problem: Problem,
    probe: Probe,
    arguments: Sequence[Sequence[Any]],
    tensors: dict[str, torch.Tensor],
    models: dict[Any, Any],
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
    is_last = bool(probe.gradients) and not probe.backward_at_once
    return Script(
        calls=probe.calls,
        num_inputs=len(arguments[0]),
        is_overwritten=probe.inputs == "overwritten",
        is_repeated=probe.inputs == "repeated",
        before=probe.before,
        more_calls=probe.more_calls,
        at_once=probe.at_once,
        mode=probe.mode,
        gradients=probe.gradients,
        gradient_layout=probe.gradient_layout,
        backward=probe.backward or (probe.calls - 1,) * is_last,
        backward_at_once=probe.backward_at_once,
        first_place=probe.first_place,
        dtype=probe.dtype,
        accumulates=probe.accumulates,
        edits=probe.edits,
        is_inference=probe.is_inference,
        num_threads=probe.num_threads,
        default_dtype=probe.default_dtype,
        layout_at=probe.layout_at,
        options=_options_of(problem, probe.has_options, models),
        other_options=_options_of(problem, "numbers" if _makes_another(probe) else "", models),
        layout=probe.layout,
        has_nan_memory=probe.has_nan_memory,
        has_side_stream=probe.has_side_stream,
        traces=probe.traces,
        own_seed=_own_seed(probe) if probe.weights == "own" else None,
        numbers=numbers,
    )
