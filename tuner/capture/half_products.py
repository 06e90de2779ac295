"""Products of float32 as three of float16, which tensor cores take: which calls, and their step.

Two templates make them: from PyTorch's own float16 products (`templates/_lib/triton_products.py`),
and on Hopper by one kernel of ours (`triton_wgmma.py` there).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tuner.capture.graph import Graph
from tuner.capture.library import Call

__all__ = [
    "HALVES_TEMPLATE", "PRODUCTS", "SHORTEST", "WGMMA_TEMPLATE", "Products", "given_to",
    "has_halves", "step_of", "takes_halves", "turned",
]  # fmt: skip

HALVES_TEMPLATE = "nest_fp16x3"
WGMMA_TEMPLATE = "nest_wgmma"


@dataclass(frozen=True, slots=True)
class Products:
    """How a template makes large products of float32.

    Attributes:
        title: more words for the template's.
        function: that computes one.
        tail: further arguments of the function, each after a comma.
        requires: lines of the head, what must hold.
        parameters: lines of the head, by the parameter's name.
        include: the functions' text.
        takes_epilogues: whether pointwise work behind a product can be part of its kernel.
        takes_steps: whether the products of a step of training are made so as well.
    """

    title: str
    function: str
    tail: str
    requires: str
    parameters: dict[str, str]
    include: str
    takes_epilogues: bool = False
    takes_steps: bool = False


def _parameter(name: str, about: str, rest: str) -> dict[str, str]:
    return {name: f'  {name}: {{about: "{about}", {rest}}}\n'}


_INCLUDE = '{% include "_lib/triton_products.py" %}\n'
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
}
FEWEST = 128  # rows and columns, below which splitting costs what it saves
SHORTEST = 256  # numbers in a sum
LONGEST = 2**16  # beyond, PyTorch sums in pieces, side by side and more exactly


def takes_halves(graph: Graph, call: Call, *, shortest: int = SHORTEST) -> bool:
    """Whether a call is a product of two matrices of float32 that is large enough.

    Args:
        graph: that the call is of.
        call: any.
        shortest: the fewest numbers in a sum.
    """
    if call.function not in ("linear", "matmul") or call.dtype != "float32":
        return False
    x, weight = (graph.value(name) for name in call.reads[:2])
    is_matrix = len(weight.shape) == 2 and len(x.shape) >= 2
    if not is_matrix or {x.dtype, weight.dtype} != {"float32"}:
        return False
    is_large = min(math.prod(x.shape[:-1]), call.shape[-1]) >= FEWEST
    return is_large and shortest <= x.shape[-1] <= LONGEST


def has_halves(graph: Graph, calls: Sequence[Call]) -> bool:
    """Whether any of the calls is such a product."""
    return any(takes_halves(graph, call) for call in calls)


def turned(calls: Iterable[Call]) -> dict[str, str]:
    """Return the matrices that some calls transpose, by the names of what these give."""
    return {c.name: c.reads[0] for c in calls if c.function == "permute" and c.args[1] == "[1, 0]"}


def given_to(
    graph: Graph,
    call: Call,
    named: Callable[[str], str],
    turns: Mapping[str, str],
    out: str = "",
) -> list[str]:
    """Return the arguments of such a product.

    An operand that a call transposes is read where it lies, and is turned: another step would
    have to copy it.

    Args:
        graph: that the call is of.
        call: the product.
        named: gives a value's name in the plan.
        turns: of `turned`.
        out: where it writes, if not to the call's value.
    """
    x, weight, bias = (*(named(turns.get(name, name)) for name in call.reads), "null")[:3]
    depth = graph.value(call.reads[0]).shape[-1]
    rows, columns = math.prod(call.shape[:-1]), call.shape[-1]
    x_turned = call.reads[0] in turns
    weight_turned = (call.function == "matmul") != (call.reads[1] in turns)
    numbers = (rows, columns, depth, int(x_turned), int(weight_turned))
    return [x, weight, bias, out or named(call.name), *map(str, numbers)]


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
    args = ", ".join(given_to(graph, call, named, turns))
    shape = ", ".join(map(str, call.shape))
    step = f"  - {{call: {products.function}, args: [{args}{products.tail}]}}"
    return step, f"  {named(call.name)}: {{shape: [{shape}]}}"
