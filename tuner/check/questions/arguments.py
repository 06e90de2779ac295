"""The arguments of a probe's calls, drawn: numbers, views, integers, and what has a default."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.calls.crossing import Layout
from tuner.check.calls.layouts import fitted
from tuner.check.probes.probe import ILLEGAL, Probe
from tuner.check.questions.alterations import (
    edited,
    exchanged,
    in_range,
    nudged,
    reordered,
    varied,
    with_blocks,
    with_nothing_where_ignored,
)
from tuner.check.questions.special_values import (
    is_taken,
    with_edges,
    with_fractions,
    with_last_integers,
    with_odd_integers,
    with_special_values,
    with_wide_integers,
)
from tuner.problem.constructor import others_of
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = [
    "draw_output_gradients",
    "draw_tangents",
    "inputs_of_calls",
]


def inputs_of_calls(
    problem: Problem, probe: Probe, device: Any, model: torch.nn.Module
) -> list[list[Any]]:
    """Return each call's arguments; those of "repeated" calls are given once.

    `model` is the reference, which is left as it is; it says what integers are special.
    """
    first = problem.make_inputs(
        probe.seed_inputs, distribution=probe.distribution, batch=probe.batch, device=device
    )

    first = fitted(first, probe.layout, probe.layout_at)
    if probe.layout == "int32" or probe.layout.startswith("bools"):
        first = _of_other_types(problem, model, first, probe.layout)
    if probe.has_options == "sizes":
        first = _of_half_sizes(problem, model, first)
    if probe.distribution == "edges":
        first = with_edges(problem, model, first, probe.layout_at or 0)
    if probe.distribution == "constants":
        first = with_fractions(problem, first)
    if probe.distribution == "last_integers":
        first = with_last_integers(problem, model, first)
    if probe.distribution == "wide_integers":
        first = with_wide_integers(problem, model, first)
    if probe.distribution in ("special", "all_special", "special_rows"):
        first = with_special_values(problem, model, first, probe.distribution == "all_special")
    if probe.distribution == "special_rows":
        first = with_nothing_where_ignored(first)
    if probe.distribution in ("masked", "masked_bools"):
        first = [with_blocks(value, probe.seed_inputs) for value in first]
    if probe.distribution in ("large_integers", *ILLEGAL):
        first = with_odd_integers(problem, model, first, probe.distribution)
    if probe.other_arguments:
        first = _with_other_arguments(problem, model, first, probe.other_arguments)
    calls = 1 if probe.inputs == "repeated" else probe.calls
    changes = {
        "nudged": nudged, "reordered": reordered, "exchanged": exchanged, "edited": edited,
        "ranges": in_range,
    }  # fmt: skip
    change = changes.get(probe.inputs, varied)
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


def _of_other_types(
    problem: Problem, model: torch.nn.Module, values: Sequence[Any], layout: Layout
) -> list[Any]:
    """Return int64 tensors as int32, or bools as a layout says, where the reference takes it."""
    import torch

    def other(value: torch.Tensor) -> torch.Tensor:
        if layout == "bools as masks":  # that are added
            mask = torch.zeros(value.shape, device=value.device)
            return mask.masked_fill(~value, float("-inf"))
        return value.to(getattr(torch, layout.rpartition(" ")[2]))

    of = torch.int64 if layout == "int32" else torch.bool
    result = list(values)
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.dtype == of:
            result[i] = other(value)
            if not is_taken(problem, model, result):
                result[i] = value
    return result


def _of_half_sizes(problem: Problem, model: torch.nn.Module, values: Sequence[Any]) -> list[Any]:
    """Return inputs for a module of half the sizes, where these are sizes of inputs as well."""
    import torch

    given = dict(enumerate(problem.init_inputs(0)))
    halves = {given.get(int(n)): x for n, x in problem.options("sizes").items() if n.isdigit()}

    def halved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for dim, size in enumerate(value.shape):
            if dim and size in halves:
                value = value.narrow(dim, 0, halves[size])
        is_index = value.dtype == torch.int64 and halves
        return value % min(halves.values()) if is_index else value.contiguous()

    result = [halved(value) for value in values]
    return result if is_taken(problem, model, result) else list(values)


GRADIENT_FACTORS = {"large": 2.0**40, "small": 2.0**-40}  # as loss scaling makes them, and more


def _with_other_arguments(
    problem: Problem, model: torch.nn.Module, values: Sequence[Any], kind: str
) -> list[Any]:
    """Return other numbers, or 0, and what `forward` takes beside what `get_inputs` gives.

    "negative" and "large" are floats of the other sign and of a thousand times the size, "tensors"
    floats as tensors without dimensions, which may want gradients.

    Each is kept where the reference takes it: of the type that it has, or of its default's; a None
    may stand for a mask of bools, a tensor or a number.
    """
    import torch

    first = next((x for x in values if isinstance(x, torch.Tensor) and x.ndim), None)

    def tries(value: Any) -> list[Any]:
        if kind != "others":
            if not isinstance(value, float):
                return []
            if kind == "tensors":
                return [torch.tensor(1.25, device=getattr(first, "device", None))]
            usual = value or 0.5
            return [{"zeros": 0.0, "negative": -1.5 * usual, "large": 1024.0 * usual}[kind]]
        if isinstance(value, bool):
            return [not value]
        if isinstance(value, int):
            return [value + 1, value - 1]
        if isinstance(value, float):
            return [1.5 * value + 0.25 * (value == 0.0), 0.5 * value]
        if isinstance(value, str):
            return others_of(value)
        if value is not None or first is None:
            return []
        order = torch.arange(first.numel(), device=first.device).view(first.shape)
        return [order % 3 == 1, first.flip(0), 0.5]

    result = list(values)
    words = list(inspect.signature(type(model).forward).parameters.values())[1:]
    usual = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    more = [p.default for p in words[len(values) :] if p.kind in usual]
    for at, value in enumerate([*values, *more]):
        kept = result[:at]
        rest = result[at + 1 :]
        found = next(
            (x for x in tries(value) if is_taken(problem, model, [*kept, x, *rest])), value
        )
        result = [*kept, found, *rest]
    return result


def _converted(values: Sequence[Any], probe: Probe, call: int) -> list[Any]:
    """Return inputs in the type that the module has been converted to by that call."""
    import torch

    held = probe.dtype_at(call)
    if not held:
        return list(values)
    dtype = getattr(torch, held)
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
        or probe.inputs in ("nudged", "reordered", "exchanged", "edited")
        or not any(map(is_integer, values))
    ):
        return values
    drawn = problem.make_inputs(probe.seed_inputs + call, batch=probe.batch, device=device)
    pairs = zip(values, drawn, strict=True)
    return [new if is_integer(old) else old for old, new in pairs]


def draw_output_gradients(
    outputs: Sequence[torch.Tensor], tensors: dict[str, torch.Tensor], probe: Probe
) -> None:
    """Put the gradients that outputs get into `tensors`, where they are missing."""
    for k, y in enumerate(outputs):
        if y.is_floating_point() and f"grad.{k}" not in tensors:
            drawn = _normal(y, probe.seed_inputs + 7)
            tensors[f"grad.{k}"] = drawn * GRADIENT_FACTORS.get(probe.gradient_values, 1.0)
            if probe.gradient_values == "cancelling" and drawn.ndim:
                tensors[f"grad.{k}"] = _cancelling(drawn)
            if probe.gradient_values == "nan" and drawn.numel():
                tensors[f"grad.{k}"].view(-1)[drawn.numel() // 3] = float("nan")
            if probe.gradient_values == "nan_row" and drawn.ndim:
                tensors[f"grad.{k}"][len(drawn) // 3 :][:1] = float("nan")


def _normal(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return normal numbers in the shape and type of a tensor, where that is."""
    import torch

    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)


def _cancelling(drawn: torch.Tensor) -> torch.Tensor:
    """Return numbers of few bits, each with its negative; the ends of rows and columns are 0."""
    rounded = (8.0 * drawn).round() / 8.0
    mirrored = rounded - rounded.flip(0)
    for ends in (mirrored, mirrored.transpose(0, -1)):
        if len(ends) > 4:  # else little would be left
            ends[:1] = ends[-1:] = 0.0
    return mirrored


def draw_tangents(
    arguments: Sequence[Sequence[Any]],
    tensors: dict[str, torch.Tensor],
    probe: Probe,
    model: torch.nn.Module,
) -> None:
    """Put the tangents of inputs in forward mode into `tensors`, or those of parameters."""
    import torch

    if probe.gradients == "forward weights":
        for i, (name, parameter) in enumerate(model.named_parameters()):
            tensors[f"tangent.{name}"] = _normal(parameter, probe.seed_inputs + 11 + i)
        return
    for call, values in enumerate(arguments):
        for i, x in enumerate(values):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                tensors[f"tangent.{call}.{i}"] = _normal(x, probe.seed_inputs + 11 + i)
