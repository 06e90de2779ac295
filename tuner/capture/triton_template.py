"""The template of a module's nests in Triton: head, parameters, and the kernels of each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.capture.half_products import CHUNK, INCLUDE, step_of, takes_halves
from tuner.capture.indexing import is_split, is_split_by_blocks
from tuner.capture.library import Call
from tuner.capture.nest import Nest
from tuner.capture.own_parameters import declared, groups_of, named, suffixes_of
from tuner.capture.precision import in_float64
from tuner.capture.templates import (
    Part,
    arguments_of,
    between_of,
    call_step,
    function_of,
    further_calls,
    main_of,
    place_of,
    work_of,
)
from tuner.capture.triton_blocks import (
    Blocks,
    chosen,
    is_split_across,
    searched,
    with_sums_of,
)
from tuner.capture.triton_loops import Writer
from tuner.capture.triton_parameters import block_parameters, is_tiled
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
_WARPS = (
    '  num_warps: {{about: "warps of a program", default: {warps}, '
    "values: [1, 2, 4, 8, 16, 32]}}\n"
)
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
    if is_split_across(task) and own is None:
        return AcrossWriter(task, function, names, blocks)
    if is_split(task) or is_split_by_blocks(task):
        return SplitWriter(task, function, names, blocks)
    return (ScanWriter if task.scans else Writer)(task, function, names, blocks)


def _steps(
    part: Part, op: str, texts: list[str], by_halves: bool, shared: Sequence[Nest]
) -> tuple[list[str], list[str]]:
    """Add the functions of a call to `texts`; return its steps, and its workspace.

    `shared` are the nests whose parameters have plain names.
    """
    steps: list[str] = []
    stages, names = part.stages, part.names
    workspace = between_of(stages, names)
    results = {*stages.outputs, *stages.updates.values()}
    suffixes = {} if part.name else suffixes_of(stages.nests)
    for task in stages.tasks if part.is_forward else with_sums(stages):
        if isinstance(task, Call) and by_halves and takes_halves(part.graph, task):
            step, room = step_of(part.graph, task, lambda name: place_of(stages, names, name))
            steps.append(step)
            workspace += [room] * (task.name not in results)
            continue
        if isinstance(task, Call):
            steps.append(call_step(stages, task, names))
            continue
        number = len(texts)
        function = function_of(op, number)
        own = None
        if isinstance(task, Nest) and _is_searched(part, task, shared):
            own = searched(suffixes.get(task.name, ""), "tile" if is_tiled(task) else "block")
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
        steps.append(f"  - {{call: {function}, args: [{', '.join(arguments)}]}}")
    return steps, workspace


def triton_template(parts: Sequence[Part], op: str, *, by_halves: bool = False) -> str:
    """Return the template of Triton kernels, its head included.

    Args:
        parts: the calls that it offers, the operator's own first.
        op: the operator's name.
        by_halves: make large products of float32 by those of float16.
    """
    stages = parts[0].stages
    texts: list[str] = []
    groups = groups_of(stages.nests)
    shared = groups.get("", [])
    found = [_steps(part, op, texts, by_halves, shared) for part in parts]
    workspace = [line for _, lines in found for line in lines]
    others: list[Nest] = []
    for part in parts[1:]:
        searched_too = [n for n in part.stages.nests if _is_searched(part, n, shared)]
        others += [nest for nest in part.stages.nests if nest not in searched_too]
        shared += searched_too
    own = [_own(nests, suffix) for suffix, nests in groups.items()]
    is_one = len(stages.nests) == 1 and not any(map(_is_shared_out, stages.nests))
    more = _PROGRAMS if any(map(is_split_across, others)) else ""
    more += CHUNK if by_halves else ""
    head = _TRITON_HEAD.format(
        title=f"Blocks of rows ({sum(len(n.passes) for n in stages.nests)} passes)"
        + ", products of float16" * by_halves,
        steps="\n".join(found[0][0]),
        further=further_calls(parts, [steps for steps, _ in found]),
        work=work_of(stages),
        kernels="one kernel" if is_one else "a few kernels",
        requires="".join(requires for requires, _ in own),
        parameters="".join(parameters for _, parameters in own) + more,
        workspace="\n".join(["workspace:", *workspace, ""]) if workspace else "",
    )
    divided = _DIVIDED if stages.nests and main_of(stages).is_wide else ""
    return head + (INCLUDE if by_halves else "") + divided + "".join(texts)


def _is_searched(part: Part, nest: Nest, shared: Sequence[Nest]) -> bool:
    """Whether a search decides a nest's blocks: of the forward, and of the same that is kept.

    What is kept has no blocks of a kind that the forward does not have, which no search times.
    """
    is_own = not part.name or any(is_tiled(nest) is is_tiled(other) for other in shared)
    return part.is_forward and is_own


def _is_shared_out(nest: Nest) -> bool:
    """Whether several programs share rows, where a search decides between how many."""
    return is_split(nest) or is_split_by_blocks(nest)


def _own(nests: Sequence[Nest], suffix: str) -> tuple[str, str]:
    """Return what must hold of the parameters that nests share, the largest first, and these."""
    requires, parameters, warps = block_parameters(nests)
    requires += _OF_SCANS if any(nest.scans for nest in nests) else ""
    parameters += _WARPS.format(warps=warps)
    parameters += _STAGES if any(nest.reductions or nest.scans for nest in nests) else ""
    parameters += _SPLIT if any(map(_is_shared_out, nests)) else ""
    return named(requires, suffix), declared(parameters, nests[0], suffix)
