"""The operations of a captured graph: one table of names, operands and meanings.

Operands are tensors of the graph or numbers. Operands of pointwise operations broadcast as in
PyTorch, and tensors among them have one dtype: where PyTorch would promote, a `cast` comes first.
`attrs` are plain data; axes count from 0. A meaning that is left empty is PyTorch's function of
that name. What is not in the table is a call of PyTorch's operator `aten.<name>`: `attrs` holds
its `overload` and its arguments by their names in PyTorch's schema, a tensor among them as
`{"ref": i}`, which is `args[i]`. A node with several results stands for its first; a node
`result` picks each other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "COMMUTING", "COMPARISONS", "MOVES", "VOCABULARY", "WINDOW", "Kind", "Operation", "kind_of",
]  # fmt: skip

Kind = Literal["pointwise", "reduction", "index", "create", "library", "scan", "opaque"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: its operands in order (`?` may be absent) and its attributes.

    `is_comparison` says that its operands need not have the dtype of its result.
    """

    name: str
    kind: Kind
    operands: str
    attrs: tuple[str, ...] = ()
    meaning: str = ""
    is_comparison: bool = False


def _pointwise(operands: str, names: str, *, is_comparison: bool = False) -> list[Operation]:
    return [
        Operation(name, "pointwise", operands, is_comparison=is_comparison)
        for name in names.split()
    ]


_CONVOLUTION = ("stride", "padding", "dilation", "groups")
WINDOW = ("kernel_size", "stride", "padding")  # of pooling: most has a dilation besides
_ROWS = [
    *_pointwise("x", "neg abs exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal square sin cos"),
    *_pointwise("x", "tanh sigmoid silu erf relu selu mish hardsigmoid hardswish logsigmoid"),
    *_pointwise("x", "sign floor ceil round trunc"),
    *_pointwise("x", "isnan logical_not", is_comparison=True),
    *_pointwise("x, y", "add sub mul div pow maximum minimum"),
    Operation("product", "pointwise", "x, y", (), "mul, rounded before anything is added"),
    *_pointwise("x, y", "lt le gt ge eq ne logical_and logical_or", is_comparison=True),
    Operation("gelu", "pointwise", "x", (), "x * (1 + erf(x / sqrt(2))) / 2"),
    Operation("gelu_tanh", "pointwise", "x", (), "gelu with the tanh approximation"),
    Operation("leaky_relu", "pointwise", "x, slope", (), "x where x > 0, else slope * x"),
    Operation("elu", "pointwise", "x, alpha", (), "x where x > 0, else alpha * expm1(x)"),
    Operation(
        "softplus",
        "pointwise",
        "x, beta, threshold",
        (),
        "x where beta * x > threshold, else log1p(exp(beta * x)) / beta",
    ),
    Operation("clamp", "pointwise", "x, low, high", (), "hardtanh and relu6 too"),
    Operation("where", "pointwise", "condition, x, y", (), "condition is bool"),
    Operation("cast", "pointwise", "x", (), "x in the dtype of the node", is_comparison=True),
    Operation("sum", "reduction", "x", ("axes", "keepdim")),
    Operation("amax", "reduction", "x", ("axes", "keepdim")),
    Operation("amin", "reduction", "x", ("axes", "keepdim")),
    Operation("prod", "reduction", "x", ("axes", "keepdim")),
    Operation("mean", "reduction", "x", ("axes", "keepdim")),
    Operation(
        "var", "reduction", "x", ("axes", "keepdim", "correction"), "divided by n - correction"
    ),
    Operation("argmax", "reduction", "x", ("axes", "keepdim"), "the first index; over one axis"),
    Operation("argmin", "reduction", "x", ("axes", "keepdim"), "the first index; over one axis"),
    Operation("view", "index", "x", (), "the same elements in row-major order, another shape"),
    Operation("permute", "index", "x", ("axes",)),
    Operation("expand", "index", "x", (), "broadcast to the node's shape"),
    Operation("slice", "index", "x", ("axis", "start", "stop", "step"), "0 <= start <= stop"),
    Operation("flip", "index", "x", ("axes",)),
    Operation("cat", "index", "x, ...", ("axis",)),
    Operation("gather", "index", "x, index", ("axis",)),
    Operation("placed", "index", "index", ("axis", "value"), "value at that index, else 0"),
    Operation("pad", "index", "x, value", ("low", "high"), "more or fewer elements, by axis"),
    Operation("full", "create", "value"),
    Operation("arange", "create", "", ("start", "step"), "start + i * step"),
    Operation("linear", "library", "x, weight, bias?", (), "x @ weight.T + bias"),
    Operation("matmul", "library", "x, y"),
    Operation("bmm", "library", "x, y"),
    *(Operation(f"conv{n}d", "library", "x, weight, bias?", _CONVOLUTION) for n in (1, 2, 3)),
    *(
        Operation(
            f"conv_transpose{n}d",
            "library",
            "x, weight, bias?",
            (*_CONVOLUTION, "output_padding"),
        )
        for n in (1, 2, 3)
    ),
    Operation(
        "attention",
        "library",
        "query, key, value, mask?",
        ("is_causal", "scale", "enable_gqa"),
        "scaled_dot_product_attention",
    ),
    *(
        Operation(f"max_pool{n}d", "library", "x", (*WINDOW, "dilation", "ceil_mode"))
        for n in (1, 2, 3)
    ),
    *(
        Operation(
            f"avg_pool{n}d",
            "library",
            "x",
            (
                *WINDOW,
                "ceil_mode",
                "count_include_pad",
                *(("divisor_override",) if n > 1 else ()),
            ),
        )
        for n in (1, 2, 3)
    ),
    *(Operation(f"adaptive_avg_pool{n}d", "library", "x", ("output_size",)) for n in (1, 2, 3)),
    Operation(
        "max_place",
        "library",
        "x, corner, first",
        (*WINDOW, "dilation"),
        "of each window's maximum, the last NaN or else the first one, its place in the plane: "
        "`corner` is that of the window's first element, `first` of the first one inside",
    ),
    Operation(
        "max_pool_grad",
        "library",
        "grad, places, own",
        (*WINDOW, "dilation"),
        "sums over the windows whose place is an element's `own`",
    ),
    Operation(
        "avg_pool_grad",
        "library",
        "grad",
        (*WINDOW, "dilation", "divisor"),
        "sums over the windows that hold an element, / divisor",
    ),
    Operation("cumsum", "scan", "x", ("axis",)),
    Operation("cumprod", "scan", "x", ("axis",)),
    Operation("result", "opaque", "x", ("index",), "a further result of the node x"),
]

VOCABULARY: dict[str, Operation] = {row.name: row for row in _ROWS}
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
# Operations whose first two operands may change places.
COMMUTING = {"add", "mul", "maximum", "minimum", "eq", "ne"}
# What elements go through as they are: no arithmetic is done.
MOVES = {"permute", "slice", "flip", "expand", "view", "cat", "pad"}


def kind_of(op: str) -> Kind:
    """Return the kind of an operation by its name; `aten.<name>` is opaque.

    Raises:
        KeyError: neither in the table nor of that form.
    """
    return "opaque" if op.startswith("aten.") else VOCABULARY[op].kind
