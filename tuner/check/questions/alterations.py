"""Changes of a tensor's content: of one element, of an order, of signs; what sums do not tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "WEIGHTS",
    "edited",
    "exchanged",
    "in_range",
    "nudged",
    "reordered",
    "varied",
    "with_blocks",
    "with_nothing_where_ignored",
]

IGNORED = -100  # the label that PyTorch's losses ignore

# The ends of whole numbers, each call's: an int8, a uint8 and a 16-bit integer hold all but one.
RANGES = ((0, 255), (-128, 128), (0, 256), (-32768, 32768), (0, 65536))


def _is_number(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def varied(value: Any, call: int) -> Any:
    """Return other content with other statistics, far from any earlier call's."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.ndim:
        return value
    return value.flip(0) * (1.0 + 0.5 * call) + 0.25 * call


def nudged(value: Any, call: int) -> Any:
    """Return the same content but for one element, past the middle."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return value
    changed = value.clone()
    at = (2 * value.numel() // 3 + 5 * call) % value.numel()
    at -= at > 0 and at % 2 == 0  # an odd place: who samples, begins with the first
    changed.view(-1)[at] = -3.0 * changed.view(-1)[at] - 1.0
    return changed


def _stepped(value: Any, call: int) -> Any:
    """Return the same content but for one element, which is 2^-11 of itself larger or smaller.

    The largest one at an even place other than the first, so that it shows: in what is computed,
    never in bfloat16, and seldom in a sum over all.
    """
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return value
    changed = value.clone()
    flat = changed.view(-1)
    at = 2 * int(flat[2::2].abs().argmax()) + 2 if flat.numel() > 2 else 0
    old = float(flat[at])
    flat[at] = old * (1.0 + 2.0**-11)
    if float(flat[at].bfloat16()) != float(value.reshape(-1)[at].bfloat16()):
        flat[at] = old * (1.0 - 2.0**-11)
    return changed


def reordered(value: Any, call: int) -> Any:
    """Return the same rows, last first: no sum over all of them tells."""
    import torch

    return value.flip(0) if isinstance(value, torch.Tensor) and value.ndim else value


def exchanged(value: Any, call: int) -> Any:
    """Return the same rows, two in the middle exchanged: sums, ends and norms are the same."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.ndim or len(value) < 4:
        return value
    order = list(range(len(value)))
    at = len(order) // 3
    order[at], order[at + 1] = order[at + 1], order[at]
    return value[order]


def edited(value: Any, call: int) -> Any:
    """Return another of these changes for each call: one element, two rows, all rows, all."""
    return (varied, nudged, exchanged, reordered)[call % 4](value, call)


def in_range(value: Any, call: int) -> Any:
    """Return whole numbers from 0 to 255 stretched to the range of that call, with both ends."""
    if not _is_number(value):
        return value
    least, most = RANGES[call % len(RANGES)]
    return (value * ((most - least) / 255)).round() + least


def _mirrored(value: Any, call: int) -> Any:
    """Return rows with the same numbers, last first: sums and norms of rows are the same."""
    return value.flip(-1) if _is_number(value) and value.ndim else value


def _negated(value: Any, call: int) -> Any:
    """Return the same but for the sign of the largest row, or element: squares are the same."""
    if not _is_number(value):
        return value
    changed = value.clone()
    rows = changed.view(len(value) if value.ndim else 1, -1)
    rows[int(rows.norm(dim=1).argmax())] *= -1.0
    return changed


def _shifted(value: Any, call: int) -> Any:
    """Return the same but for two neighbours, one up and one as much down: sums are the same."""
    if not _is_number(value) or value.numel() < 2:
        return value
    changed = value.clone()
    flat = changed.view(-1)
    at = min(int(flat.abs().argmax()), len(flat) - 2)
    step = 0.25 if float(flat[at : at + 2].min()) > 0.25 else -0.25
    flat[at], flat[at + 1] = flat[at] + step, flat[at + 1] - step
    return changed


def with_blocks(value: Any, start: int) -> Any:
    """Return bools with rows that are false, or true, in a block and the other one elsewhere.

    At the start, in the middle, at the end; half of a row or more, or as many as a tile has.
    `start` says which rows.
    """
    import torch

    if not isinstance(value, torch.Tensor) or value.dtype != torch.bool or not value.numel():
        return value
    width = value.shape[-1] if value.ndim else 1
    marked = value.reshape(-1, width).clone()
    ends = [(0, 7 * width // 8), (width // 4, 3 * width // 4), (width // 2, width)]
    ends += [(0, min(tile, width // 2)) for tile in (16, 32)]
    for i, (first, last) in enumerate(ends):
        for is_on in (False, True):
            row = marked[(start + 2 * i + is_on) % len(marked)]
            row.fill_(not is_on)
            row[first : max(last, first + 1)] = is_on
    return marked.view(value.shape)


def with_nothing_where_ignored(values: Sequence[Any]) -> list[Any]:
    """Return numbers that are Inf or NaN, in turn, in rows whose label is one that is ignored."""
    import torch

    labels = [x for x in values if isinstance(x, torch.Tensor) and x.dtype == torch.int64]
    result = list(values)
    for i, value in enumerate(values):
        for label in labels:
            if not _is_number(value) or value.shape[: label.ndim] != label.shape:
                continue
            rows = (label == IGNORED).nonzero(as_tuple=True)
            turn = torch.arange(len(rows[0]), device=value.device) % 2
            poison = torch.where(turn == 0, float("inf"), float("nan")).to(value.dtype)
            result[i] = value.clone()
            result[i][rows] = poison.view(-1, *[1] * (value.ndim - label.ndim))
    return result


# By the name that a probe has for it.
WEIGHTS = {
    "nudged": nudged, "stepped": _stepped, "reordered": reordered, "mirrored": _mirrored,
    "negated": _negated, "shifted": _shifted,
}  # fmt: skip
