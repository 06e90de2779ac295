"""What other runs of the same kernel expect of a space: on other devices, of other shapes.

A source gives every configuration of the space a feature: the logarithm of its time there, as
recorded, or as a Gaussian process over what was recorded expects. Features are clipped and
scaled as the search's own targets are. Their mean is what the search expects before its first
trial; how far to follow it, and each source by itself, is learnt from the trials (a linear kernel
over the features). Beside it stands a second model that knows nothing of the sources; each of
the two counts as much as it makes the times seen probable, so that sources which mislead are soon
disregarded.

Source: Hoeting et al., "Bayesian model averaging: a tutorial", 1999.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.errors import InputError
from tuner.search.encoding import Array, Encoding
from tuner.search.levels import Known
from tuner.search.surrogate import Remaining, Surrogate
from tuner.space.search_space import SearchSpace
from tuner.trial import Outcome

__all__ = ["MAX_SOURCES", "Expectation", "Informed", "Source"]

CLIPS = (0.7, 0.1)  # quantiles: the whole of a source, and its best configurations by themselves
MAX_SOURCES = 4  # with a feature of their own; all have part in the mean
MIN_SHARED = 5  # configurations of a source that mean something here
DISTRUST = 3.0  # by how much sources that misled at the start are less probable, as a logarithm
MAX_MODEL_ROWS = 300  # of a source, for what it did not record


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An earlier run or a recording.

    Attributes:
        name: for messages.
        space: what it searched.
        latency_us: float64 by config id; NaN where a configuration failed.
        is_bound: bool by config id, where measuring was stopped early: the time is longer than
            `latency_us`, nobody knows by how much. None where all were measured to the end.
    """

    name: str
    space: SearchSpace
    latency_us: Array
    is_bound: Array | None = None

    @classmethod
    def of_outcomes(
        cls, name: str, space: SearchSpace, known: Mapping[int, Outcome]
    ) -> Source | None:
        """Return what a run tried of a space, by config id; None where that is too little."""
        measured = [outcome.measurement for outcome in known.values()]
        is_bound = np.array([m is not None and m.is_censored for m in measured], dtype=bool)
        latency_us = np.array([outcome.ranked_us or math.nan for outcome in known.values()])
        if len(known) < MIN_SHARED or not np.isfinite(latency_us[~is_bound]).any():
            return None
        rows = space.rows(np.array(list(known)))
        own = SearchSpace.listed(space.parameters, rows)
        order = own.config_ids(rows).argsort()  # its own: of declaration
        return cls(name, own, latency_us[order], is_bound[order])

    @property
    def known_us(self) -> Array:
        """Latencies that were measured to the end, NaN for the others."""
        if self.is_bound is None:
            return self.latency_us
        return np.where(self.is_bound, np.nan, self.latency_us)


class Expectation:
    """The sources' features of any configurations of a space.

    Raises:
        InputError: a source lacks a parameter of the space, or too few of its configurations
            have values that are allowed here.
    """

    def __init__(self, space: SearchSpace, encoding: Encoding, sources: Sequence[Source]) -> None:
        self._encoding = encoding
        self._tables = [_Table(space, encoding, source) for source in sources]
        self.num_features = min(len(sources), MAX_SOURCES) + len(CLIPS)
        self.spread = float(np.mean([table.spread for table in self._tables]))

    def features(self, codes: Array) -> Array:
        """Return [features, configurations]: the mean at each clip, then each source."""
        each = np.array([table.features(codes) for table in self._tables])  # [source, clip, n]
        return np.concatenate([each.mean(axis=0), each[:MAX_SOURCES, 0]])

    def best(self, codes: Array, count: int) -> list[int]:
        """Return the configurations that the sources together expect to be fastest.

        By the mean logarithm of their rank: the best of one source come before what is good
        everywhere, since what one device likes best another one often likes, too.
        """
        each = np.array([table.features(codes).sum(axis=0) for table in self._tables])
        ranks = np.argsort(np.argsort(each, axis=1, kind="stable"), axis=1, kind="stable")
        order = np.argsort(np.log(ranks + 1.0).mean(axis=0), kind="stable")
        return [int(i) for i in order[:count]]


class Informed:
    """What is believed with the sources and without them, together; asked as `Surrogate` is.

    Args:
        encoding: of the space.
        pool: [columns, parameters] codes of the configurations to choose from.
        expectation: the sources'.
    """

    def __init__(self, encoding: Encoding, pool: Array, expectation: Expectation) -> None:
        self._with = Surrogate(encoding, pool, expectation)
        self._without = Surrogate(encoding, pool)
        self._distrust = 0.0
        self._is_wide = False

    def distrust(self) -> None:
        """Believe less in the sources: their best were no better than any others."""
        self._distrust = DISTRUST

    def is_fit_due(self, num: int) -> bool:
        """Whether everything is computed anew when `num` configurations are observed."""
        return self._with.is_fit_due(num)

    def look_at(self, pool: Array) -> None:
        """Take other columns to choose from."""
        self._with.look_at(pool)
        self._without.look_at(pool)

    def observe(
        self,
        names: Sequence[int],
        codes: Array,
        kinds: Sequence[Known],
        logs: Sequence[float],
        is_wide: bool = False,
    ) -> None:
        """Take what is known now; see `Surrogate.observe`."""
        self._is_wide = is_wide
        for model in (self._with, self._without):
            model.observe(names, codes, kinds, logs, is_wide)

    @property
    def trust(self) -> float:
        """The probability that the sources tell of this space."""
        lead = self._with.log_evidence - self._without.log_evidence - self._distrust
        return 1.0 / (1.0 + math.exp(-min(max(lead, -30.0), 30.0)))

    def log_improvement(self, codes: Array | None = None) -> Array:
        """Return the logarithm of the expected improvement; see `Surrogate.log_improvement`."""
        trust = min(self.trust, 0.5) if self._is_wide else self.trust  # what the sources hide
        found: Array = np.logaddexp(
            math.log(trust) + self._with.log_improvement(codes),
            math.log(max(1.0 - trust, 1e-13)) + self._without.log_improvement(codes),
        )
        return found

    def remaining(
        self, untried: Array, shares: Sequence[float], rng: np.random.Generator
    ) -> Remaining:
        """Judge what the untried columns may still bring; see `Surrogate.remaining`."""
        trust = self.trust
        one, other = (m.remaining(untried, shares, rng) for m in (self._with, self._without))
        within = {s: trust * one.within[s] + (1.0 - trust) * other.within[s] for s in shares}
        return Remaining(trust * one.improvement + (1.0 - trust) * other.improvement, within)


class _Table:
    """One source, in the codes of the space that is searched."""

    def __init__(self, space: SearchSpace, encoding: Encoding, source: Source) -> None:
        value_indices = _translated(space, source)
        fits = (value_indices >= 0).all(axis=1)
        if fits.sum() < MIN_SHARED or np.isnan(source.known_us[fits]).all():
            raise InputError(
                f"warm start from {source.name}: {fits.sum()} of its {len(value_indices)} "
                "configurations have values that this space has too\n"
                f"  expected: at least {MIN_SHARED}, one of them correct and timed to the end"
            )
        codes = encoding.codes(value_indices[fits])
        codes, first = np.unique(codes, axis=0, return_index=True)
        log, known = (np.log(us[fits][first]) for us in (source.latency_us, source.known_us))
        is_bound = np.isfinite(log) & np.isnan(known)
        self._encoding = encoding
        self._index = {row.tobytes(): i for i, row in enumerate(codes)}
        self._values = np.array([_scaled(log, known, clip) for clip in CLIPS])
        self.spread = float(np.nanstd(np.minimum(known, np.nanquantile(known, CLIPS[0]))))
        self._codes, self._log, self._is_judged = codes, known, ~is_bound
        if is_bound.any():  # no faster than the bound, and else as the others let expect
            expected = self._expected(codes[is_bound])
            self._values[:, is_bound] = np.maximum(self._values[:, is_bound], expected)

    def features(self, codes: Array) -> Array:
        """Return [clips, configurations]."""
        codes = np.ascontiguousarray(codes, dtype=np.int32)
        at = np.array([self._index.get(row.tobytes(), -1) for row in codes], dtype=int)
        found = self._values[:, np.maximum(at, 0)]
        if (at < 0).any():
            found[:, at < 0] = self._expected(codes[at < 0])
        return found

    def _expected(self, codes: Array) -> Array:
        """Return the features of what was not recorded, or has only a bound."""
        order = np.argsort(np.where(np.isnan(self._log), np.inf, self._log), kind="stable")
        order = order[self._is_judged[order]]
        half = MAX_MODEL_ROWS // 2
        rest = order[half:]
        even = rest[np.linspace(0, len(rest) - 1, min(half, len(rest))).astype(int)]
        rows = np.concatenate([order[:half], even])
        found = []
        for values in self._values:
            model = Surrogate(self._encoding, codes)
            model.observe(
                list(range(len(rows))),
                self._codes[rows],
                [Known.TIME] * len(rows),
                [float(v) for v in values[rows]],
            )
            found.append(model.expected())
        return np.array(found)


def _scaled(log: Array, known: Array, clip: float) -> Array:
    """Return values of mean 0 and variance 1; failures are as slow as the clip.

    `known` are the times that were measured to the end; only they tell where to clip.
    """
    cap = np.nanquantile(known, clip)
    value = np.minimum(np.where(np.isnan(log), cap, log), cap)
    scaled: Array = (value - value.mean()) / (value.std() + 1e-9)
    return scaled


def _translated(space: SearchSpace, source: Source) -> Array:
    """Return the source's rows as value indices of `space`; -1 where it has no such value."""
    theirs = {parameter.name: i for i, parameter in enumerate(source.space.parameters)}
    rows = source.space.rows()
    columns = []
    for parameter in space.parameters:
        if parameter.name not in theirs:
            if len(parameter.values) + (parameter.when is not None) == 1:
                columns.append(np.zeros(len(rows), dtype=int))
                continue
            known = ", ".join(sorted(theirs))
            raise InputError(
                f"warm start from {source.name}: it has no parameter {parameter.name!r}\n"
                f"  known: {known}"
            )
        column = theirs[parameter.name]
        values = source.space.parameters[column].values
        value_index = {value: i for i, value in enumerate(parameter.values)}
        absent = len(parameter.values) if parameter.when is not None else -1
        table = np.array([*[value_index.get(value, -1) for value in values], absent])
        columns.append(table[rows[:, column]])
    return np.stack(columns, axis=1)
