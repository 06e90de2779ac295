"""Run a captured graph in float64: each operation of the vocabulary in terms of torch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from tuner.capture.graph.graph import Graph, Node, Ref

_WINDOWS = {
    f"{kind}_pool{n}d": getattr(F, f"{kind}_pool{n}d")
    for kind in ("max", "avg", "adaptive_avg")
    for n in (1, 2, 3)
}
_CONVOLUTIONS = {
    f"conv{kind}{n}d": getattr(F, f"conv{kind}{n}d")
    for kind in ("", "_transpose")
    for n in (1, 2, 3)
}
_FROM_TORCH = """neg abs exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal square sin cos tanh
sigmoid erf sign floor ceil round trunc isnan logical_not relu matmul bmm selu"""
_FROM_FUNCTIONAL = """silu mish hardsigmoid hardswish logsigmoid gelu elu leaky_relu softplus
linear"""
_FUNCTIONS = {
    **{name: getattr(torch, name) for name in _FROM_TORCH.split()},
    **{name: getattr(F, name) for name in _FROM_FUNCTIONAL.split()},
}
_TWO = """add sub mul div pow lt le gt ge eq ne logical_and logical_or maximum minimum"""
_PAIRS = _TWO.split()


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    return torch.float64 if dtype.is_floating_point else dtype


def run(
    graph: Graph, inputs: list[Any], state: dict[str, torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return outputs and new buffers; `inputs` are forward's arguments."""
    values: dict[str, torch.Tensor] = {}
    for argument, given in zip(graph.arguments, inputs, strict=True):
        if argument.is_tensor:
            values[argument.name] = wide(given)
        elif not argument.is_fixed:
            values[argument.name] = torch.tensor(given, dtype=torch.float64)
    for tensor in graph.inputs:
        assert tuple(values[tensor.name].shape) == tensor.shape
        assert values[tensor.name].dtype == dtype_of(tensor.dtype)
    for tensor in (*graph.parameters, *graph.buffers):
        values[tensor.name] = wide(state[tensor.name])
        assert tuple(values[tensor.name].shape) == tensor.shape
    for tensor in graph.constants:
        values[tensor.name] = constant(tensor.value, dtype_of(tensor.dtype))
    whole: dict[str, Any] = {}
    for node in graph.nodes:
        args = [values[arg.name] if isinstance(arg, Ref) else arg for arg in node.args]
        if node.op == "result":
            result = whole[node.args[0].name][node.attrs["index"]]
        else:
            result = computed(node, args)
        if isinstance(result, (tuple, list)):
            whole[node.name] = result
            result = result[0]
        assert tuple(result.shape) == node.shape, node
        assert result.dtype == dtype_of(node.dtype), (node, result.dtype)
        values[node.name] = result
    updates = {buffer: values[name] for buffer, name in graph.buffer_updates.items()}
    return [values[name] for name in graph.outputs], updates


def constant(value: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, list):
        return torch.stack([constant(item, dtype) for item in value])
    return torch.tensor(float(value) if isinstance(value, str) else value, dtype=dtype)


def tensor_of(value: Any, like: torch.Tensor | None = None) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=None if like is None else like.dtype)


def computed(node: Node, args: list[Any]) -> Any:
    op, attrs, dtype = node.op, node.attrs, dtype_of(node.dtype)
    if op.startswith("aten."):
        return opaque(node, args)
    if op in _PAIRS:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        assert len({t.dtype for t in tensors}) == 1, node
        whole_numbers = not tensors[0].is_floating_point()
        pair = [
            a if isinstance(a, torch.Tensor) or whole_numbers else tensor_of(a, tensors[0])
            for a in args
        ]
        pair = [torch.as_tensor(a) for a in pair]
        return getattr(torch, op)(*pair)
    if op == "gelu_tanh":
        return F.gelu(args[0], approximate="tanh")
    if op == "clamp":
        return torch.clamp(*args)
    if op == "where":
        assert args[0].dtype == torch.bool
        return torch.where(args[0], *(tensor_of(a, torch.empty(0, dtype=dtype)) for a in args[1:]))
    if op == "cast":
        return args[0].to(dtype)
    if op == "gather":
        return torch.gather(args[0], attrs["axis"], args[1])
    if op in _FUNCTIONS:
        return _FUNCTIONS[op](*args)
    if op in ("sum", "amax", "amin", "mean"):
        return getattr(torch, op)(args[0], dim=attrs["axes"], keepdim=attrs["keepdim"])
    if op == "prod":
        result = args[0]
        for axis in attrs["axes"]:
            result = result.prod(axis, keepdim=True)
        return result.reshape(node.shape)
    if op == "var":
        return torch.var(
            args[0], attrs["axes"], correction=attrs["correction"], keepdim=attrs["keepdim"]
        )
    if op in ("argmax", "argmin"):
        if len(attrs["axes"]) == args[0].ndim and args[0].ndim > 1:
            return getattr(torch, op)(args[0])
        (axis,) = attrs["axes"]
        return getattr(torch, op)(args[0], axis, keepdim=attrs["keepdim"])
    return mapped(node, args)


def mapped(node: Node, args: list[Any]) -> torch.Tensor:
    op, attrs, dtype = node.op, node.attrs, dtype_of(node.dtype)
    if op == "view":
        return args[0].reshape(node.shape)
    if op == "permute":
        return args[0].permute(attrs["axes"])
    if op == "expand":
        return args[0].expand(node.shape)
    if op == "slice":
        part = slice(attrs["start"], attrs["stop"], attrs["step"])
        return args[0][(slice(None),) * attrs["axis"] + (part,)]
    if op == "flip":
        return args[0].flip(attrs["axes"])
    if op == "cat":
        return torch.cat(args, attrs["axis"])
    if op == "pad":
        pairs = zip(reversed(attrs["low"]), reversed(attrs["high"]), strict=True)
        return F.pad(args[0], [n for pair in pairs for n in pair], value=args[1])
    if op == "full":
        return torch.full(node.shape, args[0], dtype=dtype)
    if op == "arange":
        count = math.prod(node.shape)
        return (attrs["start"] + torch.arange(count) * attrs["step"]).to(dtype)
    if op in ("cumsum", "cumprod"):
        return getattr(torch, op)(args[0], attrs["axis"])
    if op in _WINDOWS:
        given = {k: v for k, v in attrs.items() if not (k == "stride" and not v)}
        return _WINDOWS[op](args[0], **given)
    if op in _CONVOLUTIONS:
        return _CONVOLUTIONS[op](*args, **attrs)
    if op == "attention":
        mask = args[3] if len(args) > 3 else None
        return F.scaled_dot_product_attention(*args[:3], attn_mask=mask, **attrs)
    raise AssertionError(f"no such operation: {op}")


def opaque(node: Node, args: list[Any]) -> Any:
    """Call PyTorch's operator as the node describes it."""
    overload = getattr(
        getattr(torch.ops.aten, node.op.removeprefix("aten.")), node.attrs["overload"]
    )

    def unpacked(value: Any) -> Any:
        if isinstance(value, dict):
            return args[value["ref"]]
        return [unpacked(item) for item in value] if isinstance(value, list) else value

    given = {k: unpacked(v) for k, v in node.attrs.items() if k not in ("overload", "pick")}
    return overload(**{k: v for k, v in given.items() if v is not None})
