"""Products of float32 as three of float16, which tensor cores take: which calls, and their step.

The kernels are `templates/_lib/triton_products.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tuner.capture.graph import Graph
from tuner.capture.library import Call

__all__ = ["CHUNK", "HALVES_TEMPLATE", "INCLUDE", "has_halves", "step_of", "takes_halves"]

HALVES_TEMPLATE = "nest_fp16x3"
INCLUDE = '{% include "_lib/triton_products.py" %}\n'
CHUNK = (
    '  chunk: {about: "columns whose float16 products the tensor cores add up by themselves, '
    'which truncate", default: 512, values: [512, 1024]}\n'
)
FEWEST = 128  # rows and columns, below which splitting costs what it saves
SHORTEST = 256  # numbers in a sum


def takes_halves(graph: Graph, call: Call) -> bool:
    """Whether a call is a product of two matrices of float32 that is large enough."""
    if call.function not in ("linear", "matmul") or call.dtype != "float32":
        return False
    x, weight = (graph.value(name) for name in call.reads[:2])
    is_matrix = len(weight.shape) == 2 and len(x.shape) >= 2
    if not is_matrix or {x.dtype, weight.dtype} != {"float32"}:
        return False
    return min(math.prod(x.shape[:-1]), call.shape[-1]) >= FEWEST and x.shape[-1] >= SHORTEST


def has_halves(graph: Graph, calls: Sequence[Call]) -> bool:
    """Whether any of the calls is such a product."""
    return any(takes_halves(graph, call) for call in calls)


def step_of(graph: Graph, call: Call, named: Callable[[str], str]) -> tuple[str, str]:
    """Return the step of such a product, and the line of the workspace that it writes to.

    `named` gives a value's name in the plan.
    """
    x, weight, bias = (*(named(name) for name in call.reads), "null")[:3]
    depth = graph.value(call.reads[0]).shape[-1]
    rows, columns = math.prod(call.shape[:-1]), call.shape[-1]
    is_turned = int(call.function == "matmul")
    out = named(call.name)
    args = f"{x}, {weight}, {bias}, {out}, {rows}, {columns}, {depth}, {is_turned}, chunk"
    shape = ", ".join(map(str, call.shape))
    return f"  - {{call: product_of_halves, args: [{args}]}}", f"  {out}: {{shape: [{shape}]}}"
