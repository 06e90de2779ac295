"""What the templates of a module's nests have in common, and the one in C++."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.capture.graph.graph import Graph, num_bytes_of
from tuner.capture.graph.vocabulary import MOVES
from tuner.capture.nests.indexing import is_split
from tuner.capture.nests.nest import Nest
from tuner.capture.nests.own_parameters import declared, groups_of, renamed, suffixes_of
from tuner.capture.nests.precision import FLOATS, HALVES, stored_dtype
from tuner.capture.tasks.library import Call
from tuner.capture.tasks.stages import Stages
from tuner.capture.writers.loops import RowWriter, parameters_of
from tuner.capture.writers.loops_across import AcrossWriter
from tuner.capture.writers.loops_tiled import TileWriter, turned_values, uneven_values

__all__ = [
    "IN_EVAL", "Part", "arguments_of", "between_of", "call_step", "cpp_template", "function_of",
    "further_calls", "main_of", "place_of", "work_of",
]  # fmt: skip

IN_EVAL = "eval"  # the call of forward in eval mode, of an operator for training


@dataclass(frozen=True, slots=True)
class Part:
    """One call of an operator: its own, where `name` is empty, or a further one.

    `names` are of values, none of `RESERVED`; what lies between tasks has a name that no other
    call's has.
    """

    name: str
    graph: Graph
    stages: Stages
    names: Mapping[str, str]

    @property
    def is_forward(self) -> bool:
        """Whether it computes what a forward gives, in eval mode or where more is kept as well."""
        return self.has_epilogues or self.name == IN_EVAL

    @property
    def has_epilogues(self) -> bool:
        """Whether kernels of its products may do the work behind these as well.

        Not in eval mode: each candidate of a search would take nvcc 1.6 times as long, for kernels
        that a search never times.
        """
        return self.name in ("", "kept")


def function_of(op: str, number: int) -> str:
    """Return the name of the function that computes a nest; they are counted from 0."""
    return f"fused_{op}_rows" + (f"_{number}" if number else "")


def place_of(stages: Stages, names: Mapping[str, str], name: str) -> str:
    """Return what the plan calls a value: an argument, a result, or what lies between."""
    results = {*stages.outputs, *stages.updates.values()}
    if name in results:
        return f"{names[name]}_out"
    return f"{names[name]}_between" if name in stages.between else names[name]


def arguments_of(stages: Stages, nest: Nest, names: Mapping[str, str]) -> list[str]:
    """Return what the plan calls the tensors of a nest, in the order of its function's."""
    found = [place_of(stages, names, t.name) for t in nest.arguments]
    return found + [place_of(stages, names, o.name) for o in nest.outputs]


def between_of(stages: Stages, names: Mapping[str, str]) -> list[str]:
    """Return what lies between tasks, float32 without a dtype; calls make theirs themselves."""
    results = {*stages.outputs, *stages.updates.values()}
    written = {o.name: o.dtype for nest in stages.nests for o in nest.outputs}
    lines = []
    forms = [
        (n, f"{names[n]}_between", (s[0], *s[2:], s[1]) if n in stages.images else s, written[n])
        for n, s in stages.between.items()
    ]
    forms += [(c.name, names[c.name], c.shape, c.dtype) for c in stages.calls]
    for name, place, shape, dtype in forms:
        if name in results or (place == names[name] and dtype == "float32"):
            continue
        more = "" if dtype == "float32" else f", dtype: {stored_dtype(dtype)}"
        lines.append(f"  {place}: {{shape: [{', '.join(map(str, shape or (1,)))}]{more}}}")
    for name, (shape, dtype) in stages.zeros.items():
        form = f"shape: {json.dumps(list(shape or (1,)))}, dtype: {stored_dtype(dtype)}"
        lines.append(f"  {names[name]}: {{{form}, zero: true}}")
    return lines


def main_of(stages: Stages) -> Nest:
    """Return the nest of the most elements, which blocks are chosen for."""
    return max(stages.nests, key=lambda nest: nest.num_elements)


def call_step(stages: Stages, call: Call, names: Mapping[str, str]) -> str:
    """Return a call of PyTorch's own operation as a step of the plan."""
    is_last = call.name in stages.images

    def operand(name: str) -> str:
        place = place_of(stages, names, name)
        if name in stages.images and name in stages.between:  # of a nest; PyTorch knows its own
            return f"{place}.channels_first"
        # The image and its filters; those of a convolution in 2D or 3D lie like it.
        return f"{place}.channels_last" if is_last and name in call.reads[:2] else place

    args, gives = json.dumps(call.written(operand)), place_of(stages, names, call.name)
    pick = "" if call.pick is None else f", pick: {call.pick}"
    layout = ", layout: channels_last" if is_last else ""
    layout = ", layout: bytes" if call.makes_truths else layout
    return f"  - {{aten: {call.function}, args: {args}, gives: {gives}{pick}{layout}}}"


def work_of(stages: Stages) -> str:
    """Return in words what is generated of a call."""
    num = len([call for call in stages.calls if call.function not in MOVES])
    if not num:
        return "all of the forward"
    return f"all but {num} of PyTorch's own operations"


def _rounds(stages: Stages) -> bool:
    """Whether a cast to fewer bits is computed; beside float64 those are to float32."""
    nests = [nest for nest in stages.nests if not nest.is_wide]
    return any(s.op.startswith("as_") for nest in nests for s in nest.statements)


def further_calls(parts: Sequence[Part], steps: Sequence[list[str]]) -> str:
    """Return what a head says of the calls beside the operator's own; all lines of a template."""
    lines = ["extra:"] if len(parts) > 1 else []
    for part, own in zip(parts[1:], steps[1:], strict=True):
        lines += [f"  {part.name}:", "    steps:", *(f"    {step}" for step in own)]
    return "".join(f"{line}\n" for line in lines)


def _cpp_steps(part: Part, op: str, texts: list[str]) -> tuple[list[str], bool]:
    """Add the functions of a call to `texts`; return its steps, and whether pages may be huge."""
    steps: list[str] = []
    large: list[str] = []
    stages, names = part.stages, part.names
    suffixes = {} if part.name else suffixes_of(stages.nests)
    for task in stages.tasks:
        if isinstance(task, Call):
            steps.append(call_step(stages, task, names))
            continue
        nest, function = task, function_of(op, len(texts))
        rows, cols = str(nest.space.rows), str(nest.space.cols)
        arguments = ", ".join([*arguments_of(stages, nest, names), rows, cols, "num_threads"])
        steps.append(f"  - {{call: {function}, args: [{arguments}]}}")
        is_tiled = turned_values(nest) or uneven_values(nest)
        writer = TileWriter if is_tiled else RowWriter
        lines = (AcrossWriter if nest.space.is_across else writer)(nest, function, names).lines()
        texts.append(renamed("\n".join(lines) + "\n", suffixes.get(nest.name, "")))
        for output in nest.outputs:
            if output.dtype in FLOATS and nest.is_inner(output.name):
                place, size = place_of(stages, names, output.name), num_bytes_of(output.dtype)
                call = f"{{call: fused_{op}_huge_pages, args: [{place}, {rows}, {cols}, {size}], "
                large.insert(0, f'  - {call}when: "huge_pages"}}')
    return [*large, *steps], bool(large)


def cpp_template(parts: Sequence[Part], op: str) -> str:
    """Return the template of C++ loops, its head included.

    Args:
        parts: the calls that it offers, the operator's own first.
        op: the operator's name.
    """
    stages = parts[0].stages
    texts: list[str] = []
    found = [_cpp_steps(part, op, texts) for part in parts]
    has_large = any(is_large for _, is_large in found)
    bits = _bits_of(stages)
    workspace = [line for part in parts for line in between_of(part.stages, part.names)]
    head = [
        "---",
        f"title: Sweeps over each row ({sum(len(n.passes) for n in stages.nests)}), in C++",
        "language: cpp",
        "requires:",
        '  - {expr: "device.kind == \'cpu\'", why: "it is C++ for the CPU"}',
        f'  - {{expr: "{bits} * width <= device.simd_bits", why: "a vector is no wider than this '
        "machine's registers\"}",
        "parameters:",
        *_cpp_parameters(parts, has_large),
        *(["workspace:", *workspace] if workspace else []),
        "steps:",
        *found[0][0],
        *further_calls(parts, [own for own, _ in found]).splitlines(),
        "optimisations:",
        f'  - {{text: "{work_of(stages)} in loops over rows: hardly anything is stored between"}}',
        '  - {text: "outputs are written past the caches", when: "stream_output"}',
        "---",
        *_cpp_includes(parts),
        *(_huge_pages_function(op) if has_large else []),
        *_cpp_constants(parts),
    ]
    return "\n".join([*head, "", "", "\n\n".join(texts)])


def _bits_of(stages: Stages) -> int:
    """Return how many bits a number in a vector has."""
    return 64 if main_of(stages).is_wide else 32


def _nests_of(parts: Sequence[Part]) -> list[Nest]:
    return [nest for part in parts for nest in part.stages.nests]


def _cpp_parameters(parts: Sequence[Part], has_large: bool) -> list[str]:
    """Return the lines of a head's parameters; `has_large`: whether pages may be huge."""
    (_, own), *second = groups_of(parts[0].stages.nests).items()
    bits = _bits_of(parts[0].stages)
    widths = [128 // bits, 256 // bits, 512 // bits]
    lines = [
        '  width: {about: "numbers in a vector", '
        f'default: {{expr: "device.simd_bits // {bits}"}}, values: {widths}}}',
        *parameters_of([*own, *_nests_of(parts[1:])]),
        '  max_threads: {about: "threads at most; 0 is as many as PyTorch uses", default: 0, '
        "values: [0]}",
        '  stream_output: {about: "write outputs past the caches, where the machine can", '
        "default: false, values: [false, true]}",
    ]
    if has_large:
        lines.append(
            '  huge_pages: {about: "ask Linux for 2 MB pages under outputs, where their '
            'memory is fresh", default: true, values: [true, false]}'
        )
    for suffix, nests in second:  # which have parameters of their own
        lines += [declared(line, nests[0], suffix) for line in parameters_of(nests)]
    if any(map(is_split, _nests_of(parts))):
        lines.append(
            '  piece: {about: "columns of a long row that one thread takes at a time", '
            "default: 65536, values: [16384, 65536, 262144]}"
        )
    return lines


def _cpp_includes(parts: Sequence[Part]) -> list[str]:
    """Return the lines by which a text has the headers that its loops need."""
    nests = _nests_of(parts)
    dtypes = {t.dtype for n in nests for t in n.arguments}
    dtypes |= {o.dtype for n in nests for o in n.outputs}
    is_wide = main_of(parts[0].stages).is_wide
    lines = [
        *(f"#include <{name}>" for name in _HEADERS),
        "",
        *([_WIDE_VECTORS] if is_wide else _VECTORS),
        '{% include "_lib/cpu_rows.hpp" %}',
    ]
    if dtypes & HALVES or any(_rounds(part.stages) for part in parts):
        lines.append('{% include "_lib/cpu_halves.hpp" %}')
    if any(nest.scans for nest in nests):
        lines.append('{% include "_lib/cpu_scans.hpp" %}')
    if any(nest.taps for nest in nests):
        lines.append('{% include "_lib/cpu_windows.hpp" %}')
    return lines


def _huge_pages_function(op: str) -> list[str]:
    """Return the lines of the function that asks for huge pages, where these are wanted."""
    return [
        "{% if huge_pages %}",
        '{% include "_lib/cpu_huge_pages.hpp" %}',
        f'extern "C" const char* fused_{op}_huge_pages(void* made, int64_t rows, '
        "int64_t cols, int64_t num_bytes) {",
        "  pages::prefer_huge(made, rows * cols * num_bytes);",
        "  return nullptr;",
        "}",
        "{% endif %}",
    ]


def _cpp_constants(parts: Sequence[Part]) -> list[str]:
    """Return the lines that give the loops their parameters."""
    _, *second = groups_of(parts[0].stages.nests)
    lines = [
        "constexpr int64_t kThreads = {{ max_threads }};",
        "constexpr int kUnroll = {{ unroll }};",
        *(f"constexpr int kUnroll{suffix} = {{{{ unroll{suffix} }}}};" for suffix in second),
    ]
    if any(map(is_split, _nests_of(parts))):
        lines.append("constexpr int64_t kSplit = {{ piece }};")
    return lines


_WIDE_VECTORS = '{% include "_lib/cpu_doubles.hpp" %}\n'
_VECTORS = [
    '{% include "_lib/cpu_simd.hpp" %}',
    "",
    '{% include "_lib/cpu_math.hpp" %}',
    "",
    "{% if stream_output %}",
    '{% include "_lib/cpu_stream.hpp" %}',
    "{% endif %}",
]
_HEADERS = ["algorithm", "cmath", "cstdint", "cstring", "type_traits", "utility", "vector"]
