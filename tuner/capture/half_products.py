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
    "makers_of", "read_turned", "step_of", "takes_halves", "turned", "weights_converted",
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
        takes_batches=True,
    ),
}
PRODUCTS = _OF_MATRICES | CONVOLUTIONS
_NOT_CONVERTED = (
    '  - {expr: "product_weight == \'split\'", why: "no product here has a weight whose rows '
    'begin at multiples of 16 bytes, as the copy engine reads them"}\n'
)
TILE_COLUMNS = (128, 192, 256)
_STAGE = 64  # numbers of a sum in a stage of copies, at most
FEWEST = 128  # rows and columns, below which splitting costs what it saves
SHORTEST = 256  # numbers in a sum
SHORTEST_OF_MANY = 32  # the same where four times as many rows and columns are written
LONGEST = 2**16  # beyond, PyTorch sums in pieces, side by side and more exactly
MOST_OF_PIECES = 2**28  # numbers of all pieces' results: 1 GB


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
    if products is not None and products.convolves:
        return False
    is_batched = _is_batched(graph, call)
    if not (is_batched or _is_of_matrices(graph, call)):
        return False
    takes_all = products is None or products.takes_batches
    rows, columns, depth = _sizes_of(graph, call)
    fewest = min(rows, columns)
    # Of a short sum the result takes the time, where one kernel writes it once.
    is_written_once = products is not None and products.takes_epilogues
    if is_written_once and depth >= SHORTEST_OF_MANY and 4 * depth <= fewest:
        shortest = min(shortest, depth)
    num_pieces = -(-2 * depth // LONGEST)
    can_be_cut = not is_batched and num_pieces * math.prod(call.shape) <= MOST_OF_PIECES
    longest = depth if takes_all and can_be_cut else LONGEST
    is_taken = takes_all or not is_batched
    return is_taken and fewest >= FEWEST and shortest <= depth <= longest


def _is_of_matrices(graph: Graph, call: Call) -> bool:
    """Whether a call is the product of two matrices; rows of the first may have any shape."""
    if call.function not in ("linear", "matmul"):
        return False
    x, weight = (graph.value(name).shape for name in call.reads[:2])
    is_one = len(weight) >= 2 and math.prod(weight[:-2]) == 1
    return is_one and len(x) >= 2 and math.prod(x[:-1]) == math.prod(call.shape[:-1])


def _is_batched(graph: Graph, call: Call) -> bool:
    """Whether a call is products of several matrices, of which either side may be one for all."""
    if call.function not in ("bmm", "matmul") or len(call.shape) < 3:
        return False
    batches = [graph.value(name).shape[:-2] for name in call.reads[:2]]
    shared = [math.prod(each) == 1 for each in batches]
    return not shared[1] and all(
        each == call.shape[:-2] or is_one for each, is_one in zip(batches, shared, strict=True)
    )


def _sizes_of(graph: Graph, call: Call) -> tuple[int, int, int]:
    """Return rows, columns and terms of a product; of each batch, where there are several."""
    is_batched = _is_batched(graph, call)
    rows = call.shape[-2] if is_batched else math.prod(call.shape[:-1])
    return rows, call.shape[-1], graph.value(call.reads[0]).shape[-1]


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
    convertible = _convertible(products, graph, calls)
    if not convertible:
        requires += _NOT_CONVERTED
    # What is split in memory is read and written once more: better the smaller operand. Of a long
    # sum that takes most of the time, and a weight whose rows lie across is read twice.
    sizes = [_sizes_of(graph, call) for call, _ in convertible]
    rows, columns = (sum(each[axis] for each in sizes) for axis in (0, 1))
    is_larger = columns > rows or any(depth > LONGEST for _, _, depth in sizes)
    weight = "converted" if is_larger else "split"
    # Where the weight is converted, x's rows are a tile's columns.
    tile = next((n for n in TILE_COLUMNS if is_larger and rows <= n), TILE_COLUMNS[-1])
    return requires, parameters.replace("<weight>", weight).replace("<n>", str(tile))


def weights_converted(products: Products, graph: Graph, calls: Sequence[Call]) -> list[str]:
    """Return how weights lie that a product's own kernel can convert: in "rows", in "columns".

    Args:
        products: that make the products.
        graph: that the calls are of.
        calls: all of a forward.
    """
    return sorted({lies for _, lies in _convertible(products, graph, calls)}, reverse=True)


def _convertible(
    products: Products, graph: Graph, calls: Sequence[Call]
) -> list[tuple[Call, str]]:
    """Return the products whose weight can be converted as it is loaded, and how it lies.

    The copy engine reads rows that begin at multiples of 16 bytes.
    """
    turns = turned(calls)
    found: list[tuple[Call, str]] = []
    for call in calls:
        if not takes_halves(graph, call, products=products):
            continue
        x_turned, weight_turned = _turned_operands(graph, call, turns)
        _, columns, depth = _sizes_of(graph, call)
        is_one = _is_of_matrices(graph, call)
        is_shared = math.prod(graph.value(call.reads[1]).shape[:-2]) == 1
        if weight_turned and columns % 4 == 0 and (is_shared or depth % _STAGE == 0):
            found.append((call, "columns"))
        elif not (weight_turned or x_turned) and is_one and depth % 4 == 0 and depth <= LONGEST:
            found.append((call, "rows"))
    return found


def _turned_operands(graph: Graph, call: Call, turns: Mapping[str, str]) -> tuple[bool, bool]:
    """Return whether x and the weight of a product lie the other way in memory."""
    x, weight = (name in read_turned(graph, call, turns) for name in call.reads[:2])
    return x, (call.function != "linear") != weight


def read_turned(graph: Graph, call: Call, turns: Mapping[str, str]) -> set[str]:
    """Return what of `turned` a product turns back: matrices, or batches of these.

    Args:
        graph: that the call is of.
        call: a product that halves make.
        turns: of `turned`.
    """
    is_batched = _is_batched(graph, call)
    return {
        name
        for name in call.reads[:2]
        if name in turns and (is_batched or math.prod(graph.value(name).shape[:-2]) == 1)
    }


def turned(calls: Iterable[Call]) -> dict[str, str]:
    """Return the values of which some calls transpose the last two dimensions, by what these give.

    Args:
        calls: of a forward.
    """
    found = {}
    for call in calls:
        if call.function != "permute" or len(call.shape) < 2:
            continue
        *others, last, first = range(len(call.shape))
        if call.args[1] == str([*others, first, last]):
            found[call.name] = call.reads[0]
    return found


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
    back = read_turned(graph, call, turns) if not products.convolves else set()
    reads = [turns[name] if name in back else name for name in call.reads]
    operands = [*(*map(named, reads), "null")[:3], out or named(call.name)]
    if products.convolves:
        how = geometry_of(call)
        geometry = (*how.stride, *how.pad, *how.dilation, *call.shape[2:])
        turn = [int(how.is_transposed)] if products.of == "images" else []
        own = map(str, (*products.more, *turn, *geometry))
        return [*operands, *more, *products.parameters, *own]
    numbers = [*_sizes_of(graph, call), *map(int, _turned_operands(graph, call, turns))]
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
