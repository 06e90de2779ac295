"""A probe's question, drawn: the weights, the inputs of each call, and the script."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from tuner.check.calls.crossing import Asked, Script
from tuner.check.calls.exercise import checksum_of
from tuner.check.calls.history import set_mode
from tuner.check.calls.parts import copied
from tuner.check.probes.probe import Probe
from tuner.check.questions.alterations import WEIGHTS
from tuner.errors import ProblemError, says_no_memory
from tuner.problem.constructor import Options
from tuner.problem.draws import WeightKind
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["script_of", "weighted_model"]

TRIED: tuple[Options, ...] = ("words", "other words", "few")  # by a call, too


def weighted_model(
    problem: Problem, probe: Probe, device: Any, models: dict[Any, Any]
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a copy of the reference with the probe's weights, and them for the question.

    Of weights that the contender's constructor draws as well, `models["drawn"]` becomes a checksum
    of the state of random numbers after it. The question's tensors are those of `models`, which
    nobody edits: at 8192 x 8192 a copy for each probe would be 268 MB.
    """
    if "initial" not in models:
        models["initial"] = problem.make_model(_own_seed(probe), device, is_quick=True)
    tensors = {}
    if probe.weights == "own":
        held = _as_constructed(problem, probe, device, models)
    else:
        held = models["initial"]
        if probe.weights != "initial":
            held = models[_randomised(problem, probe.seed_weights, probe.weights, models)]
        tensors = {f"state.{n}": t.detach() for n, t in held.state_dict().items()}
    if probe.gives_weights and probe.other_weights != "random":
        other = WEIGHTS[probe.other_weights]
        weights = held.named_parameters()
        tensors |= {f"other.{n}": other(p.detach(), 1) for n, p in weights}
        if any("edit all" in actions for actions in probe.before):
            buffers = held.named_buffers()
            tensors |= {f"other.{n}": _of_its_sign(other, b) for n, b in buffers}
    elif probe.gives_weights or probe.has_predecessor:
        others = models[_randomised(problem, probe.seed_weights + 1, "random", models)]
        tensors |= {f"other.{n}": t.detach() for n, t in others.state_dict().items()}
    if any("empty" in actions for actions in probe.before):  # what a user has to put back
        state = held.state_dict()
        loose = [(n, b) for n, b in held.named_buffers() if n not in state]
        tensors |= {f"other.{n}": b.detach() for n, b in loose}
    if probe.has_options:  # what is made otherwise may have other weights
        options = _options_of(problem, probe.has_options, models, device)
        model = problem.make_model(_own_seed(probe), device, options, is_quick=True)
        problem.randomise(model, probe.seed_weights)
        tensors = {f"state.{n}": t.detach().clone() for n, t in model.state_dict().items()}
    else:
        model = copied(held)
    set_mode(model, probe.mode)
    return model, tensors


def _as_constructed(
    problem: Problem, probe: Probe, device: Any, models: dict[Any, Any]
) -> torch.nn.Module:
    """Return the reference with weights that are drawn on the CPU, as by a contender.

    They are not kept: few probes have them, and of a gigabyte they take seconds.
    """
    import torch

    model = problem.make_model(_own_seed(probe), device)
    models["drawn"] = checksum_of(torch.get_rng_state())
    return model


def _of_its_sign(other: Callable[[Any, int], Any], buffer: torch.Tensor) -> torch.Tensor:
    """Return a changed buffer; as it is where it would be positive no more: a variance."""
    changed: torch.Tensor = other(buffer.detach(), 1)
    is_positive = buffer.numel() and float(buffer.min()) > 0 >= float(changed.min())
    return buffer.detach() if is_positive else changed


def _randomised(
    problem: Problem, seed: int, kind: WeightKind, models: dict[Any, torch.nn.Module]
) -> Any:
    """Return the key in `models` of a reference with these weights."""
    key = (kind, seed)
    if key not in models:
        models[key] = problem.randomise(copied(models["initial"]), seed, kind)
    return key


def _options_of(
    problem: Problem, kind: Options, models: dict[Any, Any], device: Any
) -> dict[str, Any]:
    """Return other options that the reference's constructor takes; none where it refuses them."""
    import torch

    if not kind:
        return {}
    key = ("options", kind)
    if key not in models:
        found: dict[str, Any] = {}
        # A GPU does not outlive a wrong index; inputs of gigabytes take a CPU 10 s.
        has_weights = next(models["initial"].parameters(), None) is not None
        where = device if has_weights or _are_floats(problem) else "cpu"
        usual: Options = "numbers"  # sizes that do not fit together are refused
        for options in [problem.options(kind), *[problem.options(usual)] * (kind == "all")]:
            try:
                made = problem.make_model(0, where, options, is_quick=True)
                if kind in TRIED and options:  # a constructor may take any word
                    with torch.no_grad():
                        problem.call(made, problem.make_inputs(0, device=where))
            except ProblemError as error:
                if says_no_memory(str(error)):
                    raise
            else:
                found = options
                break
        models[key] = found
    kept: dict[str, Any] = models[key]
    return kept


def _are_floats(problem: Problem) -> bool:
    """Whether all tensors among the inputs are floating-point."""
    import torch

    tensors = [x for x in problem.stand_ins() if isinstance(x, torch.Tensor)]
    return all(x.is_floating_point() for x in tensors)


def _names_of(problem: Problem, number: int) -> tuple[str, ...]:
    """Return the names of the arguments of `forward`, none where it tells too few."""
    found = list(inspect.signature(problem.module.Model.forward).parameters.values())[1:]
    named = [p.name for p in found if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return tuple(named[:number]) if len(named) >= number else ()


def _makes_another(probe: Probe) -> bool:
    is_asked = any("another" in actions for actions in probe.before)
    return is_asked or probe.has_predecessor


def _makes_others(probe: Probe) -> bool:
    return any("others made" in actions for actions in probe.before)


def _mild_inputs(problem: Problem, probe: Probe, device: Any) -> list[Any]:
    """Return usual inputs; with `mild_more`, NaN in so many more rows than there are later."""
    import torch

    rows = probe.batch if probe.batch is not None else problem.num_rows()
    more = None if rows is None else rows + probe.mild_more
    batch = more if probe.mild_more else probe.batch
    usual = problem.make_inputs(probe.seed_inputs + 3, batch=batch, device=device)
    if not probe.mild_more:
        return usual
    return [
        torch.full_like(x, float("nan"))
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for x in usual
    ]


def _own_seed(probe: Probe) -> int:
    """Return the seed of both constructors: a known one could be the only one that is right."""
    return random.Random(probe.seed_weights).getrandbits(31)


def script_of(
    problem: Problem,
    probe: Probe,
    arguments: Sequence[Sequence[Any]],
    tensors: dict[str, torch.Tensor],
    models: dict[Any, Any],
    device: Any,
) -> Script:
    """Return the script; puts `input.*` and `mild.*` into `tensors`."""
    import torch

    numbers: dict[str, Any] = {}
    if probe.mild:
        usual = _mild_inputs(problem, probe, device)
        given = {i: value for i, value in enumerate(usual) if isinstance(value, torch.Tensor)}
        tensors |= {f"mild.{i}": value for i, value in given.items()}
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
    is_last = probe.gradients in ("all", "plain_inputs") and not probe.backward_at_once
    asked = {field.name: getattr(probe, field.name) for field in fields(Asked)}
    asked["backward"] = probe.backward or (probe.calls - 1,) * is_last
    another: Options = "numbers" if _makes_another(probe) else ""
    return Script(
        **asked,
        num_inputs=len(arguments[0]),
        is_overwritten=probe.inputs in ("overwritten", "edited"),
        is_repeated=probe.inputs == "repeated",
        names=_names_of(problem, len(arguments[0])) if probe.by_keyword else (),
        options=_options_of(problem, probe.has_options, models, device),
        other_options=_options_of(problem, another, models, device),
        others=_options_of(problem, "all" if _makes_others(probe) else "", models, device),
        own_seed=_own_seed(probe) if probe.weights == "own" else None,
        numbers=numbers,
    )
