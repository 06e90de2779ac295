"""The templates of a module's nests: heads, parameters, and the functions that the plan calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.capture.graph import Graph
from tuner.capture.indexing import is_split
from tuner.capture.library import MOVES, Call
from tuner.capture.loops import kept_values, loops_text
from tuner.capture.loops_across import across_text
from tuner.capture.nest import Nest
from tuner.capture.precision import FLOATS, HALVES, in_float64, num_bytes_of
from tuner.capture.stages import Stages
from tuner.capture.triton_blocks import (
    SEARCHED,
    blocks_of,
    chosen,
    first_blocks,
    is_split_across,
)
from tuner.capture.triton_loops import Writer
from tuner.capture.triton_scans import ScanWriter
from tuner.capture.triton_split import AcrossWriter, SplitWriter

__all__ = ["Part", "cpp_template", "function_of", "main_of", "triton_template"]

_TRITON_HEAD = """\
---
title: {title}, in Triton
language: triton
requires:
  - {{expr: "device.kind == 'cuda'", why: "Triton needs a GPU"}}
  - {{expr: "device.has_triton", why: "Triton is installed"}}
  - {{expr: "block_rows * block_columns <= num_warps * 32 * {per_lane}", why: "what a program \
holds fits in its registers"}}
  - {{expr: "block_rows * block_columns >= num_warps * 32", why: "every lane has an element"}}
{of_scans}parameters:
  block_rows: {{about: "rows of one program", default: {default_rows}, values: {block_rows}}}
  block_columns: {{about: "columns at a time; a row that is no longer is read once",
    default: {default_columns}, values: {block_columns}}}
  num_warps: {{about: "warps of a program", default: {default_warps},
    values: [1, 2, 4, 8, 16, 32]}}
{more}{workspace}steps:
{steps}
{further}optimisations:
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
_LAYOUT = (
    '  layout: {about: "how images lie in memory for convolutions: as given, or channels last, '
    'with copies before and behind", default: as_given, values: [as_given, channels_last]}\n'
)
_SPLIT = (
    '  split: {about: "blocks of a long row that one program takes", default: 8, '
    "values: [1, 2, 4, 8, 16, 32, 64]}\n"
)
_PROGRAMS = (
    '  programs: {about: "programs that sums over the batch are split between, at least one for '
    'each block of them", default: {expr: "4 * device.num_sms"}}\n'
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

    @property
    def is_forward(self) -> bool:
        """Whether it computes what a forward gives, also where more of that is kept."""
        return self.name in ("", "kept")


def function_of(op: str, number: int) -> str:
    """Return the name of the function that computes a nest; they are counted from 0."""
    return f"fused_{op}_rows" + (f"_{number}" if number else "")


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
    forms = [(n, f"{names[n]}_between", s, written[n]) for n, s in stages.between.items()]
    forms += [(c.name, names[c.name], c.shape, c.dtype) for c in stages.calls]
    for name, place, shape, dtype in forms:
        if name in results or (place == names[name] and dtype == "float32"):
            continue
        more = "" if dtype == "float32" else f", dtype: {dtype}"
        lines.append(f"  {place}: {{shape: [{', '.join(map(str, shape or (1,)))}]{more}}}")
    return lines


def main_of(stages: Stages) -> Nest:
    """Return the nest of the most elements, which blocks are chosen for."""
    return max(stages.nests, key=lambda nest: nest.space.rows * nest.space.cols)


def _call_steps(stages: Stages, call: Call, names: Mapping[str, str]) -> list[str]:
    """Return a call of PyTorch's own operation as steps of the plan, one for each layout."""

    def step(condition: str, suffix: str) -> str:
        ends = dict.fromkeys(call.reads[:2], suffix)  # the image and its filters
        args = json.dumps(call.written(lambda n: _place(stages, names, n) + ends.get(n, "")))
        gives = _place(stages, names, call.name)
        pick = "" if call.pick is None else f", pick: {call.pick}"
        return f"  - {{aten: {call.function}, args: {args}, gives: {gives}{pick}{condition}}}"

    if not call.has_layout:
        return [step("", "")]
    last = "channels_last"
    return [
        step(f', when: "layout != {last!r}"', ""),
        step(f', when: "layout == {last!r}"', f".{last}"),
    ]


def _layout(stages: Stages) -> str:
    return _LAYOUT if any(call.has_layout for call in stages.calls) else ""


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


def _triton_steps(part: Part, op: str, texts: list[str]) -> tuple[list[str], list[str]]:
    """Add the functions of a call to `texts`; return its steps, and its workspace."""
    steps: list[str] = []
    stages, names = part.stages, part.names
    workspace = _between(stages, names)
    for task in stages.tasks:
        if isinstance(task, Call):
            steps += _call_steps(stages, task, names)
            continue
        nest, number = task, len(texts)
        blocks = SEARCHED if part.is_forward else chosen(nest)
        writer = SplitWriter if is_split(nest) else ScanWriter if nest.scans else Writer
        arguments = _arguments(stages, nest, names)
        rows, cols = nest.space.rows, nest.space.cols
        more = [str(rows), str(cols)]
        pieces = ""
        if is_split(nest):
            block = "block_rows * block_columns * split"
            if not part.is_forward:
                block = f"{blocks.rows} * {blocks.columns} * {blocks.split}"
            pieces = f"cdiv({cols}, {block})"
        elif is_split_across(nest) and not part.is_forward:
            writer = AcrossWriter
            pieces = f"max(1, programs // cdiv({rows}, {blocks.rows}))"
            pieces = f"min(cdiv({cols}, {blocks.columns}), {pieces})"
            more.append(f'"{pieces}"')
        if pieces:
            count, dtype = len(nest.reductions), nest.precision
            for what, size in (("partial", f"{rows} * {pieces}"), ("totals", f"{rows}")):
                form = f'shape: ["{count} * {size}"], dtype: {dtype}'
                workspace.append(f"  {what}_{number}: {{{form}}}")
            arguments += [f"partial_{number}", f"totals_{number}"]
        function = function_of(op, number)
        text = writer(nest, function, names, blocks).text()
        texts.append(in_float64(text) if nest.is_wide else text)
        steps.append(f"  - {{call: {function}, args: [{', '.join([*arguments, *more])}]}}")
    return steps, workspace


def triton_template(parts: Sequence[Part], op: str) -> str:
    """Return the template of Triton kernels, its head included.

    Args:
        parts: the calls that it offers, the operator's own first.
        op: the operator's name.
    """
    stages = parts[0].stages
    texts: list[str] = []
    found = [_triton_steps(part, op, texts) for part in parts]
    workspace = [line for _, lines in found for line in lines]
    searched = [nest for part in parts if part.is_forward for nest in part.stages.nests]
    others = [nest for part in parts if not part.is_forward for nest in part.stages.nests]
    first = main_of(stages)
    num_whole = sum(first.is_dense(t.name) for t in first.arguments) + 2
    default_rows, default_columns, default_warps = first_blocks(first)
    is_one = len(stages.nests) == 1 and not is_split(first)
    more = _STAGES if any(nest.reductions or nest.scans for nest in searched) else ""
    more += _SPLIT if any(map(is_split, searched)) else ""
    more += _PROGRAMS if any(map(is_split_across, others)) else ""
    more += next(filter(None, (_layout(part.stages) for part in parts)), "")
    head = _TRITON_HEAD.format(
        title=f"Blocks of rows ({sum(len(n.passes) for n in stages.nests)} passes)",
        steps="\n".join(found[0][0]),
        further=_further(parts, [steps for steps, _ in found]),
        work=_work(stages),
        kernels="one kernel" if is_one else "a few kernels",
        per_lane=max(16, 256 // num_whole),
        of_scans=_OF_SCANS if any(nest.scans for nest in searched) else "",
        **blocks_of(first),
        default_rows=default_rows,
        default_columns=default_columns,
        default_warps=default_warps,
        more=more,
        workspace="\n".join(["workspace:", *workspace, ""]) if workspace else "",
    )
    return head + (_DIVIDED if first.is_wide else "") + "".join(texts)


def _further(parts: Sequence[Part], steps: Sequence[list[str]]) -> str:
    """Return what a head says of the calls beside the operator's own; all lines of a template."""
    lines = ["also:"] if len(parts) > 1 else []
    for part, own in zip(parts[1:], steps[1:], strict=True):
        lines += [f"  {part.name}:", "    steps:", *(f"    {step}" for step in own)]
    return "".join(f"{line}\n" for line in lines)


def _cpp_steps(part: Part, op: str, texts: list[str]) -> tuple[list[str], bool]:
    """Add the functions of a call to `texts`; return its steps, and whether pages may be huge."""
    steps: list[str] = []
    large: list[str] = []
    stages, names = part.stages, part.names
    for task in stages.tasks:
        if isinstance(task, Call):
            steps += _call_steps(stages, task, names)
            continue
        nest, function = task, function_of(op, len(texts))
        rows, cols = str(nest.space.rows), str(nest.space.cols)
        arguments = ", ".join([*_arguments(stages, nest, names), rows, cols, "num_threads"])
        steps.append(f"  - {{call: {function}, args: [{arguments}]}}")
        write = across_text if nest.space.is_across else loops_text
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
    is_wide = main_of(stages).is_wide
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
    parameters += _layout(stages).splitlines()
    workspace = [line for part in parts for line in _between(part.stages, part.names)]
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
        *_further(parts, [own for own, _ in found]).splitlines(),
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
