"""A nest as the text of a Triton template: programs that hold blocks of rows and columns.

Where a whole row fits in a program it is read once; else each pass reads it again, and keeps one
partial result a lane until the pass is over. Without reductions programs share rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tuner.capture.loops import row_index
from tuner.capture.nest import Nest, Pass, Reduction, Statement
from tuner.capture.operations import OPERATIONS, converted, emit, literal

__all__ = ["RESERVED", "blocks_of", "triton_template"]

# What the text itself names.
RESERVED = {
    "col_ids", "col_at", "first_col", "is_col", "is_row", "num_columns", "num_rows", "present",
    "row_at", "row_ids", "tl", "libdevice", "triton", "block", "blocks",
}  # fmt: skip
_START = {"sum": "0.0", "amax": 'float("-inf")', "amin": 'float("inf")'}
_JOINED = {"sum": "add", "amax": "maximum", "amin": "minimum"}

_HEAD = """\
---
title: {title}, in Triton
language: triton
requires:
  - {{expr: "device.kind == 'cuda'", why: "Triton needs a GPU"}}
  - {{expr: "device.has_triton", why: "Triton is installed"}}
  - {{expr: "block_rows * block_columns <= num_warps * 32 * {per_lane}", why: "what a program \
holds fits in its registers"}}
  - {{expr: "block_rows * block_columns >= num_warps * 32", why: "every lane has an element"}}
parameters:
  block_rows: {{about: "rows of one program", default: {default_rows}, values: {block_rows}}}
  block_columns: {{about: "columns at a time; a row that is no longer is read once",
    default: {default_columns}, values: {block_columns}}}
  num_warps: {{about: "warps of a program", default: 4, values: [1, 2, 4, 8, 16, 32]}}
{stages}steps:
  - {{call: {function}, args: [{arguments}, rows, cols]}}
optimisations:
  - {{text: "all of the forward in one kernel: nothing in between is stored"}}
deterministic: true
---
import triton
import triton.language as tl
from triton.language.extra import libdevice
"""
_EXTREME = """

@triton.jit
def {function}_{fold}(one, other):
    return tl.{name}(one, other, propagate_nan=tl.PropagateNan.ALL)
"""
_STAGES = '  stages: {about: "blocks on their way at a time", default: 2, values: [1, 2, 3, 4]}\n'


def blocks_of(nest: Nest) -> dict[str, list[int]]:
    """Return the sizes of blocks that are worth trying: long where memory is contiguous."""
    if nest.inner == 1:
        return {
            "block_rows": [1, 2, 4, 8, 16],
            "block_columns": [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768],
        }
    return {
        "block_rows": [16, 32, 64, 128, 256, 512, 1024],
        "block_columns": [1, 2, 4, 8, 16, 32, 64, 128],
    }


def triton_template(nest: Nest, function: str, names: Mapping[str, str]) -> str:
    """Return a template, its head included.

    Args:
        nest: what to compute.
        function: its name, which the plan calls.
        names: of values, none of `RESERVED`.
    """
    return _Writer(nest, function, names).text()


class _Writer:
    def __init__(self, nest: Nest, function: str, names: Mapping[str, str]) -> None:
        self.nest, self.function, self.names = nest, function, names
        self.given = {tensor.name: place for tensor, place in nest.arguments}
        every = [s for p in nest.passes for s in (*p.statements, *p.after)] + list(nest.before)
        self.kinds = {s.name: OPERATIONS[s.op].gives for s in every}
        self.places = self.given | {s.name: s.place for s in every}
        self.places |= {r.name: "row" for p in nest.passes for r in p.reductions}
        self.col_at = "col_ids" if nest.inner == 1 else "col_at"
        self.inputs = [names[t.name] for t, _ in nest.arguments]
        self.outputs = [names[name] for name, _ in dict.fromkeys(nest.outputs)]
        self.folds = {r.fold for p in nest.passes for r in p.reductions}

    def text(self) -> str:
        num_whole = sum(place == "whole" for place in self.given.values()) + 2
        head = _HEAD.format(
            title=f"Blocks of rows ({len(self.nest.passes)} passes)",
            function=self.function,
            arguments=", ".join([*self.inputs, *(f"{name}_out" for name in self.outputs)]),
            per_lane=max(16, 256 // num_whole),
            **blocks_of(self.nest),
            default_rows=1 if self.nest.inner == 1 else 128,
            default_columns=1024 if self.nest.inner == 1 else 8,
            stages=_STAGES if self.folds else "",
        )
        for fold in sorted(self.folds - {"sum"}):
            head += _EXTREME.format(function=self.function, fold=fold, name=_JOINED[fold])
        body = self._shared_rows() if not self.folds else self._own_rows()
        return head + "\n\n" + "\n".join([*self._signature(), *body, *self._launch()]) + "\n"

    def _signature(self) -> Iterator[str]:
        yield '@triton.jit(do_not_specialize=["num_rows"])'
        yield f"def {self.function}_kernel("
        pointers = [f"{name}_all" for name in self.inputs] + [f"{n}_out" for n in self.outputs]
        yield f"    {', '.join(pointers)}, num_rows, num_columns,"
        more = ", IS_ONE_BLOCK: tl.constexpr" if self.folds else ""
        yield f"    ROWS: tl.constexpr, COLUMNS: tl.constexpr{more},"
        yield "):"

    def _shared_rows(self) -> Iterator[str]:
        """One block of one pass in each program."""
        yield "    blocks = tl.cdiv(num_columns, COLUMNS)"
        yield from self._rows("(tl.program_id(0) // blocks)")
        yield "    first_col = (tl.program_id(0) % blocks) * COLUMNS"
        for each in self.nest.passes:
            yield from (f"    {line}" for line in self._block("first_col + ", each, set()))
        yield from self._row_outputs()

    def _own_rows(self) -> Iterator[str]:
        """All columns of its rows in each program."""
        yield from self._rows("tl.program_id(0)")
        yield "    if IS_ONE_BLOCK:"
        known: set[str] = set()
        for number, each in enumerate(self.nest.passes):
            for line in self._block("" if not number else None, each, known):
                yield f"        {line}"
            for reduction in each.reductions:
                value = self._masked(reduction)
                yield f"        {self.names[reduction.name]} = {self._reduced(reduction, value)}"
            yield from (f"        {self._statement(s)}" for s in each.after)
        yield "    else:"
        for each in self.nest.passes:
            for reduction in each.reductions:
                start = _START[reduction.fold]
                name = self.names[reduction.name]
                yield f"        {name}_part = tl.full([ROWS, COLUMNS], {start}, tl.float32)"
            yield "        for first_col in tl.range("
            yield "            0, num_columns, COLUMNS, num_stages={{ stages }}"
            yield "        ):"
            for line in self._block("first_col + ", each, set()):
                yield f"            {line}"
            for reduction in each.reductions:
                name = f"{self.names[reduction.name]}_part"
                joined = [name, self._masked(reduction)]
                value = emit(_JOINED[reduction.fold], joined, None, "triton")
                yield f"            {name} = {value}"
            for reduction in each.reductions:
                name = self.names[reduction.name]
                yield f"        {name} = {self._reduced(reduction, f'{name}_part')}"
            yield from (f"        {self._statement(s)}" for s in each.after)
        yield from self._row_outputs()

    def _rows(self, program: str) -> Iterator[str]:
        yield f"    row_ids = ({program} * ROWS + tl.arange(0, ROWS)).to(tl.int64)"
        yield "    is_row = row_ids < num_rows"
        inner = self.nest.inner
        if inner == 1:
            yield "    row_at = row_ids[:, None] * num_columns"
        else:
            outer = f"(row_ids // {inner}) * ({inner} * num_columns)"
            yield f"    row_at = ({outer} + row_ids % {inner})[:, None]"
        for tensor, place in self.nest.arguments:
            name = self.names[tensor.name]
            if place == "row":
                at = row_index(self.nest, tensor.name, "row_ids", "//")
                at = at if "row_ids" in at else f"{at} + 0 * row_ids"
                yield f"    {name} = tl.load({name}_all + {at}, mask=is_row, other=0.0)"
            elif place == "one":
                yield f"    {name} = tl.load({name}_all)"
        yield from (f"    {self._statement(s)}" for s in self.nest.before)

    def _block(self, first: str | None, each: Pass, known: set[str]) -> Iterator[str]:
        """Read, compute and write one block of a pass; `known` are the values that are there.

        `first` is where its columns begin, None where they are those of the pass before.
        """
        if first is not None:
            yield f"col_ids = ({first}tl.arange(0, COLUMNS))[None, :]"
            yield "is_col = col_ids < num_columns"
            if self.nest.inner > 1:
                yield f"col_at = col_ids.to(tl.int64) * {self.nest.inner}"
            yield "present = is_row[:, None] & is_col"
        read = {o for s in each.statements for o in s.operands if isinstance(o, str)}
        read |= {r.value for r in each.reductions} | {*each.writes}
        for name in sorted(read - known, key=lambda n: self.names.get(n, "")):
            text = self.names[name]
            if self.given.get(name) == "whole":
                at = f"{text}_all + row_at + {self.col_at}"
                yield f"{text} = tl.load({at}, mask=present, other=0.0)"
            elif self.given.get(name) == "column":
                yield f"{text} = tl.load({text}_all + col_ids, mask=is_col, other=0.0)"
        for statement in each.statements:
            if statement.name not in known:
                yield self._statement(statement)
        known |= read | {s.name for s in each.statements}
        for name in each.writes:
            out = self.names[name]
            value = self._floats(name, is_block=True)
            yield f"tl.store({out}_out + row_at + {self.col_at}, {value}, mask=present)"

    def _in(self, name: str, is_block: bool) -> str:
        """Return a value as it is used in a block: one for each row is spread over its columns."""
        text = self.names[name]
        return f"{text}[:, None]" if is_block and self.places[name] == "row" else text

    def _floats(self, name: str, is_block: bool) -> str:
        """Return a value as floats."""
        text = self._in(name, is_block)
        return converted(text, self.kinds.get(name, "float"), "float", "triton")

    def _masked(self, reduction: Reduction) -> str:
        value = self._floats(reduction.value, is_block=True)
        return f"tl.where(present, {value}, {_START[reduction.fold]})"

    def _reduced(self, reduction: Reduction, value: str) -> str:
        if reduction.fold == "sum":
            return f"tl.sum({value}, axis=1)"
        return f"tl.reduce({value}, 1, {self.function}_{reduction.fold})"

    def _row_outputs(self) -> Iterator[str]:
        for name, place in dict.fromkeys(self.nest.outputs):
            if place == "row":
                value = self._floats(name, is_block=False)
                yield f"    tl.store({self.names[name]}_out + row_ids, {value}, mask=is_row)"

    def _statement(self, statement: Statement) -> str:
        takes = OPERATIONS[statement.op].takes
        is_block = statement.place in ("whole", "column")
        operands = [
            converted(self._in(o, is_block), self.kinds.get(o, "float"), wanted, "triton")
            if isinstance(o, str)
            else converted(literal(float(o), "triton"), "float", wanted, "triton")
            for o, wanted in zip(statement.operands, takes, strict=True)
        ]
        attrs = {name: float(str(value)) for name, value in statement.attrs.items()}
        value = emit(statement.op, operands, attrs, "triton")
        return f"{self.names[statement.name]} = {value}"

    def _launch(self) -> Iterator[str]:
        outputs = [f"{name}_out" for name in self.outputs]
        given = ", ".join([*self.inputs, *outputs, "rows", "cols"])
        yield ""
        yield ""
        yield f"def {self.function}({given}):"
        yield "    # A row that is shorter than the block is done by a block of its own length."
        yield "    block = min({{ block_columns }}, triton.next_power_of_2(cols))"
        yield "    if cols + block >= 2**31:"
        yield '        raise RuntimeError(f"{cols} columns are past 2^31")'
        grid = "triton.cdiv(rows, {{ block_rows }})"
        if not self.folds:
            grid = f"{grid} * triton.cdiv(cols, block)"
        yield f"    blocks = {grid}"
        yield "    if blocks >= 2**31:"
        yield '        raise RuntimeError(f"{blocks} programs do not fit in a grid")'
        yield f"    {self.function}_kernel[(blocks,)]("
        yield f"        {given},"
        more = " IS_ONE_BLOCK=cols <= block," if self.folds else ""
        yield "        ROWS={{ block_rows }}, COLUMNS=block," + more
        yield "        num_warps={{ num_warps }},"
        yield "    )"
