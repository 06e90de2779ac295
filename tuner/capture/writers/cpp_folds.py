"""How C++ loops compute a statement, reduce, and scan: each step of a vector, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tuner.capture.nests.nest import Nest, Reduction, Scan, Statement, emitted, scale_text
from tuner.capture.nests.operations import converted, emit, literal

__all__ = [
    "START",
    "STEPS",
    "STEPS_BACKWARDS",
    "carries_of",
    "columns_of",
    "indented",
    "joined",
    "parts_of",
    "scaled",
    "statement_text",
]

START = {"sum": "0.0f", "amax": "-INFINITY", "amin": "INFINITY",
         "argmax": "-INFINITY", "argmin": "INFINITY"}  # fmt: skip
_JOINED = {"amax": "maximum", "amin": "minimum"}
STEPS = [
    "int64_t j = begin;",
    "for (; j + kUnroll * simd::kWidth <= end; j += kUnroll * simd::kWidth)",
    "  for (int u = 0; u < kUnroll; ++u)",
    "    step(std::false_type{}, j + u * simd::kWidth, simd::kWidth, u);",
    "for (; j + simd::kWidth <= end; j += simd::kWidth)",
    "  step(std::false_type{}, j, simd::kWidth, 0);",
    "if (j < end) step(std::true_type{}, j, static_cast<int>(end - j), 0);",
]
STEPS_BACKWARDS = [
    "int64_t j = end - (end - begin) % simd::kWidth;",
    "if (j < end) step(std::true_type{}, j, static_cast<int>(end - j), 0);",
    "while (j >= begin + kUnroll * simd::kWidth)",
    "  for (int u = 0; u < kUnroll; ++u)",
    "    step(std::false_type{}, j -= simd::kWidth, simd::kWidth, u);",
    "while (j > begin) step(std::false_type{}, j -= simd::kWidth, simd::kWidth, 0);",
]
_SCANS = {"sum": "scans::Sum", "prod": "scans::Product"}


def statement_text(statement: Statement, nest: Nest, names: Mapping[str, str]) -> str:
    """Write the value of a statement."""
    if isinstance(statement, Scan):
        return _scan_text(statement, nest, names)
    return emitted(statement, nest, names.__getitem__, is_wide=nest.is_wide)


def joined(reduction: Reduction, value: str, names: Mapping[str, str], column: str) -> str:
    """Write how a vector of values is added to what was found before it."""
    part = f"{names[reduction.name]}_part[u]"
    if reduction.fold == "sum":
        return f"rows_of::add({part}, {value});"
    if reduction.is_index:
        order = ">" if reduction.fold == "argmax" else "<"
        place = f"{names[reduction.name]}_place[u]"
        return f"rows_of::take_first({part}, {place}, {value}, {value} {order} {part}, {column});"
    return f"{part} = {emit(_JOINED[reduction.fold], [part, value])};"


def scaled(reduction: Reduction) -> str:
    """Write the product with a sum's scale, in float64; nothing where that is 1."""
    return scale_text(reduction, "cols", "cpp")


def parts_of(reduction: Reduction, name: str) -> Iterator[str]:
    """Write what a reduction holds on its way: a vector of values for each step of `u`."""
    if reduction.fold == "sum":
        yield f"math::Halves {name}_part[kUnroll] = {{}};"
        return
    yield f"simd::Floats {name}_part[kUnroll];"
    start = START[reduction.fold]
    yield f"for (int u = 0; u < kUnroll; ++u) {name}_part[u] = math::splat({start});"
    if reduction.is_index:
        yield f"math::Mask {name}_place[kUnroll] = {{}};"


def carries_of(
    statements: Sequence[Statement], names: Mapping[str, str], *, is_across: bool = False
) -> Iterator[str]:
    """Write what scans hold of the columns before: a number, or one of each row of a tile."""
    for scan in (s for s in statements if isinstance(s, Scan)):
        carry = f"{names[scan.name]}_carry"
        if is_across:
            yield f"math::Halves {carry}[kUnroll];"
            begun = f"{carry}[u] = scans::begun<{_SCANS[scan.fold]}>();"
            yield f"for (int u = 0; u < kUnroll; ++u) {begun}"
        else:
            yield f"double {carry} = {scan.neutral};"


def columns_of(place: str | None, first: str, end: str) -> Iterator[str]:
    """Write `first` and `last` of the columns that a pass goes over.

    Where it takes something of a `place` of each row alone, it goes over that, if it is here.
    """
    if place is None:
        yield f"const int64_t first = {first}, last = {end};"
        return
    yield f"const int64_t least = {first}, most = {end};"
    yield f"const bool is_here = ({place})[0] >= least && ({place})[0] < most;"
    yield f"const int64_t first = is_here ? static_cast<int64_t>(({place})[0]) : 0;"
    yield "const int64_t last = is_here ? first + 1 : 0;"


def _scan_text(scan: Scan, nest: Nest, names: Mapping[str, str]) -> str:
    """Write the next values of a scan; what lies behind the last column changes nothing."""
    (operand,) = scan.operands
    if isinstance(operand, str):
        value = converted(names[operand], nest.kinds.get(operand, "float"), "float")
    else:
        value = literal(float(operand), "cpp")
    fold, carry = _SCANS[scan.fold], f"{names[scan.name]}_carry"
    if nest.space.is_across:
        return f"scans::across<{fold}>({carry}[u], {value})"
    way = "true" if scan.is_backwards else "false"
    value = f"rows_of::first<kPart>({value}, n, {scan.neutral}f)"
    return f"scans::along<{fold}, {way}>({carry}, {value})"


def indented(lines: Iterator[str], by: int) -> Iterator[str]:
    """Indent lines, but not those of Jinja2 and the preprocessor."""
    for line in lines:
        is_mark = line[:1] == "#" or line[:2] in ("{%", "{#")
        yield line if is_mark else " " * by + line
