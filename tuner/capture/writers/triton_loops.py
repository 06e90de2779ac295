"""A nest as the text of Triton kernels: programs that hold blocks of rows and columns.

Where a whole row fits in a program it is read once; else each pass reads it again, and keeps one
partial result a lane until the pass is over. Without reductions programs share rows. For rows that
are few and long see `triton_split`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tuner.capture.nests.indexing import inner_rows, offset, part_places, row_dims
from tuner.capture.nests.nest import COLUMN, Nest, Pass, Reduction, Statement, emitted
from tuner.capture.nests.operations import converted, emit
from tuner.capture.nests.paired_sweeps import SweepPair, paired_sweeps
from tuner.capture.nests.precision import HALVES
from tuner.capture.nests.windows import triton_tap
from tuner.capture.writers.triton_blocks import SEARCHED, Blocks
from tuner.capture.writers.triton_folds import (
    JOINED,
    START,
    begun,
    fold_functions,
    joined,
    lane_counts,
    scaled,
    stepped,
)

__all__ = ["RESERVED", "Writer"]

# What the text itself names.
RESERVED = {
    "col_ids", "first_col", "is_col", "is_row", "num_columns", "num_rows", "present", "row_ids",
    "tl", "libdevice", "triton", "block", "blocks", "column_index", "partial", "totals", "piece",
    "pieces", "program", "last_col", "first_piece", "more",
    "given", "length", "odd", "shares",
    "block_rows", "programs", "row_blocks", "outer_row", "inner_ids", "lanes", "split",
}  # fmt: skip
_WHOLE = {"int64": "tl.int64", "bool": "tl.uint8"}


class Writer:
    """The text of one nest: kernels, and the function that starts them, which the plan calls.

    Args:
        nest: what to compute.
        function: its name.
        names: of values, none of `RESERVED`.
        blocks: how large they are.
    """

    def __init__(
        self, nest: Nest, function: str, names: Mapping[str, str], blocks: Blocks = SEARCHED
    ) -> None:
        self.nest, self.function, self.blocks = nest, function, blocks
        self.names = {**names, COLUMN: "column_index"}
        self.space = nest.space
        self.rows, self.columns = row_dims(self.space), sorted(self.space.columns)
        # Rows of one block lie beside each other, in whichever order of memory.
        self.inner_rows = inner_rows(self.space) if nest.is_transposed else self.rows
        self.outer_rows = self.rows[: len(self.rows) - len(self.inner_rows)]
        self.num_inner = math.prod(self.space.sizes[d] for d in self.inner_rows)
        self.given = {*nest.read}
        self.inputs = [names[t.name] for t in nest.arguments]
        self.outputs = [names[o.name] for o in nest.outputs]
        self.pairs = paired_sweeps(nest)
        self.folds = {r.fold for r in nest.reductions}
        self.has_own_rows = bool(self.folds)  # a program has all columns of its rows
        results = [f"{name}_out" for name in self.outputs]
        self.pointers = [f"{name}_all" for name in self.inputs] + results
        self.tensors = ", ".join([*self.inputs, *results])  # what the plan's call passes
        # Between how many programs columns are split, as an expression over sizes and parameters;
        # "" where they are not. What each finds lies between kernels, of what `split` reduces.
        self.pieces = ""
        self.is_given_pieces = False
        self.split = nest
        has_products = any(s.op == "product" for s in nest.statements)
        self.launched = "@launched_rounded" if has_products else "@launched"

    def text(self) -> str:
        """Return the kernels and what starts them."""
        head = fold_functions(self.function, self.folds)
        body = self._own_rows() if self.has_own_rows else self._shared_rows()
        return head + "\n".join([*self._signature(), *body, *self._launch()]) + "\n"

    # ---- a program has rows of its own, or blocks of them -------------------------------------

    def _signature(self) -> Iterator[str]:
        yield from ("", "", self.launched, '@triton.jit(do_not_specialize=["num_rows"])')
        yield f"def {self.function}_kernel("
        yield f"    {', '.join(self.pointers)}, num_rows, num_columns,"
        more = ", IS_ONE_BLOCK: tl.constexpr" if self.folds else ""
        yield f"    ROWS: tl.constexpr, COLUMNS: tl.constexpr{more},"
        yield "):"

    def _shared_rows(self) -> Iterator[str]:
        """One block of one pass in each program."""
        yield "    blocks = tl.cdiv(num_columns, COLUMNS)"
        yield from self._begin("(tl.program_id(0) // blocks)")
        yield "    first_col = (tl.program_id(0) % blocks) * COLUMNS"
        for each in self.nest.passes:
            yield from (f"    {line}" for line in self._block("first_col + ", each, set()))
        yield from self._row_outputs()

    def _own_rows(self) -> Iterator[str]:
        """All columns of its rows in each program."""
        yield from self._begin("tl.program_id(0)")
        yield "    if IS_ONE_BLOCK:"
        yield from (f"    {line}" for line in self._one_block())
        yield "    else:"
        for number, each in enumerate(self.nest.passes):
            pair = self.pairs.get(number)
            if number - 1 not in self.pairs:
                sweep = self._sweep(each, "0", "num_columns", pair)
                yield from (f"        {line}" for line in sweep)
                counts = lane_counts("0", "num_columns")
                found = self._found(each, pair, counts, is_all=True)
                yield from (f"        {line}" for line in found)
            yield from (f"        {self._statement(s)}" for s in each.after)
        yield from self._row_outputs()

    def _one_block(self) -> Iterator[str]:
        """All passes over rows that one block holds: it is read once."""
        known: set[str] = set()
        for number, each in enumerate(self.nest.passes):
            for line in self._block("" if not number else None, each, known):
                yield f"    {line}"
            for reduction in each.reductions:
                name, value = self.names[reduction.name], self._masked(reduction)
                whole = f"{self._reduced(reduction, value, self._places())}{scaled(reduction)}"
                is_rounded = reduction.is_wide or reduction.is_mean
                whole = f"({whole}).to(tl.float32)" if is_rounded else whole
                yield f"    {name} = {whole}"
            yield from (f"    {self._statement(s)}" for s in each.after)

    def _places(self) -> str:
        return "col_ids + tl.zeros([ROWS, COLUMNS], tl.int32)"

    def _sweep(
        self,
        each: Pass,
        first: str,
        last: str,
        pair: SweepPair | None = None,
        step: str = "COLUMNS",
    ) -> Iterator[str]:
        """Go over some columns and keep one partial result a lane; blocks are a step apart."""
        if pair is not None:
            yield from begun(pair, self.names)
        for reduction in each.reductions if pair is None else ():
            name, start = self.names[reduction.name], START[reduction.fold]
            dtype = "tl.float64" if reduction.is_wide else "tl.float32"
            yield f"{name}_part = tl.full([ROWS, COLUMNS], {start}, {dtype})"
            if reduction.is_index:
                yield f"{name}_place = tl.zeros([ROWS, COLUMNS], tl.int32)"
        yield "for first_col in tl.range("
        yield f"    {first}, {last}, {step}, num_stages={self._stages(each)}"
        yield "):"
        yield from (f"    {line}" for line in self._block("first_col + ", each, set()))
        if pair is not None:
            value = self._floats(pair.first.value, is_block=True)
            yield from (f"    {line}" for line in stepped(pair, self.names, value))
            return
        for reduction in each.reductions:
            name, value = f"{self.names[reduction.name]}_part", self._masked(reduction)
            if reduction.is_index:
                place = f"{self.names[reduction.name]}_place"
                call = f"{self.function}_{reduction.fold}"
                yield f"    {name}, {place} = {call}({name}, {place}, {value}, {self._places()})"
            else:
                more = emit(JOINED[reduction.fold], [name, value], None, "triton")
                yield f"    {name} = {more}"

    def _stages(self, each: Pass) -> int | str:
        """Return how many blocks are on their way at a time: one where elements are gathered.

        Triton would copy these ahead 4 bytes at a time. A GroupNorm of 7.5 GB, whose weights lie
        so, took 21 ms on an H200, four times what its memory takes.
        """
        for name in self._read(each):
            is_given = name in self.given and self.nest.is_inner(name)
            at = offset(self.space, name, self.columns, "col_ids", "//") if is_given else ""
            if name in self.nest.taps or "//" in at or "%" in at:
                return 1
        return self.blocks.stages

    @staticmethod
    def _read(each: Pass) -> set[str]:
        """Return what a pass takes, from memory or computed in it."""
        read = {o for s in each.statements for o in s.refs}
        return read | {r.value for r in each.reductions} | {o.name for o in each.writes}

    def _found(
        self, each: Pass, pair: SweepPair | None, counts: str, *, is_all: bool
    ) -> Iterator[str]:
        """Put together what the lanes hold after a sweep; of a part of a row, as it is stored."""
        if pair is not None:
            largest = f"{self.function}_amax"
            yield from joined(pair, self.names, largest, counts, is_all=is_all)
            return
        for reduction in each.reductions:
            name = self.names[reduction.name]
            is_stored_sum = reduction.fold == "sum" and not is_all
            part = f"{name}_part" + (".to(tl.float64)" if is_stored_sum else "")
            found = self._reduced(reduction, part, f"{name}_place")
            if is_all or reduction.is_wide:  # a wide sum would not fit as it is
                found += scaled(reduction)
            is_rounded = (reduction.is_wide or reduction.is_mean) and is_all
            yield f"{name} = {f'({found}).to(tl.float32)' if is_rounded else found}"

    # ---- rows and blocks ----------------------------------------------------------------------

    def _begin(self, program: str) -> Iterator[str]:
        if self.outer_rows:
            yield f"    row_blocks = tl.cdiv({self.num_inner}, ROWS)"
            yield f"    outer_row = ({program} // row_blocks).to(tl.int64)"
            inner = f"{program} % row_blocks * ROWS + tl.arange(0, ROWS)"
            yield f"    inner_ids = ({inner}).to(tl.int64)"
            yield f"    is_row = inner_ids < {self.num_inner}"
            yield f"    row_ids = outer_row * {self.num_inner} + inner_ids"
        else:
            yield f"    row_ids = ({program} * ROWS + tl.arange(0, ROWS)).to(tl.int64)"
            yield "    is_row = row_ids < num_rows"
        for part, place in part_places(self.nest, self.names):
            yield f"    {part} = {place}"
        for given in self.nest.read:
            if self.nest.is_inner(given):
                continue
            name, at = self.names[given], self._row_at(given, "row_ids")
            if at:
                value = f"tl.load({name}_all + {at}, mask=is_row, other=0)"
            else:
                value = f"tl.load({name}_all)"
            yield f"    {name} = {value}.to(tl.float32)"
        for index in self.nest.indices:
            if not self.nest.is_inner(index):
                at = self._row_at(index, "row_ids")
                yield f"    {self.names[index]} = ({at}).to(tl.float32)"
        yield from (f"    {self._statement(s)}" for s in self.nest.before)

    def _row_at(self, name: str, rows: str) -> str:
        if not self.outer_rows:
            return offset(self.space, name, self.rows, rows, "//")
        inner = rows.replace("row_ids", "inner_ids")
        terms = [
            offset(self.space, name, self.outer_rows, "outer_row", "//"),
            offset(self.space, name, self.inner_rows, inner, "//"),
        ]
        if rows == "row_ids" and terms[0] and not terms[1]:  # a block all the same, as its mask
            terms[1] = f"0 * {inner}"
        return " + ".join(t for t in terms if t)

    def _row_blocks(self, size: str, rows: str = "rows", ceil_div: str = "ceil_div") -> str:
        """Write how many blocks of so many rows there are."""
        if not self.outer_rows:
            return f"{ceil_div}({rows}, {size})"
        return f"{rows} // {self.num_inner} * {ceil_div}({self.num_inner}, {size})"

    def _at(self, name: str) -> str:
        """Return where a block of a value lies."""
        terms = [self._row_at(name, "row_ids[:, None]")]
        # A row may have more than 2^31 elements between its first and its last one.
        is_narrow = self._is_narrow() and self.space.is_plain(name)
        wide = "col_ids" if is_narrow else "col_ids.to(tl.int64)"
        terms.append(offset(self.space, name, self.columns, wide, "//"))
        if self.nest.is_whole(name) and self.rows and is_narrow:
            terms[0] = "row_ids[:, None] * num_columns"
        return " + ".join(t for t in terms if t)

    def _is_narrow(self) -> bool:
        """Whether a row lies in one piece."""
        return self.columns == list(range(len(self.rows), len(self.space.sizes)))

    def _block(self, first: str | None, each: Pass, known: set[str]) -> Iterator[str]:
        """Read, compute and write one block of a pass; `known` are the values that are there.

        `first` is where its columns begin, None where they are those of the pass before.
        """
        if first is not None:
            yield f"col_ids = ({first}tl.arange(0, COLUMNS))[None, :]"
            yield "is_col = col_ids < num_columns"
            yield "present = is_row[:, None] & is_col"
        read = self._read(each)
        for name in sorted(read - known, key=lambda n: self.names.get(n, "")):
            text = self.names[name]
            if name == COLUMN:
                yield f"{text} = col_ids.to(tl.float32)"
            elif name in self.nest.indices and self.nest.is_inner(name):
                yield f"{text} = ({self._at(name)}).to(tl.float32)"
            elif name in self.nest.taps:
                tap = self.nest.taps[name]
                source = f"{self.names[tap.source]}_all"
                yield from triton_tap(tap, text, source, self._at(name))
            elif name in self.given and self.nest.is_inner(name):
                mask = "present" if self.space.varies[name] & {*self.inner_rows} else "is_col"
                value = f"tl.load({text}_all + {self._at(name)}, mask={mask}, other=0)"
                yield f"{text} = {value}.to(tl.float32)"
        for statement in each.statements:
            if statement.name not in known:
                yield from self._lines(statement)
        known |= read | {s.name for s in each.statements}
        for output in each.writes:
            value = self._stored(output.name, output.dtype, is_block=True)
            at, mask = self._at(output.name), "present"
            if not self.space.varies[output.name] & {*self.inner_rows}:
                at = f"0 * row_ids[:, None] + {at}"  # of the mask's shape
                # Once: each program would write the same to one place.
                first = "inner_ids" if self.outer_rows else "row_ids"
                mask = f"present & ({first}[:, None] == 0)"
            yield f"tl.store({self.names[output.name]}_out + {at}, {value}, mask={mask})"

    def _in(self, name: str, is_block: bool) -> str:
        """Return a value as it is used in a block: one for each row is spread over its columns."""
        is_spread = is_block and not self.nest.is_inner(name)
        is_row = self.space.varies[name] & {*self.rows} or self._is_row(name)
        return f"{self.names[name]}[:, None]" if is_spread and is_row else self.names[name]

    def _is_row(self, name: str) -> bool:
        """Whether a value is a block of rows though all rows are alike: what was reduced."""
        if any(r.name == name for r in self.nest.reductions):
            return True
        after = [s for p in self.nest.passes for s in p.after]
        found = next((s for s in (*after, *self.nest.before) if s.name == name), None)
        return found is not None and any(self._is_row(o) for o in found.refs)

    def _stored(self, name: str, dtype: str, is_block: bool) -> str:
        value = self._floats(name, is_block)
        if dtype == "bool":
            return f"({value} != 0.0).to(tl.uint8)"
        if dtype in HALVES:  # rounded to the nearest, halves to the even one
            return f"({value}).to(tl.{dtype})"
        return f"{value}.to({_WHOLE[dtype]})" if dtype in _WHOLE else value

    def _floats(self, name: str, is_block: bool) -> str:
        """Return a value as floats."""
        text = self._in(name, is_block)
        return converted(text, self.nest.kinds.get(name, "float"), "float", "triton")

    def _masked(self, reduction: Reduction) -> str:
        value = self._floats(reduction.value, is_block=True)
        found = f"tl.where(present, {value}, {START[reduction.fold]})"
        return f"{found}.to(tl.float64)" if reduction.is_wide else found

    def _scale_left(self, reduction: Reduction) -> str:
        """Return the product with what a stored part was not multiplied by."""
        return "" if reduction.is_wide else scaled(reduction)

    def _reduced(self, reduction: Reduction, value: str, places: str) -> str:
        if reduction.fold == "sum":
            return f"tl.sum({value}, axis=1)"
        call = f"{self.function}_{reduction.fold}"
        if reduction.is_index:
            return f"tl.reduce(({value}, {places}), 1, {call})[1]"
        return f"tl.reduce({value}, 1, {call})"

    def _row_outputs(self) -> Iterator[str]:
        for output in self.nest.outputs:
            if self.nest.is_inner(output.name):
                continue
            name, at = self.names[output.name], self._row_at(output.name, "row_ids")
            value = self._stored(output.name, output.dtype, is_block=False)
            yield f"    tl.store({name}_out + {at or '0 * row_ids'}, {value}, mask=is_row)"

    def _lines(self, statement: Statement) -> Iterator[str]:
        """Write a statement of a block."""
        yield self._statement(statement)

    def _statement(self, statement: Statement) -> str:
        is_block = self.nest.is_inner(statement.name)

        def text_of(operand: str) -> str:
            return self._in(operand, is_block)

        is_wide = self.nest.is_wide
        value = emitted(statement, self.nest, text_of, "triton", is_wide=is_wide)
        return f"{self.names[statement.name]} = {value}"

    def _launch(self) -> Iterator[str]:
        yield from ("", "", "@replayed", f"def {self.function}({self.tensors}, rows, cols):")
        yield "    # A row that is shorter than the block is done by a block of its own length."
        yield f"    block = min({self.blocks.columns}, 1 << (cols - 1).bit_length())"
        yield "    if cols + block >= 2**31:"
        yield '        raise RuntimeError(f"{cols} columns are past 2^31")'
        yield f"    block_rows = {self.blocks.rows}"
        grid = self._row_blocks("block_rows")
        if not self.has_own_rows:
            grid = f"{grid} * ceil_div(cols, block)"
        yield f"    blocks = {grid}"
        yield "    if blocks >= 2**31:"
        yield '        raise RuntimeError(f"{blocks} programs do not fit in a grid")'
        yield f"    {self.function}_kernel[(blocks,)]("
        yield f"        {self.tensors}, rows, cols,"
        more = " IS_ONE_BLOCK=cols <= block," if self.folds else ""
        yield f"        ROWS=block_rows, COLUMNS=block,{more}"
        registers = self.blocks.max_registers
        limit = "" if registers is None else f" maxnreg={registers},"
        yield f"        num_warps={self.blocks.num_warps},{limit}"
        yield "    )"
