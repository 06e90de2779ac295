"""Tensors, arguments and state_dicts in words, for what is said of a module that does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuner.check.calls.exercise import outputs_of
from tuner.plans import Argument
from tuner.problem.returned import is_plain, words_of
from tuner.wording import one_line

__all__ = ["declared", "described", "differences", "form_of", "kind_of"]


def differences(
    mine: Sequence[tuple[str, str, tuple[int, ...]]],
    theirs: Sequence[tuple[str, str, tuple[int, ...]]],
    order: Sequence[str],
    wanted_order: Sequence[str],
) -> list[str]:
    """Say key by key how a state_dict differs, and where else the order of parameters does."""

    def words(key: tuple[str, str, tuple[int, ...]]) -> str:
        return f"{key[1].removeprefix('torch.')}{list(key[2])}"

    own, wanted = {k[0]: words(k) for k in mine}, {k[0]: words(k) for k in theirs}
    found = [f"{n!r} {text} is missing" for n, text in wanted.items() if n not in own]
    found += [f"{n!r} {text} is one too many" for n, text in own.items() if n not in wanted]
    found += [
        f"{n!r} is {own[n]}, not {text}"
        for n, text in wanted.items()
        if n in own and own[n] != text
    ]
    if not found:  # an optimiser's state goes by position
        pairs = enumerate(zip(order, wanted_order, strict=False), 1)
        found = [f"parameter {i} is {a!r}, not {b!r}" for i, (a, b) in pairs if a != b][:1]
    return found


def form_of(result: Any) -> str:
    """Describe what a module returned: a tensor, a tuple of them, or what has names for them."""
    one, *more = (described(y) for y in outputs_of(result)) if outputs_of(result) else ("()",)
    is_tuple = isinstance(result, tuple | list)
    names = "" if is_plain(result) else f" in {words_of(result)}"
    return (f"({', '.join([one, *more])},)" if is_tuple or names else one) + names


def described(value: Any) -> str:
    """Describe a tensor by dtype and shape, anything else as it is written."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return one_line(repr(value), 40)


def declared(argument: Argument) -> str:
    """Describe an argument as `op.yaml` declares it."""
    if argument.shape is None:
        return f"{argument.name}: {argument.dtype}"
    return f"{argument.name}: {argument.dtype}[{', '.join(argument.shape)}]"


def kind_of(value: Any) -> str:
    """Say what stands where a module's class should."""
    return "a class, not an nn.Module" if isinstance(value, type) else f"a {type(value).__name__}"
