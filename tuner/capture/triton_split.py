"""A nest as Triton kernels where rows are few and long: several programs split each row, or block.

Each pass is a kernel, and another one puts together what its programs found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tuner.capture.merged import Merged
from tuner.capture.nest import Nest, Pass, Reduction
from tuner.capture.triton_folds import fold_functions, put_together
from tuner.capture.triton_loops import Writer
from tuner.capture.triton_merged import PUT_MOMENTS_TOGETHER, lane_counts

__all__ = ["SplitWriter"]


class SplitWriter(Writer):
    """The text of one nest whose rows are split."""

    def __init__(
        self, nest: Nest, function: str, names: Mapping[str, str], block: tuple[str, str]
    ) -> None:
        super().__init__(nest, function, names, block)
        # Of rows that lie beside each other several; of others one, in a block as large.
        rows, columns = block
        self.has_rows = nest.space.is_across
        self.num_rows = self._param(rows) if self.has_rows else "1"
        self.num_columns = self._param(columns if self.has_rows else f"{rows} * {columns}")
        self.moments = {n: m for n, m in self.merged.items() if m.kind == "moments"}

    def text(self) -> str:
        """Return the kernels and what starts them."""
        head = fold_functions(self.function, self.folds)
        return head + "\n".join([*self._split(), *self._launch_split()]) + "\n"

    def _split(self) -> Iterator[str]:
        has_rows = any(not self.nest.is_inner(o.name) for o in self.nest.outputs)
        for number, each in enumerate(self.nest.passes):
            if number - 1 in self.moments:
                continue
            merged = self.moments.get(number)
            yield from ("", "", "@triton.jit")
            yield f"def {self.function}_pass_{number}("
            yield f"    {', '.join(self.pointers)}, partial, totals, num_rows, num_columns,"
            yield "    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,"
            yield "):"
            yield "    program = tl.program_id(0)"
            yield "    pieces = tl.cdiv(num_columns, PIECE)"
            yield from self._known("(program // pieces)", number)
            yield "    piece = (program % pieces) * PIECE"
            yield "    last_col = tl.minimum(piece + PIECE, num_columns)"
            sweep = self._sweep(each, "piece", "last_col", merged)
            yield from (f"    {line}" for line in sweep)
            found = self._found(each, merged, lane_counts("piece", "last_col"), is_all=False)
            yield from (f"    {line}" for line in found)
            for reduction in _both(each, merged):
                name, index = self.names[reduction.name], self.nest.reductions.index(reduction)
                at = f"({index} * num_rows + row_ids) * pieces + program % pieces"
                yield f"    tl.store(partial + {at}, {name}, mask=is_row)"
        if has_rows:
            yield from ("", "", "@triton.jit")
            yield f"def {self.function}_results("
            yield f"    {', '.join(self.pointers)}, totals, num_rows, ROWS: tl.constexpr,"
            yield "):"
            yield from self._known("tl.program_id(0)", len(self.nest.passes))
            yield from self._row_outputs()
        for fold in sorted(self.folds):
            yield put_together(self.function, fold)
        if self.moments:
            yield PUT_MOMENTS_TOGETHER.format(function=self.function).rstrip("\n")

    def _known(self, program: str, number: int) -> Iterator[str]:
        """Read and compute what is known of the rows before a pass."""
        yield from self._begin(program)
        for each in self.nest.passes[:number]:
            for reduction in each.reductions:
                at = f"totals + {self.nest.reductions.index(reduction)} * num_rows + row_ids"
                name = self.names[reduction.name]
                loaded = f"tl.load({at}, mask=is_row, other=0.0)"
                is_scaled = any(reduction == merged.second for merged in self.moments.values())
                scale = "" if is_scaled else self._scale_left(reduction)
                yield f"    {name} = {loaded}{scale}"
            yield from (f"    {self._statement(s)}" for s in each.after)

    def _launch_split(self) -> Iterator[str]:
        outputs = [f"{name}_out" for name in self.outputs]
        given = ", ".join([*self.inputs, *outputs])
        yield from ("", "", f"def {self.function}({given}, partial, totals, rows, cols):")
        yield f"    block = {self.num_columns}"
        yield "    if cols + block * {{ split }} >= 2**31:"
        yield '        raise RuntimeError(f"{cols} columns are past 2^31")'
        yield "    pieces = triton.cdiv(cols, block * {{ split }})"
        for number, each in enumerate(self.nest.passes):
            if number - 1 in self.moments:
                continue
            blocks = "rows" if not self.has_rows else f"({self._row_blocks(self.num_rows)})"
            yield f"    {self.function}_pass_{number}[({blocks} * pieces,)]("
            yield f"        {given}, partial, totals, rows, cols,"
            yield f"        ROWS={self.num_rows}, COLUMNS=block, PIECE=block * {{{{ split }}}},"
            yield "        num_warps={{ num_warps }},"
            yield "    )"
            if number in self.moments:
                yield from self._moments_together(self.moments[number])
                continue
            for reduction in each.reductions:
                number_of = self.nest.reductions.index(reduction)
                call = f"{self.function}_put_together_{reduction.fold}[(rows,)]"
                yield f"    {call}(partial, totals, rows, pieces, NUMBER={number_of})"
        if any(not self.nest.is_inner(o.name) for o in self.nest.outputs):
            yield f"    {self.function}_results[({self._row_blocks('128')},)]("
            yield f"        {given}, totals, rows, ROWS=128,"
            yield "    )"

    def _moments_together(self, merged: Merged) -> Iterator[str]:
        mean, squares = (self.nest.reductions.index(r) for r in (merged.first, merged.second))
        scale = merged.second.scale
        factor = 'float("nan")' if math.isnan(scale) else repr(scale)
        yield f"    {self.function}_put_together_moments[(rows,)]("
        yield f"        partial, totals, rows, cols, pieces, {factor},"
        yield f"        PIECE=block * {{{{ split }}}}, MEAN={mean}, SQUARES={squares},"
        yield "    )"


def _both(each: Pass, merged: Merged | None) -> list[Reduction]:
    """Return what a sweep finds."""
    return list(each.reductions) if merged is None else [merged.first, merged.second]
