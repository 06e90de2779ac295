"""What a reference may refuse, or would take too long for, and what is asked then."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from tuner.check.calls.crossing import Action, Layout, Report, Script
from tuner.check.calls.exercise import num_elements
from tuner.check.calls.layouts import laid_out_where
from tuner.check.calls.parts import copied
from tuner.check.probes.batches import FEW_ROWS, Extent
from tuner.check.probes.probe import ROWS, Probe
from tuner.errors import ProblemError, says_no_memory
from tuner.machine.platforms import is_gpu
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = [
    "FEWER_ROWS",
    "MOST_ELEMENTS",
    "extent_of",
    "fewer_rows",
    "is_odd",
    "lies_otherwise",
    "milder_than",
    "refuses_layout",
    "tamer",
    "unread",
]

FEWEST_ROWS = 2  # of which it is measured what a row takes where memory ran out for more
FEWER_ROWS = 321  # in place of 65,537 where these would cost too much
MOST_ELEMENTS = 5 * 10**7  # of all steps: some 0.2 s
TALL_ROWS = 64  # where what grows faster than the rows shows


def lies_otherwise(layout: Layout) -> bool:
    """Whether inputs of a layout have the numbers, shapes and types of contiguous ones."""
    others = ("contiguous", "float64", "too_wide", "twice_wide", "mixed", "int32", *ROWS)
    return layout not in others and not layout.startswith("bools")


def refuses_layout(
    problem: Problem, model: torch.nn.Module, probe: Probe, values: Sequence[Any]
) -> bool:
    """Whether the reference itself raises at such strides, as `view` does."""
    import torch

    if probe.layout == "misaligned" or not lies_otherwise(probe.layout):
        return False
    try:
        with torch.no_grad():
            laid = laid_out_where(values, Script(layout=probe.layout))
            problem.call(copied(model), laid)
    except ProblemError:
        return True
    return False


def unread(said: str) -> str:
    """Return why a judge could not judge an answer: what it raised on it."""
    if says_no_memory(said):
        return f"there was no memory to judge its answer: {said}"
    return f"its answer was garbled: {said}"


def _row_elements(
    problem: Problem, model: torch.nn.Module, device: Any, rows: int, seed: int = 0
) -> float:
    """Return how many numbers a call takes and makes for each row, in all its steps.

    Infinity where they grow faster than the rows, from `rows` to twice as many, or dim 0 is not a
    batch.
    """
    try:
        return _elements(problem, model, device, rows, seed)[0]
    except ProblemError:
        return math.inf


def _elements(
    problem: Problem, model: torch.nn.Module, device: Any, rows: int, seed: int = 0
) -> tuple[float, int]:
    """Return `_row_elements`, and the numbers of inputs that do not grow with the rows.

    Raises:
        ProblemError: the reference takes no such number of rows.
    """
    import torch

    counts, shapes = [], []
    for batch in (rows, 2 * rows):
        values = problem.make_inputs(seed, batch=batch, device=device)
        counts.append(_num_elements(problem, model, values))
        shapes.append([x.shape for x in values if isinstance(x, torch.Tensor)])
    few, more = counts
    fixed = sum(one.numel() for one, other in zip(*shapes, strict=True) if one == other)
    return (more - few) / rows if more <= 2.2 * few else math.inf, fixed


def _num_elements(problem: Problem, model: torch.nn.Module, values: Sequence[Any]) -> int:
    import torch

    with torch.no_grad():
        return num_elements(problem, copied(model), values)


def extent_of(problem: Problem, model: torch.nn.Module, device: Any) -> Extent:
    """Measure how large a problem is; its rows have no numbers where these are not known.

    Those of a reference that takes no other number of rows are a share of its own call's.
    """
    kind: Literal["gpu", "cpu"] = "gpu" if is_gpu(device) else "cpu"
    num_rows = problem.num_rows()
    for rows in (FEW_ROWS, FEWEST_ROWS):
        try:
            row, fixed = _elements(problem, model, device, rows)
        except ProblemError as error:
            if not says_no_memory(str(error)):
                break
        else:
            return Extent(num_rows, row if math.isfinite(row) else 0.0, kind, fixed)
    own = _num_elements(problem, model, problem.make_inputs(0, device=device))
    return Extent(num_rows, own / max(1, num_rows or 1), kind, is_fixed=True)


def fewer_rows(problem: Problem, probe: Probe, model: torch.nn.Module, device: Any) -> int | None:
    """Return at how many rows a tall probe is asked where its own take too long, else None.

    Its own do not where the numbers of all steps grow with the rows alone, and are few.
    """
    asked = probe.batch or 0
    extent = extent_of(problem, model, device)
    if extent.row_elements and extent.row_elements * asked <= MOST_ELEMENTS:
        many = _row_elements(problem, model, device, TALL_ROWS, probe.seed_inputs)
        if many * asked <= MOST_ELEMENTS:
            return None
    return min(FEWER_ROWS, extent.most_rows)


def milder_than(probe: Probe, script: Script, report: Report) -> Probe | None:
    """Return what is asked where the reference refuses a probe that others may take, else None."""
    has_none = report.stage == "gradients" and is_odd(probe)  # as LayerNorm of no rows, on a GPU
    if has_none or (report.error and script.is_forward):  # not all operations have that mode
        return dataclasses.replace(probe, gradients="")
    if not report.error:
        return None
    if probe.mapped:  # what looks at values, or edits buffers, cannot be
        return dataclasses.replace(probe, mapped="")
    if probe.mode == "cumulative":  # its own `momentum` has to be a number
        return dataclasses.replace(probe, mode="train")
    tame = tamer(probe)
    if tame is None and probe.gradients:  # of what is refused there are none to be given
        return dataclasses.replace(probe, gradients="")
    return tame


def tamer(probe: Probe) -> Probe | None:
    """Return a probe that the reference may take where it raises at this one, if there is one.

    Not every number is legal for every reference (a probability is at most 1), nor is dim 0 the
    rows of a batch in each (a square matrix product).
    """
    if any("convert part" in actions for actions in probe.before):  # of mixed types
        whole = tuple(
            tuple[Action, ...]("convert" if a == "convert part" else a for a in actions)
            for actions in probe.before
        )
        return dataclasses.replace(probe, before=whole)
    if probe.has_options == "sizes":  # which do not fit together, or not the inputs
        return dataclasses.replace(probe, has_options="")
    if probe.gradient_layout == "in_graph":  # not every backward can be differentiated
        return dataclasses.replace(probe, gradient_layout="contiguous")
    if probe.layout in ("same", "shared"):  # one input's numbers may be illegal for another one
        return dataclasses.replace(probe, layout="contiguous")
    if probe.may_be_refused or probe.dtype:
        return None
    if probe.default_dtype:  # it makes tensors of the default one, which then do not fit
        return dataclasses.replace(probe, default_dtype="")
    is_handled = probe.has_zeros or probe.is_touched
    if is_handled or probe.methods or probe.attributes or probe.paths:
        bare = dataclasses.replace(probe, before=(), methods=(), attributes=(), paths=())
        if bare != probe:  # it may be that options are zeros, and nothing else is done
            return bare
    if probe.mild_more:
        return dataclasses.replace(probe, mild=(), mild_more=0)
    if probe.calls > 1 and probe.inputs != "repeated" and not probe.is_drawn:
        return dataclasses.replace(probe, is_drawn=True)
    if probe.distribution != "as_given":
        return dataclasses.replace(probe, distribution="as_given")
    if probe.mild:
        return dataclasses.replace(probe, mild=())
    if probe.is_reduced and probe.batch is not None:
        return dataclasses.replace(probe, batch=None, is_reduced=False)
    return None


def is_odd(probe: Probe) -> bool:
    """Whether a reference may refuse what a probe asks."""
    return probe.may_be_refused or bool(
        probe.batch is not None or probe.dtype or probe.has_options
    )
