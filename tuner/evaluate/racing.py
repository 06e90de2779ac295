"""Files raced against the baseline in fresh processes, which take turns."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import compress
from types import MappingProxyType

from tuner.errors import TunerError
from tuner.evaluate.asking import is_of_memory, require_memory, waits_for_memory
from tuner.evaluate.contender import Contender, Unedited, get_ready
from tuner.evaluate.exposed import MOST_PREEMPTED_PER_S
from tuner.evaluate.job_spec import JobSpec, too_fast
from tuner.evaluate.race import Race
from tuner.evaluate.race_sets import RaceSets, Ready, raise_if
from tuner.evaluate.raced_steps import race_steps, warm_up_steps
from tuner.evaluate.second_clock import SecondClock
from tuner.evaluate.timed_calls import TimedCalls
from tuner.evaluate.worker import Worker
from tuner.machine.turns import turns_of

__all__ = ["Racer"]

# Of samples from one process before the next one's turn; a GPU's scatter by a few in a thousand.
BURST_S, GPU_BURST_S = 0.05, 0.03
# Turns of each process, at least; further ones of slow calls say little, since processes differ by
# more than their turns do.
MIN_ROUNDS = 5
FEW_ROUNDS = 3  # on other data
MIN_BURST = 3  # samples of a turn, whose median counts
MAX_WARM_UPS = 12  # turns of each process before the race, unless two in a row agree
FEW_WARM_UPS = 2  # of processes that have raced before
WARM_UP_SAMPLES = 5
MOST_WARM_UP_S = 1.2  # of each process: slow calls are long enough to settle in fewer
# A call, and all around it, longer than the threads of the process before it stay awake: one that
# is not timed is enough ahead of a turn, two turns are enough to settle.
SLOW_S = 0.05
MIN_SETS = 3  # of processes, whatever the time: of two, an interval is hopelessly wide
DISTURBED_WAIT_S = 0.2
SHARE_OF_OTHERS = 0.25  # of the samples, once more, on each of the other data
STEPS_ON = "ordinary"  # the data of steps of training, where they are timed
NONE: Mapping[str, str] = MappingProxyType({})
STEADY = 0.05  # relative difference of two medians that agree


class Racer:
    """Races contenders in fresh processes, each with the baseline and all others beside it.

    Args:
        spec: the problem.
        ready: processes that were started before, as `RaceSets` takes them.
    """

    def __init__(self, spec: JobSpec, ready: Ready | None = None) -> None:
        self._spec = spec
        self._sets = RaceSets(spec, ready)
        self._is_gpu = spec.is_gpu
        self._files = Unedited(spec)
        self._turns = turns_of(spec.device)
        self._calls = TimedCalls()
        self._clock = SecondClock(self._calls, self._is_gpu)
        self._num_throttled = self._num_disturbed = self._num_shortages = 0
        self._preempted_per_s = 0.0  # of the last burst

    @property
    def _burst_s(self) -> float:
        return GPU_BURST_S if self._is_gpu else BURST_S

    def get_ready(self, contenders: Sequence[Contender]) -> None:
        """Let imports be over before a race begins; does not wait."""
        get_ready(self._spec, contenders, "baseline")

    def race(
        self,
        contenders: Sequence[Contender],
        *,
        num_processes: int,
        seconds: float,
        others: Mapping[str, str] = NONE,
        has_steps: bool = False,
        on_round: Callable[[float], None] = lambda _: None,
        until_s: float | None = None,
        goes_on: Callable[[int], bool] = lambda _: False,
    ) -> Race:
        """Time the baseline and contenders in turn, in that many fresh sets of processes.

        They are timed on the reference's weights as it is constructed, and on its inputs.

        What a contender's process tells of its times is compared with this process's clock, and
        with the physical floor; one output of calls that this process timed is judged, in a set
        of processes that nobody can foresee. Who is clearly slower than another contender in all
        of the first sets, and was judged, is in no further one. What is ours (the reference as
        torch.compile makes it) is in all of them, whatever it answers, and takes no steps of
        training.

        Args:
            contenders: all that are not ours must have been checked.
            num_processes: how often every process is started anew.
            seconds: of samples for each contender and set of processes.
            others: the data that each set races on as well, by their names, with the path of a
                file of tensors or ""; none where a GPU's memory does not hold them besides.
            has_steps: whether the first sets race steps of training as well.
            on_round: is given the share of the race that is over, after each turn of all.
            until_s: when it should be over, by `time.monotonic`; three sets are raced anyway.
            goes_on: whether one more set races, where those before leave open who is faster; it
                is asked after each from the last planned one on.

        Raises:
            WorkerError: a process failed, or what it reported cannot be believed; the message
                starts with the contender's name.
        """

        def race(others: Mapping[str, str]) -> Race:
            return self._race(
                contenders, num_processes, seconds, others, has_steps, on_round, until_s, goes_on
            )

        try:
            return race(others)
        except TunerError as error:
            if not (others and self._is_gpu and is_of_memory(error)):
                raise
        # Other data are as many bytes as the given ones, in each process.
        found = race(NONE)
        found.lacks_others = True
        return found

    @waits_for_memory
    def _race(
        self,
        contenders: Sequence[Contender],
        num_processes: int,
        seconds: float,
        others: Mapping[str, str],
        has_steps: bool,
        on_round: Callable[[float], None],
        until_s: float | None,
        goes_on: Callable[[int], bool],
    ) -> Race:
        race = Race([[] for _ in range(len(contenders) + 1)])
        self._num_shortages = self._num_throttled = self._num_disturbed = 0
        race.others = {name: Race([[] for _ in race]) for name in others}
        if has_steps:
            race.steps = Race([[] for _ in race])
        for contender in contenders:
            self._files.remember(contender)
        sure = num_processes if until_s is None else min(num_processes, MIN_SETS)
        judged = [secrets.randbelow(sure) for _ in contenders]
        lanes = list(range(1, len(race)))  # of those that are not clearly behind
        with closing(self._sets.each(contenders, num_processes, lanes)) as sets:
            for number, racers in sets:
                num_sets = max(num_processes, number + 1)
                active = [contenders[lane - 1] for lane in lanes]
                for racer in racers:  # no thread of one slows the turn of another
                    racer.rest_between_calls()
                with self._turns.shared():
                    self._given(racers)
                with ThreadPoolExecutor(len(racers)) as pool:  # torch.compile compiles in it
                    list(pool.map(lambda racer: self._burst(racer, 1), racers))
                require_memory(self._turns, self._num_shortages)

                def on_turn(share: float, before: int = number, of: int = num_sets) -> None:
                    on_round((before + 0.8 * share) / of)

                is_further = number >= num_processes  # whom all of these judge
                asked_now = [is_further or judged[lane - 1] == number for lane in lanes]
                self._race_set(race, racers, lanes, active, asked_now, seconds, others, on_turn)
                for contender in active:
                    raise_if(contender, self._files.edited(contender))
                theirs = [lane for lane in lanes if not contenders[lane - 1].is_ours]
                if number + 1 >= MIN_SETS and (behind := race.clearly_behind(theirs)):
                    lanes[:] = [n for n in lanes if n not in behind or judged[n - 1] > number]
                is_over = until_s is not None and time.monotonic() > until_s
                is_over = is_over and number + 1 >= MIN_SETS
                if number + 1 >= num_processes and not is_over:
                    is_over = not (race.leaves_open(theirs) and goes_on(number + 1))
                    num_sets += not is_over
                on_round((number + 1) / num_sets)
                if is_over:
                    break
        race.num_throttled, race.num_disturbed = self._num_throttled, self._num_disturbed
        race.num_shortages = self._num_shortages
        race.is_rough = self._calls.is_rough
        return race

    def _race_set(
        self,
        race: Race,
        racers: Sequence[Worker],
        lanes: Sequence[int],
        active: Sequence[Contender],
        asked_now: Sequence[bool],
        seconds: float,
        others: Mapping[str, str],
        on_turn: Callable[[float], None],
    ) -> None:
        """Let one set of processes race, and add what they reported.

        `active` are the contenders of `lanes`; those of `asked_now` are judged in this set. The
        device is held alone while something is timed, and shared while outputs are judged. Steps
        of training are raced on ordinary data where these are named, else on the given ones.
        """
        number = race.num_processes
        with self._turns.alone():
            turns = self._rounds(racers, seconds, on_round=on_turn)
            for lane, rounds in zip((0, *lanes), turns, strict=True):
                race.bursts[lane].append(rounds)
            self._check_clocks(race, racers, lanes, active, asked_now)
        with self._turns.shared():
            for racer, contender, is_asked in zip(racers[1:], active, asked_now, strict=True):
                if contender.is_ours and number == 0:
                    race.answer = self._calls.answer(racers[0], racer, self._sets.lends)
                if is_asked and not contender.is_ours:
                    refusal = self._calls.last_output(racers[0], racer, self._sets.lends)
                    raise_if(contender, refusal)
            self._judge_kept(racers, active)
            if number == 0:
                for place, (lane, contender) in enumerate(zip(lanes, active, strict=True), 1):
                    race.falls_back[lane] = not contender.is_ours and (
                        self._calls.is_own_path(racers[0], racers[place])
                    )
        if race.steps is not None and STEPS_ON not in others:
            self._race_steps(race.steps, racers, lanes, active, number)
        for name, path in others.items():
            other = race.others[name]
            with self._turns.shared():  # draws gigabytes, perhaps
                other.on = self._given(racers, name, path)
            with self._turns.alone():
                short_s = seconds * SHARE_OF_OTHERS
                turns = self._rounds(racers, short_s, FEW_WARM_UPS, FEW_ROUNDS)
                for lane, rounds in zip((0, *lanes), turns, strict=True):
                    other.bursts[lane].append(rounds)
                self._check_clocks(other, racers, lanes, active, asked_now)
            with self._turns.shared():
                self._judge_kept(racers, active)
            if race.steps is not None and name == STEPS_ON:
                self._race_steps(race.steps, racers, lanes, active, number)

    def _race_steps(
        self,
        steps: Race,
        racers: Sequence[Worker],
        lanes: Sequence[int],
        active: Sequence[Contender],
        number: int,
    ) -> None:
        """Race steps of training in a set of that number, on what was given last."""
        if number >= MIN_SETS:
            return
        takes_part = [True, *(not contender.is_ours for contender in active)]
        those = list(compress(racers, takes_part))
        with self._turns.shared():
            warm_up_steps(self._calls, those)
        their_lanes = list(compress((0, *lanes), takes_part))
        with self._turns.alone():
            race_steps(self._calls, steps, those, their_lanes, self._burst_s)

    def _check_clocks(
        self,
        race: Race,
        racers: Sequence[Worker],
        lanes: Sequence[int],
        active: Sequence[Contender],
        asked_now: Sequence[bool],
    ) -> None:
        """Raise where times that were reported in the last set cannot be true."""
        reported_us = [statistics.median(race[lane][-1]) for lane in (0, *lanes)]
        for place, contender in enumerate(active, 1):
            refusal = too_fast(reported_us[place], self._spec.impossible_us)
            if not refusal and asked_now[place - 1] and not contender.is_ours:
                is_bound_here = "file" not in contender.load
                refusal = self._clock.refusal(racers, reported_us, place, is_bound_here)
            raise_if(contender, refusal)

    def _given(self, racers: Sequence[Worker], name: str = "given", path: str = "") -> str:
        """Give all of them what they are timed on, by its name; return what it is in words."""
        self._calls.forget()
        return self._sets.give(racers, name, path)

    def _judge_kept(self, racers: Sequence[Worker], contenders: Sequence[Contender]) -> None:
        """Raise where the output of a call that was timed is wrong."""
        for racer, contender in zip(racers[1:], contenders, strict=True):
            refusal = "" if contender.is_ours else self._calls.kept_outputs(racers[0], racer)
            raise_if(contender, refusal)

    def _burst(self, racer: Worker, num_samples: int, *, is_slow: bool = False) -> list[float]:
        data = self._calls.burst(racer, num_samples, is_slow=is_slow).data
        self._num_throttled += data["num_throttled"]
        self._preempted_per_s = data["preempted_per_s"]
        self._num_shortages = max(self._num_shortages, data["num_shortages"])
        return list(data["samples_us"])

    def _rounds(
        self,
        racers: Sequence[Worker],
        seconds: float,
        max_warm_ups: int = MAX_WARM_UPS,
        min_rounds: int = 0,
        on_round: Callable[[float], None] = lambda _: None,
    ) -> list[list[list[float]]]:
        """Let processes take turns; a round is one burst of samples from each.

        A round in which other programs took the processor is repeated after a moment, unless
        that was so too often: then the machine is busy all the time.
        """
        # Warm up until two turns of each agree: allocators and huge pages settle slowly. The last
        # turn sets the burst's length: short, so that drift hits all alike.
        before, is_slow = [0.0] * len(racers), False
        begun_s = time.perf_counter()
        for number in range(max_warm_ups):
            start_s = time.perf_counter()
            is_long = is_slow or start_s - begun_s > MOST_WARM_UP_S * len(racers)
            if number >= FEW_WARM_UPS and is_long:
                break
            num_samples = MIN_BURST if is_slow else WARM_UP_SAMPLES
            now = [
                statistics.median(self._burst(racer, num_samples, is_slow=is_slow))
                for racer in racers
            ]
            sample_s = (time.perf_counter() - start_s) / (num_samples * len(racers))
            is_slow = sample_s >= SLOW_S
            if all(abs(n - b) <= STEADY * n for n, b in zip(now, before, strict=True)):
                break
            before = now
        num_samples = max(MIN_BURST, min(20, round(self._burst_s / sample_s)))
        num_rounds = max(min_rounds or MIN_ROUNDS, round(seconds / (num_samples * sample_s)))
        rounds: list[list[list[float]]] = [[] for _ in racers]
        for number in range(num_rounds):
            turn, is_disturbed = self._round(racers, num_samples, number, is_slow=is_slow)
            while is_disturbed and self._num_disturbed < num_rounds:
                self._num_disturbed += 1
                time.sleep(DISTURBED_WAIT_S)
                turn, is_disturbed = self._round(racers, num_samples, number, is_slow=is_slow)
            for lane, burst in zip(rounds, turn, strict=True):
                lane.append(burst)
            on_round((number + 1) / num_rounds)
        return rounds

    def _round(
        self, racers: Sequence[Worker], num_samples: int, number: int, *, is_slow: bool
    ) -> tuple[list[list[float]], bool]:
        """Return one burst of each, and whether one was disturbed."""
        order = list(range(len(racers)))
        bursts: list[list[float]] = [[] for _ in racers]
        is_disturbed = False
        for place in reversed(order) if number % 2 else order:
            bursts[place] = self._burst(racers[place], num_samples, is_slow=is_slow)
            # A GPU's own clock hardly sees what becomes of the host.
            is_disturbed |= self._preempted_per_s > MOST_PREEMPTED_PER_S and not self._is_gpu
        return bursts, is_disturbed
