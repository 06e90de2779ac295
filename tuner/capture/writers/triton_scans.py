"""A nest with scans as a Triton kernel: blocks of rows, and of their columns one after the other.

A block is scanned in float64, from what all blocks before it amount to, and rounded once. The
lanes of a block are joined in pairs, so that of products beyond the range of float64, unlike those
of C++, it depends on the block which ones meet a zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tuner.capture.nests.nest import Nest, Scan, Statement
from tuner.capture.nests.operations import literal
from tuner.capture.writers.triton_blocks import SEARCHED, Blocks
from tuner.capture.writers.triton_loops import Writer

__all__ = ["ScanWriter"]

_PRODUCT = """

@triton.jit
def {function}_product(one, other):
    return one * other
"""
_SCANS = {"sum": "tl.cumsum", "prod": "tl.cumprod"}
_JOINS = {"sum": "+", "prod": "*"}


class ScanWriter(Writer):
    """The text of one nest that has scans; for the arguments see `Writer`."""

    def __init__(
        self, nest: Nest, function: str, names: Mapping[str, str], blocks: Blocks = SEARCHED
    ) -> None:
        super().__init__(nest, function, names, blocks)
        self.has_own_rows = True

    def text(self) -> str:
        """Return the kernel and what starts it."""
        has_products = any(scan.fold == "prod" for scan in self.nest.scans)
        head = _PRODUCT.format(function=self.function) if has_products else ""
        return head + super().text()

    def _own_rows(self) -> Iterator[str]:
        """All columns of its rows in each program, in order."""
        yield from self._begin("tl.program_id(0)")
        for scan in self.nest.scans:
            name = self.names[scan.name]
            yield f"    {name}_carry = tl.full([ROWS], {scan.neutral}, tl.float64)"
        yield "    blocks = tl.cdiv(num_columns, COLUMNS)"
        yield f"    for block in tl.range(0, blocks, num_stages={self.blocks.stages}):"
        first = "(blocks - 1 - block)" if self.nest.is_backwards else "block"
        for each in self.nest.passes:
            for line in self._block(f"{first} * COLUMNS + ", each, set()):
                yield f"        {line}"
        yield from self._row_outputs()

    def _lines(self, statement: Statement) -> Iterator[str]:
        if not isinstance(statement, Scan):
            yield from super()._lines(statement)
            return
        name, fold = self.names[statement.name], statement.fold
        wide, carry = f"{name}_wide", f"{name}_carry"
        yield f"{wide} = tl.where(present, {self._scanned(statement)}, {statement.neutral})"
        yield f"{wide} = {wide}.to(tl.float64)"
        way = f"reverse={statement.is_backwards}"
        upto = f"{carry}[:, None] {_JOINS[fold]} {_SCANS[fold]}({wide}, 1, {way})"
        yield f"{name} = ({upto}).to(tl.float32)"
        whole = f"tl.sum({wide}, axis=1)"
        if fold == "prod":
            whole = f"tl.reduce({wide}, 1, {self.function}_product)"
        yield f"{carry} = {carry} {_JOINS[fold]} {whole}"

    def _scanned(self, scan: Scan) -> str:
        (operand,) = scan.operands
        if isinstance(operand, str):
            return self._floats(operand, is_block=True)
        return literal(float(operand), "triton")
