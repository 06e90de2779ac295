"""The template of a nest of long rows that a cluster of Hopper's blocks holds: each is read once.

Of a row that no Triton program holds each pass reads all again. Here the blocks of a cluster have
a row in their shared memory (`templates/_lib/cluster_rows.cuh`), and passes go over it there. The
text is CUDA C++ beside Triton's, of which the gradients are.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from tuner.capture.nests.indexing import offset, row_dims
from tuner.capture.nests.nest import (
    COLUMN,
    Nest,
    Output,
    Reduction,
    Statement,
    emitted,
    still_needed,
)
from tuner.capture.nests.operations import OPERATIONS, converted, literal, operation_of
from tuner.capture.nests.paired_sweeps import paired_sweeps
from tuner.capture.tasks.stages import Stages
from tuner.capture.writers.templates import Part, arguments_of, function_of
from tuner.capture.writers.triton_template import TRITON_IMPORTS, further_of
from tuner.space.expression import Expression

__all__ = ["CLUSTER_TEMPLATE", "cluster_template", "refusal_of_clusters"]

CLUSTER_TEMPLATE = "nest_cluster"
RING_BYTES = 220 * 1024  # of a block's shared memory; kRingBytes in cluster_rows.cuh
SHORTEST_BYTES = 32 * 1024  # of a row, below which one program holds it
MOST_BLOCKS = 16  # of a cluster; not all GPUs have room for so many
CHUNKS = (32768, 16384, 8192)  # bytes
# Of gradients, which no search decides: any device with clusters has room for so many blocks, and
# a thread has 128 registers.
MOST_PORTABLE, THREADS_OF_GRADIENTS = 8, 512
_FOLDS = {"sum": "kSum", "amax": "kLargest", "amin": "kSmallest"}
_STARTS = {"sum": "0", "amax": "-__builtin_inff()", "amin": "__builtin_inff()"}

_HEAD = """\
---
title: Rows in the shared memory of a cluster of blocks ({sweeps} passes)
language: triton
requires:
  - {{expr: "device.kind == 'cuda'", why: "it is CUDA C++ beside Triton, for a GPU"}}
  - {{expr: "device.has_triton", why: "Triton is installed"}}
  - {{expr: "device.capability == 90", why: "clusters and bulk copies as sm_90a has them"}}
  - {{expr: "device.has_nvcc", why: "the CUDA C++ needs nvcc"}}
  - {{expr: "{fits}",
     why: "the blocks of a cluster hold a whole row, 220 KB each, in whole chunks"}}
parameters:
  cluster_blocks: {{about: "blocks that hold a row together", \
default: {blocks}, values: {some_blocks}}}
  cluster_threads: {{about: "threads of a block, 32 of which bring what the others take", \
default: 1024, values: [256, 512, 1024]}}
  cluster_chunk: {{about: "bytes of a row in one copy to shared memory", default: {chunk}, \
values: [8192, 16384, 32768]}}
{parameters}{workspace}steps:
{step}
{further}optimisations:
  - {{text: "all of the forward in one kernel, which reads each row once"}}
deterministic: true
---
"""

# What rows need, with constants of its own for each space of names.
_INCLUDED = """\
{{% with {values}cluster_space = "{space}" %}}
{{% include "_lib/cluster_rows.cuh" %}}

{{% include "_lib/cluster_launch.cuh" %}}
{{% endwith %}}
"""


def refusal_of_clusters(stages: Stages) -> str:
    """Return why no cluster takes a graph's tasks; "" where one does."""
    if len(stages.tasks) != 1 or len(stages.nests) != 1:
        return "it is more than one nest"
    (nest,) = stages.nests
    space = nest.space
    if nest.scans or nest.taps or nest.parts or nest.is_wide:
        return "it has scans, windows or float64"
    if not nest.reductions or any(r.is_index for r in nest.reductions):
        return "it reduces nothing, or to the numbers of columns"
    if sorted(space.columns) != list(range(len(row_dims(space)), len(space.sizes))):
        return "a row does not lie in one piece"
    tensors = [(t.name, t.dtype) for t in nest.arguments]
    tensors += [(o.name, o.dtype) for o in nest.outputs]
    if any(dtype != "float32" or space.is_moved(name) for name, dtype in tensors):
        return "not all tensors are float32 and in order of memory"
    if any(s.op not in OPERATIONS for s in nest.statements):
        return "a value is rounded on the way"
    if any(nest.is_inner(o.name) and not nest.is_whole(o.name) for o in nest.outputs):
        return "a result varies over some of the columns alone"
    if len(nest.passes) - len(paired_sweeps(nest)) < 2:
        return "a row is read once anyway"
    num_bytes = 4 * space.cols
    if num_bytes <= SHORTEST_BYTES:
        return "a program holds a row"
    if not staged_of(nest):
        return "nothing is read that lies as a row"
    if _first_of(nest) is None:
        return "no cluster holds a row"
    return ""


def cluster_template(parts: Sequence[Part], op: str) -> str:
    """Return the template, its head included, of tasks that `refusal_of_clusters` does not refuse.

    Args:
        parts: the calls that it offers, the operator's own first.
        op: the operator's name.
    """
    (nest,) = parts[0].stages.nests
    first = _first_of(nest)
    assert first is not None
    blocks, chunk = first
    steps, functions = dict[str, list[str]](), ""
    kernels = [_INCLUDED.format(space="cluster_rows", values="")]
    # A forward that keeps something for its gradients has the same rows in its clusters.
    for part in sorted(filter(_has_clusters, parts), key=lambda part: not part.is_forward):
        function, (each,) = function_of(op, len(steps)), part.stages.nests
        given = [*arguments_of(part.stages, each, part.names), str(each.space.rows)]
        steps[part.name] = [f"  - {{call: {function}, args: [{', '.join(given)}]}}"]
        space = "cluster_rows"
        if not part.is_forward:
            own = _first_of(each)
            assert own is not None  # it is not refused
            space = f"{space}_{len(steps) - 1}"
            values = f"cluster_blocks = {own[0]}, cluster_chunk = {own[1]}, "
            values += f"cluster_threads = {THREADS_OF_GRADIENTS}, "
            kernels.append(_INCLUDED.format(space=space, values=values))
        kernels += _Text(each, function, space).lines()
        taken = ", ".join([*(f"given_{i}" for i in range(len(given) - 1)), "rows"])
        functions += f'\n\ndef {function}({taken}):\n    cuda_code("{function}", {taken})\n'
    (step,) = steps.pop("")
    further = further_of(parts, op, steps)
    head = _HEAD.format(
        sweeps=len(nest.passes),
        fits=_fits(nest),
        blocks=blocks,
        some_blocks=[n for n in (blocks, 2 * blocks) if n <= MOST_BLOCKS],
        chunk=chunk,
        step=step,
        parameters=further.parameters,
        workspace="\n".join(["workspace:", *further.workspace, ""]) if further.workspace else "",
        further=further.calls,
    )
    kernel = "\n".join(kernels)
    return (
        f"{head}{{% set rows_kernels %}}\n{kernel}\n{{% endset %}}\n{TRITON_IMPORTS}\n\n"
        f'{{% include "_lib/triton_clusters.py" %}}\n{functions}{further.text}'
    )


def _has_clusters(part: Part) -> bool:
    """Whether clusters take a call; gradients where the fewest blocks are no more than any has."""
    if refusal_of_clusters(part.stages):
        return False
    first = _first_of(part.stages.nests[0])
    return part.is_forward or (first is not None and first[0] <= MOST_PORTABLE)


def staged_of(nest: Nest) -> list[str]:
    """Return the arguments that lie as rows do: these are brought to shared memory."""
    return [t.name for t in nest.arguments if nest.is_whole(t.name)]


def _fits(nest: Nest) -> str:
    """Return as an expression that a block's ring has a slot for each chunk of its slice."""
    slice_bytes = f"cdiv({nest.space.cols}, 32 * cluster_blocks) * 128"
    slot_bytes = f"({len(staged_of(nest))} * (cluster_chunk + 16))"
    return f"cdiv({slice_bytes}, cluster_chunk) <= min(64, {RING_BYTES} // {slot_bytes})"


def _first_of(nest: Nest) -> tuple[int, int] | None:
    """Return with how many blocks and which chunk a search begins; None where none holds a row.

    With the fewest blocks and the largest chunk: on an H200 (2026-11-26) rows of 262 KB took
    5.1 ms in two blocks, 7.2 in four, 8.4 in eight; of 1 to 1.6 MB longer in 16 than in eight.
    """
    fits = Expression.parse(_fits(nest))
    tried = itertools.product((1, 2, 4, 8, MOST_BLOCKS), CHUNKS)
    return next(
        (t for t in tried if fits.holds({"cluster_blocks": t[0], "cluster_chunk": t[1]})), None
    )


class _Text:
    """A nest as a kernel of CUDA C++, and the function that starts it.

    Names are counted: `a` of what is read from global memory, `x` of what lies in shared memory,
    `v` of statements, `r` of reductions, `p` of what these are found from.
    """

    def __init__(self, nest: Nest, function: str, space: str) -> None:
        self.nest, self.function, self.space = nest, function, space
        self.staged = staged_of(nest)
        self.rows, self.columns = row_dims(nest.space), sorted(nest.space.columns)
        self.names: dict[str, str] = {}  # of what is known of a row
        self.count = 0

    def lines(self) -> Iterator[str]:
        """Write all of it."""
        pointers = [f"const float* g{i}" for i in range(len(self.nest.arguments))]
        pointers += [f"float* y{i}" for i in range(len(self.nest.outputs))]
        parameters = ", ".join([*pointers, "int64_t rows"])
        passed = [pointer.split()[-1] for pointer in pointers]
        num, cols = len(self.staged), self.nest.space.cols
        sources = ", ".join(f"g{self._number(name)}" for name in self.staged)
        yield f"__global__ void __launch_bounds__({self.space}::kThreads, 1)"
        yield f"{self.function}_kernel({parameters}) {{"
        yield f"  using namespace {self.space};"
        # Two braces together are Jinja2's.
        yield f"  const Sources<{num}> sources = {{ {{{sources}}} }};"
        yield f"  Block<{num}, {cols}> block(sources, rows);"
        yield "  if (block.is_bringing()) {"
        yield "    block.bring();"
        yield "    return;"
        yield "  }"
        yield "#pragma unroll 1"
        yield "  for (int64_t row = block.first_row(); row < rows; row += block.clusters) {"
        yield from (f"    {line}" for line in self._row())
        yield "  }"
        yield "}"
        yield ""
        yield f'extern "C" const char* {self.function}({parameters}, void* stream) {{'
        taken = ", ".join([*passed, "rows"])
        yield f"  return {self.space}::start<{self.function}_kernel>(rows, stream, {taken});"
        yield "}"

    def _row(self) -> Iterator[str]:
        for tensor in self.nest.arguments:
            if not self.nest.is_inner(tensor.name):
                yield self._read(tensor.name, self.names)
        for index in self.nest.indices:
            if not self.nest.is_inner(index):
                yield self._index(index, self.names)
        yield from self._computed(self.nest.before)
        last = len(self.nest.passes) - 1
        for number, each in enumerate(self.nest.passes):
            needed = still_needed(each, ())
            yield from self._computed(
                [s for s in each.statements if not self.nest.is_inner(s.name)]
            )
            parts = [self._part() for _ in each.reductions]
            for reduction, part in zip(each.reductions, parts, strict=True):
                start = _STARTS[reduction.fold]
                yield f"{_kind(reduction)} {part}[4] = {{{', '.join([start] * 4)}}};"
            is_first, is_last = (str(b).lower() for b in (number == 0, number == last))
            yield f"block.sweep<{is_first}, {is_last}>(row, [&](const auto& x, int first_column, "
            yield "                                  auto present) {"
            inner = [s for s in needed if self.nest.is_inner(s.name)]
            written = [(self._output(o), o) for o in each.writes if self.nest.is_inner(o.name)]
            found = list(zip(each.reductions, parts, strict=True))
            yield from (f"  {line}" for line in self._four(inner, found, written))
            yield "});"
            for reduction, part in zip(each.reductions, parts, strict=True):
                yield from self._together(reduction, part)
            yield from self._computed(each.after)
        yield from self._row_outputs()

    def _four(
        self,
        statements: list[Statement],
        parts: list[tuple[Reduction, str]],
        written: list[tuple[str, Output]],
    ) -> Iterator[str]:
        """What a sweep does with four columns."""
        for pointer, _ in written:
            yield f"float made_{pointer}[4];"
        yield "#pragma unroll"
        yield "for (int i = 0; i < 4; ++i) {"
        yield "  if (!present(i)) continue;"
        names = dict(self.names)
        wanted = {o for s in statements for o in s.refs}
        wanted |= {r.value for r, _ in parts} | {o.name for _, o in written}
        for at, name in enumerate(self.staged):
            if name in wanted:
                names[name] = f"x[{at}][i]"
        if COLUMN in wanted:
            names[COLUMN] = "static_cast<float>(column)"
        lines = [
            self._read(t.name, names) for t in self.nest.arguments if t.name in wanted - {*names}
        ]
        lines += [self._index(n, names) for n in self.nest.indices if n in wanted - {*names}]
        lines += [self._statement(statement, names) for statement in statements]
        for reduction, part in parts:
            value = self._float(reduction.value, names)
            fold = f"Fold::{_FOLDS[reduction.fold]}"
            lines.append(f"{part}[i] = joined<{fold}, {_kind(reduction)}>({part}[i], {value});")
        for pointer, output in written:
            lines.append(f"made_{pointer}[i] = {self._float(output.name, names)};")
        if any(re.search(r"\bcolumn\b", line) for line in lines):
            lines.insert(0, "const int column = first_column + i;")
        yield from (f"  {line}" for line in lines)
        yield "}"
        for pointer, _ in written:
            place = f"{pointer} + row * {self.nest.space.cols} + first_column"
            yield f"store({place}, made_{pointer}, present);"

    def _together(self, reduction: Reduction, part: str) -> Iterator[str]:
        fold = f"Fold::{_FOLDS[reduction.fold]}"
        four = [f"double({part}[{i}])" for i in range(4)]
        joined = four[0]
        for other in four[1:]:
            joined = f"joined<{fold}>({joined}, {other})"
        name = self._new("r", reduction.name, self.names)
        found = f"block.template together<{fold}>({joined})"
        if reduction.scale != 1.0:  # also where it is NaN
            found += f" * {literal(reduction.scale, 'cuda', is_wide=True)}"
        yield f"const float {name} = float({found});"

    def _row_outputs(self) -> Iterator[str]:
        own = [o for o in self.nest.outputs if not self.nest.is_inner(o.name)]
        if not own:
            return
        yield "if (block.own == 0 && threadIdx.x == 0) {"
        for output in own:
            at = self._at(output.name) or "0"
            yield f"  {self._output(output)}[{at}] = {self._float(output.name, self.names)};"
        yield "}"

    # ---- values -------------------------------------------------------------------------------

    def _number(self, name: str) -> int:
        return [t.name for t in self.nest.arguments].index(name)

    def _output(self, output: Output) -> str:
        return f"y{[o.name for o in self.nest.outputs].index(output.name)}"

    def _new(self, letter: str, name: str, names: dict[str, str]) -> str:
        self.count += 1
        names[name] = f"{letter}{self.count}"
        return names[name]

    def _part(self) -> str:
        self.count += 1
        return f"p{self.count}"

    def _at(self, name: str) -> str:
        """Return where an element of a value lies."""
        space = self.nest.space
        terms = [
            offset(space, name, self.rows, "row"),
            offset(space, name, self.columns, "column"),
        ]
        return " + ".join(term for term in terms if term)

    def _read(self, name: str, names: dict[str, str]) -> str:
        value = f"__ldg(g{self._number(name)} + {self._at(name) or '0'})"
        return f"const float {self._new('a', name, names)} = {value};"

    def _index(self, name: str, names: dict[str, str]) -> str:
        value = f"static_cast<float>({self._at(name) or '0'})"
        return f"const float {self._new('a', name, names)} = {value};"

    def _float(self, name: str, names: Mapping[str, str]) -> str:
        return converted(names[name], self.nest.kinds.get(name, "float"), "float", "cuda")

    def _computed(self, statements: tuple[Statement, ...] | list[Statement]) -> Iterator[str]:
        for statement in statements:
            if statement.name not in self.names:
                yield self._statement(statement, self.names)

    def _statement(self, statement: Statement, names: dict[str, str]) -> str:
        value = emitted(statement, self.nest, names.__getitem__, "cuda")
        kind = "bool" if operation_of(statement.op).gives == "mask" else "float"
        return f"const {kind} {self._new('v', statement.name, names)} = {value};"


def _kind(reduction: Reduction) -> str:
    """Return what a thread keeps of it: no sum on the way to a wide one may overflow."""
    return "double" if reduction.is_wide else "float"
