"""Products of float32 as three of float16, which tensor cores take: which calls, and their step.

Two templates make products of matrices: from PyTorch's own float16 products
(`templates/_lib/triton_products.py`), and on Hopper by one kernel of ours (`triton_wgmma.py`).
Others make convolutions (`convolutions`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tuner.capture.graph.graph import Graph
from tuner.capture.tasks.convolutions import CONVOLUTIONS, geometry_of, is_convolution, made_as
from tuner.capture.tasks.library import Call
from tuner.capture.tasks.makers import INCLUDE_PRODUCTS, Products, parameter

__all__ = ["HALVES_TEMPLATE", "PRODUCTS", "SHORTEST", "WGMMA_TEMPLATE", "Halves", "makers_of"]

HALVES_TEMPLATE = "nest_fp16x3"
WGMMA_TEMPLATE = "nest_wgmma"


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
        include=INCLUDE_PRODUCTS,
    ),
    WGMMA_TEMPLATE: Products(
        title=", products of float16 in one Hopper kernel",
        function="product_by_wgmma",
        behind="product_and_more_by_wgmma",
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
        include=INCLUDE_PRODUCTS + '{% include "_lib/triton_wgmma.py" %}\n',
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


def _takes(products: Products, graph: Graph, call: Call, shortest: int = SHORTEST) -> bool:
    """Whether halves can make a call so: a large product of two matrices, or a convolution.

    Sums have `shortest` numbers at least; fewer of a large result.
    """
    if call.dtype != "float32" or {dtype for _, dtype in call.forms} != {"float32"}:
        return False
    if is_convolution(call):
        kind = made_as(graph, call)
        return kind is not None and products.of == kind
    if products.convolves:
        return False
    is_batched = _is_batched(call)
    if not (is_batched or _is_of_matrices(call)):
        return False
    rows, columns, depth = _sizes_of(call)
    fewest = min(rows, columns)
    # Of a short sum the result takes the time, where one kernel writes it once.
    if products.takes_epilogues and depth >= SHORTEST_OF_MANY and 4 * depth <= fewest:
        shortest = min(shortest, depth)
    num_pieces = -(-2 * depth // LONGEST)
    can_be_cut = not is_batched and num_pieces * math.prod(call.shape) <= MOST_OF_PIECES
    longest = depth if products.takes_batches and can_be_cut else LONGEST
    is_taken = products.takes_batches or not is_batched
    return is_taken and fewest >= FEWEST and shortest <= depth <= longest


def _is_of_matrices(call: Call) -> bool:
    """Whether a call is the product of two matrices; rows of the first may have any shape."""
    if call.function not in ("linear", "matmul"):
        return False
    x, weight = (shape for shape, _ in call.forms[:2])
    is_one = len(weight) >= 2 and math.prod(weight[:-2]) == 1
    return is_one and len(x) >= 2 and math.prod(x[:-1]) == math.prod(call.shape[:-1])


def _is_batched(call: Call) -> bool:
    """Whether a call is products of several matrices, of which either side may be one for all."""
    if call.function not in ("bmm", "matmul") or len(call.shape) < 3:
        return False
    batches = [shape[:-2] for shape, _ in call.forms[:2]]
    shared = [math.prod(each) == 1 for each in batches]
    return not shared[1] and all(
        each == call.shape[:-2] or is_one for each, is_one in zip(batches, shared, strict=True)
    )


def _sizes_of(call: Call) -> tuple[int, int, int]:
    """Return rows, columns and terms of a product; of each batch, where there are several."""
    is_batched = _is_batched(call)
    rows = call.shape[-2] if is_batched else math.prod(call.shape[:-1])
    return rows, call.shape[-1], call.forms[0][0][-1]


def makers_of(graph: Graph, calls: Sequence[Call]) -> dict[str, Products]:
    """Return of `PRODUCTS` those that make any of the calls."""
    return {
        name: products
        for name, products in PRODUCTS.items()
        if any(_takes(products, graph, call) for call in calls)
    }


@dataclass(frozen=True)
class Halves:
    """The products and convolutions of a forward, made by halves.

    Attributes:
        products: that make them.
        graph: that the calls are of.
        calls: all of a forward.
    """

    products: Products
    graph: Graph
    calls: Sequence[Call]

    def made(self, shortest: int = SHORTEST) -> set[str]:
        """Return which calls are made so, where a matrix product's sums are as long at least."""
        return {c.name for c in self.calls if _takes(self.products, self.graph, c, shortest)}

    def head(self) -> tuple[str, str]:
        """Return lines of a template's head: what must hold, and the parameters."""
        requires, parameters = self.products.requires, self.products.declared(self.calls)
        if "<weight>" not in parameters:
            return requires, parameters
        convertible = self._convertible()
        if not convertible:
            requires += _NOT_CONVERTED
        # What is split in memory is read and written once more: better the smaller operand. Of a
        # long sum that takes most of the time, and a weight whose rows lie across is read twice.
        sizes = [_sizes_of(call) for call, _ in convertible]
        rows, columns = (sum(each[axis] for each in sizes) for axis in (0, 1))
        is_larger = columns > rows or any(depth > LONGEST for _, _, depth in sizes)
        weight = "converted" if is_larger else "split"
        # Where the weight is converted, x's rows are a tile's columns.
        tile = next((n for n in TILE_COLUMNS if is_larger and rows <= n), TILE_COLUMNS[-1])
        return requires, parameters.replace("<weight>", weight).replace("<n>", str(tile))

    def weights_converted(self) -> list[str]:
        """Return how weights lie that a kernel of ours can convert: in "rows", in "columns"."""
        return sorted({lies for _, lies in self._convertible()}, reverse=True)

    def _convertible(self) -> list[tuple[Call, str]]:
        """Return the products whose weight can be converted as it is loaded, and how it lies.

        The copy engine reads rows that begin at multiples of 16 bytes.
        """
        made = self.made()
        found: list[tuple[Call, str]] = []
        for call in self.calls:
            if call.name not in made:
                continue
            x_turned, weight_turned = self._turned_operands(call)
            _, columns, depth = _sizes_of(call)
            is_one = _is_of_matrices(call)
            is_shared = math.prod(call.forms[1][0][:-2]) == 1
            if weight_turned and columns % 4 == 0 and (is_shared or depth % _STAGE == 0):
                found.append((call, "columns"))
            elif not (weight_turned or x_turned) and is_one and not depth % 4 and depth <= LONGEST:
                found.append((call, "rows"))
        return found

    def _turned_operands(self, call: Call) -> tuple[bool, bool]:
        """Return whether x and the weight of a product lie the other way in memory."""
        x, weight = (name in self.read_turned(call) for name in call.reads[:2])
        return x, (call.function != "linear") != weight

    def read_turned(self, call: Call) -> set[str]:
        """Return what of `turned` a product turns back: matrices, or batches of these."""
        is_batched = _is_batched(call)
        return {
            name
            for name, (shape, _) in zip(call.reads[:2], call.forms[:2], strict=True)
            if name in self.turned and (is_batched or math.prod(shape[:-2]) == 1)
        }

    @cached_property
    def turned(self) -> dict[str, str]:
        """The values of which some calls transpose the last two dimensions, by what these give."""
        found = {}
        for call in self.calls:
            if call.function != "permute" or len(call.shape) < 2:
                continue
            *others, last, first = range(len(call.shape))
            if call.args[1] == str([*others, first, last]):
                found[call.name] = call.reads[0]
        return found

    def arguments(
        self, call: Call, named: Callable[[str], str], out: str = "", more: Sequence[str] = ()
    ) -> list[str]:
        """Return the arguments of such a product or convolution.

        An operand that a call transposes is read where it lies, and is turned: another step would
        have to copy it.

        Args:
            call: the product.
            named: gives a value's name in the plan.
            out: where it writes, if not to the call's value.
            more: what its epilogue is given.
        """
        products = self.products
        back = self.read_turned(call) if not products.convolves else set()
        reads = [self.turned[name] if name in back else name for name in call.reads]
        operands = [*(*map(named, reads), "null")[:3], out or named(call.name)]
        if products.convolves:
            how = geometry_of(call)
            geometry = (*how.stride, *how.pad, *how.dilation, *call.shape[2:])
            turn = [int(how.is_transposed)] if products.of == "images" else []
            own = map(str, (*products.more, *turn, *geometry))
            return [*operands, *more, *products.parameters, *own]
        numbers = [*_sizes_of(call), *map(int, self._turned_operands(call))]
        return [*operands, *map(str, numbers), *more]

    def step(self, call: Call, named: Callable[[str], str]) -> tuple[str, str]:
        """Return the step of such a product, and the line of the workspace that it writes to."""
        args = ", ".join(self.arguments(call, named))
        shape = ", ".join(map(str, call.shape))
        step = f"  - {{call: {self.products.function}, args: [{args}{self.products.tail}]}}"
        return step, f"  {named(call.name)}: {{shape: [{shape}]}}"
