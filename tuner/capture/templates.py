"""The templates of a module's nests: heads, parameters, and the functions that the plan calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.capture.blocks import block_parameters, is_tiled, main_of
from tuner.capture.graph import Graph
from tuner.capture.indexing import is_split, is_split_across
from tuner.capture.library import MOVES, Call
from tuner.capture.loops import kept_values, loops_text
from tuner.capture.loops_across import across_text
from tuner.capture.loops_tiled import tiled_text, turned_values
from tuner.capture.nest import Nest
from tuner.capture.precision import FLOATS, HALVES, in_float64, num_bytes_of
from tuner.capture.stages import Stages
from tuner.capture.triton_loops import Writer
from tuner.capture.triton_scans import ScanWriter
from tuner.capture.triton_split import SplitWriter

__all__ = ["Part", "cpp_template", "function_of", "triton_template"]

_TRITON_HEAD = """\
---
title: {title}, in Triton
language: triton
requires:
  - {{expr: "device.kind == 'cuda'", why: "Triton needs a GPU"}}
  - {{expr: "device.has_triton", why: "Triton is installed"}}
{fits}{of_scans}parameters:
{blocks}  num_warps: {{about: "warps of a program", default: {default_warps}, \
values: [1, 2, 4, 8, 16, 32]}}
{more}{workspace}steps:
{steps}
optimisations:
  - {{text: "{work} in {kernels}: nothing else is stored"}}
deterministic: true
---
import triton
import triton.language as tl
from triton.language.extra import libdevice
"""
# As the correctly rounded division of float32 is called.
_DIVIDED = """

@triton.jit
def divided(one, other):
    return one / other
"""
# The lanes of a program share 65536 registers, and one has 255 at most. Compiled for sm_90, a scan
# takes some 35, and 5 for each element of a lane: value and sum, of 64 bits each, and a half more.
_OF_SCANS = (
    '  - {expr: "5 * block_rows * block_columns <= num_warps * 32 * '
    '(min(255, 2048 // num_warps) - 35)", '
    'why: "a scan holds its block in float64, in registers"}\n'
)
_STAGES = '  stages: {about: "blocks on their way at a time", default: 2, values: [1, 2, 3, 4]}\n'
_SPLIT = (
    '  split: {about: "blocks of a long row that one program takes", default: 8, '
    "values: [1, 2, 4, 8, 16, 32, 64]}\n"
)


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


def function_of(op: str, number: int) -> str:
    """Return the name of the function that computes a nest; they are counted from 0."""
    return f"fused_{op}_rows" + (f"_{number}" if number else "")


def _is_stored_last(stages: Stages, name: str) -> bool:
    """Whether a nest writes a value channels last; where a call makes it, PyTorch knows."""
    return name in stages.images and name in stages.between


def _place(stages: Stages, names: Mapping[str, str], name: str) -> str:
    """Return what the plan calls a value: an argument, a result, or what lies between."""
    results = {*stages.outputs, *stages.updates.values()}
    if name in results:
        return f"{names[name]}_out"
    return f"{names[name]}_between" if name in stages.between else names[name]


def _arguments(stages: Stages, nest: Nest, names: Mapping[str, str]) -> list[str]:
    found = [_place(stages, names, t.name) for t in nest.arguments]
    return found + [_place(stages, names, o.name) for o in nest.outputs]


def _between(stages: Stages, names: Mapping[str, str]) -> list[str]:
    """Return what lies between tasks: of float32 unless told; calls make theirs themselves."""
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
        more = "" if dtype == "float32" else f", dtype: {dtype}"
        lines.append(f"  {place}: {{shape: [{', '.join(map(str, shape or (1,)))}]{more}}}")
    return lines


def _call_step(stages: Stages, call: Call, names: Mapping[str, str]) -> str:
    """Return a call of PyTorch's own operation as a step of the plan."""
    is_last = call.name in stages.images

    def operand(name: str) -> str:
        place = _place(stages, names, name)
        if _is_stored_last(stages, name):
            return f"{place}.channels_first"
        # The image and its filters; those of a convolution in 2D or 3D lie like it.
        return f"{place}.channels_last" if is_last and name in call.reads[:2] else place

    args, gives = json.dumps(call.written(operand)), _place(stages, names, call.name)
    pick = "" if call.pick is None else f", pick: {call.pick}"
    layout = ", layout: channels_last" if is_last else ""
    return f"  - {{aten: {call.function}, args: {args}, gives: {gives}{pick}{layout}}}"


def _work(stages: Stages) -> str:
    num = len([call for call in stages.calls if call.function not in MOVES])
    if not num:
        return "all of the forward"
    return f"all but {num} of PyTorch's own operations"


def _rounds(stages: Stages) -> bool:
    """Whether a cast to fewer bits is computed; beside float64 those are to float32."""
    nests = [nest for nest in stages.nests if not nest.is_wide]
    parts = [(n.before, *((*p.statements, *p.after) for p in n.passes)) for n in nests]
    return any(s.op.startswith("as_") for part in parts for some in part for s in some)


def triton_template(part: Part, op: str) -> str:
    """Return the template of Triton kernels, its head included.

    Args:
        part: the operator's own call.
        op: the operator's name.
    """
    stages, names = part.stages, part.names
    steps, workspace = [], _between(stages, names)
    texts: list[str] = []
    for task in stages.tasks:
        if isinstance(task, Call):
            steps.append(_call_step(stages, task, names))
            continue
        nest, number = task, len(texts)
        function = function_of(op, number)
        arguments = _arguments(stages, nest, names)
        rows, cols = str(nest.space.rows), str(nest.space.cols)
        kind = "tile" if is_tiled(nest) else "block"
        has_pieces = is_split(nest) or is_split_across(nest)
        if has_pieces:
            size = f"{kind}_columns * split"
            size = size if nest.space.is_across else f"{kind}_rows * {size}"
            pieces = f"{rows} * cdiv({cols}, {size})"
            count, dtype = len(nest.reductions), nest.precision
            for what, size in (("partial", pieces), ("totals", rows)):
                form = f'shape: ["{count} * {size}"], dtype: {dtype}'
                workspace.append(f"  {what}_{number}: {{{form}}}")
            arguments += [f"partial_{number}", f"totals_{number}"]
        writer = SplitWriter if has_pieces else ScanWriter if nest.scans else Writer
        text = writer(nest, function, names, (f"{kind}_rows", f"{kind}_columns")).text()
        texts.append(in_float64(text) if nest.is_wide else text)
        steps.append(f"  - {{call: {function}, args: [{', '.join([*arguments, rows, cols])}]}}")
    has_loops = any(nest.reductions or nest.scans for nest in stages.nests)
    splits = any(is_split(nest) or is_split_across(nest) for nest in stages.nests)
    fits, blocks, warps = block_parameters(stages.nests)
    head = _TRITON_HEAD.format(
        title=f"Blocks of rows ({sum(len(n.passes) for n in stages.nests)} passes)",
        steps="\n".join(steps),
        work=_work(stages),
        kernels="one kernel" if len(texts) == 1 and not splits else "a few kernels",
        fits=fits,
        blocks=blocks,
        of_scans=_OF_SCANS if any(nest.scans for nest in stages.nests) else "",
        default_warps=warps,
        more=(_STAGES if has_loops else "") + (_SPLIT if splits else ""),
        workspace="\n".join(["workspace:", *workspace, ""]) if workspace else "",
    )
    return head + (_DIVIDED if main_of(stages.nests).is_wide else "") + "".join(texts)


def _cpp_steps(part: Part, op: str, texts: list[str]) -> tuple[list[str], bool]:
    """Add the functions of a call to `texts`; return its steps, and whether pages may be huge."""
    steps: list[str] = []
    large: list[str] = []
    stages, names = part.stages, part.names
    for task in stages.tasks:
        if isinstance(task, Call):
            steps.append(_call_step(stages, task, names))
            continue
        nest, function = task, function_of(op, len(texts))
        rows, cols = str(nest.space.rows), str(nest.space.cols)
        arguments = ", ".join([*_arguments(stages, nest, names), rows, cols, "num_threads"])
        steps.append(f"  - {{call: {function}, args: [{arguments}]}}")
        write = tiled_text if turned_values(nest) else loops_text
        write = across_text if nest.space.is_across else write
        texts.append(write(nest, function, names))
        for output in nest.outputs:
            if output.dtype in FLOATS and nest.is_inner(output.name):
                place, size = _place(stages, names, output.name), num_bytes_of(output.dtype)
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
    nests = [nest for part in parts for nest in part.stages.nests]
    kept = [value for nest in nests for value in kept_values(nest)]
    splits = any(is_split(nest) for nest in nests)
    texts: list[str] = []
    found = [_cpp_steps(part, op, texts) for part in parts]
    steps, large = found[0][0], any(is_large for _, is_large in found)
    is_wide = main_of(stages.nests).is_wide
    bits = 64 if is_wide else 32
    widths = [128 // bits, 256 // bits, 512 // bits]
    dtypes = {t.dtype for n in nests for t in n.arguments}
    dtypes |= {o.dtype for n in nests for o in n.outputs}
    parameters = [
        '  width: {about: "numbers in a vector", '
        f'default: {{expr: "device.simd_bits // {bits}"}}, values: {widths}}}',
        '  unroll: {about: "vectors at a time", default: 2, values: [1, 2, 4]}',
        '  max_threads: {about: "threads at most; 0 is as many as PyTorch uses", default: 0, '
        "values: [0]}",
        '  stream_output: {about: "write outputs past the caches, where the machine can", '
        "default: false, values: [false, true]}",
    ]
    if large:
        parameters.append(
            '  huge_pages: {about: "ask Linux for 2 MB pages under outputs, which are fresh at '
            'every call", default: true, values: [true, false]}'
        )
    if kept:
        parameters.append(
            '  keep: {about: "keep what is costly from one sweep over a row to the next", '
            "default: true, values: [true, false]}"
        )
    if splits:
        parameters.append(
            '  piece: {about: "columns of a long row that one thread takes at a time", '
            "default: 65536, values: [16384, 65536, 262144]}"
        )
    workspace = [line for part in parts for line in _between(part.stages, part.names)]
    further: list[str] = ["also:"] if len(parts) > 1 else []
    for part, (own, _) in zip(parts[1:], found[1:], strict=True):
        further += [f"  {part.name}:", "    steps:", *(f"    {step}" for step in own)]
    head = [
        "---",
        f"title: Sweeps over each row ({sum(len(n.passes) for n in stages.nests)}), in C++",
        "language: cpp",
        "requires:",
        '  - {expr: "device.kind == \'cpu\'", why: "it is C++ for the CPU"}',
        f'  - {{expr: "{bits} * width <= device.simd_bits", why: "a vector is no wider than this '
        "machine's registers\"}",
        "parameters:",
        *parameters,
        *(["workspace:", *workspace] if workspace else []),
        "steps:",
        *steps,
        *further,
        "optimisations:",
        f'  - {{text: "{_work(stages)} in loops over rows: hardly anything is stored between"}}',
        '  - {text: "outputs are written past the caches", when: "stream_output"}',
        "---",
        *(f"#include <{name}>" for name in _HEADERS),
        "",
        *([_WIDE_VECTORS] if is_wide else _VECTORS),
        '{% include "_lib/cpu_rows.hpp" %}',
    ]
    if dtypes & HALVES or any(_rounds(part.stages) for part in parts):
        head.append('{% include "_lib/cpu_halves.hpp" %}')
    if any(nest.scans for nest in nests):
        head.append('{% include "_lib/cpu_scans.hpp" %}')
    if any(nest.taps for nest in nests):
        head.append('{% include "_lib/cpu_windows.hpp" %}')
    if large:
        head += [
            "{% if huge_pages %}",
            '{% include "_lib/cpu_huge_pages.hpp" %}',
            f'extern "C" const char* fused_{op}_huge_pages(void* made, int64_t rows, '
            "int64_t cols, int64_t num_bytes) {",
            "  pages::prefer_huge(made, rows * cols * num_bytes);",
            "  return nullptr;",
            "}",
            "{% endif %}",
        ]
    head += [
        "constexpr int64_t kThreads = {{ max_threads }};",
        "constexpr int kUnroll = {{ unroll }};",
    ]
    if splits:
        head.append("constexpr int64_t kSplit = {{ piece }};")
    return "\n".join([*head, "", "", "\n\n".join(texts)])


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
