"""Whether a forward does at few rows, and at many, what it does at its own number of them.

A record holds what forward did at one batch. Two records of much the same batch do not tell what
it decides by the number of rows (`if len(x) > 100`, `min(len(x), 64)`, `x.squeeze()`); calls on
fake tensors, which cost milliseconds, do.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.capture.any_batch import quotient_of
from tuner.capture.graph.tracing import fake_module, resized
from tuner.problem.dispatching import dispatched
from tuner.problem.modes import TuneMode
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["MANY_ROWS", "rows_tried"]

MANY_ROWS = 2**20 + 7  # what is the same there is taken for the same at any larger number
# Powers of two and what divides by few of them, beside those of the records.
_TRIED = (
    *range(1, 13),
    *(15, 16, 17, 20, 24, 31, 32, 33, 48, 60, 64, 65, 96, 100, 101, 127, 128, 129, 192, 200),
    *(255, 256, 257, 384, 500, 512, 513, 768, 1000, 1023, 1024, 1025, 1536, 2000, 2048, 2049),
    *(3072, 4096, 4097, 8192, 10_000, 16_384, 20_001, 65_536, 100_003, 2**17, 2**18 + 1),
    *(2**20, MANY_ROWS),
)
_FEW_STEPS = 400  # of a forward that is called at all of these; of a larger one at a third
_MORE_STEPS = 4  # as many as at its own batch: then a call has become a loop, and is cut off


@dataclass(slots=True)
class _Record:
    """The functions of PyTorch that a forward called: their words, and all of their numbers.

    `num_steps` are the operators that these were made of.
    """

    words: list[str] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    num_steps: int = 0


def rows_tried(
    problem: Problem, mode: TuneMode, batches: tuple[int, int]
) -> tuple[int, int | None] | None:
    """Return from and up to how many rows forward does the same; None where `batches` differ.

    `batches` are those of two records. No upper end is None. What the file raises at a number of
    rows, as BatchNorm does at one, is another thing.
    """
    import torch

    own, other = batches
    with fake_module(problem, mode) as (model, _, values, _known), torch.no_grad():
        inputs = values, problem.with_rows()
        most = None
        found = {}
        for batch in batches:
            record = _called(model, inputs, batch, most)
            if record is None:
                return None
            found[batch] = record
            most = _MORE_STEPS * record.num_steps + 100

        def is_same_at(rows: int) -> bool:
            record = found.get(rows) or _called(model, inputs, rows, most)
            return record is not None and _are_alike({**found, rows: record})

        if not is_same_at(other):
            return None
        tried = _TRIED if found[own].num_steps <= _FEW_STEPS else (1, 2, *_TRIED[2::3])
        fewest, most_rows = sorted(batches)
        for rows in (n for n in reversed(tried) if n < min(batches)):
            if not is_same_at(rows):
                break
            fewest = rows
        for rows in (n for n in tried if n > max(batches)):
            if not is_same_at(rows):
                break
            most_rows = rows
    return fewest, None if most_rows >= MANY_ROWS else most_rows


def _called(
    model: torch.nn.Module,
    inputs: tuple[tuple[Any, ...], tuple[bool, ...]],
    rows: int,
    most: int | None,
) -> _Record | None:
    """Call a module of fake tensors on so many rows; None where it fails, or takes most steps."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_flatten

    record = _Record()

    class Functions(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            leaves, spec = tree_flatten((args, kwargs or {}, made))
            record.words.append(f"{func} {spec} {' '.join(map(_word, leaves))}")
            for leaf in leaves:
                record.numbers += _numbers(leaf)
            return made

    def counted(func: Any, args: Any, kwargs: Any) -> Any:
        record.num_steps += 1
        if most is not None and record.num_steps > most:
            raise RuntimeError("more steps than at the batch of the record")
        return func(*args, **kwargs)

    tensors = [*inputs[0], *model.parameters(), *model.buffers()]
    fake = next((x.fake_mode for x in tensors if hasattr(x, "fake_mode")), None)
    if fake is None:
        return None
    silent = logging.root.manager.disable  # PyTorch logs an error that is raised as well
    logging.disable(logging.CRITICAL)
    said = io.StringIO()  # what a forward prints is printed once, as it is captured
    try:
        # Recurrent networks are known by shape there.
        with fake, enable_python_dispatcher(), redirect_stdout(said), redirect_stderr(said):
            given = resized(*inputs, rows)
            with dispatched(counted), Functions():
                model(*given)
    except Exception:  # whatever a user's forward raises there
        return None
    finally:
        logging.disable(silent)
    return record


def _word(leaf: object) -> str:
    """Return what of an argument or a result is the same at any number of rows."""
    shape = _shape_of(leaf)
    if shape is not None:
        return f"{getattr(leaf, 'dtype', '')}:{len(shape)}"
    return type(leaf).__name__ if _is_number(leaf) else repr(leaf)


def _numbers(leaf: Any) -> Sequence[float]:
    shape = _shape_of(leaf)
    if shape is not None:
        return [float(size) for size in shape]
    return [float(leaf)] if _is_number(leaf) else []


def _shape_of(leaf: object) -> Sequence[int] | None:
    """Return a tensor's shape, or one that is a value itself."""
    return leaf if isinstance(leaf, tuple) else getattr(leaf, "shape", None)


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _are_alike(records: Mapping[int, _Record]) -> bool:
    """Whether all are of the same calls, whose numbers depend on the batch in one way."""
    batches, found = list(records), list(records.values())
    if any(record.words != found[0].words for record in found):
        return False
    return all(
        _is_one_of_batch(values, batches)
        for values in zip(*(record.numbers for record in found), strict=True)
    )


def _is_one_of_batch(values: Sequence[float], batches: Sequence[int]) -> bool:
    one, other = values[:2]
    if one == other or math.isnan(one):
        return all(value == one or (math.isnan(value) and math.isnan(one)) for value in values)
    each = (other - one) / (batches[1] - batches[0])
    fixed = one - each * batches[0]
    lines = [each * batch + fixed for batch in batches]
    if all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(lines, values, strict=True)):
        return True
    found = quotient_of(values[:2], (batches[0], batches[1]))
    return found is not None and all(
        math.isclose(found[0].at(batch) / (found[1].at(batch) or math.nan), value, rel_tol=1e-9)
        for batch, value in zip(batches, values, strict=True)
    )
