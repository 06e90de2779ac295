"""A nest as the text of a C++ function: vectors along rows that lie beside each other in memory.

The columns lie before the rows, so that a reduction goes across vectors: each lane is a row of its
own. What belongs to a row is an array of vectors, one for each of a tile. From column to column a
tile goes further than a processor foresees, so it is several lines of the cache wide, and asks
for what it needs some columns ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tuner.capture.graph.graph import num_bytes_of
from tuner.capture.nests.indexing import counted, loaded, offset, stored, tail_stride
from tuner.capture.nests.nest import COLUMN, Nest, Pass, Statement, still_needed
from tuner.capture.nests.operations import Kind, converted
from tuner.capture.nests.windows import cpp_tap, cpp_window
from tuner.capture.writers.cpp_folds import carries_of, joined, parts_of, scaled, statement_text
from tuner.capture.writers.loops import FINISH, signature

__all__ = ["AcrossWriter"]

_LANE = "(k + u * simd::kWidth)"  # of the tail, the first one of a vector
# From column to column. Steps of less, and those within a page of memory, a processor foresees.
FAR_BYTES = 1024
LEAST_TILES = 2  # of a tail without rows before it, for two threads


class AcrossWriter:
    """The text of a nest whose tail is of rows; the arguments are those of `RowWriter`."""

    def __init__(self, nest: Nest, function: str, names: Mapping[str, str]) -> None:
        self.nest, self.function = nest, function
        self.names = {**names, COLUMN: "column_index"}
        self.space = nest.space
        every = range(len(self.space.sizes))
        self.outer = [d for d in every if d not in self.space.columns and d < self.space.tail]
        self.columns = sorted(self.space.columns)
        self.given = [*nest.read, *nest.indices]  # read or counted

    def lines(self) -> Iterator[str]:
        """Write the function."""
        length = self.space.length
        yield from signature(self.nest, self.function, self.names)
        share = "simd::kWidth" if self.outer else f"(simd::kWidth * {LEAST_TILES})"
        yield "  // Vectors of a tile: a strip of one would use a part of what memory sends."
        yield f"  constexpr int kVectors = std::clamp<int>({length} / {share}, 1, 4 * kUnroll);"
        yield "  constexpr int64_t kTile = kVectors * simd::kWidth;"
        yield f"  constexpr int64_t kTiles = ({length} + kTile - 1) / kTile;"
        yield f"  const int64_t tiles = rows / {length} * kTiles;"
        yield "  const auto tile = [=](auto is_part, const int64_t i, const int64_t k) {"
        yield "    constexpr bool kPart = decltype(is_part)::value;"
        yield "    (void)i;"
        yield "    const auto lanes = [k](int u) {"
        yield f"      const int64_t left = {length} - k - u * simd::kWidth;"
        yield "      return static_cast<int>(std::clamp<int64_t>(left, 0, simd::kWidth));"
        yield "    };"
        yield "    (void)lanes;"
        yield from (f"    {line.replace('kUnroll', 'kVectors')}" for line in self._tile())
        yield "  };"
        yield "  const int team = simd::team_size(kThreads, num_threads, tiles);"
        yield "#pragma omp parallel num_threads(team)"
        yield "  {"
        yield "#pragma omp for schedule(static)"
        yield "    for (int64_t t = 0; t < tiles; ++t) {"
        yield "      const int64_t i = t / kTiles, k = t % kTiles * kTile;"
        yield f"      if (k + kTile <= {length}) {{"
        yield "        tile(std::false_type{}, i, k);"
        yield "      } else {"
        yield "        tile(std::true_type{}, i, k);"
        yield "      }"
        yield "    }"
        yield from FINISH
        yield "  }"
        yield "  return nullptr;"
        yield "}"

    def _at(self, name: str, column: str = "") -> str:
        """Return where the first lane of a tile finds a value."""
        terms = [offset(self.space, name, self.outer, "i") if self.outer else ""]
        terms.append(offset(self.space, name, self.columns, column) if column else "")
        return " + ".join(t for t in terms if t) or "0"

    def _load(self, name: str, column: str = "") -> str:
        own, at = self.names[name], self._at(name, column)
        if name in self.nest.indices:
            apart, is_dense = tail_stride(self.space, name), self.nest.is_dense(name)
            number = f"math::splat(static_cast<simd::Float>({at}))"
            return counted(apart, at, _LANE) if is_dense else number
        if self.nest.is_dense(name):
            return loaded(tail_stride(self.space, name), f"{own}_all + {at}", _LANE)
        return f"math::splat(rows_of::as_float({own}_all[{at}]))"

    def _store(self, name: str, value: str, column: str = "") -> str:
        place = f"{self.names[name]}_out + {self._at(name, column)}"
        return stored(tail_stride(self.space, name), place, _LANE, value)

    def _tile(self) -> Iterator[str]:
        for given in self.given:
            if not self.nest.is_inner(given):
                name = self.names[given]
                yield f"simd::Floats {name}_rows[kUnroll];"
                yield from _each([f"{name}_rows[u] = {self._load(given)};"])
                yield f"(void){name}_rows;"
        yield from self._of_rows(self.nest.before)
        for each in self.nest.passes:
            yield from self._pass(each)
            yield from self._of_rows(each.after)
        for output in self.nest.outputs:
            if self.nest.is_inner(output.name):
                continue
            name, at = self.names[output.name], self._at(output.name)
            if any(r.name == output.name and r.is_index for r in self.nest.reductions):
                place = (
                    f"{name}_out[{at} + ({_LANE} + w) * {tail_stride(self.space, output.name)}]"
                )
                store = f"for (int w = 0; w < n; ++w) {place} = {name}_rows[u][w];"
            else:
                value = converted(f"{name}_rows[u]", self._kind(output.name), "float")
                store = self._store(output.name, value)
            yield from _each([store])

    def _kind(self, name: str) -> Kind:
        return self.nest.kinds.get(name, "float")

    def _of_rows(self, statements: tuple[Statement, ...] | list[Statement]) -> Iterator[str]:
        own = {s.name for s in statements}
        for statement in statements:
            kind = "math::Mask" if self._kind(statement.name) == "mask" else "simd::Floats"
            yield f"{kind} {self.names[statement.name]}_rows[kUnroll];"
            yield f"(void){self.names[statement.name]}_rows;"
        if statements:
            read = {o for s in statements for o in s.refs} - own
            body = self._known(read)
            for statement in statements:
                name = self.names[statement.name]
                body.append(f"const auto {name} = {self._text(statement)};")
                body.append(f"{name}_rows[u] = {name};")
            yield from _each(body)

    def _known(self, read: set[str]) -> list[str]:
        names = sorted(self.names[name] for name in read)
        return [f"const auto {name} = {name}_rows[u];" for name in names]

    def _text(self, statement: Statement) -> str:
        return statement_text(statement, self.nest, self.names)

    def _pass(self, each: Pass) -> Iterator[str]:
        for reduction in each.reductions:
            name = self.names[reduction.name]
            kind = "math::Mask" if reduction.is_index else "simd::Floats"
            yield f"{kind} {name}_rows[kUnroll] = {{}};"
            yield f"(void){name}_rows;"
        yield "{"
        for reduction in each.reductions:
            yield from (f"  {line}" for line in parts_of(reduction, self.names[reduction.name]))
        carries = carries_of(each.statements, self.names, is_across=True)
        yield from (f"  {line}" for line in carries)
        if self.nest.is_backwards:
            yield "  for (int64_t c = cols - 1; c >= 0; --c) {"
        else:
            yield "  for (int64_t c = 0; c < cols; ++c) {"
        yield from (f"    {line}" for line in self._column(each))
        yield "  }"
        for reduction in each.reductions:
            name = self.names[reduction.name]
            value = f"{name}_{'place' if reduction.is_index else 'part'}[u]"
            if reduction.fold == "sum":
                halves = (f"{value}.{half}{scaled(reduction)}" for half in ("low", "high"))
                value = f"math::narrowed(math::Halves{{{', '.join(halves)}}})"
            yield f"  for (int u = 0; u < kUnroll; ++u) {name}_rows[u] = {value};"
        yield "}"

    def _column(self, each: Pass) -> Iterator[str]:
        """Write the step of one column: what is the same for all rows, then each vector's."""
        statements = still_needed(each, [])
        computed = {s.name for s in statements}
        read = {o for s in statements for o in s.refs}
        read |= {r.value for r in each.reductions} | {o.name for o in each.writes}
        read -= computed
        yield from self._asked_ahead(read)
        body = self._known({n for n in read if n != COLUMN and not self.nest.is_inner(n)})
        if COLUMN in read:
            index = "math::splat(static_cast<simd::Float>(c))"
            yield f"const simd::Floats {self.names[COLUMN]} = {index};"
        for name in sorted(read.intersection(self.given), key=lambda n: self.names[n]):
            if not self.nest.is_inner(name):
                continue
            text = f"const simd::Floats {self.names[name]} = {self._load(name, 'c')};"
            if self.nest.is_dense(name):
                body.append(text)
            else:
                yield text
        for name in sorted(read & self.nest.taps.keys(), key=lambda n: self.names[n]):
            tap, own = self.nest.taps[name], self.names[name]
            yield cpp_window(tap, own)
            source, apart = f"{self.names[tap.source]}_all", tail_stride(self.space, name)
            body.append(cpp_tap(own, source, self._at(name, "c"), _LANE, apart))
        for statement in statements:
            body.append(f"const auto {self.names[statement.name]} = {self._text(statement)};")
        for reduction in each.reductions:
            value = self._floats(reduction.value)
            body.append(f"const simd::Floats {self.names[reduction.name]}_next = {value};")
            here = "rows_of::place(c)"
            taken = f"{self.names[reduction.name]}_next"
            body.append(joined(reduction, taken, self.names, here))
        for output in each.writes:
            body.append(self._store(output.name, self._floats(output.name), "c"))
        yield from _each(body)

    def _asked_ahead(self, read: set[str]) -> Iterator[str]:
        """Ask for what columns far behind this one need."""
        column = f"(c {'-' if self.nest.is_backwards else '+'} rows_of::kAhead)"
        for tensor in self.nest.arguments:
            name, strides = tensor.name, self.space.strides(tensor.name)
            step = strides.get(self.columns[-1], 0) * num_bytes_of(tensor.dtype)
            is_vector = self.nest.is_dense(name) and tail_stride(self.space, name) == 1
            if name in read and step >= FAR_BYTES and is_vector:
                place = f"{self.names[name]}_all + {self._at(name, column)} + k"
                yield f"rows_of::ask_ahead<kTile>({place});"

    def _floats(self, name: str) -> str:
        return converted(self.names[name], self._kind(name), "float")


def _each(body: list[str]) -> Iterator[str]:
    """Write what is done for each vector of a tile."""
    yield "for (int u = 0; u < kUnroll; ++u) {"
    yield "  const int n = kPart ? lanes(u) : simd::kWidth;"
    yield "  (void)n;"
    yield from (f"  {line}" for line in body)
    yield "}"
