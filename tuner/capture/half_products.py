"""Products of float32 as three of float16, which tensor cores take: which calls, and their step.

Two templates make products of matrices: from PyTorch's own float16 products
(`templates/_lib/triton_products.py`), and on Hopper by one kernel of ours (`triton_wgmma.py`).
Three make convolutions: in Triton (`triton_convolutions.py`), as exact as float32 or as TF32, and
on Hopper those without strides by one kernel of ours (`triton_convolutions_wgmma.py`).
Convolutions of each channel by itself have few products, and a template that makes them in float32
(`triton_planes.py`).
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tuner.capture.graph import Graph
from tuner.capture.library import Call

__all__ = [
    "CONVOLUTION_TEMPLATE", "CONVOLUTION_WGMMA_TEMPLATE", "HALVES_TEMPLATE", "PLANES_TEMPLATE",
    "PRODUCTS", "ROUNDED_TEMPLATE", "SHORTEST", "WGMMA_TEMPLATE", "Products", "given_to",
    "makers_of", "step_of", "takes_halves", "turned",
]  # fmt: skip

HALVES_TEMPLATE = "nest_fp16x3"
WGMMA_TEMPLATE = "nest_wgmma"
CONVOLUTION_TEMPLATE = "nest_convolution"
ROUNDED_TEMPLATE = "nest_convolution_rounded"
PLANES_TEMPLATE = "nest_depthwise"
CONVOLUTION_WGMMA_TEMPLATE = "nest_convolution_wgmma"


@dataclass(frozen=True, slots=True)
class Products:
    """How a template makes large products of float32, or convolutions.

    Attributes:
        title: more words for the template's.
        function: that computes one.
        tail: further arguments of the function, each after a comma.
        requires: lines of the head, what must hold.
        parameters: lines of the head, by the parameter's name; words as `<channels>` there are by
            how many channels the convolutions have.
        include: the functions' text.
        takes_epilogues: whether pointwise work behind a product can be part of its kernel.
        takes_steps: whether the products of a step of training are made so as well.
        of: what it makes: products of matrices, convolutions, or those of each channel by itself.
        more: numbers that its function is told behind its parameters.
    """

    title: str
    function: str
    tail: str
    requires: str
    parameters: dict[str, str]
    include: str
    takes_epilogues: bool = False
    takes_steps: bool = False
    of: Literal["matrices", "images", "planes"] = "matrices"
    more: tuple[int, ...] = ()

    @property
    def convolves(self) -> bool:
        """Whether it makes convolutions, and no products of matrices."""
        return self.of != "matrices"

    def declared(self, calls: Iterable[Call]) -> str:
        """Return the head's lines of its parameters, where it makes these calls."""
        most = max((call.shape[1] for call in calls if len(call.shape) > 1), default=1)
        values = [value for value in _CHANNELS if value < 2 * most] or [*_CHANNELS[:1]]
        channels = min(values[-1], 128)
        text = "".join(self.parameters.values()).replace("<channels>", str(channels))
        text = text.replace("<part>", str(min(channels, 64)))
        text = text.replace("<depth>", "64" if channels == 128 else "32")
        text = text.replace("<warps>", "8" if channels == 128 else "4")
        return text.replace("<all channels>", str(values[-3:]))


def _parameter(name: str, about: str, rest: str) -> dict[str, str]:
    return {name: f'  {name}: {{about: "{about}", {rest}}}\n'}


_INCLUDE = '{% include "_lib/triton_products.py" %}\n'
_OF_IMAGES = Products(
    title=", convolutions of float16",
    function="convolution_by_halves",
    tail="",
    requires='  - {expr: "device.capability >= 80", why: "float16 products of tensor cores"}\n'
    '  - {expr: "image_pixels * image_channels <= 2048 * image_warps", '
    'why: "a block\'s sums, twice, are in registers"}\n'
    '  - {expr: "4 * image_stages * image_depth * (image_pixels + image_channels) '
    '<= 232448", why: "halves of stages lie in shared memory"}\n',
    parameters=_parameter(
        "image_pixels",
        "pixels of the result that a program makes",
        "default: 128, values: [64, 128, 256]",
    )
    | _parameter(
        "image_channels",
        "channels of the result that a program makes",
        "default: <channels>, values: <all channels>",
    )
    | _parameter(
        "image_depth",
        "numbers of a sum that tensor cores add up by themselves, which truncate",
        "default: <depth>, values: [32, 64]",
    )
    | _parameter(
        "image_warps",
        "warps of such a program",
        "default: <warps>, values: [4, 8]",
    )
    | _parameter(
        "image_stages", "parts of a sum on their way at a time", "default: 3, values: [2, 3, 4]"
    ),
    include=_INCLUDE + '{% include "_lib/triton_convolutions.py" %}\n',
    takes_epilogues=True,
    takes_steps=True,  # those of what is kept for the backward; gradients are PyTorch's
    of="images",
    more=(3,),  # products of float16
)
PRODUCTS = {
    HALVES_TEMPLATE: Products(
        title=", products of float16",
        function="product_of_halves",
        tail=", chunk",
        requires='  - {expr: "device.capability != 90 or not device.has_nvcc", '
        'why: "a kernel of ours makes them faster and more exactly there"}\n',
        parameters=_parameter(
            "chunk",
            "columns whose float16 products the tensor cores add up by themselves, which truncate",
            "default: 512, values: [512, 1024]",
        ),
        include=_INCLUDE,
    ),
    WGMMA_TEMPLATE: Products(
        title=", products of float16 in one Hopper kernel",
        function="product_by_wgmma",
        tail="",
        requires='  - {expr: "device.capability == 90", why: "wgmma is in sm_90a alone"}\n'
        '  - {expr: "device.has_nvcc", why: "the products\' CUDA C++ needs nvcc"}\n',
        parameters=_parameter(
            "product_n",
            "columns of one output tile of a product, which has 128 rows",
            "default: 256, values: [128, 192, 256]",
        )
        | _parameter(
            "product_k",
            "elements of k in one stage of a product's copies; as many stages as fit",
            "default: 64, values: [32, 64]",
        )
        | _parameter(
            "product_cluster",
            "blocks that share rows of the weight",
            "default: 1, values: [1, 2]",
        )
        | _parameter(
            "product_raster",
            "row tiles walked before the next column tile, so that both operands stay in L2; "
            "0: all",
            "default: 8, values: [0, 4, 8, 16]",
        ),
        include=_INCLUDE + '{% include "_lib/triton_wgmma.py" %}\n',
        takes_epilogues=True,
        takes_steps=True,
    ),
    CONVOLUTION_TEMPLATE: _OF_IMAGES,
    ROUNDED_TEMPLATE: replace(
        _OF_IMAGES, title=", convolutions of float16 as inexact as TF32", more=(1,)
    ),
    PLANES_TEMPLATE: Products(
        title=", convolutions of each channel",
        function="convolution_of_planes",
        tail="",
        requires="",
        parameters=_parameter(
            "plane_pixels",
            "pixels of a channel that a program makes",
            "default: 1024, values: [256, 512, 1024, 2048]",
        )
        | _parameter("plane_warps", "warps of such a program", "default: 4, values: [2, 4, 8]"),
        include="import torch\n" + '{% include "_lib/triton_planes.py" %}\n',
        takes_epilogues=True,
        takes_steps=True,
        of="planes",
    ),
    CONVOLUTION_WGMMA_TEMPLATE: Products(
        title=", convolutions of float16 in one Hopper kernel",
        function="convolution_by_wgmma",
        tail="",
        requires='  - {expr: "device.capability == 90", why: "wgmma is in sm_90a alone"}\n'
        '  - {expr: "device.has_nvcc", why: "the convolutions\' CUDA C++ needs nvcc"}\n'
        '  - {expr: "image_part * (image_groups + 1) // 2 <= '
        '480 // (image_consumers * image_blocks) - 28", '
        'why: "a warpgroup\'s sums are in registers"}\n',
        parameters=_parameter(
            "image_consumers",
            "warpgroups of a block that multiply",
            "default: 2, values: [2, 4]",
        )
        | _parameter(
            "image_groups",
            "64 pixels that one of these makes after another",
            "default: 1, values: [1, 2]",
        )
        | _parameter(
            "image_part",
            "channels of the result that a block makes at a time",
            "default: <part>, values: <all channels>",
        )
        | _parameter(
            "image_blocks",
            "blocks of a multiprocessor, of which one stores while another multiplies",
            "default: 2, values: [1, 2]",
        ),
        include=_INCLUDE + "{% with image_halves = 2 %}"
        '{% include "_lib/triton_convolutions_wgmma.py" %}{% endwith %}\n',
        takes_epilogues=True,
        takes_steps=True,
        of="images",
    ),
}
_CONVOLUTION = re.compile(r"conv(_transpose)?[123]d")
_CHANNELS = (16, 32, 64, 128, 256)
MOST_PHASES = 64
MOST_PLACES = 64  # of a channel's filter, which are written out
FEWEST = 128  # rows and columns, below which splitting costs what it saves
SHORTEST = 256  # numbers in a sum
LONGEST = 2**16  # beyond, PyTorch sums in pieces, side by side and more exactly


def takes_halves(
    graph: Graph, call: Call, *, products: Products | None = None, shortest: int = SHORTEST
) -> bool:
    """Whether halves can make a call: a large product of two matrices, or a convolution.

    Args:
        graph: that the call is of.
        call: any.
        products: what would make it; any of `PRODUCTS` if not given.
        shortest: the fewest numbers in a sum of a product of matrices.
    """
    if call.dtype != "float32" or {graph.value(n).dtype for n in call.reads} != {"float32"}:
        return False
    if _CONVOLUTION.fullmatch(call.function):
        kind = _kind_of(graph, call)
        return kind is not None and (products is None or products.of == kind)
    if call.function not in ("linear", "matmul") or (products is not None and products.convolves):
        return False
    x, weight = (graph.value(name) for name in call.reads[:2])
    if len(weight.shape) != 2 or len(x.shape) < 2:
        return False
    is_large = min(math.prod(x.shape[:-1]), call.shape[-1]) >= FEWEST
    return is_large and shortest <= x.shape[-1] <= LONGEST


@dataclass(frozen=True, slots=True)
class _Convolution:
    """What a call of a convolution says of its geometry, a number for each direction."""

    stride: list[int]
    pad: list[int]
    dilation: list[int]
    groups: int
    is_transposed: bool


def _convolution(call: Call) -> _Convolution:
    numbers = [ast.literal_eval(arg) for arg in call.args[3:]]
    if call.function.startswith("conv_transpose"):
        stride, pad, _, groups, dilation = numbers
        return _Convolution(stride, pad, dilation, groups, True)
    stride, pad, dilation, groups = numbers
    return _Convolution(stride, pad, dilation, groups, False)


def _kind_of(graph: Graph, call: Call) -> Literal["images", "planes"] | None:
    """Return which templates make a convolution, None where PyTorch does."""
    how, x = _convolution(call), graph.value(call.reads[0])
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


def makers_of(graph: Graph, calls: Sequence[Call]) -> dict[str, Products]:
    """Return of `PRODUCTS` those that make any of the calls."""
    return {
        name: products
        for name, products in PRODUCTS.items()
        if any(takes_halves(graph, call, products=products) for call in calls)
    }


def turned(calls: Iterable[Call]) -> dict[str, str]:
    """Return the matrices that some calls transpose, by the names of what these give."""
    return {c.name: c.reads[0] for c in calls if c.function == "permute" and c.args[1] == "[1, 0]"}


def given_to(
    products: Products,
    graph: Graph,
    call: Call,
    named: Callable[[str], str],
    turns: Mapping[str, str],
    out: str = "",
    more: Sequence[str] = (),
) -> list[str]:
    """Return the arguments of such a product or convolution.

    An operand that a call transposes is read where it lies, and is turned: another step would
    have to copy it.

    Args:
        products: that make it.
        graph: that the call is of.
        call: the product.
        named: gives a value's name in the plan.
        turns: of `turned`.
        out: where it writes, if not to the call's value.
        more: what its epilogue is given.
    """
    reads = [turns.get(name, name) for name in call.reads]
    operands = [*(*map(named, reads), "null")[:3], out or named(call.name)]
    if products.convolves:
        how = _convolution(call)
        geometry = (*how.stride, *how.pad, *how.dilation, *call.shape[2:])
        turn = [int(how.is_transposed)] if products.of == "images" else []
        told = map(str, (*products.more, *turn, *geometry))
        return [*operands, *more, *products.parameters, *told]
    depth = graph.value(call.reads[0]).shape[-1]
    rows, columns = math.prod(call.shape[:-1]), call.shape[-1]
    x_turned = call.reads[0] in turns
    weight_turned = (call.function == "matmul") != (call.reads[1] in turns)
    numbers = [rows, columns, depth, int(x_turned), int(weight_turned)]
    return [*operands, *map(str, numbers), *more]


def step_of(
    products: Products,
    graph: Graph,
    call: Call,
    named: Callable[[str], str],
    turns: Mapping[str, str],
) -> tuple[str, str]:
    """Return the step of such a product, and the line of the workspace that it writes to.

    The arguments are as for `given_to`.
    """
    args = ", ".join(given_to(products, graph, call, named, turns))
    shape = ", ".join(map(str, call.shape))
    step = f"  - {{call: {products.function}, args: [{args}{products.tail}]}}"
    return step, f"  {named(call.name)}: {{shape: [{shape}]}}"
