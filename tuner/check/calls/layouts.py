"""How arguments lie in memory: strides, offsets, elements or arguments that share memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.calls.crossing import Layout, Script

if TYPE_CHECKING:
    import torch

__all__ = ["fitted", "laid_out", "laid_out_where", "one_object", "opposite", "overwrite"]

EXTRA_ROWS: dict[Layout, int] = {"fewer rows": -1, "more rows": 1}


def laid_out(value: Any, layout: Layout, padding: int = 8) -> Any:
    """Return a copy of a tensor in fresh memory, with the strides or alignment of `layout`.

    `padding` is how many elements lie between two padded rows.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim == 0 or not value.numel():
        return value.clone()
    is_float = value.is_floating_point()
    beside = float("nan") if is_float else 0  # in memory that belongs to no element
    if not is_float and layout in ("expanded", "rows expanded", "overlapping", "negated"):
        return value.clone()  # would be other labels
    if layout == "transposed" and value.ndim >= 2:
        return value.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout in ("channels_last", "reversed", "rows inside") and value.ndim >= 3:
        order = _order_in_memory(layout, value.ndim)
        back = sorted(range(value.ndim), key=order.__getitem__)
        return value.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    if layout in ("transposed padded", "transposed cut"):  # as `big[:, :n].t()` is
        kind: Layout = "padded" if layout == "transposed padded" else "cut"
        if value.ndim >= 2:
            return laid_out(value.transpose(-1, -2), kind, padding).transpose(-1, -2)
    if layout == "strided":
        wide = value.new_full((*value.shape[:-1], 2 * value.shape[-1]), beside)
        wide[..., ::2] = value
        return wide[..., ::2]
    if layout == "padded" and value.ndim >= 2:
        wide = value.new_full((*value.shape[:-1], value.shape[-1] + padding), beside)
        wide[..., :-padding] = value
        return wide[..., :-padding]
    if layout == "sliced" and value.ndim >= 2:  # in the middle, as x[:, :t] is, or in the first
        sizes = [n + 3 * (i == value.ndim - 2) for i, n in enumerate(value.shape)]
        whole = value.new_full(sizes, beside)
        return whole.narrow(-2, 0, value.shape[-2]).copy_(value)
    if layout == "chunked" and value.ndim >= 2:  # channels of a larger image
        count = value.shape[1]
        whole = value.new_full((value.shape[0], 2 * count, *value.shape[2:]), beside)
        return whole.narrow(1, count, count).copy_(value)
    if layout == "cut":  # a part of a larger tensor: an odd offset, and odd strides
        width, rows = value.shape[-1], value.shape[0] if value.ndim > 1 else 0
        larger = (*([rows + 2] if rows else []), *value.shape[1:-1], width + 5 - width % 2)
        whole = value.new_full(larger, beside)
        return (whole[2:] if rows else whole)[..., 3 : 3 + width].copy_(value)
    if layout == "misaligned":
        buffer = value.new_full((value.numel() + 1,), beside)
        return buffer[1:].view(value.shape).copy_(value)
    if layout == "expanded":
        return value[..., :1].clone().expand(value.shape)
    if layout == "rows expanded":
        return value[:1].clone().expand(value.shape)
    if layout == "overlapping":
        rows = _overlapping(torch.empty_like(value).reshape(-1), value.shape)
        return rows.copy_(value)  # equal where they overlap
    if layout == "negated":  # what is in memory is the negative, as in a conjugate's view
        return torch._neg_view(opposite(value))
    return value.clone(memory_format=torch.contiguous_format)


def opposite(value: torch.Tensor) -> torch.Tensor:
    """Return the negative, contiguous; of floating-point numbers to the bit.

    A GPU's own negation gives all NaN the same bits, which then are not the given ones.
    """
    import torch

    if not value.is_floating_point():
        return -value
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    bits = value.contiguous().view(whole)
    return bits.bitwise_xor(torch.iinfo(whole).min).view(value.dtype)


def _order_in_memory(layout: Layout, ndim: int) -> list[int]:
    """Return the dimensions from the one with the largest stride to that with the smallest."""
    middle = list(range(2, ndim))
    if layout == "channels_last":
        return [0, *middle, 1]
    return [1, 0, *middle] if layout == "rows inside" else [*range(ndim)][::-1]


def one_object(values: Sequence[Any]) -> list[Any]:
    """Return arguments of which those of one type and shape are the first such one itself."""
    import torch

    first: dict[Any, Any] = {}
    return [
        first.setdefault((x.dtype, x.shape), x) if isinstance(x, torch.Tensor) else x
        for x in values
    ]


def laid_out_where(values: Sequence[Any], script: Script) -> list[Any]:
    """Return copies of arguments in fresh memory, all or one of them with the script's layout."""
    import torch

    if script.layout == "same":
        return one_object([laid_out(value, "contiguous") for value in values])

    if script.layout == "shared":
        return _in_one_memory(values)

    tensors = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
    at = None if script.layout_at is None or not tensors else script.layout_at % len(tensors)
    return [
        # Of several each has a distance of its own between its rows.
        laid_out(
            value, script.layout if at is None or i == tensors[at] else "contiguous", 8 + 8 * i
        )
        for i, value in enumerate(values)
    ]


def fitted(values: Sequence[Any], layout: Layout, at: int | None = None) -> list[Any]:
    """Return arguments with such values as their layout can have, in ordinary memory.

    Elements that share memory are equal; "float64" and "mixed" change the type, "too_wide" and
    "twice_wide" the last size, and one of several inputs has other rows than the others.

    Args:
        values: of a call.
        layout: that they shall have.
        at: the only tensor that has it, by its place among those with rows; None for all.
    """
    import torch

    if layout == "same":
        return one_object(values)
    if layout in ("fewer rows", "more rows", "one row"):
        return _with_other_rows(values, layout, at or 0)

    def is_number(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 0

    if layout == "shared":
        return [laid_out(value, "contiguous") for value in _in_one_memory(values)]
    if layout == "mixed":
        found = [i for i, value in enumerate(values) if is_number(value)]
        dtype = torch.float64 if len(found) > 1 else torch.bfloat16
        return [v.to(dtype) if i in found[-1:] else v for i, v in enumerate(values)]

    def one(value: Any) -> Any:
        if not is_number(value):
            return value
        if layout == "overlapping" and value.numel():
            return _overlapping(value.reshape(-1), value.shape).contiguous()
        if layout in ("expanded", "rows expanded"):
            return laid_out(value, layout).contiguous()
        if layout == "float64":
            return value.double()
        if layout == "too_wide":
            return torch.cat([value, value[..., :1]], dim=-1)
        if layout == "twice_wide":
            return torch.cat([value, value], dim=-1)
        return value

    return [one(value) for value in values]


def _with_other_rows(values: Sequence[Any], layout: Layout, at: int) -> list[Any]:
    """Return arguments of which one has other rows; as they are where one alone has any."""
    import torch

    result = list(values)
    found = [i for i, x in enumerate(values) if isinstance(x, torch.Tensor) and x.ndim and len(x)]
    if len(found) > 1:
        place = found[at % len(found)]
        value = values[place]
        rows = len(value) + EXTRA_ROWS[layout] if layout in EXTRA_ROWS else 1
        result[place] = torch.cat([value, value[:1]])[:rows]
    return result


def _overlapping(memory: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return rows that begin in the middle of the row before, as those of `unfold`."""
    width = math.prod(shape[1:])
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    strides[0] = max(1, width // 2)
    return memory.as_strided(list(shape), strides)


def _in_one_memory(values: Sequence[Any]) -> list[Any]:
    """Return arguments of which those of one type share memory, as `x` and `x.t()` do.

    The first is as given. Another of its size has its elements in another order, a smaller one
    the first of them.
    """
    import torch

    result: list[Any] = []
    first: Any = None
    for value in values:
        is_tensor = isinstance(value, torch.Tensor) and value.is_floating_point()
        if not is_tensor or not value.numel() or not value.ndim:
            result.append(laid_out(value, "contiguous"))
        elif first is None:
            first = laid_out(value, "contiguous")
            result.append(first)
        elif value.dtype != first.dtype or value.numel() > first.numel():
            result.append(laid_out(value, "contiguous"))
        else:
            flat = first.view(-1)[: value.numel()]
            last_first = flat.view(value.shape[::-1])
            result.append(last_first.permute(*range(value.ndim - 1, -1, -1)))
    return result


def overwrite(old: torch.Tensor, new: torch.Tensor, call: int) -> None:
    """Give memory other content, in a way that no version counter tells of, another each call."""
    import torch

    kept = old.detach()
    is_plain = kept.device.type == "cpu" and not kept.is_neg() and kept.dtype != torch.bfloat16
    way = call % 3
    if way == 2 and is_plain:
        kept.numpy()[...] = new.numpy()
    elif way == 0 and kept.numel() and kept.dtype != torch.bool:
        with torch.cuda.device_of(kept):  # DLPack takes tensors of the current GPU alone
            torch.from_dlpack(kept).copy_(new)
    else:
        old.data.copy_(new)
