"""A nest as C++ loops over tiles of rows, where some tensors lie row beside row, or unevenly.

Vectors go along the columns, as the channels of images that lie channels last. What lies in the
other order is read into a buffer before a tile, or written from one behind it, as many elements as
a line of the cache has at a time. What is uneven along a row is gathered into a buffer of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from tuner.capture.nests.indexing import inner_rows, is_split, offset
from tuner.capture.nests.nest import Nest
from tuner.capture.nests.precision import CPP_TYPES
from tuner.capture.nests.space import Space
from tuner.capture.writers.cpp_folds import indented
from tuner.capture.writers.loops import FINISH, RowWriter

__all__ = ["TileWriter", "turned_values", "uneven_values"]


def turned_values(nest: Nest) -> list[str]:
    """Return the tensors whose elements of several rows lie beside each other, by name."""
    inner = inner_rows(nest.space)
    return [name for name in _moved(nest) if _is_beside(nest.space, name, inner)]


def _is_beside(space: Space, name: str, inner: Sequence[int]) -> bool:
    """Whether elements of all these rows lie beside each other; some may be the same in others."""
    apart, size = space.strides(name), 1
    for dim in reversed(inner):
        if apart.get(dim) != size:
            return False
        size *= space.sizes[dim]
    return True


def uneven_values(nest: Nest) -> list[str]:
    """Return the tensors whose elements of a row lie unevenly apart, by name."""
    turned = turned_values(nest)
    return [n for n in _moved(nest) if not nest.space.is_even(n) and n not in turned]


def _moved(nest: Nest) -> list[str]:
    if nest.space.is_across or is_split(nest) or not nest.is_transposed:
        return []
    return [n for n in nest.stored if nest.is_dense(n) and nest.space.is_moved(n)]


class TileWriter(RowWriter):
    """The text of a nest with turned or uneven values."""

    def __init__(self, nest: Nest, function: str, names: Mapping[str, str]) -> None:
        super().__init__(nest, function, names)
        self.turned, self.uneven = turned_values(nest), uneven_values(nest)
        self.inner = math.prod(self.space.sizes[d] for d in inner_rows(self.space))

    def _own_rows(self) -> Iterator[str]:
        """Tiles of rows, each by one thread."""
        dtypes = {t.name: t.dtype for t in self.nest.arguments}
        dtypes |= {o.name: o.dtype for o in self.nest.outputs}
        outputs = {o.name for o in self.nest.outputs}
        yield "  constexpr int64_t kTile = 16;  // a line of the cache, of float32"
        yield f"  constexpr int64_t kTiles = ({self.inner} + kTile - 1) / kTile;"
        yield f"  const int64_t tiles = rows / {self.inner} * kTiles;"
        yield "  const int team = simd::team_size(kThreads, num_threads, tiles);"
        yield "#pragma omp parallel num_threads(team)"
        yield "  {"
        for name in self.turned:
            own, kind = self.names[name], CPP_TYPES[dtypes[name]]
            yield f"    std::vector<{kind}> {own}_tile(cols * kTile);"
        for name in self.uneven:
            yield f"    std::vector<{CPP_TYPES[dtypes[name]]}> {self.names[name]}_row_of(cols);"
        yield "#pragma omp for schedule(static)"
        yield "    for (int64_t t = 0; t < tiles; ++t) {"
        yield f"      const int64_t run = t / kTiles * {self.inner};"
        yield "      const int64_t begin_row = run + t % kTiles * kTile;"
        yield f"      const int64_t end_row = std::min(begin_row + kTile, run + {self.inner});"
        yield from self._turn(self.given, "_all", is_read=True)
        yield "      for (int64_t i = begin_row; i < end_row; ++i) {"
        yield from indented(self._gathered(self.given, "_all", is_read=True), 8)
        yield from indented(self._row(), 8)
        yield from indented(self._gathered(outputs, "_out", is_read=False), 8)
        yield "      }"
        yield from self._turn(outputs, "_out", is_read=False)
        yield "    }"
        yield from FINISH
        yield "  }"

    def _turn(self, among: set[str], end: str, *, is_read: bool) -> Iterator[str]:
        """Copy a tile of each turned value, from memory or to it."""
        for name in self.turned:
            if name not in among:
                continue
            own = self.names[name]
            columns = offset(self.space, name, sorted(self.space.columns), "c")
            row = offset(self.space, name, self.rows, "begin_row")
            yield "      for (int64_t c = 0; c < cols; ++c) {"
            yield f"        auto* const lies = {own}{end} + {row} + {columns};"
            yield f"        auto* const tile = {own}_tile.data() + c * kTile;"
            copied = "tile[k] = lies[k]" if is_read else "lies[k] = tile[k]"
            yield f"        for (int64_t k = 0; k < end_row - begin_row; ++k) {copied};"
            yield "      }"

    def _gathered(self, among: set[str], end: str, *, is_read: bool) -> Iterator[str]:
        """Copy a row of each uneven value, from memory or to it, in the order of its memory."""
        for name in self.uneven:
            if name not in among:
                continue
            own, strides, inner = self.names[name], self.space.strides(name), 1
            apart: dict[int, int] = {}  # in the buffer, as the columns are counted
            for dim in sorted(self.space.columns, reverse=True):
                apart[dim], inner = inner, inner * self.space.sizes[dim]
            order = sorted(self.space.columns, key=lambda dim: -strides[dim])
            for depth, dim in enumerate(order):
                size = self.space.sizes[dim]
                yield f"{' ' * 2 * depth}for (int64_t c{dim} = 0; c{dim} < {size}; ++c{dim})"
            row = offset(self.space, name, self.rows, "i") or "0"
            lies = " + ".join([f"{own}{end}[{row}", *(f"c{d} * {strides[d]}" for d in order)])
            buffer = f"{own}_row_of[" + " + ".join(f"c{d} * {apart[d]}" for d in order)
            pair = (f"{buffer}]", f"{lies}]")
            yield f"{' ' * 2 * len(order)}{' = '.join(pair if is_read else reversed(pair))};"

    def _first(self, name: str, end: str) -> str:
        if name in self.uneven:
            return f"{self.names[name]}_row_of.data() + column"
        if name not in self.turned:
            return super()._first(name, end)
        return f"{self.names[name]}_tile.data() + column * kTile + (i - begin_row)"

    def _apart(self, name: str) -> int | str:
        if name in self.uneven:
            return 1
        return "kTile" if name in self.turned else super()._apart(name)
