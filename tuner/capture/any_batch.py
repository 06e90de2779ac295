"""An operator's texts for two batches, as one text for any batch.

A number that grows with the batch is written as a multiple of it. Where anything else differs,
such as a loop's own text, there is no such text, and the operator is for its own batch alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

__all__ = ["another_batch", "any_batch"]

_NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.])")
_ESTIMATES = ("flops: ", "bytes: ")  # of which a part may not grow
_VIEWS = tuple(f"- {{aten: {name}, " for name in ("view", "reshape", "expand"))
_PLAN = ("- {call: ", "- {aten: ", "outputs: ", "extra: ")
# The sizes as given, and defaults of blocks and products: any of these is right for any batch.
_AS_GIVEN = re.compile(
    r"(extra_)?sizes: |_TUNED_ROWS = |  (block_|num_warps|product_)\w*: |    default: "
)
_TENSOR = re.compile(r"  \w+: \{shape: ")


def another_batch(batch: int) -> int:
    """Return the next prime: it divides no other size, and hardly any is the same."""
    found = batch + 1
    while any(found % d == 0 for d in range(2, math.isqrt(found) + 1)) or found < 3:
        found += 1
    return found


def any_batch(one: str, other: str, batches: tuple[int, int], *, name: str) -> str | None:
    """Return the text for any batch, or None.

    Args:
        one: the text for the first of `batches`.
        other: the text for the second.
        batches: how many rows (dim 0) the inputs have.
        name: what the batch is called in the text.
    """
    lines = [one.split("\n"), other.split("\n")]
    if len(lines[0]) != len(lines[1]):
        return None
    found = [_line(a, b, batches, name) for a, b in zip(*lines, strict=True)]
    return None if None in found else "\n".join(line for line in found if line is not None)


def _line(one: str, other: str, batches: tuple[int, int], name: str) -> str | None:
    if one == other or _AS_GIVEN.match(one):
        return one
    step = one.lstrip()
    is_view = step.startswith(_VIEWS)
    is_plan = step.startswith((*_PLAN, *_ESTIMATES)) or _TENSOR.match(one) is not None
    is_result = ".view((" in one or "_unsafe_view.default(" in one
    if not (is_plan or is_result):
        return None
    mine, its = _NUMBER.split(one), _NUMBER.split(other)
    if mine[::2] != its[::2]:
        return None
    numbers = list(_numbers(mine[1::2], its[1::2], batches, name, one.startswith(_ESTIMATES)))
    if None in numbers:
        return None
    if step.startswith("- {aten: "):  # PyTorch's operations take numbers, and views one -1
        changed = [i for i, n in enumerate(numbers) if n != mine[1::2][i]]
        if not is_view or len(changed) != 1:
            return None
        numbers[changed[0]] = "-1"
    parts = [*mine]
    parts[1::2] = [str(number) for number in numbers]
    return "".join(parts)


def _numbers(
    mine: list[str], its: list[str], batches: tuple[int, int], name: str, is_estimate: bool
) -> Iterator[str | None]:
    """Yield each number as an expression of the batch, None where it does not grow with it."""
    for one, other in zip(map(int, mine), map(int, its), strict=True):
        more = other - one
        each, rest = divmod(more, batches[1] - batches[0])
        fixed = one - each * batches[0]
        if not more:
            yield str(one)
        elif is_estimate and each > 0:
            yield f"{each} * {name} + {max(0, fixed)}"
        elif rest or fixed:
            yield None
        else:
            yield name if each == 1 else f"{each} * {name}"
