"""Sums over the batch beside the nest that computes what is summed, as one Triton kernel.

A norm's gradients are one nest of rows for the input, and sums of its rows for the weights. Where
a program holds whole rows, it takes rows in turns and keeps one sum a column, so that what is
summed is neither stored nor read again. What the programs found is put together in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tuner.capture.nests.nest import Nest
from tuner.capture.tasks.library import Call
from tuner.capture.tasks.stages import Stages
from tuner.capture.writers.triton_blocks import Blocks, is_split_across
from tuner.capture.writers.triton_folds import fold_functions
from tuner.capture.writers.triton_loops import Writer
from tuner.capture.writers.triton_split import AcrossWriter

__all__ = ["Summed", "SumsWriter", "with_sums"]

MAX_COLUMNS = 8192  # of a row that a program holds beside its sums


@dataclass(frozen=True, slots=True)
class Summed:
    """A nest, without what it would write for the sums alone, and the sums over its rows."""

    nest: Nest
    sums: Nest


def with_sums(stages: Stages) -> list[Nest | Call | Summed]:
    """Return the tasks of some gradients, with sums in the nest right before them."""
    found: list[Nest | Call | Summed] = []
    for task in stages.tasks:
        before = found[-1] if found else None
        if isinstance(task, Nest) and isinstance(before, Nest) and _is_sum_of(task, before):
            found[-1] = _joined(stages, before, task)
        else:
            found.append(task)
    return found


def _is_sum_of(sums: Nest, nest: Nest) -> bool:
    """Whether a nest sums values of another one over its rows, and computes nothing before."""
    rows, cols = nest.space.rows, nest.space.cols
    if not nest.reductions or nest.space.is_across or nest.scans or cols > MAX_COLUMNS:
        return False
    if not is_split_across(sums) or (sums.space.rows, sums.space.cols) != (cols, rows):
        return False
    if sums.space.columns != {*range(len(sums.space.columns))}:  # the first dimensions
        return False
    if nest.space.columns & {*range(len(nest.space.sizes) - len(nest.space.columns))}:
        return False
    if not all(sums.is_inner(t.name) for t in sums.arguments):
        return False
    (first, *others) = sums.passes
    if others or first.statements or first.writes or nest.is_wide != sums.is_wide:
        return False
    known = {t.name for t in nest.arguments} | nest.computed
    return all(
        r.fold == "sum"
        and not r.is_wide
        and r.value in known
        and r.value not in nest.kinds
        and nest.is_whole(r.value)
        for r in sums.reductions
    )


def _joined(stages: Stages, nest: Nest, sums: Nest) -> Summed:
    """Leave out what only the sums read."""
    wanted = {*stages.outputs, *stages.updates.values()}
    for task in stages.tasks:
        if isinstance(task, Call):
            wanted |= {*task.reads}
        elif task is not sums:
            wanted |= {t.name for t in task.arguments}
    passes = tuple(
        replace(p, writes=[o for o in p.writes if o.name in wanted]) for p in nest.passes
    )
    outputs = tuple(o for o in nest.outputs if o.name in wanted)
    # The sums read only what the nest has, so that their part of the kernel is given nothing.
    return Summed(replace(nest, passes=passes, outputs=outputs), replace(sums, arguments=()))


class SumsWriter(Writer):
    """The text of a nest with sums over its rows; for the other arguments see `Writer`."""

    def __init__(
        self, summed: Summed, function: str, names: Mapping[str, str], blocks: Blocks
    ) -> None:
        super().__init__(summed.nest, function, names, blocks)
        self.sums = AcrossWriter(summed.sums, function, names, blocks)
        most = f"max(1, 8 * programs // {blocks.num_warps})"
        self.pieces = f"min(cdiv({self.space.rows}, {blocks.rows}), {most})"
        self.is_given_pieces = True
        self.split = summed.sums

    def text(self) -> str:
        """Return the kernels and what starts them."""
        lines = [*self._kernel(), *self.sums.together(0), *self._launch()]
        head = fold_functions(self.function, self.folds)
        return head + "\n".join(lines) + "\n"

    def _kernel(self) -> Iterator[str]:
        yield from ("", "", self.launched, '@triton.jit(do_not_specialize=["num_rows"])')
        yield f"def {self.function}_kernel("
        yield f"    {', '.join(self.pointers)}, partial, num_rows, num_columns,"
        yield "    ROWS: tl.constexpr, COLUMNS: tl.constexpr,"
        yield "):"
        reductions = self.sums.nest.reductions
        for reduction in reductions:
            yield f"    {self.names[reduction.name]}_part = tl.zeros([ROWS, COLUMNS], tl.float32)"
        yield "    pieces = tl.num_programs(0)"
        yield "    for block in tl.range("
        blocks = self._row_blocks("ROWS", "num_rows", "tl.cdiv")
        yield f"        tl.program_id(0), {blocks}, pieces,"
        yield f"        num_stages={self.blocks.stages},"
        yield "    ):"
        yield from (f"    {line}" for line in self._begin("block"))
        yield from (f"    {line}" for line in self._one_block())
        for reduction in reductions:
            part, value = f"{self.names[reduction.name]}_part", self._masked(reduction)
            yield f"        {part} = {part} + {value}"
        yield from (f"    {line}" for line in self._row_outputs())
        yield "    last_col = tl.arange(0, COLUMNS)"
        for reduction in reductions:
            place, name = self.sums.place_of(reduction), self.names[reduction.name]
            at = f"({place} * pieces + tl.program_id(0)) * num_columns + last_col"
            found = f"tl.sum({name}_part.to(tl.float64), axis=0)"
            yield f"    tl.store(partial + {at}, {found}, mask=last_col < num_columns)"

    def _launch(self) -> Iterator[str]:
        given = ", ".join([self.tensors, *(f"{name}_out" for name in self.sums.outputs)])
        yield from (
            "",
            "",
            "@replayed",
            f"def {self.function}({given}, partial, totals, rows, cols, pieces):",
        )
        yield "    block = triton.next_power_of_2(cols)"
        yield f"    block_rows = {self.blocks.rows}"
        yield f"    {self.function}_kernel[(pieces,)]("
        yield f"        {self.tensors}, partial, rows, cols,"
        yield "        ROWS=block_rows, COLUMNS=block,"
        yield f"        num_warps={self.blocks.num_warps}, maxnreg={self.blocks.max_registers},"
        yield "    )"
        yield from self.sums.launch_together(0, "cols", "rows")
