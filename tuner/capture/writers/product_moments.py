"""Moments of a product's columns, found by the kernel that makes the product.

A normalisation over the batch behind a Linear first takes the mean and the variance of each column
of what pointwise work makes of the product. The kernel has all of a tile's numbers in registers,
and leaves the moments of each column over the tile's rows where the kernels of the nest that
follows would leave theirs (`triton_split`): nobody reads the product once more for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tuner.capture.nests.indexing import is_split_by_blocks
from tuner.capture.nests.nest import Nest, Statement
from tuner.capture.nests.operations import converted
from tuner.capture.nests.paired_sweeps import SweepPair, paired_sweeps
from tuner.capture.tasks.library import Call
from tuner.capture.tasks.stages import Stages
from tuner.capture.writers.product_epilogues import (
    MATRICES,
    computed,
    is_computable,
    place_of_number,
    started_by,
    tasks_behind,
)

__all__ = ["SMALLEST_PIECE", "moments_behind", "moments_cuda_text", "moments_python_text"]

SMALLEST_PIECE = 128  # rows of a tile of a product, at least
# Products of pieces of sums have no columns until they are added up.
_STARTS = tuple(each for each in MATRICES if each[0] != "_in_pieces")
_INLINE = "__device__ __forceinline__"
_PLACED = "int64_t row, int64_t column, int64_t columns"


def moments_behind(stages: Stages, call: Call) -> Nest | None:
    """Return the nest behind a product of matrices that begins with moments of its columns."""
    behind = tasks_behind(stages, call)
    if not behind or not isinstance(behind[0], Nest):
        return None
    nest = behind[0]
    pair = _pair(nest)
    # The nest's kernels are those that put parts together, over all of a column in one piece.
    is_moved = nest.space.last or nest.space.orders
    if pair is None or not is_split_by_blocks(nest) or nest.passes[0].writes or is_moved:
        return None
    sizes, columns = nest.space.sizes, call.shape[-1]
    is_whole = math.prod(sizes) == math.prod(call.shape) and math.prod(sizes[1:]) == columns
    if not is_whole or nest.space.columns != frozenset({0}) or nest.taps or nest.parts:
        return None
    statements = _statements(nest, pair)
    read = {o for s in statements for o in s.refs} | {pair.first.value}
    given = [t for t in nest.arguments if t.name in read]
    places = {t.name: place_of_number(nest, t.name, columns) for t in given}
    is_read = places.get(call.name) == "row * columns + column" and None not in places.values()
    is_known = is_computable(statements) and read.isdisjoint(nest.indices)
    return nest if is_read and is_known and {t.dtype for t in given} == {"float32"} else None


def _pair(nest: Nest) -> SweepPair | None:
    pair = paired_sweeps(nest).get(0)
    return pair if pair is not None and pair.kind == "moments" else None


def _statements(nest: Nest, pair: SweepPair) -> list[Statement]:
    """Return what the number whose moments are taken is computed by, in order."""
    needed, found = {pair.first.value}, list[Statement]()
    for statement in reversed([*nest.before, *nest.passes[0].statements]):
        if statement.name in needed:
            needed |= {*statement.refs}
            found.insert(0, statement)
    return found


def _given(nest: Nest, call: Call) -> list[str]:
    """Return what the number is computed from besides the product, in order."""
    pair = _pair(nest)
    assert pair is not None
    read = {o for s in _statements(nest, pair) for o in s.refs}
    return [t.name for t in nest.arguments if t.name in read and t.name != call.name]


def moments_cuda_text(nest: Nest, call: Call, function: str) -> str:
    """Return the class that says which numbers' moments are taken, and what starts products.

    Args:
        nest: that begins with the moments.
        call: the product.
        function: the name of the function.
    """
    pair = _pair(nest)
    assert pair is not None
    given = _given(nest, call)
    names = {call.name: "sum"} | {name: f"a{i}" for i, name in enumerate(given)}
    mean, squares = map(nest.reductions.index, (pair.first, pair.second))
    lines = [
        f"struct {function}_epilogue {{",
        "  static constexpr bool kHasMoments = true;",
        f"  static constexpr int64_t kMean = {mean}, kSquares = {squares};",
        "  double* partial;",
        *(f"  const float* g{i};" for i in range(len(given))),
        f"  {_INLINE} float operator()(float sum, int64_t, int64_t, int64_t) const {{",
        "    return sum;",
        "  }",
        f"  {_INLINE} float of_moments(float sum, {_PLACED}) const {{",
    ]
    for i, name in enumerate(given):
        place = place_of_number(nest, name, call.shape[-1])
        lines.append(f"    const float a{i} = __ldg(g{i} + {place});")
    for i, (kind, text) in enumerate(computed(nest, names, "cuda", _statements(nest, pair))):
        lines.append(f"    const {kind} v{i} = {text};")
    kind = nest.kinds.get(pair.first.value, "float")
    lines += [
        f"    return {converted(names[pair.first.value], kind, 'float', 'cuda')};",
        "  }",
        f"  {_INLINE} bool reads(int64_t, int64_t, int64_t) const {{ return true; }}",
        "};",
    ]
    pointers = [("double*", "partial"), *(("const float*", f"g{i}") for i in range(len(given)))]
    return "\n".join([*lines, *started_by(function, pointers, _STARTS)]) + "\n"


def moments_python_text(
    nest: Nest, call: Call, function: str, behind: str, host: str, arguments: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the function that a step calls, and the values that it is given besides, in order.

    Args:
        nest: that begins with the moments.
        call: the product.
        function: the name of both functions, of Python and of CUDA C++.
        behind: the function that starts the nest's kernels.
        host: the function that starts products.
        arguments: what `behind` is given, its last four the parts, the totals, rows and columns.
    """
    taken = ", ".join(f"n{i}" for i in range(len(arguments)))
    partial = f"n{len(arguments) - 4}"
    text = f'''

@replayed
def {function}(
    x, weight, bias, out, num_rows, num_columns, depth, x_turned, weight_turned, {taken}, *given
):
    found = {host}(
        x, weight, bias, out, num_rows, num_columns, depth, x_turned, weight_turned,
        "{function}", ({partial}, *given), has_moments=True,
    )
    {behind}({taken}, found)
'''
    return text, _given(nest, call)
