"""A nest as C++ loops over tiles of rows, where some tensors lie row beside row.

Vectors go along the columns, as the channels of images that lie channels last. What lies in the
other order is read into a buffer before a tile, or written from one behind it, as many elements as
a line of the cache has at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tuner.capture.nests.indexing import inner_rows, is_split, offset
from tuner.capture.nests.nest import Nest
from tuner.capture.nests.precision import CPP_TYPES
from tuner.capture.writers.cpp_folds import indented
from tuner.capture.writers.loops import FINISH, RowWriter

__all__ = ["TileWriter", "turned_values"]


def turned_values(nest: Nest) -> list[str]:
    """Return the tensors whose elements of several rows lie beside each other, by name."""
    space = nest.space
    if space.is_across or is_split(nest) or not nest.is_transposed:
        return []
    inner = inner_rows(space)[-1:]
    names = [*(t.name for t in nest.arguments), *(o.name for o in nest.outputs)]
    return [
        n
        for n in names
        if nest.is_inner(n)
        and nest.is_dense(n)
        and space.is_moved(n)
        and all(space.strides(n).get(dim) == 1 for dim in inner)
    ]


class TileWriter(RowWriter):
    """The text of a nest with turned values."""

    def __init__(self, nest: Nest, function: str, names: Mapping[str, str]) -> None:
        super().__init__(nest, function, names)
        self.turned = turned_values(nest)
        self.inner = math.prod(self.space.sizes[d] for d in inner_rows(self.space))

    def _own_rows(self) -> Iterator[str]:
        """Tiles of rows, each by one thread."""
        dtypes = {t.name: t.dtype for t in self.nest.arguments}
        dtypes |= {o.name: o.dtype for o in self.nest.outputs}
        yield "  constexpr int64_t kTile = 16;  // a line of the cache, of float32"
        yield f"  constexpr int64_t kTiles = ({self.inner} + kTile - 1) / kTile;"
        yield f"  const int64_t tiles = rows / {self.inner} * kTiles;"
        yield "  const int team = simd::team_size(kThreads, num_threads, tiles);"
        yield "#pragma omp parallel num_threads(team)"
        yield "  {"
        for name in self.turned:
            own, kind = self.names[name], CPP_TYPES[dtypes[name]]
            yield f"    std::vector<{kind}> {own}_tile(cols * kTile);"
        yield "#pragma omp for schedule(static)"
        yield "    for (int64_t t = 0; t < tiles; ++t) {"
        yield f"      const int64_t run = t / kTiles * {self.inner};"
        yield "      const int64_t begin_row = run + t % kTiles * kTile;"
        yield f"      const int64_t end_row = std::min(begin_row + kTile, run + {self.inner});"
        yield from self._turn(self.given, "_all", is_read=True)
        yield "      for (int64_t i = begin_row; i < end_row; ++i) {"
        yield from indented(self._row(), 8)
        yield "      }"
        yield from self._turn({o.name for o in self.nest.outputs}, "_out", is_read=False)
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

    def _first(self, name: str, end: str) -> str:
        if name not in self.turned:
            return super()._first(name, end)
        return f"{self.names[name]}_tile.data() + column * kTile + (i - begin_row)"

    def _apart(self, name: str) -> int | str:
        return "kTile" if name in self.turned else super()._apart(name)
