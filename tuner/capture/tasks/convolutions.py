"""Convolutions of float32 on a GPU: which calls templates of ours make, and by which.

Four make them from float16 halves, as exact as float32 or as TF32: in Triton
(`templates/_lib/triton_convolutions.py`), and on Hopper those without strides by one kernel of
ours (`triton_convolutions_wgmma.py`). Convolutions of each channel by itself have few products,
and a template that makes them in float32 (`triton_planes.py`).
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from tuner.capture.graph.graph import Graph
from tuner.capture.tasks.library import Call
from tuner.capture.tasks.makers import INCLUDE_PRODUCTS, Products, parameter

__all__ = [
    "CONVOLUTIONS", "CONVOLUTION_TEMPLATE", "CONVOLUTION_WGMMA_TEMPLATE", "OF_CHANNELS_LAST",
    "PLANES_TEMPLATE", "ROUNDED_TEMPLATE", "ROUNDED_WGMMA_TEMPLATE", "Geometry", "geometry_of",
    "is_convolution", "made_as",
]  # fmt: skip

CONVOLUTION_TEMPLATE = "nest_convolution"
CONVOLUTION_WGMMA_TEMPLATE = "nest_convolution_wgmma"
ROUNDED_WGMMA_TEMPLATE = "nest_convolution_wgmma_rounded"
ROUNDED_TEMPLATE = "nest_convolution_rounded"
PLANES_TEMPLATE = "nest_depthwise"

# What PyTorch does with this module's convolutions on this device: known once it was looked at.
OF_ROUNDED = (
    '  - {expr: "device.rounds_convolutions", '
    'why: "PyTorch does not round these convolutions, and nothing that does is as exact"}\n'
)
OF_CHANNELS_LAST = (
    '  - {expr: "device.rounds_convolutions or not device.rounds_channels_last", '
    'why: "PyTorch rounds these convolutions with channels last alone: that is less exact"}\n'
)
_OF_IMAGES = Products(
    title=", convolutions of float16",
    function="convolution_by_halves",
    tail="",
    requires='  - {expr: "device.capability >= 80", why: "float16 products of tensor cores"}\n'
    '  - {expr: "image_pixels * image_channels <= 2048 * image_warps", '
    'why: "a block\'s sums, twice, are in registers"}\n'
    '  - {expr: "4 * image_stages * image_depth * (image_pixels + image_channels) '
    '<= 232448", why: "halves of stages lie in shared memory"}\n',
    parameters=parameter(
        "image_pixels",
        "pixels of the result that a program makes",
        "default: 128, values: [64, 128, 256]",
    )
    | parameter(
        "image_channels",
        "channels of the result that a program makes",
        "default: <channels>, values: <all channels>",
    )
    | parameter(
        "image_depth",
        "numbers of a sum that tensor cores add up by themselves, which truncate",
        "default: <depth>, values: [32, 64]",
    )
    | parameter(
        "image_warps",
        "warps of such a program",
        "default: <warps>, values: [4, 8]",
    )
    | parameter(
        "image_stages", "parts of a sum on their way at a time", "default: 3, values: [2, 3, 4]"
    ),
    include=INCLUDE_PRODUCTS + '{% include "_lib/triton_convolutions.py" %}\n',
    takes_epilogues=True,
    takes_steps=True,  # those of what is kept for the backward; gradients are PyTorch's
    of="images",
    more=(3,),  # products of float16
)
# What registers hold: sums of all groups, and of a part of the filters; of one product, which
# tensor cores add up by themselves, the former alone. An instruction's also fit at the launch.
_SUMS = "image_part * (image_groups + 1) // 2 <= 480 // (image_consumers * image_blocks) - 28"
_SUMS_OF_ONE = (
    "image_part * image_groups // 2 <= 480 // (image_consumers * image_blocks) - 34 "
    "and image_part // 2 + 26 <= 512 // ((image_consumers + 1) * image_blocks)"
)
_BY_WGMMA = Products(
    title=", convolutions of float16 in one Hopper kernel",
    function="convolution_by_wgmma",
    tail="",
    requires='  - {expr: "device.capability == 90", why: "wgmma is in sm_90a alone"}\n'
    '  - {expr: "device.has_nvcc", why: "the convolutions\' CUDA C++ needs nvcc"}\n'
    f'  - {{expr: "{_SUMS}", '
    'why: "a warpgroup\'s sums are in registers"}\n',
    parameters=parameter(
        "image_consumers",
        "warpgroups of a block that multiply",
        "default: 2, values: [2, 3, 4]",
    )
    | parameter(
        "image_groups",
        "64 pixels that one of these makes after another",
        "default: 1, values: [1, 2]",
    )
    | parameter(
        "image_part",
        "channels of the result that a block makes at a time",
        "default: <part>, values: <all channels>",
    )
    | parameter(
        "image_blocks",
        "blocks of a multiprocessor, of which one stores while another multiplies",
        "default: 2, values: [1, 2]",
    ),
    include=INCLUDE_PRODUCTS + "{% with image_halves = 2 %}"
    '{% include "_lib/triton_convolutions_wgmma.py" %}{% endwith %}\n',
    takes_epilogues=True,
    takes_steps=True,
    of="images",
)
CONVOLUTIONS = {
    CONVOLUTION_TEMPLATE: _OF_IMAGES,
    ROUNDED_TEMPLATE: replace(
        _OF_IMAGES,
        title=", convolutions of float16 as inexact as TF32",
        requires=_OF_IMAGES.requires + OF_ROUNDED,
        more=(1,),
        precision="fp16",
    ),
    PLANES_TEMPLATE: Products(
        title=", convolutions of each channel",
        function="convolution_of_planes",
        tail="",
        requires="",
        parameters=parameter(
            "plane_pixels",
            "pixels of a channel that a program makes",
            "default: 1024, values: [256, 512, 1024, 2048]",
        )
        | parameter("plane_warps", "warps of such a program", "default: 4, values: [2, 4, 8]"),
        include="import torch\n" + '{% include "_lib/triton_planes.py" %}\n',
        takes_epilogues=True,
        takes_steps=True,
        of="planes",
        precision="fp32",
    ),
    CONVOLUTION_WGMMA_TEMPLATE: _BY_WGMMA,
    ROUNDED_WGMMA_TEMPLATE: replace(
        _BY_WGMMA,
        title=", convolutions of float16 as inexact as TF32 in one Hopper kernel",
        include=_BY_WGMMA.include.replace("image_halves = 2", "image_halves = 1"),
        requires=_BY_WGMMA.requires.replace(_SUMS, _SUMS_OF_ONE) + OF_ROUNDED,
        precision="fp16",
    ),
}
_CONVOLUTION = re.compile(r"conv(_transpose)?[123]d")
MOST_PHASES = 64
MOST_PLACES = 64  # of a channel's filter, which are written out


def is_convolution(call: Call) -> bool:
    """Whether it is a convolution, and no gradient of one."""
    return _CONVOLUTION.fullmatch(call.function) is not None


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a call of a convolution says of its geometry, a number for each direction."""

    stride: list[int]
    pad: list[int]
    dilation: list[int]
    groups: int
    is_transposed: bool


def geometry_of(call: Call) -> Geometry:
    """Return the geometry of a convolution."""
    numbers = [ast.literal_eval(arg) for arg in call.args[3:]]
    if call.function.startswith("conv_transpose"):
        stride, pad, _, groups, dilation = numbers
        return Geometry(stride, pad, dilation, groups, True)
    stride, pad, dilation, groups = numbers
    return Geometry(stride, pad, dilation, groups, False)


def made_as(graph: Graph, call: Call) -> Literal["images", "planes"] | None:
    """Return which templates make a convolution, None where PyTorch does."""
    if not is_convolution(call):
        return None
    how, x = geometry_of(call), graph.value(call.reads[0])
    is_image = len(call.shape) == len(x.shape) == 2 + len(how.stride)
    if not is_image or not isinstance(how.pad, list):
        return None
    if how.groups > 1:
        places = math.prod(graph.value(call.reads[1]).shape[2:])
        is_plane = how.groups == x.shape[1] and not how.is_transposed
        return "planes" if is_plane and places <= MOST_PLACES else None
    # Phases whose places of the filter lie side by side.
    is_even = all(s == 1 or d == 1 for s, d in zip(how.stride, how.dilation, strict=True))
    is_even = is_even and math.prod(how.stride) <= MOST_PHASES
    return "images" if is_even or not how.is_transposed else None
