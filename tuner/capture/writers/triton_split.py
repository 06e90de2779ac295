"""A nest as Triton kernels where rows are few: several programs split each, or a block of them.

Each pass is a kernel, and another one puts together what its programs found, in an order that does
not depend on which of them was first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tuner.capture.nests.nest import Nest, Pass, Reduction
from tuner.capture.nests.paired_sweeps import SweepPair
from tuner.capture.writers.triton_blocks import SEARCHED, Blocks
from tuner.capture.writers.triton_folds import (
    PUT_MOMENTS_TOGETHER,
    START,
    fold_functions,
    lane_counts,
    put_together,
)
from tuner.capture.writers.triton_loops import Writer

__all__ = ["AcrossWriter", "SplitWriter"]


class _PartsWriter(Writer):
    """What both ways to split rows have in common: parts are put together between passes."""

    def _known(self, program: str, number: int) -> Iterator[str]:
        """Read and compute what is known of the rows before a pass."""
        yield from self._begin(program)
        for each in self.nest.passes[:number]:
            for reduction in each.reductions:
                at = f"totals + {self.place_of(reduction)} * num_rows + row_ids"
                left = self._left(reduction)
                total = f"tl.load({at}, mask=is_row, other=0.0){left}"
                total = f"({total}).to(tl.float32)" if left and reduction.is_mean else total
                yield f"    {self.names[reduction.name]} = {total}"
            yield from (f"    {self._statement(s)}" for s in each.after)

    def _left(self, reduction: Reduction) -> str:
        """Return the product with what a total was not multiplied by."""
        return ""

    def place_of(self, reduction: Reduction) -> int:
        """Return where its parts lie among those of others."""
        return self.nest.reductions.index(reduction)


class SplitWriter(_PartsWriter):
    """The text of one nest whose rows are split."""

    def __init__(
        self,
        nest: Nest,
        function: str,
        names: Mapping[str, str],
        blocks: Blocks = SEARCHED,
        smallest_given: int = 0,
    ) -> None:
        super().__init__(nest, function, names, blocks)
        # Moments of the first pass may be given instead, each of so many columns at least.
        self.takes_moments = smallest_given > 0
        # Of rows that lie beside each other several; of others one, in a block as large.
        self.has_rows = nest.space.is_across
        self.moments = {n: m for n, m in self.pairs.items() if m.kind == "moments"}
        sizes = [blocks.rows] * (not self.has_rows) + [blocks.columns, blocks.split]
        taken = " * ".join(str(size).strip("{} ") for size in sizes)
        self.pieces = f"cdiv({self.space.cols}, {taken})"
        if self.takes_moments:
            self.pieces = f"max({self.pieces}, cdiv({self.space.cols}, {smallest_given}))"

    def text(self) -> str:
        """Return the kernels and what starts them."""
        head = fold_functions(self.function, self.folds)
        return head + "\n".join([*self._split(), *self._launch_split()]) + "\n"

    def _split(self) -> Iterator[str]:
        for number, each in enumerate(self.nest.passes):
            if number - 1 in self.moments:
                continue
            pair = self.moments.get(number)
            yield from ("", "", self.launched, "@triton.jit")
            yield f"def {self.function}_pass_{number}("
            is_given = self.takes_moments and number == 0
            odd, again = ("odd, ", " AGAIN: tl.constexpr,") if is_given else ("", "")
            yield f"    {', '.join(self.pointers)}, partial, totals, {odd}num_rows, num_columns,"
            yield f"    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,{again}"
            yield "):"
            if is_given:  # and right, unless the flag is set
                yield from ("    if AGAIN:", "        if tl.load(odd) == 0:", "            return")
            # The other way round than before, so that the L2 cache has what comes first.
            is_back = number % 2 or number - 2 in self.moments
            program = "tl.program_id(0)"
            yield f"    program = {f'tl.num_programs(0) - 1 - {program}' if is_back else program}"
            yield "    pieces = tl.cdiv(num_columns, PIECE)"
            yield from self._known("(program // pieces)", number)
            yield "    piece = (program % pieces) * PIECE"
            yield "    last_col = tl.minimum(piece + PIECE, num_columns)"
            sweep = self._sweep(each, "piece", "last_col", pair)
            yield from (f"    {line}" for line in sweep)
            found = self._found(each, pair, lane_counts("piece", "last_col"), is_all=False)
            yield from (f"    {line}" for line in found)
            for reduction in _both(each, pair):
                name, index = self.names[reduction.name], self.place_of(reduction)
                at = f"({index} * num_rows + row_ids) * pieces + program % pieces"
                yield f"    tl.store(partial + {at}, {name}, mask=is_row)"
            if self._has_results(number):
                yield from (f"    {self._statement(s)}" for s in each.after)
                yield "    is_row = is_row & (piece == 0)"
                yield from self._row_outputs()
        if self._has_results(None):
            yield from ("", "", self.launched, "@triton.jit")
            yield f"def {self.function}_results("
            yield f"    {', '.join(self.pointers)}, totals, num_rows, num_columns,"
            yield "    ROWS: tl.constexpr,"
            yield "):"
            yield from self._known("tl.program_id(0)", len(self.nest.passes))
            yield from self._row_outputs()
        paired = {r for pair in self.moments.values() for r in (pair.first, pair.second)}
        for fold in sorted({r.fold for r in self.nest.reductions if r not in paired}):
            yield put_together(self.function, fold)
        if self.moments:
            yield PUT_MOMENTS_TOGETHER.format(function=self.function).rstrip("\n")

    def _has_results(self, number: int | None) -> bool:
        """Whether a pass writes what is of a row; None: a kernel behind the last one does."""
        last = len(self.nest.passes) - 1
        is_any = any(not self.nest.is_inner(o.name) for o in self.nest.outputs)
        is_last_pass = not self.nest.passes[last].reductions
        return is_any and number == (last if is_last_pass else None)

    def _left(self, reduction: Reduction) -> str:
        is_scaled = any(reduction == pair.second for pair in self.moments.values())
        return "" if is_scaled else self._scale_left(reduction)

    def _launch_split(self) -> Iterator[str]:
        given = ", given=None" if self.takes_moments else ""
        taken = f"{self.tensors}, partial, totals, rows, cols{given}"
        yield from ("", "", "@replayed", f"def {self.function}({taken}):")
        rows, columns = self.blocks.rows, self.blocks.columns
        block = columns if self.has_rows else f"{rows} * {columns}"
        yield f"    block, split = {block}, {self.blocks.split}"
        yield f"    block_rows = {rows if self.has_rows else 1}"
        yield "    if cols + block * split >= 2**31:"
        yield '        raise RuntimeError(f"{cols} columns are past 2^31")'
        yield "    pieces = ceil_div(cols, block * split)"
        if self.takes_moments:
            yield "    # Moments are given of so many columns each, with a flag where they may"
            yield "    # not hold."
            yield "    length, odd = given or (block * split, None)"
            yield "    shares, pieces = pieces, ceil_div(cols, length)"
        yield "    lanes = min(1024, 1 << (pieces - 1).bit_length())"
        yield "    blocks = ceil_div(rows, 1024 // lanes)"
        for number, each in enumerate(self.nest.passes):
            if number - 1 in self.moments:
                continue
            of_rows = f"({self._row_blocks('block_rows')})" if self.has_rows else "rows"
            if self.takes_moments and number == 0:
                yield from self._launch_first(of_rows)
                yield from self._moments_together(self.moments[number], "length")
                continue
            pieces = "shares" if self.takes_moments else "pieces"
            yield f"    {self.function}_pass_{number}[({of_rows} * {pieces},)]("
            yield f"        {self.tensors}, partial, totals, rows, cols,"
            yield "        ROWS=block_rows, COLUMNS=block, PIECE=block * split,"
            yield f"        num_warps={self.blocks.num_warps},"
            yield "    )"
            if number in self.moments:
                yield from self._moments_together(self.moments[number])
                continue
            for reduction in each.reductions:
                yield f"    {self.function}_put_together_{reduction.fold}[(blocks,)]("
                yield f"        partial, totals, rows, pieces, NUMBER={self.place_of(reduction)},"
                yield "        ROWS=1024 // lanes, PIECES=lanes,"
                yield "    )"
        if self._has_results(None):
            yield f"    {self.function}_results[({self._row_blocks('128')},)]("
            yield f"        {self.tensors}, totals, rows, cols, ROWS=128,"
            yield "    )"

    def _launch_first(self, of_rows: str) -> Iterator[str]:
        """Start the first pass unless its moments are given, and there is nothing to ask."""
        yield "    if given is None or odd is not None:"
        yield f"        {self.function}_pass_0[({of_rows} * pieces,)]("
        yield f"            {self.tensors}, partial, totals, totals if odd is None else odd,"
        yield "            rows, cols, ROWS=block_rows, PIECE=length,"
        # Whole blocks make a piece of a product's tile.
        yield "            COLUMNS=block if given is None else min(block, 64),"
        yield f"            AGAIN=given is not None, num_warps={self.blocks.num_warps},"
        yield "        )"

    def _moments_together(self, pair: SweepPair, length: str = "block * split") -> Iterator[str]:
        mean, squares = map(self.place_of, (pair.first, pair.second))
        scale, less = pair.second.scale, pair.second.less
        factor = 'float("nan")' if math.isnan(scale) else repr(scale)
        if pair.second.is_mean:
            factor = f'1.0 / (cols - {less!r}) if cols > {less!r} else float("nan")'
        yield f"    {self.function}_put_together_moments[(blocks,)]("
        yield f"        partial, totals, rows, cols, pieces, {factor},"
        yield f"        PIECE={length}, MEAN={mean}, SQUARES={squares},"
        yield "        ROWS=1024 // lanes, PIECES=lanes,"
        yield "    )"


def _both(each: Pass, pair: SweepPair | None) -> list[Reduction]:
    """Return what a sweep finds."""
    return list(each.reductions) if pair is None else [pair.first, pair.second]


class AcrossWriter(_PartsWriter):
    """The text of one nest whose rows are adjacent in memory, and their columns split.

    Programs hold blocks of rows, and take blocks of columns in turns: at any time they read what
    lies together. There are `programs` of them, a parameter, or one for each block of rows.
    """

    def __init__(
        self, nest: Nest, function: str, names: Mapping[str, str], blocks: Blocks
    ) -> None:
        super().__init__(nest, function, names, blocks)
        most = f"max(1, programs // cdiv({self.space.rows}, {blocks.rows}))"
        self.pieces = f"min(cdiv({self.space.cols}, {blocks.columns}), {most})"
        self.is_given_pieces = True

    def text(self) -> str:
        """Return the kernels and what starts them."""
        head = fold_functions(self.function, self.folds)
        lines = [line for n in range(len(self.nest.passes)) for line in self._pass(n)]
        return head + "\n".join([*lines, *self._launch()]) + "\n"

    def _pass(self, number: int) -> Iterator[str]:
        each = self.nest.passes[number]
        yield from (
            "",
            "",
            self.launched,
            '@triton.jit(do_not_specialize=["num_columns", "pieces"])',
        )
        yield f"def {self.function}_pass_{number}("
        yield f"    {', '.join(self.pointers)}, partial, totals, num_rows, num_columns, pieces,"
        yield "    ROWS: tl.constexpr, COLUMNS: tl.constexpr,"
        yield "):"
        yield "    piece = tl.program_id(0) % pieces"
        yield from self._known("(tl.program_id(0) // pieces)", number)
        step = "pieces * COLUMNS"
        for line in self._sweep(each, "piece * COLUMNS", "num_columns", step=step):
            yield f"    {line}"
        yield from (f"    {line}" for line in self._found(each, None, "", is_all=False))
        for reduction in each.reductions:
            at = f"({self.place_of(reduction)} * pieces + piece) * num_rows + row_ids"
            yield f"    tl.store(partial + {at}, {self.names[reduction.name]}, mask=is_row)"
        if each.reductions:
            yield from self.together(number)

    def together(self, number: int) -> Iterator[str]:
        """Put together what the programs of a pass found; write what that is of a row."""
        each = self.nest.passes[number]
        not_for = '@triton.jit(do_not_specialize=["num_columns", "pieces"])'
        yield from ("", "", self.launched, not_for)
        yield f"def {self.function}_together_{number}("
        yield f"    {', '.join(self.pointers)}, partial, totals, num_rows, num_columns, pieces,"
        yield "    ROWS: tl.constexpr, PIECES: tl.constexpr,"
        yield "):"
        yield from self._known("tl.program_id(0)", number)
        for reduction in each.reductions:
            name, start = self.names[reduction.name], START[reduction.fold]
            place = self.place_of(reduction)
            yield f"    {name}_part = tl.full([PIECES, ROWS], {start}, tl.float64)"
            yield "    for first_piece in range(0, pieces, PIECES):"
            yield "        piece = (first_piece + tl.arange(0, PIECES))[:, None]"
            at = f"({place} * pieces + piece) * num_rows + row_ids[None, :]"
            mask = "(piece < pieces) & is_row[None, :]"
            yield f"        more = tl.load(partial + {at}, mask={mask}, other={start})"
            call = f"{self.function}_{reduction.fold}"
            if reduction.fold == "sum":
                yield f"        {name}_part = {name}_part + more"
                found = f"tl.sum({name}_part, axis=0)"
            else:
                yield f"        {name}_part = {call}({name}_part, more.to(tl.float64))"
                found = f"tl.reduce({name}_part, 0, {call})"
            yield f"    {name} = ({found}{self._scale_left(reduction)}).to(tl.float32)"
            if number + 1 < len(self.nest.passes):
                at = f"{place} * num_rows + row_ids"
                yield f"    tl.store(totals + {at}, {name}, mask=is_row)"
        if number == self._last():
            yield from (f"    {self._statement(s)}" for s in each.after)
            yield from self._row_outputs()

    def _last(self) -> int:
        """Return the last pass that reduces; whatever a row has is known behind it."""
        return max(n for n, each in enumerate(self.nest.passes) if each.reductions)

    def _launch(self) -> Iterator[str]:
        taken = f"{self.tensors}, partial, totals, rows, cols, pieces"
        yield from ("", "", "@replayed", f"def {self.function}({taken}):")
        yield f"    if cols + pieces * {self.blocks.columns} >= 2**31:"
        yield '        raise RuntimeError(f"{cols} columns are past 2^31")'
        yield f"    blocks = {self._row_blocks(str(self.blocks.rows))} * pieces"
        for number, each in enumerate(self.nest.passes):
            yield f"    {self.function}_pass_{number}[(blocks,)]("
            yield f"        {taken},"
            yield f"        ROWS={self.blocks.rows}, COLUMNS={self.blocks.columns},"
            yield f"        num_warps={self.blocks.num_warps},"
            yield "    )"
            if each.reductions:
                yield from self.launch_together(number, "rows", "cols")

    def launch_together(self, number: int, rows: str, cols: str) -> Iterator[str]:
        """Start the kernel of `together`, of so many `rows` and `cols`."""
        yield f"    {self.function}_together_{number}[({self._row_blocks('32', rows)},)]("
        yield f"        {self.tensors}, partial, totals, {rows}, {cols}, pieces,"
        yield "        ROWS=32, PIECES=128, num_warps=8,"
        yield "    )"
