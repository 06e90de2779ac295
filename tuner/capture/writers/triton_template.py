"""The template of a module's nests in Triton: head, parameters, and the kernels of each call."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from tuner.capture.nests.indexing import is_split, is_split_by_blocks
from tuner.capture.nests.nest import Nest
from tuner.capture.nests.own_parameters import declared, groups_of, largest_first, named
from tuner.capture.nests.precision import in_float64
from tuner.capture.tasks.convolutions import OF_CHANNELS_LAST, is_convolution
from tuner.capture.tasks.half_products import SHORTEST, Halves
from tuner.capture.tasks.library import Call
from tuner.capture.tasks.makers import Products
from tuner.capture.writers.product_epilogues import cuda_text, epilogue_of, python_text
from tuner.capture.writers.product_moments import (
    SMALLEST_PIECE,
    moments_behind,
    moments_cuda_text,
    moments_python_text,
)
from tuner.capture.writers.templates import (
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
from tuner.capture.writers.triton_blocks import (
    Blocks,
    chosen,
    is_split_across,
    searched,
    with_sums_of,
)
from tuner.capture.writers.triton_loops import Writer
from tuner.capture.writers.triton_parameters import block_parameters, is_tiled, takes_blocks_of
from tuner.capture.writers.triton_scans import ScanWriter
from tuner.capture.writers.triton_split import AcrossWriter, SplitWriter
from tuner.capture.writers.triton_sums import Summed, SumsWriter, with_sums

__all__ = ["TRITON_IMPORTS", "Further", "further_of", "triton_template"]

Groups = Mapping[str, Sequence[Nest]]  # which share parameters, by what the names of these end in

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
{of_steps}deterministic: true
---
"""
TRITON_IMPORTS = """\
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


{% include "_lib/triton_launch.py" %}


{% include "_lib/triton_replay.py" %}
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
_EPILOGUE = (
    '  product_epilogue: {{about: "work behind a product, pointwise or moments of its columns: at '
    'the end of its kernel, or a kernel of its own", default: fused, values: {values}}}\n'
)
_OF_STEPS = '  - {text: "products of gradients are made as the large ones of the forward are"}\n'
_FUSED, _APART = (f", when: \"product_epilogue == '{how}'\"" for how in ("fused", "apart"))
_PROGRAMS = (
    '  programs: {about: "programs that sums over the batch are split between, at least one for '
    'each block of them", default: {expr: "4 * device.num_sms"}}\n'
)


def _writer(
    task: Nest | Summed,
    function: str,
    names: Mapping[str, str],
    own: Blocks | None,
    smallest_given: int,
) -> Writer:
    """Return what writes a nest's kernels; `own` are blocks that a search decides.

    The first moments of some may be given instead, of pieces of `smallest_given` columns at least.
    """
    if isinstance(task, Summed):
        return SumsWriter(task, function, names, with_sums_of(task.nest))
    blocks = own or chosen(task)
    if is_split_across(task) and own is None:
        return AcrossWriter(task, function, names, blocks)
    if is_split(task) or is_split_by_blocks(task):
        return SplitWriter(task, function, names, blocks, smallest_given)
    return (ScanWriter if task.scans else Writer)(task, function, names, blocks)


def _steps(
    part: Part,
    op: str,
    texts: list[str],
    products: Products | None,
    epilogues: dict[tuple[str, str], _Behind],
    groups: Groups,
) -> tuple[list[str], list[str]]:
    """Add the functions of a call to `texts`; return its steps, and its workspace.

    What is done by products' kernels of nests behind them is added to `epilogues`, by call and
    nest; `groups` are the forward's nests that share their parameters.
    """
    steps: list[str] = []
    # The product whose epilogue the next nest may be, or that may find its first moments.
    product: Call | None = None
    has_moments = False
    stages, names = part.stages, part.names
    halves = Halves(products, part.graph, stages.calls) if products else None
    by_halves = _by_halves(part, halves) if halves else set()
    left_out = _left_out(part, halves, by_halves) if halves else set()
    workspace = between_of(stages, names)
    results = {*stages.outputs, *stages.updates.values()}

    def placed(name: str) -> str:
        return place_of(stages, names, name)

    for task in stages.tasks if part.is_forward else with_sums(stages):
        if isinstance(task, Call) and halves and task.name in by_halves:
            step, room = halves.step(task, placed)
            takes_it = halves.products.takes_epilogues and part.is_forward
            is_first = takes_it and epilogue_of(stages, task, results) is not None
            nest = None if is_first or not takes_it else _with_moments(part, halves, task, groups)
            has_moments = nest is not None
            product = task if is_first or has_moments else None
            steps.append(step[:-1] + _APART + "}" if product else step)
            workspace += [room] * (task.name not in results)
            continue
        if isinstance(task, Call) and task.name in left_out:
            continue
        if isinstance(task, Call):
            steps.append(call_step(stages, task, names))
            continue
        number = len(texts)
        function = function_of(op, number)
        own = None
        if isinstance(task, Nest) and (suffix := _suffix_of(part, task, groups)) is not None:
            own = searched(suffix, "tile" if is_tiled(task) else "block")
        is_given = product is not None and has_moments
        writer = _writer(task, function, names, own, SMALLEST_PIECE if is_given else 0)
        nest, split = writer.nest, writer.split
        arguments = arguments_of(stages, nest, names)
        arguments += [a for a in arguments_of(stages, split, names) if a not in arguments]
        if writer.pieces:
            count = len(split.reductions) * split.space.rows
            # Of terms that cancel, what a program found must not be rounded as it is stored.
            for what, form, dtype in (
                ("partial", f"{count} * {writer.pieces}", "float64"),
                ("totals", f"{count}", nest.precision),
            ):
                workspace.append(f'  {what}_{number}: {{shape: ["{form}"], dtype: {dtype}}}')
                arguments.append(f"{what}_{number}")
        arguments += [str(nest.space.rows), str(nest.space.cols)]
        arguments += [f'"{writer.pieces}"'] if writer.is_given_pieces else []
        text = writer.text()
        texts.append(in_float64(text) if nest.is_wide else text)
        condition = ""
        if product is not None:
            fused, condition = f"{function}_behind_product", _APART
            assert halves is not None
            host = halves.products.behind or halves.products.function
            if has_moments:
                found = moments_python_text(nest, product, fused, function, host, arguments)
                text, more = found
                made = _Behind(moments_cuda_text(nest, product, fused), is_whole=False)
                place, behind = placed(product.name), [*arguments, *map(placed, more)]
            else:
                text, more = python_text(nest, product, fused, function, host)
                made = _Behind(cuda_text(nest, product, fused), is_whole=True)
                place = placed(nest.outputs[0].name)
                behind = [*arguments[-2:], *map(placed, more)]
            texts[-1] += text
            epilogues[part.name, nest.name] = made
            given = halves.arguments(product, placed, place, behind)
            steps.append(f"  - {{call: {fused}, args: [{', '.join(given)}]{_FUSED}}}")
            product = None
        steps.append(f"  - {{call: {function}, args: [{', '.join(arguments)}]{condition}}}")
    return steps, workspace


def _with_moments(part: Part, halves: Halves, product: Call, groups: Groups) -> Nest | None:
    """Return the nest that takes moments of a product's columns from the product's kernel."""
    nest = None if halves.products.convolves else moments_behind(part.stages, product)
    is_across = nest is not None and is_split_across(nest)  # whose kernels take none
    if nest is None or (is_across and _suffix_of(part, nest, groups) is None):
        return None
    return nest


class _Behind(NamedTuple):
    """What a product's kernel does of the nest behind it.

    Attributes:
        text: its CUDA C++.
        is_whole: whether that is all of the nest.
    """

    text: str
    is_whole: bool


def _of_steps(parts: Sequence[Part], products: Products | None) -> str:
    """Return what a head says of the products of a step of training, if there are any."""
    if products is None or products.convolves:
        return ""
    halves = [(part, Halves(products, part.graph, part.stages.calls)) for part in parts[1:]]
    return _OF_STEPS if any(_by_halves(*each) for each in halves) else ""


def _by_halves(part: Part, halves: Halves) -> set[str]:
    """Return the products of a call that are made by halves.

    A sum of a gradient may be as long as the batch, which is not known: the function that makes
    the product decides about those.
    """
    return halves.made(shortest=SHORTEST if part.is_forward else 1)


def _left_out(part: Part, halves: Halves, by_halves: Collection[str]) -> set[str]:
    """Return the transpositions that products by halves alone read, which turn them back."""
    stages = part.stages
    read = {t.name for nest in stages.nests for t in nest.arguments}
    for call in stages.calls:
        back = halves.read_turned(call) if call.name in by_halves else set()
        read |= {*call.reads} - back
    return {*halves.turned} - read - {*stages.outputs, *stages.updates.values()}


def triton_template(parts: Sequence[Part], op: str, *, products: Products | None = None) -> str:
    """Return the template of Triton kernels, its head included.

    Args:
        parts: the calls that it offers, the operator's own first.
        op: the operator's name.
        products: how large products of float32 are made; by PyTorch where that is None.
    """
    stages = parts[0].stages
    texts: list[str] = []
    epilogues: dict[tuple[str, str], _Behind] = {}
    groups = groups_of(stages.nests)
    found = [_steps(part, op, texts, products, epilogues, groups) for part in parts]
    workspace = [line for _, lines in found for line in lines]
    others: list[Nest] = []
    decided: dict[str, list[tuple[str, Nest]]] = {suffix: [] for suffix in groups}
    for part in parts:  # the forward first, whose largest nest says what is worth trying
        for nest in part.stages.nests if part.name else largest_first(stages.nests):
            suffix = _suffix_of(part, nest, groups)
            if suffix is None:
                others.append(nest)
            else:
                decided[suffix].append((part.name, nest))
    whole = {place for place, behind in epilogues.items() if behind.is_whole}
    own = [
        _own([n for _, n in nests], suffix, _APART * all((p, n.name) in whole for p, n in nests))
        for suffix, nests in decided.items()
    ]
    is_one = len(stages.nests) == 1 and not any(map(_is_shared_out, stages.nests))
    more = _PROGRAMS if any(map(is_split_across, others)) else ""
    halves = Halves(products, parts[0].graph, stages.calls) if products else None
    requires, ours = halves.head() if halves else ("", "")
    if any(is_convolution(call) and call.name in stages.images for call in stages.calls):
        requires += OF_CHANNELS_LAST
    more += ours
    if epilogues:
        # A search times the forward alone.
        is_timed = any(not part for part, _ in epilogues)
        more += _EPILOGUE.format(values='["fused", "apart"]' if is_timed else '["fused"]')
    head = _TRITON_HEAD.format(
        title=f"Blocks of rows ({sum(len(n.passes) for n in stages.nests)} passes)"
        + (products.title if products else ""),
        steps="\n".join(found[0][0]),
        further=further_calls(parts, [steps for steps, _ in found]),
        work=work_of(stages),
        of_steps=_of_steps(parts, products),
        kernels="one kernel" if is_one else "a few kernels",
        requires=requires + "".join(lines for lines, _ in own),
        parameters="".join(parameters for _, parameters in own) + more,
        workspace="\n".join(["workspace:", *workspace, ""]) if workspace else "",
    )
    divided = _DIVIDED if stages.nests and main_of(stages).is_wide else ""
    if halves and halves.products.takes_epilogues:
        made = "\n".join(["", *(behind.text for behind in epilogues.values())])
        chosen_text = f'{{% if product_epilogue == "fused" %}}{made}{{% endif %}}' * bool(
            epilogues
        )
        head += f"{{% set epilogues %}}{chosen_text}{{% endset %}}\n"
        head += f"{{% set product_weights = {json.dumps(halves.weights_converted())} %}}\n"
    include = TRITON_IMPORTS + (products.include if products else "")
    return head + include + divided + "".join(texts)


class Further(NamedTuple):
    """Calls beside an operator's own: three times lines of a head, and the functions' text."""

    calls: str
    parameters: str
    workspace: list[str]
    text: str


def further_of(parts: Sequence[Part], op: str, made: Mapping[str, list[str]]) -> Further:
    """Return the calls of an operator but its own, the first, whose kernels no search decides.

    `made` are the steps of those that others write, of one nest each; that one is as well.
    """
    texts = ["" for _ in range(1 + len(made))]  # functions are counted
    left = [part for part in parts[1:] if part.name not in made]
    own = {part.name: _steps(part, op, texts, None, {}, {}) for part in left}
    found = [own.get(part.name) or (made[part.name], []) for part in parts[1:]]
    nests = [nest for part in left for nest in part.stages.nests]
    return Further(
        further_calls(parts, [[], *(steps for steps, _ in found)]),
        _PROGRAMS if any(map(is_split_across, nests)) else "",
        [line for _, lines in found for line in lines],
        "".join(texts),
    )


def _suffix_of(part: Part, nest: Nest, groups: Groups) -> str | None:
    """Return what the names of a nest's parameters end in; None where no search decides them.

    A search times the forward. Nests whose blocks are of one kind may share them: what is kept
    has those of the forward's nest of its name, if it can.
    """
    if not part.is_forward:
        return None
    alike = [suffix for suffix, nests in groups.items() if takes_blocks_of(nest, nests)]
    own = [s for s in alike if any(other.name == nest.name for other in groups[s])]
    return next(iter([*own, *alike]), None)


def _is_shared_out(nest: Nest) -> bool:
    """Whether several programs share rows, where a search decides between how many."""
    return is_split(nest) or is_split_by_blocks(nest)


def _own(nests: Sequence[Nest], suffix: str, condition: str) -> tuple[str, str]:
    """Return what must hold of the parameters that nests share, the largest first, and these.

    `condition` is when there are such parameters.
    """
    requires, parameters, warps = block_parameters(nests)
    requires += _OF_SCANS if any(nest.scans for nest in nests) else ""
    parameters += _WARPS.format(warps=warps)
    parameters += _STAGES if any(nest.reductions or nest.scans for nest in nests) else ""
    parameters += _SPLIT if any(map(_is_shared_out, nests)) else ""
    if condition:
        parameters = re.sub(r"\}\n(?=  \w|\Z)", f"{condition}}}\n", parameters)
    return named(requires, suffix), declared(parameters, nests[0], suffix)
