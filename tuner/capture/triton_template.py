"""The template of a module's nests in Triton: head, parameters, and the kernels of each call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tuner.capture.half_products import Products, given_to, step_of, takes_halves
from tuner.capture.indexing import is_split
from tuner.capture.library import Call
from tuner.capture.nest import Nest
from tuner.capture.own_parameters import declared, groups_of, named, suffixes_of
from tuner.capture.precision import in_float64
from tuner.capture.product_epilogues import cuda_text, epilogue_of, python_text
from tuner.capture.templates import (
    Part,
    arguments_of,
    between_of,
    call_steps,
    function_of,
    further_calls,
    layout_of,
    main_of,
    place_of,
    work_of,
)
from tuner.capture.triton_blocks import (
    Blocks,
    blocks_of,
    chosen,
    first_blocks,
    is_split_across,
    searched,
    with_sums_of,
)
from tuner.capture.triton_loops import Writer
from tuner.capture.triton_scans import ScanWriter
from tuner.capture.triton_split import AcrossWriter, SplitWriter
from tuner.capture.triton_sums import Summed, SumsWriter, with_sums

__all__ = ["triton_template"]

_TRITON_HEAD = """\
---
title: {title}, in Triton
language: triton
requires:
  - {{expr: "device.kind == 'cuda'", why: "Triton needs a GPU"}}
  - {{expr: "device.has_triton", why: "Triton is installed"}}
{requires}parameters:
{parameters}{workspace}steps:
{steps}
{further}optimisations:
  - {{text: "{work} in {kernels}: nothing else is stored"}}
deterministic: true
---
import triton
import triton.language as tl
from triton.language.extra import libdevice
"""
_REQUIRES = """\
  - {{expr: "block_rows * block_columns <= num_warps * 32 * {per_lane}", why: "what a program \
holds fits in its registers"}}
  - {{expr: "block_rows * block_columns >= num_warps * 32", why: "every lane has an element"}}
"""
_BLOCKS = """\
  block_rows: {{about: "rows of one program", default: {rows}, values: {block_rows}}}
  block_columns: {{about: "columns at a time; a row that is no longer is read once",
    default: {columns}, values: {block_columns}}}
  num_warps: {{about: "warps of a program", default: {warps},
    values: [1, 2, 4, 8, 16, 32]}}
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
_EPILOGUE = (
    '  product_epilogue: {about: "pointwise work behind a product: at the end of its kernel, or a '
    'kernel of its own", default: fused, values: [fused, apart]}\n'
)
_FUSED, _APART = (f", when: \"product_epilogue == '{how}'\"" for how in ("fused", "apart"))
_PROGRAMS = (
    '  programs: {about: "programs that sums over the batch are split between, at least one for '
    'each block of them", default: {expr: "4 * device.num_sms"}}\n'
)


def _writer(
    task: Nest | Summed, function: str, names: Mapping[str, str], own: Blocks | None
) -> Writer:
    """Return what writes a nest's kernels; `own` are blocks that a search decides."""
    if isinstance(task, Summed):
        return SumsWriter(task, function, names, with_sums_of(task.nest))
    blocks = own or chosen(task)
    if is_split(task):
        return SplitWriter(task, function, names, blocks)
    if is_split_across(task) and own is None:
        return AcrossWriter(task, function, names, blocks)
    return (ScanWriter if task.scans else Writer)(task, function, names, blocks)


def _steps(
    part: Part,
    op: str,
    texts: list[str],
    products: Products | None,
    epilogues: dict[str, str],
) -> tuple[list[str], list[str]]:
    """Add the functions of a call to `texts`; return its steps, and its workspace.

    The CUDA C++ of products with nests behind them is added to `epilogues`, by nest.
    """
    steps: list[str] = []
    product: Call | None = None  # whose epilogue the next nest may be
    stages, names = part.stages, part.names
    workspace = between_of(stages, names)
    results = {*stages.outputs, *stages.updates.values()}
    suffixes = {} if part.name else suffixes_of(stages.nests)

    def placed(name: str) -> str:
        return place_of(stages, names, name)

    for task in stages.tasks if part.is_forward else with_sums(stages):
        if isinstance(task, Call) and products and takes_halves(part.graph, task):
            step, room = step_of(products, part.graph, task, placed)
            is_first = products.takes_epilogues and epilogue_of(stages, task, results) is not None
            product = task if is_first else None
            steps.append(step[:-1] + _APART + "}" if is_first else step)
            workspace += [room] * (task.name not in results)
            continue
        if isinstance(task, Call):
            steps += call_steps(stages, task, names)
            continue
        number = len(texts)
        function = function_of(op, number)
        own = None
        if part.is_forward and isinstance(task, Nest):
            own = searched(suffixes.get(task.name, ""))
        writer = _writer(task, function, names, own)
        nest, split = writer.nest, writer.split
        arguments = arguments_of(stages, nest, names)
        arguments += [a for a in arguments_of(stages, split, names) if a not in arguments]
        if writer.pieces:
            count = len(split.reductions) * split.space.rows
            for what, form in ("partial", f"{count} * {writer.pieces}"), ("totals", f"{count}"):
                form = f'shape: ["{form}"], dtype: {nest.precision}'
                workspace.append(f"  {what}_{number}: {{{form}}}")
                arguments.append(f"{what}_{number}")
        arguments += [str(nest.space.rows), str(nest.space.cols)]
        arguments += [f'"{writer.pieces}"'] if writer.is_given_pieces else []
        text = writer.text()
        texts.append(in_float64(text) if nest.is_wide else text)
        condition = ""
        if product is not None:
            fused, condition = f"{function}_behind_product", _APART
            text, more = python_text(nest, product, fused, function)
            texts[-1] += text
            epilogues[nest.name] = cuda_text(nest, product, fused)
            given = given_to(part.graph, product, placed, placed(nest.outputs[0].name))
            given += [*arguments[-2:], *map(placed, more)]
            steps.append(f"  - {{call: {fused}, args: [{', '.join(given)}]{_FUSED}}}")
            product = None
        steps.append(f"  - {{call: {function}, args: [{', '.join(arguments)}]{condition}}}")
    return steps, workspace


def triton_template(parts: Sequence[Part], op: str, *, products: Products | None = None) -> str:
    """Return the template of Triton kernels, its head included.

    Args:
        parts: the calls that it offers, the operator's own first.
        op: the operator's name.
        products: how large products of float32 are made; by PyTorch where that is None.
    """
    stages = parts[0].stages
    texts: list[str] = []
    epilogues: dict[str, str] = {}
    found = [_steps(part, op, texts, products, epilogues) for part in parts]
    workspace = [line for _, lines in found for line in lines]
    others = [nest for part in parts if not part.is_forward for nest in part.stages.nests]
    groups = groups_of(stages.nests)
    for part in [part for part in parts[1:] if part.is_forward and groups]:
        groups[""] += part.stages.nests
    own = [
        _own(nests, suffix, _APART * all(nest.name in epilogues for nest in nests))
        for suffix, nests in groups.items()
    ]
    is_one = len(stages.nests) == 1 and not is_split(stages.nests[0])
    more = _PROGRAMS if any(map(is_split_across, others)) else ""
    more += "".join(products.parameters.values()) if products else ""
    more += _EPILOGUE if epilogues else ""
    more += next(filter(None, (layout_of(part.stages) for part in parts)), "")
    head = _TRITON_HEAD.format(
        title=f"Blocks of rows ({sum(len(n.passes) for n in stages.nests)} passes)"
        + (products.title if products else ""),
        steps="\n".join(found[0][0]),
        further=further_calls(parts, [steps for steps, _ in found]),
        work=work_of(stages),
        kernels="one kernel" if is_one else "a few kernels",
        requires=(products.requires if products else "")
        + "".join(requires for requires, _ in own),
        parameters="".join(parameters for _, parameters in own) + more,
        workspace="\n".join(["workspace:", *workspace, ""]) if workspace else "",
    )
    divided = _DIVIDED if stages.nests and main_of(stages).is_wide else ""
    if products and products.takes_epilogues:
        made = "\n".join(["", *epilogues.values()])
        chosen_text = f'{{% if product_epilogue == "fused" %}}{made}{{% endif %}}' * bool(
            epilogues
        )
        head += f"{{% set epilogues %}}{chosen_text}{{% endset %}}\n"
    return head + (products.include if products else "") + divided + "".join(texts)


def _own(nests: Sequence[Nest], suffix: str, condition: str) -> tuple[str, str]:
    """Return what must hold of the parameters that nests share, the largest first, and these.

    `condition` is when there are such parameters.
    """
    first = nests[0]
    num_whole = sum(first.is_dense(t.name) for t in first.arguments) + 2  # values of a lane
    requires = _REQUIRES.format(per_lane=max(16, 256 // num_whole))
    requires += _OF_SCANS if any(nest.scans for nest in nests) else ""
    rows, columns, warps = first_blocks(first)
    blocks = _BLOCKS.format(rows=rows, columns=columns, warps=warps, **blocks_of(first))
    blocks += _STAGES if any(nest.reductions or nest.scans for nest in nests) else ""
    blocks += _SPLIT if any(map(is_split, nests)) else ""
    if condition:
        blocks = re.sub(r"\}\n(?=  \w|\Z)", f"{condition}}}\n", blocks)
    return named(requires, suffix), declared(blocks, first, suffix)
