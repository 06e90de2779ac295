"""Nodes of a graph as calls of PyTorch's own operations: products, convolutions, pooling.

A call is written as a step's arguments are, with the graph's names in braces: `{x}`, `[1, 1]`.
What moves elements without computing is a call too, where no nest reads it where it lies.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import JsonValue

from tuner.capture.graph.graph import Graph, Node, Operand, Ref, Tensor
from tuner.capture.graph.lowering import plain
from tuner.capture.graph.vocabulary import MOVES, VOCABULARY
from tuner.capture.nests.index_space import AS_INT64, OVER_COLUMNS, refusal
from tuner.capture.nests.operations import OPERATIONS
from tuner.capture.nests.precision import FLOATS, WHOLE

__all__ = [
    "MATRIX_PRODUCTS", "Call", "call_of", "flops_of", "is_call", "with_results_apart",
]  # fmt: skip

MATRIX_PRODUCTS = frozenset({"linear", "matmul", "bmm", "attention"})
# The arguments that PyTorch takes, in its order: operands and attributes of the vocabulary's.
_POOL = "x kernel_size stride padding"
_FORMS = {
    "linear": "linear x weight bias",
    "matmul": "matmul x y",
    "bmm": "bmm x y",
    **{f"conv{n}d": f"conv{n}d x weight bias stride padding dilation groups" for n in (1, 2, 3)},
    **{
        f"conv_transpose{n}d": f"conv_transpose{n}d x weight bias stride padding output_padding "
        "groups dilation"
        for n in (1, 2, 3)
    },
    **{f"max_pool{n}d": f"max_pool{n}d {_POOL} dilation ceil_mode" for n in (1, 2, 3)},
    "avg_pool1d": f"avg_pool1d {_POOL} ceil_mode count_include_pad",
    **{
        f"avg_pool{n}d": f"avg_pool{n}d {_POOL} ceil_mode count_include_pad divisor_override"
        for n in (2, 3)
    },
    **{f"adaptive_avg_pool{n}d": f"adaptive_avg_pool{n}d x output_size" for n in (1, 2, 3)},
    "attention": "scaled_dot_product_attention query key value mask =0.0 is_causal scale= "
    "enable_gqa=",
    "cumsum": "cumsum x axis",
    "cumprod": "cumprod x axis",
    "permute": "permute x axes",
    "slice": "slice x axis start stop step",
    "flip": "flip x axes",
    "expand": "broadcast_to x shape",
    "view": "reshape x shape",
}
# Calls that move truths as the bytes that they are.
_OF_BYTES = {*MOVES, "cast", "aten.scatter", "aten.gather", "aten.index", "aten.index_select"}
_BYTES = {"constant_pad_nd", "reshape", "broadcast_to"}
_BYTES |= {name.removeprefix("aten.") for name in _OF_BYTES}
# What has loops and is no pointwise operation.
_OTHERS = {*OVER_COLUMNS, "gather", "placed", "cast", "tap", "permuted", "index"}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of PyTorch's operation.

    Attributes:
        name: of its result, a value of the graph.
        function: PyTorch's name for it.
        args: in its order; a value of the graph stands as `{its name}`.
        reads: the values among them, in order.
        shape: of the result, in elements.
        dtype: of the result.
        flops: of its arithmetic, two for a product and its sum.
        pick: which of several results it is, None where there is one.
        forms: shape in elements and dtype of each of `reads`.
    """

    name: str
    function: str
    args: tuple[str, ...]
    reads: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    flops: int
    pick: int | None = None
    forms: tuple[tuple[tuple[int, ...], str], ...] = ()

    @property
    def makes_truths(self) -> bool:
        """Whether PyTorch's operation gives truths, where bytes are expected."""
        return self.dtype == "bool" and self.function not in _BYTES

    def written(self, named: Callable[[str], str]) -> list[str]:
        """Return the arguments with each value as `named` has it."""
        return [re.sub(r"\{([^}]*)\}", lambda found: named(found[1]), arg) for arg in self.args]


def is_call(node: Node) -> bool:
    """Whether PyTorch's own operation takes a node's place: no loop is generated for it."""
    return node.op not in OPERATIONS and node.op not in _OTHERS


def with_results_apart(graph: Graph) -> Graph:
    """Return the graph with each further result of an operation as a call that picks it.

    Such calls of the same arguments are made once, as the steps of a plan.
    A call that nothing reads the first result of is left out as what is of no use.
    """
    nodes = []
    for node in graph.nodes:
        if node.op == "result":
            (source,) = node.refs
            made = graph.value(source)
            assert isinstance(made, Node)
            attrs = {**made.attrs, "pick": node.attrs["index"]}
            node = replace(node, op=made.op, args=made.args, attrs=attrs)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


_INSTEAD = {  # of numbers that calls do not take
    "uint": AS_INT64,
    "complex": "write it with two tensors, of real and of imaginary parts, or tune what stands "
    "before or behind",
}


_MADE_BEFORE = (
    "make it in the constructor, self.register_buffer('edges', torch.tensor([...]), "
    "persistent=False), and give the call self.edges"
)


def call_of(graph: Graph, node: Node) -> Call:
    """Return a node as a call.

    Raises:
        NotOneNest: it names the line of the user's file and the operation.
    """
    values: list[Tensor | Node] = [graph.value(name) for name in node.refs]
    everything: list[Tensor | Node] = [node, *values]
    for value in everything:
        if value.dtype not in {*FLOATS, *WHOLE, "bool"}:
            what = f"{node.op} of {value.dtype}"
            then = _INSTEAD.get(value.dtype.rstrip("0123456789"), "")
            raise refusal(
                node, what, "numbers of float16 to float64, int8 to int64, uint8 or bool", then
            )
        if isinstance(value, Tensor) and value.value is not None:
            what = f"a tensor of numbers that forward makes, in a call of {node.op}"
            raise refusal(node, what, "tensors that are given, or the module's own", _MADE_BEFORE)
    function, args = _form(node)
    if node.op not in _OF_BYTES:  # truths are bytes, which PyTorch may not take for them
        truths = [value.name for value in values if value.dtype == "bool"]
        args = tuple(_with_each(arg, truths, ".truths") for arg in args)
    for value in values:  # which are zeros in memory
        if isinstance(value, Node) and value.op == "full" and value.args[0] != 0:
            if value.dtype == "bool":
                raise refusal(node, f"{node.op} of a tensor that is True everywhere")
            number = f" + {_operand(value.args[0])}"
            args = tuple(_with_each(arg, [value.name], number) for arg in args)
    if node.op == "expand":  # which -1 leaves as it is, for any batch
        before = [None] * (len(node.shape) - len(values[0].shape)) + [*values[0].shape]
        pairs = zip(before, node.shape, strict=True)
        args = (args[0], _constant([-1 if old == new else new for old, new in pairs]))
    flops = flops_of(node, values)
    pick = node.attrs.get("pick")
    which = pick if isinstance(pick, int) else None
    forms = tuple((value.shape, value.dtype) for value in values)
    return Call(node.name, function, args, node.refs, node.shape, node.dtype, flops, which, forms)


def _with_each(arg: str, names: Sequence[str], end: str) -> str:
    for name in names:
        arg = arg.replace(f"{{{name}}}", f"{{{name}}}{end}")
    return arg


def _form(node: Node) -> tuple[str, tuple[str, ...]]:
    if node.op.startswith("aten."):
        return _opaque(node)
    if node.op == "cast":
        return "alias", (f"{_operand(node.args[0])}.{node.dtype}",)
    if node.op == "cat":
        return "cat", (f"[{', '.join(map(_operand, node.args))}]", _constant(node.attrs["axis"]))
    if node.op == "pad":
        low, high = node.attrs["low"], node.attrs["high"]
        assert isinstance(low, list) and isinstance(high, list)
        ends = [end for pair in reversed(list(zip(low, high, strict=True))) for end in pair]
        return "constant_pad_nd", (_operand(node.args[0]), _constant(ends), _operand(node.args[1]))
    if node.op == "prod":
        axes = node.attrs["axes"]
        if not isinstance(axes, list) or len(axes) != 1:
            raise refusal(node, "a product over several dimensions")
        keeps = _constant(node.attrs["keepdim"])
        return "prod", (_operand(node.args[0]), _constant(axes[0]), keeps)
    if node.op not in _FORMS:
        raise refusal(node, f"no loop is generated for {node.op} yet")
    function, *words = _FORMS[node.op].split()
    names = [name.strip(" ?") for name in VOCABULARY[node.op].operands.split(",")]
    known = {name: _operand(arg) for name, arg in zip(names, node.args, strict=False)}
    known |= {name: _constant(value) for name, value in node.attrs.items()}
    known |= {"shape": _constant(list(node.shape))}
    return function, tuple(_argument(word, known) for word in words)


def _argument(word: str, known: Mapping[str, str]) -> str:
    """Return an argument by a word of its form: `=0.0` is a number, `scale=` has to be named."""
    if word.startswith("="):
        return word[1:]
    name = word.rstrip("=")
    return f"{word if word.endswith('=') else ''}{known.get(name, 'null')}"


def _opaque(node: Node) -> tuple[str, tuple[str, ...]]:
    """Return a call of what the vocabulary does not know, as PyTorch's record has it."""

    def written(value: JsonValue) -> str:
        if isinstance(value, dict):
            return _operand(node.args[int(str(value["ref"]))])
        if isinstance(value, list):
            return f"[{', '.join(map(written, value))}]"
        return _constant(value)

    name = node.op.removeprefix("aten.")
    given = {n: value for n, value in node.attrs.items() if n not in ("overload", "pick")}
    schema = _schema_of(name, str(node.attrs["overload"])) if "overload" in node.attrs else {}
    while given and (last := schema.get([*given][-1])) and last.is_default(given[[*given][-1]]):
        given.popitem()  # PyTorch may take it by its name alone
    if any(isinstance(v, str) and n != "rounding_mode" for n, v in given.items()):
        raise refusal(node, f"no loop is generated for {node.op} yet")
    words = {n for n, form in schema.items() if form.is_word}
    return name, tuple(f"{n}={written(v)}" if n in words else written(v) for n, v in given.items())


@dataclass(frozen=True, slots=True)
class _Form:
    """An argument in PyTorch's schema: what stands for it, and whether it has to be named."""

    default: JsonValue
    has_default: bool
    is_word: bool

    def is_default(self, value: JsonValue) -> bool:
        return self.has_default and type(value) is type(self.default) and value == self.default


@functools.lru_cache(1024)
def _schema_of(name: str, overload: str) -> Mapping[str, _Form]:
    import torch

    schema = getattr(getattr(torch.ops.aten, name), overload or "default")._schema
    return {
        a.name: _Form(plain(a.default_value), a.has_default_value(), a.kwarg_only)
        for a in schema.arguments
    }


def _operand(operand: Operand) -> str:
    return f"{{{operand.name}}}" if isinstance(operand, Ref) else _constant(operand)


def _constant(value: JsonValue) -> str:
    if value is None:
        return "null"
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(value)


def flops_of(node: Node, values: Sequence[Tensor | Node]) -> int:
    """Count a product and its sum as two, for each element of what is summed."""
    count = math.prod(node.shape)
    if node.op in ("linear", "matmul", "bmm"):
        return 2 * count * values[0].shape[-1]
    if node.op == "attention":
        query, key = values[0].shape, values[1].shape
        return 2 * math.prod(query) * key[-2] + 2 * count * key[-2]
    if node.op == "aten.convolution_backward":
        return 2 * math.prod(values[0].shape) * math.prod(values[2].shape[1:])
    if node.op.startswith("conv_transpose"):
        return 2 * math.prod(values[0].shape) * math.prod(values[1].shape[1:])
    if node.op.startswith("conv"):
        return 2 * count * math.prod(values[1].shape[1:])
    if "pool" in node.op:
        return math.prod(values[0].shape)
    return 0 if node.op in MOVES else count
