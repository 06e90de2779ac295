"""How large the blocks of Triton kernels are: searched for the forward, chosen for gradients.

A search times the forward alone, so that its values say little of the nests of a step of training.
Those get theirs from shapes, without the batch, at which a step may be another one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.capture.graph.graph import num_bytes_of
from tuner.capture.nests.indexing import is_split, lies_apart
from tuner.capture.nests.nest import Nest
from tuner.capture.nests.precision import HALVES

__all__ = [
    "SEARCHED", "Blocks", "chosen", "is_split_across", "power_of_2", "searched",
    "with_sums_of",
]  # fmt: skip

STAGED_BYTES = 80 * 1024  # of shared memory, which a program has on any GPU since Ampere


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a nest's kernels are started with: numbers, a template's parameters in braces, or text.

    The text may name `cols`, `block`, the columns of a block that is cut to a short row, and
    `block_rows`.

    Attributes:
        rows: of one program at a time.
        columns: of one program at a time.
        num_warps: of one program.
        stages: blocks on their way at a time.
        split: blocks of a long row that one program takes.
        max_registers: of a lane, so that another program fits beside one; None for any number.
    """

    rows: int | str
    columns: int | str
    num_warps: int | str
    stages: int | str = 2
    split: int | str = 8
    max_registers: int | None = None


def searched(suffix: str = "", kind: str = "block") -> Blocks:
    """Return the blocks that a search decides.

    Args:
        suffix: what their parameters end in.
        kind: what those of rows and columns begin with: "block", or "tile" (`triton_parameters`).
    """
    names = (f"{kind}_rows", f"{kind}_columns", "num_warps", "stages", "split")
    rows, columns, num_warps, stages, split = (f"{{{{ {name}{suffix} }}}}" for name in names)
    return Blocks(rows, columns, num_warps, stages, split)


SEARCHED = searched()


def is_split_across(nest: Nest) -> bool:
    """Whether the columns of a gradient's nest are split, of rows that are adjacent in memory.

    That is a reduction over the batch: a weight alone has too few elements to keep a GPU busy.
    """
    if not nest.reductions or not nest.space.is_across:
        return False
    return 0 in nest.space.columns and not any(r.is_index for r in nest.reductions)


def chosen(nest: Nest) -> Blocks:
    """Return the blocks of a gradient's nest.

    A lane holds 16 values of each tensor, 8 where those are many. A row that is shorter than
    `columns` is a block of its own, and more of them are taken at a time. Rows that are adjacent
    in memory are read 128 bytes or more at a time. Of rows that no block holds few are on their
    way, so that the L2 cache has them when they are read again.
    """
    given = [t.dtype for t in nest.arguments if nest.is_dense(t.name)]
    dense = given + [o.dtype for o in nest.outputs if nest.is_dense(o.name)]
    if is_split_across(nest):
        rows = min(256 if HALVES & {*given} else 128, power_of_2(nest.space.rows))
        return Blocks(rows, max(1, 2048 // rows), 4)
    if nest.scans:
        return Blocks(32, 32, 4) if nest.space.is_across else Blocks(1, 1024, 4)
    if is_split(nest):
        return Blocks(1, 1024, 4)
    if lies_apart(nest):
        return Blocks(32, 64, 4)
    lanes = "block_rows * block // 512" if len(dense) <= 4 else "block_rows * block // 256"
    warps, registers = f"max(4, {lanes})", None if len(dense) <= 4 else 64
    if nest.space.is_across:
        return Blocks("max(32, 1024 // block)", 128, warps)
    if not nest.reductions:
        return Blocks("max(1, 1024 // block)", 1024, warps)
    warps = f"32 if cols > block else {warps}"
    stages = _stages(nest, 8192)
    return Blocks("max(1, 1024 // block)", 8192, warps, stages, max_registers=registers)


def with_sums_of(nest: Nest) -> Blocks:
    """Return the blocks of a nest whose programs keep sums of its rows: 4 values a lane."""
    columns = power_of_2(nest.space.cols)
    rows = max(8 if lies_apart(nest) else 1, 1024 // columns)  # 8: 32 bytes of memory
    warps = min(32, max(4, rows * columns // 128))
    return Blocks(rows, columns, warps, _stages(nest, rows * columns), max_registers=64)


def _stages(nest: Nest, size: int) -> int:
    """Return how many blocks of so many elements are on their way: what shared memory holds."""
    num_bytes = sum(num_bytes_of(t.dtype) for t in nest.arguments if nest.is_inner(t.name))
    return 1 + min(2, STAGED_BYTES // max(1, num_bytes * size))


def power_of_2(number: int) -> int:
    """Return the least power of 2 that is no less."""
    return 1 << (number - 1).bit_length()
