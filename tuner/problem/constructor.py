"""Other arguments for a reference's constructor: which of them a candidate obeys."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

__all__ = ["Options", "other_options", "others_of"]

Options = Literal[
    "", "numbers", "zeros", "signs", "large", "flags", "last flag", "words", "other words",
    "few", "sizes", "all",
]  # fmt: skip
# Words that PyTorch's functions and modules take in each other's place.
WORDS = (
    ("mean", "sum", "none"), ("none", "tanh"), ("tanh", "relu"),
    ("zeros", "reflect", "replicate", "circular"), ("nearest", "bilinear"), ("fan_in", "fan_out"),
)  # fmt: skip
FEW = {-1: 1, 0: 1, 1: 2}
SMALL = 0.01  # below it a number is an eps, which many refuse to be 0
FACTOR = 1000.0  # by which such a one shows


def others_of(word: str) -> list[str]:
    """Return the words that may stand in the place of one."""
    return [w for words in WORDS if word in words for w in words if w != word]


def other_options(model: type, given: Sequence[Any], kind: Options) -> dict[str, Any]:
    """Return other values for what a constructor is given or has defaults for: eps, bias ...

    What is given has its place as its name, "0". Whether they fit together is not asked here.

    Args:
        model: the class.
        given: what `get_init_inputs` gives.
        kind: "numbers" are floats of another size (a small one becomes so large that it shows),
            "zeros", "signs" (of the other sign), "large" (beyond 1), "flags" the other bools,
            "last flag" one of several, "words" and "other words" others of a kind, as of padding,
            "few" the whole numbers -1, 0 and 1, as of a dimension or a stride, "sizes" half of
            each whole number; "all" are sizes, numbers and flags.
    """
    try:
        parameters = list(inspect.signature(model).parameters.values())
    except (TypeError, ValueError):
        return {}
    usual = parameters[len(given) :]
    named = {str(i): x for i, x in enumerate(given)} | {p.name: p.default for p in usual}
    if kind in ("flags", "last flag"):
        flags = [name for name, value in named.items() if type(value) is bool]
        is_one = kind == "last flag"
        return {name: not named[name] for name in (flags[1:][-1:] if is_one else flags)}
    if kind in ("words", "other words"):
        words = {n: others_of(value) for n, value in named.items() if isinstance(value, str)}
        at = 0 if kind == "words" else 1
        return {name: others[at] for name, others in words.items() if len(others) > at}
    if kind == "few":
        return {n: FEW[x] for n, x in named.items() if type(x) is int and x in FEW}
    if kind == "sizes":
        return {n: max(1, x // 2) for n, x in named.items() if type(x) is int and x > 0}
    if kind == "all":
        kinds: tuple[Options, ...] = ("sizes", "numbers", "flags")
        return {n: x for each in kinds for n, x in other_options(model, given, each).items()}
    numbers = {name: value for name, value in named.items() if type(value) is float}
    if kind == "numbers":
        return {n: x * (FACTOR if 0.0 < x < SMALL else 0.5) for n, x in numbers.items()}
    factor, term = {"zeros": (0.0, 0.0), "signs": (-1.0, 0.0), "large": (2.0, 1.0)}[kind]
    return {name: factor * x + term for name, x in numbers.items() if x >= SMALL}
