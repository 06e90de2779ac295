"""What may vary and what must hold: parameters, constraints, and how they are judged in bulk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.errors import ExpressionError, InputError
from tuner.space.expression import Expression, unknown_name
from tuner.space.grammar import Env, compile_tree
from tuner.trial import Value

__all__ = [
    "MAX_PACKED",
    "Bools",
    "Constraint",
    "Judge",
    "Parameter",
    "ValueIndices",
    "base_of",
    "check_declared",
    "index_type",
    "is_obeyed",
    "pack",
]

MAX_TABLE = 2**22  # remembered verdicts of one rule; 4 MiB
MAX_JUDGED = 30_000_000  # configurations that one rule is judged for; about 10 s
MAX_PACKED = 2**62  # so that packed value indices stay within int64

Bools = NDArray[np.bool_]
ValueIndices = NDArray[np.signedinteger]  # of values; after the last one: absent


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tunable name and its values; absent from `params` where `when` does not hold."""

    name: str
    values: tuple[Value, ...]
    when: Expression | None = None


@dataclass(frozen=True, slots=True)
class Constraint:
    """A rule that every configuration obeys, and why there is such a rule.

    It is judged only where `when` (if given) holds, and where neither asks for a name that does
    not exist: an absent parameter, or a fact that this device does not have (a CPU's
    `device.num_sms`). `origin` says who asks for it, such as `gemm.yaml:12` or `template wgmma`.
    """

    expression: Expression
    why: str
    origin: str = ""
    when: Expression | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names that it may ask for."""
        return self.expression.names | (self.when.names if self.when else frozenset())


def check_declared(
    parameters: Sequence[Parameter], constraints: Sequence[Constraint], facts: Env
) -> None:
    """Refuse names and values declared twice, and rules with names that nobody declares.

    Raises:
        InputError: of parameters and facts, two share a name; or a parameter has no values, or
            one of them twice.
        ExpressionError: a `when` or constraint uses an unknown name.
    """
    names: set[str] = set()
    for parameter in parameters:
        if parameter.name in names or parameter.name in facts:
            raise InputError(f"the name {parameter.name!r} is declared twice")
        if len(set(parameter.values)) < len(parameter.values) or not parameter.values:
            raise InputError(f"{parameter.name} needs values, each of them once")
        names.add(parameter.name)
    known = [*names, *facts]
    rules = [(p.when, f"{p.name}: when") for p in parameters if p.when]
    rules += [(c.expression, c.origin or "constraint") for c in constraints]
    rules += [(c.when, c.origin or "constraint") for c in constraints if c.when]
    for rule, place in rules:
        for name in sorted(rule.names - set(known)):
            if name.startswith("device."):  # a fact of another kind of device: never judged
                continue
            raise ExpressionError(f"{place}: {rule.text!r}: {unknown_name(name, known)}")


def base_of(parameter: Parameter) -> int:
    """How many value indices a parameter has: its values, and absence where it is conditional."""
    return len(parameter.values) + (parameter.when is not None)


def index_type(bases: Iterable[int]) -> type[np.signedinteger]:
    """Return the smallest signed type for value indices; their differences are then exact, too."""
    largest = max(bases, default=1)
    return np.int8 if largest <= 2**7 else np.int16 if largest <= 2**15 else np.int32


def _condition_holds(when: Expression | None, env: Env) -> bool:
    """Whether what has the condition `when` exists beside the named values of `env`."""
    return when is None or when.holds_where_known(env) is True


def is_obeyed(constraint: Constraint, env: Env) -> bool:
    """Whether `env` obeys the constraint, or the constraint is not judged there."""
    if not _condition_holds(constraint.when, env):
        return True
    return constraint.expression.holds_where_known(env) is not False


# ---- many at once ---------------------------------------------------------------------------


def pack(
    columns: Sequence[ValueIndices], bases: Sequence[int], num: int
) -> tuple[NDArray[np.int64], int]:
    """Return one whole number for each of `num` rows, and how many there can be.

    The numbers are ordered as the rows are; equal rows have equal ones. They are in mixed radix,
    the first column's value index most significant. Where that is too long for 64 bits, leading
    ones are replaced by their ranks among these rows.
    """
    packed, size = np.zeros(num, dtype=np.int64), 1
    for column, base in zip(columns, bases, strict=True):
        if size * base > MAX_PACKED:
            different, packed = np.unique(packed, return_inverse=True)
            size = len(different)
        packed = packed * base + column
        size *= base
    return packed, size


class Judge:
    """Judges one rule for many rows of value indices; remembers verdicts where there are few.

    Args:
        rule: what must hold.
        guard: where this does not hold, and where it or the rule asks for a name that is absent,
            the verdict is `where_absent`.
        parameters: all of them, by name.
        facts: the other names.
        where_absent: True for constraints, False for conditions.
    """

    def __init__(
        self,
        rule: Expression,
        guard: Expression | None,
        parameters: Mapping[str, Parameter],
        facts: Env,
        *,
        where_absent: bool,
    ) -> None:
        self._rule, self._guard, self._where_absent = rule, guard, where_absent
        names = rule.names | (guard.names if guard else frozenset())
        self.tuned = sorted(names & parameters.keys())
        self._facts = {name: facts[name] for name in names & facts.keys()}
        # Where all parameters exist, a function of their values, which is twice as fast.
        is_whole = guard is None and all(parameters[name].when is None for name in self.tuned)
        self._function = compile_tree(rule.tree, set(), self.tuned) if is_whole else None
        listed = [[*parameters[name].values, None] for name in self.tuned]  # the last: absent
        self._values = [np.array(values, dtype=object) for values in listed]
        self._bases = [base_of(parameters[name]) for name in self.tuned]
        size = math.prod(self._bases)
        self._memo = np.full(size, -1, dtype=np.int8) if size <= MAX_TABLE else None
        self._num_judged = 0

    def verdicts(self, value_indices: Mapping[str, ValueIndices], num: int) -> Bools:
        """Return the verdict for each of `num` rows; the names of `tuned` must be there.

        Raises:
            ExpressionError: the rule cannot be computed; the message says for which values.
            InputError: there are too many rows.
        """
        columns = [value_indices[name] for name in self.tuned]
        if self._memo is None:
            return self._judged(columns, num)
        packed, size = pack(columns, self._bases, num)
        is_new = np.zeros(size, dtype=bool)
        is_new[packed] = True
        new = np.flatnonzero(is_new & (self._memo < 0))
        if len(new):
            rows = np.unravel_index(new, self._bases) if self.tuned else ()
            self._memo[new] = self._judged(list(rows), len(new))
        verdicts: Bools = self._memo[packed].astype(bool)
        return verdicts

    def _judged(self, columns: Sequence[ValueIndices], num: int) -> Bools:
        self._num_judged += num
        if self._num_judged > MAX_JUDGED:
            raise InputError(
                f"{self._rule.text!r} would have to be judged for more than {MAX_JUDGED:,} "
                "configurations\n  hint: add a constraint over fewer of its parameters"
            )
        values = [
            known[value_indices].tolist()
            for known, value_indices in zip(self._values, columns, strict=True)
        ]
        rows = zip(*values, strict=True) if values else [()] * num
        return np.fromiter(map(self._verdict, rows), dtype=bool, count=num)

    def _verdict(self, row: tuple[Any, ...]) -> bool:
        if self._function is not None:
            try:
                value = self._function(self._facts, *row)
            except Exception:  # for any reason: the expression itself says which
                value = None
            if isinstance(value, bool):
                return value
        pairs = zip(self.tuned, row, strict=True)
        at = {name: value for name, value in pairs if value is not None}
        env = {**self._facts, **at}
        try:
            if self._guard is not None and not _condition_holds(self._guard, env):
                return self._where_absent
            verdict = self._rule.holds_where_known(env)
        except ExpressionError as error:
            where = ", ".join(f"{name} = {value}" for name, value in at.items())
            raise ExpressionError(f"{error}\n  where: {where}") from None
        return self._where_absent if verdict is None else verdict
