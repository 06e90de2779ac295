"""The data that a speed-up is for, by name, and how each of them is made.

given           the reference's own weights, as it is constructed, and its own inputs
ordinary        weights as after training, normal inputs
offset          its own weights, its inputs plus 100
heavy_tailed    its own weights, normal inputs times lognormal factors
sparse          its own weights, its inputs of which 90 % of the numbers are 0
file:NAME       its own weights, tensors of a user's file of that name
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tuner.errors import ProblemError, says_no_memory
from tuner.problem.draws import (
    HEAVY_TAILED,
    OFFSET,
    ORDINARY,
    ORDINARY_WEIGHTS,
    SPARSE,
    Distribution,
    WeightKind,
    seed_of_inputs,
)  # fmt: skip

if TYPE_CHECKING:
    import torch

    from tuner.problem.reference import Problem

__all__ = [
    "FILE", "GIVEN", "GIVEN_ALONE", "USUAL", "WORKLOADS", "data_words", "made_data",
    "other_tensors", "require_fitting",
]  # fmt: skip

GIVEN = "given"
FILE = "file:"  # before the name of a file of tensors
GIVEN_AS_WELL = "the given inputs once more"
GIVEN_ALONE = "on the reference's own weights and inputs alone"  # where nothing else was timed
USUAL = (GIVEN, "ordinary")  # where nobody says which


class _Made(NamedTuple):
    """How data are made: from which weights and inputs, and what they are in words."""

    inputs: Distribution
    weights: WeightKind | None  # None: the reference's own
    words: str
    without_inputs: str = ""  # in words, where the inputs have to be the reference's own


_MADE = {
    "ordinary": _Made("normal", "trained", ORDINARY, ORDINARY_WEIGHTS),
    "offset": _Made("offset", None, OFFSET),
    "heavy_tailed": _Made("heavy_tailed", None, HEAVY_TAILED),
    "sparse": _Made("sparse", None, SPARSE),
}
WORKLOADS = (GIVEN, *_MADE)  # all but files of tensors, in their usual order


def data_words(name: str) -> str:
    """Return what a workload is called in a sentence."""
    if name.startswith(FILE):
        return f"the tensors of {name.removeprefix(FILE)}"
    return f"{name.replace('_', '-')} data"


def other_tensors(path: str) -> str:
    """Say that a file of tensors is another one than a run began with."""
    return (
        f"{path}: other tensors than the run began with, which its times are of\n"
        "  next: put back what it was, or start a new run"
    )


def made_data(
    problem: Problem,
    model: torch.nn.Module,
    name: str,
    seed: int,
    device: str,
    path: str = "",
) -> tuple[list[Any], str]:
    """Return the inputs of a workload other than `given`, and what it is in words.

    Where the weights are not the reference's own, the model is given them, in place. Integers and
    bools are as given, except in a file of tensors. Where the reference ends in an error, NaN or
    Inf on inputs that are drawn (logarithms, probabilities), they are its own, and the words say
    so; a user's tensors are not replaced.

    Args:
        problem: the reference.
        model: the reference's module as it is constructed, on that device.
        name: of `WORKLOADS`, or `file:NAME`.
        seed: equal seeds give equal values on one kind of device.
        device: as PyTorch names it.
        path: of the file of tensors, if it is one.

    Raises:
        ProblemError: there is no memory for one more call; or the file of tensors cannot be read,
            does not fit the reference's inputs in number, shape or dtype, or the reference ends
            in an error, NaN or Inf on it.
    """
    if name.startswith(FILE):
        inputs = _tensors_of_file(problem, Path(path), seed, device)
        if why := _why_not_finite(problem, model, inputs):
            raise ProblemError(
                f"{path}: on these tensors the reference gives {why}\n"
                "  expected: inputs on which all that it returns is finite\n"
                "  next: call the module on them, or leave the file out of the workloads"
            )
        return inputs, data_words(name)
    import torch

    made = _MADE[name]
    if made.weights is not None:
        problem.randomise(model, seed, made.weights)
    inputs = problem.make_inputs(seed_of_inputs(seed), distribution=made.inputs, device=device)
    is_drawn = any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in inputs)
    why = "none is of floating-point numbers" if not is_drawn else ""
    if is_drawn and _why_not_finite(problem, model, inputs):
        why = f"{made.words} give NaN, Inf or an error"
    if not why:
        return inputs, made.words
    words = made.without_inputs or f"{GIVEN_AS_WELL} ({why})"
    return problem.make_inputs(seed_of_inputs(seed), device=device), words


def _why_not_finite(problem: Problem, model: torch.nn.Module, inputs: Sequence[Any]) -> str:
    """Return what the reference gives in place of finite numbers; empty where these are finite."""
    import torch

    try:
        with torch.no_grad():
            outputs = problem.call(copy.deepcopy(model), inputs)
        return "" if all(bool(y.isfinite().all()) for y in outputs) else "NaN or Inf"
    except ProblemError as error:
        if says_no_memory(str(error)):  # which data it is does not depend on that
            raise
        return f"an error: {error}"


def require_fitting(problem: Problem, path: Path) -> dict[int, torch.Tensor]:
    """Return the tensors of a file by their places among the reference's inputs.

    Raises:
        ProblemError: it cannot be read, or does not fit the inputs in number, shape or dtype.
    """
    import torch

    given = problem.stand_ins()
    names = _names_of_inputs(problem, len(given))
    wanted = {n: x for n, x in zip(names, given, strict=True) if isinstance(x, torch.Tensor)}
    expected = ", ".join(f"{name} {_described(x)}" for name, x in wanted.items())

    def wrong(got: str) -> ProblemError:
        return ProblemError(
            f"{path}: {got}\n"
            f"  expected: the tensors of the reference's inputs: {expected or 'none'}\n"
            "  next: write them with torch.save([...], FILE), as a list in this order or a "
            "dictionary by these names"
        )

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise wrong(f"cannot be read: {error.strerror or error}") from None
    except Exception as error:  # whatever a damaged archive makes of itself; PyTorch's own words
        # advise to load what may run any code.
        kind = type(error).__name__
        raise wrong(f"is nothing that torch.save wrote of tensors alone ({kind})") from None
    found = [loaded] if isinstance(loaded, torch.Tensor) else loaded
    if isinstance(found, list | tuple):
        if len(found) != len(wanted):
            raise wrong(f"got {len(found)} tensors in place of {len(wanted)}")
        found = dict(zip(wanted, found, strict=True))
    if not isinstance(found, Mapping):
        raise wrong(
            f"got {type(found).__name__} in place of a list, tuple or dictionary of tensors"
        )
    if set(found) != set(wanted):
        raise wrong(f"got {', '.join(map(str, found)) or 'no names'} as names of inputs")
    for name, tensor in found.items():
        if _described(tensor) != _described(wanted[name]):
            raise wrong(f"got {_described(tensor)} as {name}")
        if tensor.is_meta:
            raise wrong(f"got {_described(tensor)} without numbers as {name}")
    return {names.index(name): tensor for name, tensor in found.items()}


def _tensors_of_file(problem: Problem, path: Path, seed: int, device: str) -> list[Any]:
    """Return the given inputs with the tensors of a file in place of theirs."""
    import torch

    tensors = require_fitting(problem, path)
    given = problem.make_inputs(seed_of_inputs(seed), device=device)
    with torch.no_grad():
        for place, tensor in tensors.items():
            given[place].copy_(tensor)  # laid out in memory as the reference's own is
    return given


def _names_of_inputs(problem: Problem, number: int) -> list[str]:
    """Return the names of forward's parameters; places where it names fewer, as `*inputs` does."""
    try:
        parameters = list(inspect.signature(problem.module.Model.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*names[:number], *(f"input {place}" for place in range(len(names), number))]


def _described(value: Any) -> str:
    """Return a tensor's dtype and shape, and its layout where that is not the usual one."""
    import torch

    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    usual = value.layout == torch.strided
    layout = "" if usual else f" {str(value.layout).removeprefix('torch.')}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{layout}"
