"""Products of float32 as three of float16, which tensor cores take: which calls, and their step.

Two templates make products of matrices: from PyTorch's own float16 products
(`templates/_lib/triton_products.py`), and on Hopper by one kernel of ours (`triton_wgmma.py`).
Others make convolutions (`convolutions`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from tuner.capture.convolutions import CONVOLUTIONS, geometry_of, is_convolution, made_as
from tuner.capture.graph import Graph
from tuner.capture.library import Call
from tuner.capture.makers import Products, parameter

__all__ = [
    "HALVES_TEMPLATE", "PRODUCTS", "SHORTEST", "WGMMA_TEMPLATE", "given_to", "head_of",
    "makers_of", "step_of", "takes_halves", "turned",
]  # fmt: skip

HALVES_TEMPLATE = "nest_fp16x3"
WGMMA_TEMPLATE = "nest_wgmma"


_INCLUDE = '{% include "_lib/triton_products.py" %}\n'
_OF_MATRICES = {
    HALVES_TEMPLATE: Products(
        title=", products of float16",
        function="product_of_halves",
        tail=", chunk",
        requires='  - {expr: "device.capability != 90 or not device.has_nvcc", '
        'why: "a kernel of ours makes them faster and more exactly there"}\n',
        parameters=parameter(
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
        '  - {expr: "device.has_nvcc", why: "the products\' CUDA C++ needs nvcc"}\n'
        "  - {expr: \"product_weight == 'split' or product_n < 256 or product_k < 64 or "
        'product_cluster == 1", why: "sums, and a weight that is converted, fit in the registers '
        'that copies to a cluster leave"}\n',
        parameters=parameter(
            "product_weight",
            "how a product's weight becomes halves: split in memory before, or converted by the "
            "product's own kernel; out^T is then a product whose rows are the weight's",
            "default: <weight>, values: [split, converted]",
        )
        | parameter(
            "product_n",
            "columns of one tile of a product, which has 128 rows",
            "default: <n>, values: [128, 192, 256]",
        )
        | parameter(
            "product_k",
            "elements of k in one stage of a product's copies; as many stages as fit",
            "default: 64, values: [32, 64]",
        )
        | parameter(
            "product_cluster",
            "blocks that share what a product's columns are made of",
            "default: 1, values: [1, 2]",
        )
        | parameter(
            "product_raster",
            "row tiles walked before the next column tile, so that both operands stay in L2; "
            "0: all",
            "default: 8, values: [0, 4, 8, 16]",
        ),
        include=_INCLUDE + '{% include "_lib/triton_wgmma.py" %}\n',
        takes_epilogues=True,
        takes_steps=True,
    ),
}
PRODUCTS = _OF_MATRICES | CONVOLUTIONS
_NOT_CONVERTED = (
    '  - {expr: "product_weight == \'split\'", why: "no product here has operands whose rows '
    'begin at multiples of 16 bytes and run along the sums, as the copy engine reads them"}\n'
)
TILE_COLUMNS = (128, 192, 256)
FEWEST = 128  # rows and columns, below which splitting costs what it saves
SHORTEST = 256  # numbers in a sum
SHORTEST_OF_MANY = 32  # the same where four times as many rows and columns are written
LONGEST = 2**16  # beyond, PyTorch sums in pieces, side by side and more exactly


def takes_halves(
    graph: Graph, call: Call, *, products: Products | None = None, shortest: int = SHORTEST
) -> bool:
    """Whether halves can make a call: a large product of two matrices, or a convolution.

    Args:
        graph: that the call is of.
        call: any.
        products: what would make it; any of `PRODUCTS` if not given.
        shortest: the fewest numbers in a sum of a product of matrices; fewer of a large result.
    """
    if call.dtype != "float32" or {graph.value(n).dtype for n in call.reads} != {"float32"}:
        return False
    if is_convolution(call):
        kind = made_as(graph, call)
        return kind is not None and (products is None or products.of == kind)
    if call.function not in ("linear", "matmul") or (products is not None and products.convolves):
        return False
    x, weight = (graph.value(name) for name in call.reads[:2])
    if len(weight.shape) != 2 or len(x.shape) < 2:
        return False
    fewest, depth = min(math.prod(x.shape[:-1]), call.shape[-1]), x.shape[-1]
    # Of a short sum the result takes the time, where one kernel writes it once.
    is_written_once = products is not None and products.takes_epilogues
    if is_written_once and depth >= SHORTEST_OF_MANY and 4 * depth <= fewest:
        shortest = min(shortest, depth)
    return fewest >= FEWEST and shortest <= depth <= LONGEST


def makers_of(graph: Graph, calls: Sequence[Call]) -> dict[str, Products]:
    """Return of `PRODUCTS` those that make any of the calls."""
    return {
        name: products
        for name, products in PRODUCTS.items()
        if any(takes_halves(graph, call, products=products) for call in calls)
    }


def head_of(products: Products, graph: Graph, calls: Sequence[Call]) -> tuple[str, str]:
    """Return lines of a template's head: what must hold, and the parameters.

    Args:
        products: that the template makes.
        graph: that the calls are of.
        calls: all of a forward.
    """
    requires, parameters = products.requires, products.declared(calls)
    if "<weight>" not in parameters:
        return requires, parameters
    turns = turned(calls)
    found = [call for call in calls if takes_halves(graph, call, products=products)]
    convertible = [call for call in found if _has_rows(graph, call, turns)]
    if not convertible:
        requires += _NOT_CONVERTED
    # What is split in memory is read and written once more: better the smaller operand.
    rows = sum(math.prod(call.shape[:-1]) for call in convertible)
    is_larger = sum(call.shape[-1] for call in convertible) > rows
    weight = "converted" if is_larger else "split"
    # Where the weight is converted, x's rows are a tile's columns.
    columns = next((n for n in TILE_COLUMNS if is_larger and rows <= n), TILE_COLUMNS[-1])
    return requires, parameters.replace("<weight>", weight).replace("<n>", str(columns))


def _has_rows(graph: Graph, call: Call, turns: Mapping[str, str]) -> bool:
    """Whether sums run along rows of both operands, as the copy engine reads these."""
    x_turned, weight_turned = _turned_operands(call, turns)
    return not (x_turned or weight_turned) and graph.value(call.reads[0]).shape[-1] % 4 == 0


def _turned_operands(call: Call, turns: Mapping[str, str]) -> tuple[bool, bool]:
    """Return whether x and the weight of a product lie the other way in memory."""
    return call.reads[0] in turns, (call.function == "matmul") != (call.reads[1] in turns)


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
        how = geometry_of(call)
        geometry = (*how.stride, *how.pad, *how.dilation, *call.shape[2:])
        turn = [int(how.is_transposed)] if products.of == "images" else []
        told = map(str, (*products.more, *turn, *geometry))
        return [*operands, *more, *products.parameters, *told]
    depth = graph.value(call.reads[0]).shape[-1]
    rows, columns = math.prod(call.shape[:-1]), call.shape[-1]
    numbers = [rows, columns, depth, *map(int, _turned_operands(call, turns))]
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
