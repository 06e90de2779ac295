"""The template of a module's nests in Triton: head, parameters, and the kernels of each call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tuner.capture.nests.indexing import is_split, is_split_by_blocks
from tuner.capture.nests.nest import Nest
from tuner.capture.nests.own_parameters import declared, groups_of, largest_first, named
from tuner.capture.tasks.convolutions import OF_CHANNELS_LAST, is_convolution
from tuner.capture.tasks.half_products import Halves
from tuner.capture.tasks.makers import Products
from tuner.capture.writers.templates import Part, further_calls, main_of, work_of
from tuner.capture.writers.triton_blocks import is_split_across
from tuner.capture.writers.triton_parameters import block_parameters
from tuner.capture.writers.triton_steps import APART, Functions, by_halves_in, suffix_of

__all__ = ["TRITON_IMPORTS", "Further", "further_of", "triton_template"]

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


{% include "_lib/triton_launches.py" %}


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
_PROGRAMS = (
    '  programs: {about: "programs that sums over the batch are split between, at least one for '
    'each block of them", default: {expr: "4 * device.num_sms"}}\n'
)


def _of_steps(parts: Sequence[Part], products: Products | None) -> str:
    """Return what a head says of the products of a step of training, if there are any."""
    if products is None or products.convolves:
        return ""
    halves = [(part, Halves(products, part.graph, part.stages.calls)) for part in parts[1:]]
    return _OF_STEPS if any(by_halves_in(*each) for each in halves) else ""


def triton_template(parts: Sequence[Part], op: str, *, products: Products | None = None) -> str:
    """Return the template of Triton kernels, its head included.

    Args:
        parts: the calls that it offers, the operator's own first.
        op: the operator's name.
        products: how large products of float32 are made; by PyTorch where that is None.
    """
    stages = parts[0].stages
    groups = groups_of(stages.nests)
    functions = Functions(op, products, groups)
    found = [functions.of(part) for part in parts]
    epilogues = functions.epilogues
    workspace = [line for _, lines in found for line in lines]
    others: list[Nest] = []
    decided: dict[str, list[tuple[str, Nest]]] = {suffix: [] for suffix in groups}
    for part in parts:  # the forward first, whose largest nest says what is worth trying
        for nest in part.stages.nests if part.name else largest_first(stages.nests):
            suffix = suffix_of(part, nest, groups)
            if suffix is None:
                others.append(nest)
            else:
                decided[suffix].append((part.name, nest))
    whole = {place for place, behind in epilogues.items() if behind.is_whole}
    own = [
        _own([n for _, n in nests], suffix, APART * all((p, n.name) in whole for p, n in nests))
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
    return head + include + divided + "".join(functions.texts)


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
    functions = Functions(op, None, {}, num_before=1 + len(made))
    left = [part for part in parts[1:] if part.name not in made]
    own = {part.name: functions.of(part) for part in left}
    found = [own.get(part.name) or (made[part.name], []) for part in parts[1:]]
    nests = [nest for part in left for nest in part.stages.nests]
    return Further(
        further_calls(parts, [[], *(steps for steps, _ in found)]),
        _PROGRAMS if any(map(is_split_across, nests)) else "",
        [line for _, lines in found for line in lines],
        "".join(functions.texts),
    )


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
