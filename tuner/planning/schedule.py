"""How the time of a run is shared: search, checks, exports and races, in one plan that is shown.

A run without `time:` takes what its effort says. With it, what would not fit is made smaller in
this order: fewer finalists, fewer processes of the race, less time of samples in each; then the
search gets the rest. No probe of a check is ever left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tuner.config.run_config import RunConfig
from tuner.config.schema import StopSection
from tuner.trial import Language

__all__ = [
    "COMPILE_S", "MIN_PROCESSES", "START_S", "Costs", "Schedule", "check_s_on_cpu",
    "scheduled",
]  # fmt: skip

MIN_PROCESSES = 3  # of two, an interval over processes is hopelessly wide
MIN_SAMPLES_S = 0.2  # of samples from each process of a race
MAX_VERIFICATION = 0.6  # of the time, before finalists and processes become fewer
QUICK_SEARCH_S = 10.0  # where no earlier run has found anything
# A quick search ends where nothing is left to find: the kernels that win may be 12 of 166
# configurations.
QUICK_STOP = StopSection(within=0.01, confidence=0.95)
MIN_SEARCH_S = 2.0
REPORT_S = 3.0
# Compiling an exported file with PyTorch's headers: 12 s to 20 s of one slow core for C++, 6 s to
# 8 s beside an H200 for a CUDA kernel; Triton compiles at its first call.
COMPILE_S: dict[Language, float] = {"cpp": 8.0, "cuda": 12.0, "triton": 4.0}
CHECK_S = 8.0  # until one was seen, or PyTorch's own time is known
# Of a check on a CPU: what its processes take anyhow, and for how many calls of PyTorch's it takes
# as long: of all rows, and of as few as most questions have. 24 to 170 s of ten modules that took
# 6 to 77 ms a call were 0.5 to 1.9 times what this says.
ANYHOW_S, WHOLE_CALLS, REDUCED_CALLS = 10.0, 375, 12_500
REDUCED_NUMBERS, LEAST_ROWS = 2**20, 2.5  # of a call of few rows
# Of a set of processes: forks, contexts, what they load, what is kept of the calls, their ends.
START_S = {"cpu": 1.5, "cuda": 3.5}
WARM_UP_CALLS, WARM_UP_S = 10, 1.2  # of each process of a set: no more than either
LEAST_CALLS = 24  # of each process of a set, that count
MORE_PROCESSES = 2  # where those of a race scatter too much to tell


@dataclass(frozen=True, slots=True)
class Costs:
    """What the parts of a verification take, as far as they are known.

    `check_s` is that of all probes of one contender, `call_s` of one call of the baseline with
    all that is done around it; `num_cores` compile side by side. `start_s` is of one set of
    processes.
    """

    compile_s: float = COMPILE_S["cpp"]
    check_s: float = CHECK_S
    num_cores: int = 1
    call_s: float = 0.01
    start_s: float = START_S["cpu"]
    batches_s: float = 0.0
    num_sizes: int = 0  # at which a file of several is raced, once it is compiled and checked
    num_others: int = 1  # of the data that it is raced on besides the given ones

    def set_s(self, num_finalists: int, samples_s: float) -> float:
        """Return the seconds of one set of processes of a race, the baseline's among them."""
        counted_s = max(samples_s, LEAST_CALLS * self.call_s)
        warm_up_s = min(WARM_UP_S, WARM_UP_CALLS * self.call_s)
        # Further data take a quarter of it each, and there are waits between turns.
        counted_s *= 1.25 + 0.25 * self.num_others
        return self.start_s + (num_finalists + 1) * (counted_s + warm_up_s + 0.3)


def check_s_on_cpu(call_s: float, num_bytes: float, rows: int) -> float:
    """Return the seconds of a check on a CPU, as far as they can be known before one.

    Args:
        call_s: of one call of PyTorch's, in seconds.
        num_bytes: that a call takes and makes at least.
        rows: of its inputs.
    """
    numbers = max(1.0, num_bytes / 2)  # of float32, with those in between
    share = min(1.0, max(REDUCED_NUMBERS / numbers, LEAST_ROWS / rows))
    return ANYHOW_S + call_s * (WHOLE_CALLS + share * REDUCED_CALLS)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a run is going to do, and what that takes by the `costs`.

    `search_s` is the search's time (None: as the config's `search.timeout` says); `time_s` what
    was asked for in all, None without a limit. `reductions` say what was made smaller, and why.
    What does not fit then takes longer than was asked for, and says so.
    """

    effort: str
    num_finalists: int
    num_processes: int
    samples_s: float
    costs: Costs
    search_s: float
    time_s: float | None = None
    reductions: tuple[str, ...] = ()
    left_s: float | None = None  # of that, when it was fitted
    more_processes: int = 0  # that race where those that are planned scatter too much to tell
    is_of_pytorch: bool = False  # whose race is on the given data alone, without steps

    @property
    def of_pytorch(self) -> Schedule:
        """The same for PyTorch's own modules: what their race shows is all but known."""
        return replace(
            self, num_finalists=1, num_processes=MIN_PROCESSES, more_processes=0,
            is_of_pytorch=True,
        )  # fmt: skip

    def raced_on(
        self, others: Mapping[str, str], has_steps: bool
    ) -> tuple[Mapping[str, str], bool]:
        """Return the data that a race is on as well, and whether steps of training are raced."""
        return ({}, False) if self.is_of_pytorch else (others, has_steps)

    @property
    def stop(self) -> StopSection | None:
        """When a search ends before its time, unless its config says when."""
        return QUICK_STOP if self.effort == "quick" else None

    @property
    def compile_s(self) -> float:
        """Seconds in which the finalists' files are compiled."""
        waves = math.ceil(self.num_finalists / max(1, self.costs.num_cores))
        return waves * self.costs.compile_s

    @property
    def race_s(self) -> float:
        """Seconds of the race of all finalists."""
        return self.num_processes * self.costs.set_s(self.num_finalists, self.samples_s)

    @property
    def verification_s(self) -> float:
        """Seconds from the search's end to the verified file."""
        each_s = self.costs.batches_s + self.costs.check_s
        found_s = self.compile_s + self.num_finalists * each_s + self.race_s
        if not self.costs.num_sizes:
            return found_s
        one_s = self.num_processes * self.costs.set_s(1, self.samples_s)
        return found_s + self.costs.compile_s + each_s + (1 + self.costs.num_sizes) * one_s

    @property
    def words(self) -> str:
        """The plan in one line, for whoever waits."""
        s = "s" if self.num_finalists > 1 else ""
        total_s = self.search_s + self.verification_s + REPORT_S
        parts = [
            f"{self.num_finalists} finalist{s}: compile about {self.compile_s:.0f} s",
            f"check {self.num_finalists} x {self.costs.check_s:.0f} s",
            f"race {self.num_processes} sets of processes, {self.race_s:.0f} s",
            f"about {total_s:.0f} s from here",
        ]
        if self.costs.batches_s:
            parts.insert(1, f"other rows {self.num_finalists} x {self.costs.batches_s:.0f} s")
        search = [f"search {self.search_s:.0f} s"] if self.search_s else []
        late_s = 0.0 if self.left_s is None else total_s - self.left_s
        late = f": {late_s:.0f} s more than the time asked for, since no check is left out"
        return f"plan ({self.effort}): {', '.join([*search, *parts])}{late if late_s > 1 else ''}"

    def fitted(self, left_s: float, *, is_searched: bool = False) -> Schedule:
        """Return the schedule for the time that is left.

        Args:
            left_s: seconds until the verified file should be there.
            is_searched: the search is over, so that all of it is for the verification.
        """
        asked_s, left_s = max(0.0, left_s), max(0.0, left_s - REPORT_S)
        most_s = left_s if is_searched else MAX_VERIFICATION * left_s
        now, reductions = self, list(self.reductions)
        num_finalists = now.num_finalists
        while now.verification_s > most_s and num_finalists > 1:
            num_finalists -= 1
            now = replace(now, num_finalists=num_finalists)
        if now.num_finalists != self.num_finalists:
            reductions.append(f"{num_finalists} of {self.num_finalists} finalists")
        num_processes = now.num_processes
        while now.verification_s > most_s and num_processes > MIN_PROCESSES:
            num_processes -= 1
            now = replace(now, num_processes=num_processes)
        if now.num_processes != self.num_processes:
            reductions.append(f"{num_processes} of {self.num_processes} sets of processes")
        if now.verification_s > most_s and now.samples_s > MIN_SAMPLES_S:
            now = replace(now, samples_s=MIN_SAMPLES_S)
            reductions.append(f"{MIN_SAMPLES_S:g} s of samples of {self.samples_s:g} s")
        search_s = min(self.search_s, max(MIN_SEARCH_S, left_s - now.verification_s))
        return replace(
            now,
            search_s=0.0 if is_searched else search_s,
            left_s=asked_s,
            reductions=tuple(dict.fromkeys(reductions)),
        )


def scheduled(config: RunConfig, costs: Costs) -> Schedule:
    """Return what a config asks for, before any time has passed."""
    measure, search_s = config.measure, config.search.timeout_s
    costs = replace(costs, num_others=len(config.others))
    num_finalists, num_processes = measure.num_finalists, measure.num_processes
    samples_s = measure.finalists_s
    if config.effort == "quick":
        num_finalists, num_processes = 1, MIN_PROCESSES
        samples_s, search_s = min(samples_s, 0.5), min(search_s, QUICK_SEARCH_S)
    if config.effort == "thorough":
        num_finalists, num_processes = max(num_finalists, 5), max(num_processes, 9)
        samples_s = max(samples_s, 1.0)
    return Schedule(
        config.effort, num_finalists, num_processes, samples_s, costs, search_s, config.time_s,
        more_processes=MORE_PROCESSES,
    )  # fmt: skip
