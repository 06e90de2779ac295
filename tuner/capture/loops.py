"""A nest as the text of a C++ template: passes over rows, in vectors of floats.

The text is Jinja2 still: `width`, `unroll`, `keep` and how the output is stored are parameters of
the template, and vary in a search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tuner.capture.nest import Nest, Pass, Reduction, Statement
from tuner.capture.operations import OPERATIONS, converted, emit, literal

__all__ = ["kept_values", "loops_text", "row_index"]

KEPT_FLOPS = 8  # a value that costs more to compute again may be kept from pass to pass
_START = {"sum": "0.0f", "amax": "-INFINITY", "amin": "INFINITY"}


def kept_values(nest: Nest) -> list[str]:
    """Return the values that are computed in one pass and needed in a later one, at a cost."""
    kept: list[str] = []
    for number, each in enumerate(nest.passes):
        later = {s.name for p in nest.passes[number + 1 :] for s in p.statements}
        cost: dict[str, int] = {}
        for statement in each.statements:
            own = OPERATIONS[statement.op].flop
            before = [cost.get(o, 0) for o in statement.operands if isinstance(o, str)]
            cost[statement.name] = own + sum(before)
        names = [s.name for s in each.statements if s.place == "whole" and s.name in later]
        inner = {o for s in each.statements if s.name in names for o in s.operands}
        kept += [n for n in names if n not in kept and n not in inner and cost[n] >= KEPT_FLOPS]
    return kept


def loops_text(nest: Nest, function: str, names: Mapping[str, str]) -> str:
    """Return the function that computes the nest.

    Args:
        nest: what to compute.
        function: its name.
        names: of values, as C++ knows them; inputs and outputs are parameters of the function.
    """
    return "\n".join(_Writer(nest, function, names).lines()) + "\n"


def row_index(nest: Nest, name: str, row: str = "i", divided: str = "/") -> str:
    """Return where a value that belongs to a row lies; `divided` is how integers are divided."""
    strides, shape = nest.row_strides[name], nest.row_shape
    terms, inner, is_dense, step = [], 1, True, 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        is_dense &= stride == step or size == 1
        step *= size
    if is_dense:
        return row
    for at in range(len(shape) - 1, -1, -1):
        if strides[at]:
            index = f"{row} {divided} {inner}" if inner > 1 else row
            index = f"({index}) % {shape[at]}" if at else f"({index})"
            terms.append(f"{index} * {strides[at]}" if strides[at] > 1 else index)
        inner *= shape[at]
    return " + ".join(terms) or "0"


class _Writer:
    def __init__(self, nest: Nest, function: str, names: Mapping[str, str]) -> None:
        self.nest, self.function, self.names = nest, function, names
        self.places = {tensor.name: place for tensor, place in nest.arguments}
        self.kept = kept_values(nest)
        every = [s for p in nest.passes for s in (*p.statements, *p.after)] + list(nest.before)
        self.kinds = {s.name: OPERATIONS[s.op].gives for s in every}
        self.outputs = [name for name, _ in nest.outputs]

    def lines(self) -> Iterator[str]:
        inputs = [f"const float* {self.names[t.name]}_all" for t, _ in self.nest.arguments]
        outputs = [f"float* {self.names[n]}_out" for n in dict.fromkeys(self.outputs)]
        whole = "int64_t rows, int64_t cols, int64_t num_threads"
        yield f'extern "C" const char* {self.function}('
        yield f"    {', '.join([*inputs, *outputs, whole])}) {{"
        yield "  const int team = simd::team_size(kThreads, num_threads, rows);"
        yield "#pragma omp parallel num_threads(team)"
        yield "  {"
        if self.kept:
            yield "{% if keep %}"
            for name in self.kept:
                own = self.names[name]
                yield f"    std::vector<float> {own}_memory(cols + simd::kWidth);"
                yield f"    float* const {own}_kept = {own}_memory.data();"
            yield "{% endif %}"
        yield "#pragma omp for schedule(static)"
        yield "    for (int64_t i = 0; i < rows; ++i) {"
        for line in self._row():
            yield f"      {line}" if (line and line[0] not in "{#") or line[:2] == "{ " else line
        yield "    }"
        yield "{% if stream_output %}"
        yield "    streams::finish();"
        yield "{% endif %}"
        yield "  }"
        yield "  return nullptr;"
        yield "}"

    def _row(self) -> Iterator[str]:
        for tensor, place in self.nest.arguments:
            name = self.names[tensor.name]
            if place == "whole":
                yield f"const float* const {name}_row = {name}_all + i * cols;"
            elif place in ("row", "one"):
                at = row_index(self.nest, tensor.name) if place == "row" else "0"
                yield f"const simd::Floats {name} = math::splat({name}_all[{at}]);"
        whole = [n for n, place in dict.fromkeys(self.nest.outputs) if place == "whole"]
        for name in whole:
            out = self.names[name]
            yield f"float* const {out}_row = {out}_out + i * cols;"
        for statement in self.nest.before:
            yield self._statement(statement)
        for number, each in enumerate(self.nest.passes):
            yield from self._pass(number, each)
        for name, place in dict.fromkeys(self.nest.outputs):
            if place == "row":
                yield f"{self.names[name]}_out[i] = {self.names[name]}[0];"

    def _pass(self, number: int, each: Pass) -> Iterator[str]:
        for reduction in each.reductions:
            yield f"simd::Floats {self.names[reduction.name]};"
        yield "{  // " + self._about(each)
        for reduction in each.reductions:
            start = f"math::splat({_START[reduction.fold]})"
            name = self.names[reduction.name]
            yield f"  simd::Floats {name}_part[kUnroll];"
            yield f"  for (int u = 0; u < kUnroll; ++u) {name}_part[u] = {start};"
            if reduction.fold == "sum":
                yield f"  double {name}_total = 0.0;"
        yield "  const auto step = [&](auto is_part, const int64_t j, const int n, const int u) {"
        yield "    constexpr bool kPart = decltype(is_part)::value;"
        yield "    (void)n; (void)u;"
        if self.kept:
            yield "{% if keep %}"
            yield from (f"    {line}" for line in self._body(number, each, self.kept))
            yield "{% else %}"
            yield from (f"    {line}" for line in self._body(number, each, []))
            yield "{% endif %}"
        else:
            yield from (f"    {line}" for line in self._body(number, each, []))
        yield "  };"
        sums = [self.names[r.name] for r in each.reductions if r.fold == "sum"]
        flush = " ".join(f"rows_of::flush({name}_part, &{name}_total);" for name in sums)
        yield "  for (int64_t from = 0; from < cols; from += kPiece) {"
        yield "    const int64_t to = std::min(cols, from + kPiece);"
        yield "    int64_t j = from;"
        yield "    for (; j + kUnroll * simd::kWidth <= to; j += kUnroll * simd::kWidth)"
        yield "      for (int u = 0; u < kUnroll; ++u)"
        yield "        step(std::false_type{}, j + u * simd::kWidth, simd::kWidth, u);"
        yield "    for (; j + simd::kWidth <= to; j += simd::kWidth)"
        yield "      step(std::false_type{}, j, simd::kWidth, 0);"
        yield "    if (j < to) step(std::true_type{}, j, static_cast<int>(to - j), 0);"
        if flush:
            yield f"    {flush}"
        yield "  }"
        for reduction in each.reductions:
            yield f"  {self._folded(reduction)}"
        yield "}"
        for statement in each.after:
            yield self._statement(statement)

    def _about(self, each: Pass) -> str:
        ends = [f"{r.fold} of {self.names[r.value]}" for r in each.reductions]
        return ", ".join([*ends, *(f"writes {self.names[n]}" for n in each.writes)])

    def _body(self, number: int, each: Pass, kept: Sequence[str]) -> Iterator[str]:
        earlier = {s.name for p in self.nest.passes[:number] for s in p.statements}
        from_memory = [n for n in kept if n in earlier]
        statements = _still_needed(each, from_memory)
        computed = {s.name for s in statements}
        read = {o for s in statements for o in s.operands if isinstance(o, str)}
        read |= {r.value for r in each.reductions} | {*each.writes}
        for name in sorted(read - computed, key=lambda n: self.names[n]):
            text = self.names[name]
            if name in from_memory:
                yield f"const simd::Floats {text} = simd::load({text}_kept + j);"
            elif self.places.get(name) == "whole":
                yield f"const simd::Floats {text} = rows_of::load<kPart>({text}_row + j, n);"
            elif self.places.get(name) == "column":
                yield f"const simd::Floats {text} = rows_of::load<kPart>({text}_all + j, n);"
        for statement in statements:
            yield self._statement(statement)
        for name in kept:
            if name in computed and name not in earlier:
                yield f"simd::store({self.names[name]}_kept + j, {self.names[name]});"
        for reduction in each.reductions:
            part, value = f"{self.names[reduction.name]}_part[u]", self.names[reduction.value]
            start = _START[reduction.fold]
            value = f"rows_of::first<kPart>({value}, n, {start})"
            operation = {"sum": "add", "amax": "maximum", "amin": "minimum"}[reduction.fold]
            yield f"{part} = {emit(operation, [part, value])};"
        for name in each.writes:
            out = self.names[name]
            yield f"rows_of::store<kPart>({out}_row + j, {out}, n);"

    def _folded(self, reduction: Reduction) -> str:
        name = self.names[reduction.name]
        if reduction.fold == "sum":
            return f"{name} = math::splat(static_cast<float>({name}_total));"
        return f"{name} = math::splat(rows_of::{reduction.fold}({name}_part));"

    def _statement(self, statement: Statement) -> str:
        takes = OPERATIONS[statement.op].takes
        operands = [
            converted(self.names[o], self.kinds.get(o, "float"), wanted)
            if isinstance(o, str)
            else converted(literal(float(o), "cpp"), "float", wanted)
            for o, wanted in zip(statement.operands, takes, strict=True)
        ]
        attrs = {name: float(str(value)) for name, value in statement.attrs.items()}
        value = emit(statement.op, operands, attrs)
        return f"const auto {self.names[statement.name]} = {value};"


def _still_needed(each: Pass, from_memory: Sequence[str]) -> list[Statement]:
    """Return the statements of a pass that are needed where some values come from memory."""
    by_name = {s.name: s for s in each.statements}
    found: set[str] = set()
    left = [r.value for r in each.reductions] + list(each.writes)
    while left:
        name = left.pop()
        if name in found or name not in by_name or name in from_memory:
            continue
        found.add(name)
        left += [o for o in by_name[name].operands if isinstance(o, str)]
    return [s for s in each.statements if s.name in found]
