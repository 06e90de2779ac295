"""One thing that is asked of a candidate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tuner.check.calls.crossing import Asked, Dtype, Mode
from tuner.problem.constructor import Options
from tuner.problem.draws import Distribution, WeightKind

__all__ = ["ILLEGAL", "OWN_WORK", "ROWS", "Modes", "Probe"]

OWN_WORK = "own work, "  # how the names of the traced probes begin
ROWS = ("fewer rows", "more rows", "one row")  # of one input, where another has as many as given
ILLEGAL = ("negative_integers", "integers_beyond")  # which most references refuse


@dataclass(frozen=True, slots=True)
class Modes:
    """The mode that a problem is asked in, and what can be judged beside it.

    `random` are those in which the reference draws random numbers, so that its answers there
    cannot be compared.
    """

    own: Literal["train", "eval"] = "train"
    random: tuple[Mode, ...] = ()

    @property
    def other(self) -> Literal["train", "eval"]:
        """The mode that is asked in turn with the own one: the other one where it is no chance."""
        other: Literal["train", "eval"] = "eval" if self.own == "train" else "train"
        return self.own if other in self.random else other

    @property
    def both(self) -> tuple[Mode, ...]:
        """The own mode and the other one, where they are two."""
        return tuple(dict.fromkeys((self.own, self.other)))

    @property
    def training(self) -> Literal["train", "eval"]:
        """The mode for a step in training between steps in eval mode."""
        return "eval" if "train" in self.random else "train"

    @property
    def in_turn(self) -> dict[str, Any]:
        """Fields of a probe that asks the same input in the own and then in the other mode."""
        return {"calls": 2, "inputs": "repeated", "before": ((), (self.other,))}

    def is_random(self, probe: Probe) -> bool:
        """Whether a probe asks in a mode in which the reference draws random numbers."""
        if not self.random:
            return False
        first: Mode = "train" if probe.mode == "cumulative" else probe.mode
        later = [a for actions in probe.before for a in actions if a in ("train", "eval")]
        return any(mode in self.random for mode in (first, *later))


GIVING = (
    "edit", "edit all", "edit one", "load", "load inside", "load part", "edit state", "rebind",
    "assign", "replace", "replace one", "borrow", "borrow one",
)  # fmt: skip
TOUCHED = (
    "ones", "minus ones", "scalar", "small", "tiny", "scale row", "shift", "edit row", "derive",
    "restore",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Probe(Asked):
    """One thing that is asked of a candidate.

    `batch` None is as given. `weights`: "own" are those that the candidate's constructor draws,
    "initial" those of the reference, all others are fresh. With several `calls`, `inputs` says how
    the input of each relates to the one before: "fresh" (new content, new memory), "repeated",
    "overwritten" (new content in the same memory, same version counter), "nudged" (one element
    changed), "reordered" (the same rows, last first), "exchanged" (two neighbours among them
    exchanged), "edited" (in the same memory: such changes in turn), "ranges" (whole numbers, each
    call to the ends of another type of integers). `other_weights` are those that the module is
    given: "random", "nudged", one element of each parameter changed, "stepped", one of each by a
    two-thousandth of itself, "reordered", the same rows, last first, "mirrored", the same numbers
    in each row, last first, "negated", one row of each, or "shifted", one element up and another
    as much down; the last three change buffers as well. By default the last call alone is
    differentiated; `gradient_values` are of the incoming ones: times 2^40, times 2^-40, one
    element NaN, one row NaN, or "cancelling" (each has its negative, and the ends of rows and
    columns are 0).
    With `has_options` the constructor gets other values where it has defaults. `is_reduced`: the
    batch is smaller only to be quick, and as given where the reference refuses it. `is_drawn`:
    each call's inputs are a draw of the reference's own. `is_tall`: fewer rows where so many would
    cost much. `layout_at` is also which input has "edges". With `mild_more` the usual inputs are
    NaN, in so many more rows. With
    `other_arguments` numbers are others, 0, negative or large, what has a default is given, or
    floats are tensors; `by_keyword` passes all by their names.

    `is_random`: the reference draws random numbers there, so what is no number is judged alone.
    `is_extra` asks what the reference's class could also be asked, beyond how it is configured:
    to refuse that aloud is a difference from a drop-in, no mistake; a wrong answer is one.
    `may_refuse` makes a refusal not even that; with `may_differ` wrong values are a difference.
    `tells` is what a failure here usually means.
    """

    name: str
    distribution: Distribution = "as_given"
    batch: int | None = None
    seed_inputs: int = 0
    seed_weights: int = 0
    weights: Literal["own", "initial"] | WeightKind = "random"
    inputs: Literal[
        "fresh", "repeated", "overwritten", "nudged", "reordered", "exchanged", "edited", "ranges"
    ] = "fresh"
    other_weights: Literal[
        "random", "nudged", "stepped", "reordered", "mirrored", "negated", "shifted"
    ] = "random"
    gradient_values: Literal["", "large", "small", "nan", "nan_row", "cancelling"] = ""
    has_options: Options = ""
    is_reduced: bool = False
    is_drawn: bool = False
    is_tall: bool = False
    other_arguments: Literal["", "others", "zeros", "negative", "large", "tensors"] = ""
    by_keyword: bool = False
    mild_more: int = 0
    wants_same_bits: bool = False
    is_random: bool = False
    is_extra: bool = False
    may_refuse: bool = False
    may_differ: bool = False
    tells: str = ""

    @property
    def asks_behaviour(self) -> bool:
        """Whether its hint is of what a call or a copy does beside numbers."""
        done = {action for actions in self.before for action in actions}
        return self.holds_grads or self.accumulates or bool(done & {"hook", "load wrong"})

    @property
    def gives_weights(self) -> bool:
        """Whether the module gets other weights between its calls."""
        is_given = any(action in GIVING for actions in self.before for action in actions)
        return is_given or self.mapped == "weights"

    def dtype_at(self, call: int) -> Dtype:
        """Return the type that the module has been converted to by a call, "" for its own."""
        done = [action for actions in self.before[: call + 1] for action in actions]
        turns = [a for a in done if a == "restore" or a.startswith("convert")]
        return self.dtype if turns and turns[-1] != "restore" else ""

    @property
    def is_touched(self) -> bool:
        """Whether weights are such that a reference may refuse them, or lose digits."""
        return any(a in TOUCHED for actions in self.before for a in actions)

    @property
    def has_zeros(self) -> bool:
        """Whether weights or options are zero, where some of a reference's numbers are undefined.

        A division by an option of 0 has the sign of what rounding has left.
        """
        return self.has_options == "zeros" or any(
            a.startswith("zero") for actions in self.before for a in actions
        )

    @property
    def may_be_refused(self) -> bool:
        """Whether it asks what many references refuse, and a module must refuse as well."""
        odd = ("float64", "too_wide", "twice_wide", "mixed", *ROWS)
        return self.layout in odd or self.distribution in ILLEGAL
