"""PyTorch's reductions and scans in terms of the vocabulary: one rule for each name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tuner.capture.graph.graph import Operand, Ref
from tuner.capture.graph.lowering import Lowering

__all__ = ["REDUCING", "Results", "Rule", "axes_in_order"]

Results = Operand | tuple[Operand | None, ...] | None
Rule = Callable[[Lowering, dict[str, Any]], Results]


def axes_in_order(low: Lowering, x: Ref, dims: Any) -> list[int]:
    """Return the axes that an operator names, counted from 0; all where it names none."""
    rank = len(low.shape_of(x))
    if dims is None or dims == []:
        return list(range(rank))
    wanted = [dims] if isinstance(dims, int) else list(dims)
    return sorted(d % rank for d in wanted) if rank else []


def _over(low: Lowering, a: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a reduction: over which axes, and whether they stay."""
    axes = axes_in_order(low, a["self"], a.get("dim"))
    return {"axes": axes, "keepdim": bool(a.get("keepdim"))}


def _reduction(op: str) -> Rule:
    def rule(low: Lowering, a: dict[str, Any]) -> Results:
        x, attrs = a["self"], _over(low, a)
        assert isinstance(x, Ref)
        if op in ("sum", "prod", "mean"):
            moved = low.cast(x, low.dtype)
            assert isinstance(moved, Ref)
            x = moved
        if not low.shape_of(x):
            return low.cast(x, low.dtype) if op not in ("argmax", "argmin") else None
        if op not in ("argmax", "argmin") and all(low.shape_of(x)[n] == 1 for n in attrs["axes"]):
            return low.view(x, low.shape)  # of one element each
        return low.emit(op, x, **attrs)

    return rule


def _extreme(op: str, index_op: str) -> Rule:
    """Largest or smallest values over all, over one axis with their index, or of two tensors."""

    def rule(low: Lowering, a: dict[str, Any]) -> Results:
        if "other" in a:
            return low.pointwise("maximum" if op == "amax" else "minimum", a["self"], a["other"])
        values = _reduction(op)(low, a)
        if "dim" not in a or not low.shape_of(a["self"]):
            return values if "dim" not in a else None
        assert isinstance(values, Ref)
        attrs = _over(low, a)
        if low.shape_of(a["self"])[attrs["axes"][0]] == 1:  # the only one
            return values, low.emit("full", 0, dtype="int64")
        return values, low.emit(index_op, a["self"], dtype="int64", **attrs)

    return rule


def _truth(op: str) -> Rule:
    """Whether any or all are true: the largest or smallest of zeros and ones."""

    def rule(low: Lowering, a: dict[str, Any]) -> Results:
        x = a["self"]
        if not low.shape_of(x) or low.dtype != "bool":
            return None
        mask = low.cast(low.pointwise("ne", x, 0, shape=low.shape_of(x)), "float32")
        found = low.emit(op, mask, **_over(low, a), dtype="float32")
        return low.pointwise("ne", found, 0)

    return rule


def _var(low: Lowering, a: dict[str, Any]) -> Results:
    correction = 1 if a["correction"] is None else a["correction"]
    return low.emit("var", a["self"], **_over(low, a), correction=correction)


def _var_mean(low: Lowering, a: dict[str, Any]) -> Results:
    # First, so that the variance is about this one.
    mean = low.emit("mean", a["self"], **_over(low, a))
    variance = _var(low, a)
    assert isinstance(variance, Ref)
    return variance, mean


def _scan(op: str) -> Rule:
    def rule(low: Lowering, a: dict[str, Any]) -> Results:
        x = low.cast(a["self"], low.dtype)
        return low.emit(op, x, axis=a["dim"] % len(low.shape)) if low.shape else x

    return rule


REDUCING: dict[str, Rule] = {
    "sum": _reduction("sum"),
    "mean": _reduction("mean"),
    "prod": _reduction("prod"),
    "amax": _reduction("amax"),
    "amin": _reduction("amin"),
    "argmax": _reduction("argmax"),
    "argmin": _reduction("argmin"),
    "max": _extreme("amax", "argmax"),
    "min": _extreme("amin", "argmin"),
    "any": _truth("amax"),
    "all": _truth("amin"),
    "var": _var,
    "var_mean": _var_mean,
    "cumsum": _scan("cumsum"),
    "cumprod": _scan("cumprod"),
}
