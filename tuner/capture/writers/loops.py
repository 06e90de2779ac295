"""A nest as the text of a C++ function: passes over rows, in vectors of numbers along the columns.

The text is Jinja2 still: `width`, `unroll`, `keep` and how the output is stored are parameters of
the template, and vary in a search. Rows that are few and long are split between threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tuner.capture.nests.indexing import (
    counted,
    is_split,
    loaded,
    offset,
    part_places,
    row_dims,
    stored,
    tail_stride,
)
from tuner.capture.nests.nest import COLUMN, Nest, Pass, Reduction, Statement, still_needed
from tuner.capture.nests.operations import converted, operation_of
from tuner.capture.nests.picking import picked_place, with_picks_apart
from tuner.capture.nests.precision import CPP_TYPES
from tuner.capture.nests.windows import cpp_tap, cpp_window
from tuner.capture.writers.cpp_folds import (
    START,
    STEPS,
    STEPS_BACKWARDS,
    carries_of,
    columns_of,
    indented,
    joined,
    parts_of,
    scaled,
    statement_text,
)

__all__ = ["FINISH", "RowWriter", "parameters_of", "signature"]

_UNROLL = '  unroll: {about: "vectors at a time", default: 2, values: [1, 2, 4]}'
_KEEP = (
    '  keep: {about: "keep what is costly from one sweep over a row to the next", '
    "default: true, values: [true, false]}"
)
KEPT_FLOPS = 8  # a value that costs more to compute again may be kept from pass to pass


def parameters_of(nests: Sequence[Nest]) -> list[str]:
    """Return the parameters that nests share, as lines of a template's head."""
    return [_UNROLL, *([_KEEP] if any(map(_kept_values, map(with_picks_apart, nests))) else [])]


def _kept_values(nest: Nest) -> list[str]:
    """Return the values that are computed in one pass and needed in a later one, at a cost."""
    if nest.space.is_across or is_split(nest) or nest.scans or nest.is_transposed:
        return []
    kept: list[str] = []
    for number, each in enumerate(nest.passes):
        later = {s.name for p in nest.passes[number + 1 :] for s in p.statements}
        cost: dict[str, int] = {}
        for statement in each.statements:
            own = operation_of(statement.op).flop
            before = [cost.get(o, 0) for o in statement.refs]
            cost[statement.name] = own + sum(before)
        names = [
            s.name
            for s in each.statements
            if s.name in later and nest.is_dense(s.name) and s.name not in nest.kinds
        ]
        inner = {o for s in each.statements if s.name in names for o in s.operands}
        kept += [n for n in names if n not in kept and n not in inner and cost[n] >= KEPT_FLOPS]
    return kept


def signature(nest: Nest, function: str, names: Mapping[str, str]) -> Iterator[str]:
    """Write the head of the function, with a pointer to each part."""
    inputs = [f"const {CPP_TYPES[t.dtype]}* {names[t.name]}_all" for t in nest.arguments]
    outputs = [f"{CPP_TYPES[o.dtype]}* {names[o.name]}_out" for o in nest.outputs]
    whole = "int64_t rows, int64_t cols, int64_t num_threads"
    yield f'extern "C" const char* {function}('
    yield f"    {', '.join([*inputs, *outputs, whole])}) {{"
    if any(r.is_index for r in nest.reductions):
        yield '  if (cols >= int64_t{1} << 31) return "more than 2^31 columns";'
    for name, place in part_places(nest, names):
        yield f"  const auto* const {name} = {place};"


class RowWriter:
    """The text of a nest whose tail is of columns: a function whose threads take rows, or pieces.

    Args:
        nest: what to compute.
        function: its name.
        names: of values, as C++ knows them; inputs and outputs are parameters of the function.
    """

    def __init__(self, nest: Nest, function: str, names: Mapping[str, str]) -> None:
        self.nest, self.function = with_picks_apart(nest), function
        self.names = {**names, COLUMN: "column_index"}
        self.space = nest.space
        self.is_split = is_split(nest)
        self.kept = _kept_values(self.nest)
        self.rows = row_dims(self.space)
        self.segments = [d for d in sorted(self.space.columns) if d < self.space.tail]
        self.given = {*nest.read}

    def lines(self) -> Iterator[str]:
        """Write the function."""
        yield from signature(self.nest, self.function, self.names)
        yield from self._split_rows() if self.is_split else self._own_rows()
        yield "  return nullptr;"
        yield "}"

    def _own_rows(self) -> Iterator[str]:
        """Each row by one thread."""
        yield "  const int team = simd::team_size(kThreads, num_threads, rows);"
        yield "#pragma omp parallel num_threads(team)"
        yield "  {"
        if self.kept:
            yield "{% if keep %}"
            for name in self.kept:
                own = self.names[name]
                yield f"    std::vector<simd::Float> {own}_memory(cols + simd::kWidth);"
                yield f"    simd::Float* const {own}_kept = {own}_memory.data();"
            yield "{% endif %}"
        yield "#pragma omp for schedule(static)"
        yield "    for (int64_t i = 0; i < rows; ++i) {"
        yield from indented(self._row(), 6)
        yield "    }"
        yield from FINISH
        yield "  }"

    def _row(self) -> Iterator[str]:
        yield from self._begin()
        for number, each in enumerate(self.nest.passes):
            for reduction in each.reductions:
                yield f"{_kind(reduction)} {self.names[reduction.name]};"
            yield "{  // " + self._about(each)
            yield from indented(self._columns(number, "0", "cols"), 2)
            yield from indented(self._sweep(number, each), 2)
            for reduction in each.reductions:
                yield f"  {self.names[reduction.name]} = {self._folded(reduction)};"
            yield "}"
            yield from self._after(each)
        yield from self._row_outputs()

    def _split_rows(self) -> Iterator[str]:
        """Each row by several threads: partial results, and what they amount to."""
        yield "  const int64_t pieces = simd::ceil_div(cols, kSplit);"
        yield "  const int team = simd::team_size(kThreads, num_threads, rows * pieces);"
        for reduction in self.nest.reductions:
            name = self.names[reduction.name]
            yield f"  std::vector<double> {name}_pieces(rows * pieces);"
            yield f"  std::vector<simd::Float> {name}_rows(rows);"
        yield "#pragma omp parallel num_threads(team)"
        yield "  {"
        for number, each in enumerate(self.nest.passes):
            yield f"    // {self._about(each)}"
            yield "#pragma omp for schedule(static)"
            yield "    for (int64_t piece = 0; piece < rows * pieces; ++piece) {"
            yield "      const int64_t i = piece / pieces;"
            yield "      (void)i;"
            yield from indented(self._known(number), 6)
            start = "piece % pieces * kSplit"
            end = f"std::min<int64_t>(cols, {start} + kSplit)"
            yield from indented(self._columns(number, start, end), 6)
            yield from indented(self._sweep(number, each), 6)
            for reduction in each.reductions:
                name = self.names[reduction.name]
                value = f"{name}_total" if reduction.fold == "sum" else self._lanes(reduction)
                yield f"      {name}_pieces[piece] = {value};"
            yield "    }"
            if each.reductions:
                yield "#pragma omp for schedule(static)"
                yield "    for (int64_t i = 0; i < rows; ++i) {"
                for reduction in each.reductions:
                    name = self.names[reduction.name]
                    whole = f"rows_of::{reduction.fold}({name}_pieces.data() + i * pieces, pieces)"
                    value = f"static_cast<simd::Float>({whole}{scaled(reduction)})"
                    yield f"      {name}_rows[i] = {value};"
                yield "    }"
        if any(not self.nest.is_inner(o.name) for o in self.nest.outputs):
            yield "#pragma omp for schedule(static)"
            yield "    for (int64_t i = 0; i < rows; ++i) {"
            yield from indented(self._known(len(self.nest.passes)), 6)
            yield from indented(self._row_outputs(), 6)
            yield "    }"
        yield from FINISH
        yield "  }"

    def _known(self, number: int) -> Iterator[str]:
        """Read and compute what is known of a row before a pass."""
        yield from self._begin()
        for each in self.nest.passes[:number]:
            for reduction in each.reductions:
                name = self.names[reduction.name]
                yield f"const simd::Floats {name} = math::splat({name}_rows[i]);"
                yield f"(void){name};"
            yield from self._after(each)

    # ---- one row ------------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        """Return where a row's elements of a value begin."""
        return offset(self.space, name, self.rows, "i") or "0"

    def _begin(self) -> Iterator[str]:
        for given in self.nest.read:
            if not self.nest.is_inner(given):
                name = self.names[given]
                value = f"rows_of::as_float({name}_all[{self._at(given)}])"
                yield f"const simd::Floats {name} = math::splat({value});"
                yield f"(void){name};"
        for index in self.nest.indices:
            if not self.nest.is_inner(index):
                yield f"const simd::Floats {self.names[index]} = {_number(self._at(index))};"
                yield f"(void){self.names[index]};"
        for statement in self.nest.before:
            yield from self._statement(statement)

    def _after(self, each: Pass) -> Iterator[str]:
        for statement in each.after:
            yield from self._statement(statement)

    def _row_outputs(self) -> Iterator[str]:
        for output in self.nest.outputs:
            if not self.nest.is_inner(output.name):
                name, at = self.names[output.name], self._at(output.name)
                is_index = any(r.name == output.name and r.is_index for r in self.nest.reductions)
                if is_index:
                    yield f"{name}_out[{at}] = {name};"
                else:
                    value = self._floats(output.name)
                    yield f"rows_of::put({name}_out + {at}, ({value})[0]);"

    def _floats(self, name: str) -> str:
        return converted(self.names[name], self.nest.kinds.get(name, "float"), "float")

    def _statement(self, statement: Statement) -> Iterator[str]:
        name = self.names[statement.name]
        yield f"const auto {name} = {statement_text(statement, self.nest, self.names)};"
        yield f"(void){name};"

    def _about(self, each: Pass) -> str:
        ends = [f"{r.fold} of {self.names[r.value]}" for r in each.reductions]
        return ", ".join([*ends, *(f"writes {self.names[o.name]}" for o in each.writes)])

    # ---- one pass over some of a row ----------------------------------------------------------

    def _columns(self, number: int, first: str, end: str) -> Iterator[str]:
        """Say over which of these columns a pass goes: where it takes one of a row, over that."""
        place = picked_place(self.nest, number, self.kept)
        return columns_of(None if place is None else self._floats(place), first, end)

    def _sweep(self, number: int, each: Pass) -> Iterator[str]:
        """Go over the columns from `first` to `last`."""
        for reduction in each.reductions:
            name = self.names[reduction.name]
            yield from parts_of(reduction, name)
        yield from carries_of(each.statements, self.names)
        if self.segments:
            length = self.space.length
            if self.nest.is_backwards:
                yield f"for (int64_t s = (last - 1) / {length}; s >= 0; --s) {{"
            else:
                yield f"for (int64_t s = first / {length}; s * {length} < last; ++s) {{"
            yield f"  const int64_t column = s * {length};"
            yield "  const int64_t begin = std::max<int64_t>(first - column, 0);"
            yield f"  const int64_t end = std::min<int64_t>(last - column, {length});"
        else:
            yield "{"
            yield "  const int64_t column = 0, begin = first, end = last;"
        yield "  (void)column;"
        if self.kept:
            yield "{% if keep %}"
            yield from indented(self._segment(number, each, self.kept), 2)
            yield "{% else %}"
            yield from indented(self._segment(number, each, []), 2)
            yield "{% endif %}"
        else:
            yield from indented(self._segment(number, each, []), 2)
        steps = STEPS_BACKWARDS if self.nest.is_backwards else STEPS
        yield from indented(iter(steps), 2)
        yield "}"
        for name in [self.names[r.name] for r in each.reductions if r.fold == "sum"]:
            yield f"const double {name}_total = rows_of::total({name}_part);"

    def _segment(self, number: int, each: Pass, kept: Sequence[str]) -> Iterator[str]:
        """Write what belongs to one piece of memory, and the step of one vector."""
        earlier = {s.name for p in self.nest.passes[:number] for s in p.statements}
        from_memory = [n for n in kept if n in earlier]
        statements = still_needed(each, from_memory)
        computed = {s.name for s in statements}
        read = {o for s in statements for o in s.refs}
        read |= {r.value for r in each.reductions} | {o.name for o in each.writes}
        body: list[str] = []
        for name in sorted(read - computed, key=lambda n: self.names.get(n, "")):
            text = self.names[name]
            if name in from_memory:
                body.append(f"const simd::Floats {text} = simd::load({text}_kept + column + j);")
            elif name == COLUMN:
                body.append(f"const simd::Floats {text} = rows_of::columns(column + j);")
            elif name in self.nest.taps:
                tap = self.nest.taps[name]
                yield cpp_window(tap, text)
                yield f"const int64_t {text}_row = {self._segment_at(name)};"
                source, apart = f"{self.names[tap.source]}_all", tail_stride(self.space, name)
                body.append(cpp_tap(text, source, f"{text}_row", "j", apart))
            elif name in self.nest.indices and self.nest.is_inner(name):
                at, apart = self._segment_at(name), tail_stride(self.space, name)
                if self.nest.is_dense(name):
                    body.append(f"const simd::Floats {text} = {counted(apart, at, 'j')};")
                else:
                    yield f"const simd::Floats {text} = {_number(at)};"
            elif name in self.given and self.nest.is_inner(name):
                at = self._segment_at(name)
                if self.nest.is_dense(name):
                    yield f"const auto* const {text}_row = {self._first(name, '_all')};"
                    value = loaded(self._apart(name), f"{text}_row", "j")
                    body.append(f"const simd::Floats {text} = {value};")
                else:
                    value = f"math::splat(rows_of::as_float({text}_all[{at}]))"
                    yield f"const simd::Floats {text} = {value};"
        for statement in statements:
            if self.nest.is_dense(statement.name):
                body += self._statement(statement)
            else:
                yield from self._statement(statement)
        for output in each.writes:
            name = self.names[output.name]
            yield f"auto* const {name}_row = {self._first(output.name, '_out')};"
        body += [
            f"simd::store({self.names[n]}_kept + column + j, {self.names[n]});"
            for n in kept
            if n in computed and n not in earlier
        ]
        for reduction in each.reductions:
            value, start = self._floats(reduction.value), START[reduction.fold]
            value = f"rows_of::first<kPart>({value}, n, {start})"
            body.append(f"const simd::Floats {self.names[reduction.name]}_next = {value};")
            taken = f"{self.names[reduction.name]}_next"
            body.append(joined(reduction, taken, self.names, "math::lanes_from(column + j)"))
        for output in each.writes:
            row, value = f"{self.names[output.name]}_row", self._floats(output.name)
            body.append(stored(self._apart(output.name), row, "j", value))
        yield "const auto step = [&](auto is_part, const int64_t j, const int n, const int u) {"
        yield "  constexpr bool kPart = decltype(is_part)::value;"
        yield "  (void)n; (void)u;"
        yield from (f"  {line}" for line in body)
        yield "};"

    def _first(self, name: str, end: str) -> str:
        """Return a pointer to the first element of a piece of a tensor's memory."""
        return f"{self.names[name]}{end} + {self._segment_at(name)}"

    def _apart(self, name: str) -> int | str:
        """Return how far apart elements of that piece lie."""
        return tail_stride(self.space, name)

    def _segment_at(self, name: str) -> str:
        terms = [offset(self.space, name, self.rows, "i")]
        terms.append(offset(self.space, name, self.segments, "s") if self.segments else "")
        is_plain = self.nest.is_whole(name) and self.space.is_plain(name)
        if not self.segments and is_plain and terms[0]:
            terms[0] = "i * cols"
        return " + ".join(t for t in terms if t) or "0"

    def _lanes(self, reduction: Reduction) -> str:
        name = self.names[reduction.name]
        return f"rows_of::{reduction.fold}({name}_part)"

    def _folded(self, reduction: Reduction) -> str:
        name = self.names[reduction.name]
        if reduction.fold == "sum":
            return f"math::splat(static_cast<simd::Float>({name}_total{scaled(reduction)}))"
        if reduction.is_index:
            return f"rows_of::{reduction.fold}({name}_part, {name}_place)"
        return f"math::splat({self._lanes(reduction)})"


FINISH = ["{% if stream_output %}", "    streams::finish();", "{% endif %}"]


def _number(place: str) -> str:
    return f"math::splat(static_cast<simd::Float>({place}))"


def _kind(reduction: Reduction) -> str:
    return "int64_t" if reduction.is_index else "simd::Floats"
