"""Search a recorded space again: any sampler, many seeds, no device.

The search is the real one, with a real Optuna study in memory; only the evaluation is replaced,
by looking the outcome up. What the recorded run stopped early is reported as a lower bound, too,
and counts as nothing found.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.search.recorded import Recording
from tuner.search.score import Yardstick
from tuner.search.study import SearchBudget, search
from tuner.trial import Measurement, Outcome, Params, Status, Trial
from tuner.wording import terminal_us

__all__ = ["Replay", "Replayed", "format_replays", "replay", "replays_to_json"]

SHOWN = (10, 20, 50, 100, 200, 300, 500, 1000)  # evaluations, in the table
NEAR = (0.05, 0.01)  # of the optimum


@dataclass(frozen=True, slots=True)
class Replayed:
    """One search.

    Attributes:
        seed: of the sampler.
        order: the config ids evaluated, in order.
        score: see `tuner.search.score`; NaN where every configuration is equally fast.
        ms_per_suggestion: of telling an outcome and asking for the next configuration.
    """

    seed: int
    order: tuple[int, ...]
    score: float
    ms_per_suggestion: float


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Searches of one recorded space by one sampler."""

    sampler: str
    recording: Recording
    yardstick: Yardstick
    searches: tuple[Replayed, ...]

    def best_us(self, num: int) -> float:
        """Return the median over the searches of the best found in `num` evaluations."""
        found = [self.yardstick.best_us(entry.order, num)[-1] for entry in self.searches]
        return float(statistics.median(found))

    def evaluations_within(self, share: float) -> tuple[float, float]:
        """Return the median evaluations until within `share` of the optimum, and which share did.

        A search that did not counts as infinitely many.
        """
        counts = [self.yardstick.evaluations_within(share, s.order) for s in self.searches]
        reached = [count for count in counts if count is not None]
        median = statistics.median(math.inf if count is None else count for count in counts)
        return median, len(reached) / len(counts)


def replay(
    recording: Recording,
    sampler: str,
    *,
    num_seeds: int = 1,
    seed: int = 0,
    budget: int = 300,
    in_flight: int = 1,
) -> Replay:
    """Search a recording `num_seeds` times, with the seeds from `seed` on.

    Args:
        recording: where outcomes are looked up.
        sampler: a name of `samplers.SAMPLERS`.
        num_seeds: how many searches.
        seed: the first one's seed.
        budget: evaluations of each; fewer where the space has fewer configurations.
        in_flight: questions that are asked before the first is answered.

    Raises:
        InputError: there is no such sampler.
    """
    yardstick = Yardstick.of(recording.known_us, budget)
    searches = []
    for number in range(seed, seed + num_seeds):
        lookup = _Lookup(recording, in_flight)
        trials: list[Trial] = []
        search(
            recording.space,
            lookup,
            sampler=sampler,
            seed=number,
            budget=SearchBudget(budget, math.inf),
            journal=None,
            previous=(),
            record=trials.append,
        )
        order = tuple(lookup.order)
        ms = 1000 * lookup.suggestion_s / max(1, len(order))
        searches.append(Replayed(number, order, yardstick.score(order), ms))
    return Replay(sampler, recording, yardstick, tuple(searches))


@dataclass(frozen=True, slots=True)
class _Known:
    config_id: int
    candidate_key: str = ""


class _Lookup:
    """The evaluator that knows every outcome."""

    overlaps = False

    def __init__(self, recording: Recording, ahead: int) -> None:
        self._recording = recording
        self.ahead = ahead
        self._since_s = time.perf_counter()  # the search has had its turn from here on
        self.order: list[int] = []
        self.suggestion_s = 0.0

    def submit(self, params: Params) -> _Known:
        self.suggestion_s += time.perf_counter() - self._since_s
        config_id = self._recording.space.index(params)
        assert config_id is not None, "a search asks for what is in the space"
        self.order.append(config_id)
        self._since_s = time.perf_counter()
        return _Known(config_id)

    def first_ready(self, pending: Sequence[_Known], timeout_s: float | None = None) -> int:
        return 0

    def finish(self, pending: _Known, number: int, best_us: float | None) -> Outcome:
        status = self._recording.statuses[pending.config_id]
        latency_us = float(self._recording.latency_us[pending.config_id])
        measurement = None
        if status is Status.CORRECT:
            measurement = Measurement(
                latency_us,
                0.0,
                (latency_us,),
                is_cold=False,
                is_censored=bool(self._recording.is_bound[pending.config_id]),
            )
        self._since_s = time.perf_counter()
        return Outcome(status, measurement=measurement)


def replays_to_json(replays: Sequence[Replay]) -> str:
    """Return `{"budget", "runs": {sampler: {recording: [search, ...]}}}`.

    A search is `{"seed", "order", "score", "ms_per_suggestion"}`; `order` holds the recording's
    own keys.
    """
    runs: dict[str, dict[str, list[dict[str, object]]]] = {}
    for entry in replays:
        keys = entry.recording.keys
        runs.setdefault(entry.sampler, {})[entry.recording.name] = [
            {
                "seed": one.seed,
                "order": [keys[config_id] for config_id in one.order],
                "score": one.score if math.isfinite(one.score) else None,
                "ms_per_suggestion": round(one.ms_per_suggestion, 3),
            }
            for one in entry.searches
        ]
    return json.dumps({"budget": replays[0].yardstick.budget, "runs": runs}, indent=1)


def format_replays(replays: Sequence[Replay]) -> str:
    """Return a table of the replays of one recording: best found against evaluations."""
    first = replays[0]
    space, yardstick = first.recording.space, first.yardstick
    num_failed = sum(status is not Status.CORRECT for status in first.recording.statuses)
    searches = f"{len(first.searches)} searches" if len(first.searches) > 1 else "1 search"
    lines = [
        f"{first.recording.name}: {space.num_feasible} configurations, {num_failed} failed; "
        f"optimum {terminal_us(yardstick.optimum_us)}, median {terminal_us(yardstick.median_us)}",
        f"best found, over the optimum; the median of {searches}:",
    ]
    budget = yardstick.budget
    shown = [num for num in SHOWN if num < budget] + [budget]
    width = max(len("evaluations"), *(len(entry.sampler) for entry in replays))
    lines.append(f"  {'evaluations':{width}}  " + "  ".join(f"{num:>7}" for num in shown))
    for entry in replays:
        cells = [f"{entry.best_us(num) / yardstick.optimum_us:7.3f}" for num in shown]
        lines.append(f"  {entry.sampler:{width}}  " + "  ".join(cells))
    for entry in replays:
        scores = [one.score for one in entry.searches]
        near = []
        for share in NEAR:
            median, reached = entry.evaluations_within(share)
            count = f"{median:.0f}" if math.isfinite(median) else f"over {budget}"
            near.append(f"within {share:.0%}: {reached:.0%} of them, after {count} (median)")
        ms = statistics.mean(one.ms_per_suggestion for one in entry.searches)
        score = statistics.mean(scores)
        shown_score = "none, all are equally fast" if math.isnan(score) else f"{score:+.3f}"
        lines.append(
            f"{entry.sampler}: X{budget} {shown_score}; {'; '.join(near)}; "
            f"{ms:.1f} ms a suggestion"
        )
    lines.append(f"X{budget}: 0 as random search of what runs on average, 1 the optimum at once")
    return "\n".join(lines)
