"""An exported file beside the reference at many numbers of rows, in turns, in one process."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tuner.by_batch import AtBatch, Way
from tuner.check.calls.exercise import outputs_of
from tuner.errors import ProblemError
from tuner.evaluate.exposed import ExposedTimer
from tuner.evaluate.in_turns import (
    FEW_ROUNDS,
    LONG_US,
    InTurns,
    deciding,
    least_us_of,
    numbered,
    seconds_of_turns,
)
from tuner.evaluate.rows_left import RowsLeft
from tuner.evaluate.steps import Upstream, step_of
from tuner.evaluate.timed import INPUT_SEED, WEIGHT_SEED
from tuner.machine.host import usable_memory_bytes
from tuner.machine.platforms import is_gpu, platform_of
from tuner.problem.accuracy import Accuracy, math_mode
from tuner.problem.draws import Distribution
from tuner.problem.modes import put_into
from tuner.problem.reference import Problem
from tuner.wording import one_line

if TYPE_CHECKING:
    import torch

__all__ = ["BatchTimes"]

LEAST_ROUNDS = 3  # where a call takes long
MOST_CALL_S = 4.0  # of PyTorch's own: one that takes longer is not timed
HELD_COPIES = 10  # of inputs and outputs: two modules' gradients and what lies between
SHARE_OF_MEMORY = 0.3
ORDINARY = "ordinary"  # data: weights as after training, normal inputs


def _seconds(call: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def _call_of(model: torch.nn.Module) -> Callable[[Sequence[object]], object]:
    return lambda inputs: model(*inputs)


class BatchTimes:
    """A file's module beside the reference's, with the same weights, at any number of rows.

    Args:
        problem: of the reference, in the mode that is tuned.
        made: returns the file's module, with weights of its own.
        device: as PyTorch names it.
        accuracy: whose arithmetic the reference is run in.
        take: lets the file take one of its kernels at any number of rows, where it has several.
        kernels: which there are, by way to call it.
    """

    def __init__(
        self,
        problem: Problem,
        made: Callable[[], torch.nn.Module],
        device: str,
        accuracy: Accuracy,
        take: Callable[[int], None] = lambda _: None,
        kernels: Mapping[Way, Sequence[int]] | None = None,
    ) -> None:
        self.device = device
        self._take, self._kernels = take, kernels or {}
        self._problem, self._accuracy = problem, accuracy
        self._reference = problem.make_model(WEIGHT_SEED, device, is_quick=True)
        self._file = put_into(made().to(device), problem.mode)
        self._file.load_state_dict(self._reference.state_dict())
        self.failures: dict[str, str] = {}  # by way: why it was not timed; "" without gradients
        self._too_long: dict[Way, tuple[int, str]] = {}  # from so many rows on, and how long
        self._row_s: dict[Way, float] = {}  # of PyTorch's own call at the tuned size
        self._is_trained = False
        self.refuses_one = False  # row, as norms over a batch do

    def get_ready(self, ways: Sequence[Way]) -> int:
        """Call both at the tuned size, which compiles what is compiled then; return its rows.

        What fails, `measured` will say.
        """
        rows = self._problem.num_rows()
        assert rows is not None
        for way in ways:
            with suppress(RuntimeError, ValueError, ProblemError):
                theirs = self.calls(rows, way)[0]
                with self.arithmetic(way):
                    call_us = least_us_of(numbered(theirs), self.device)
                self._row_s[way] = call_us / 1e6 / rows
        return rows

    def measured(
        self,
        ways: Sequence[Way],
        most_s: float,
        tuned: Sequence[int] = (),
        fixed: Sequence[Way] = (),
    ) -> list[AtBatch]:
        """Time one number of rows after the other, while there is time.

        First from where on kernels win, then the tuned size and more rows, then what lies between
        (`RowsLeft`). What is left of the time goes to those that decide from where on kernels are
        taken. What memory has no room for, the reference refuses, or would take more than half of
        what is left, is left out.

        Args:
            ways: what is timed.
            most_s: seconds for all; what is compiled at first calls does not count.
            tuned: numbers of rows that are timed beside powers of two.
            fixed: ways in which the file has kernels at the tuned size alone, and is timed there.
        """
        tuned_rows = self._problem.num_rows()
        assert tuned_rows is not None
        found: list[AtBatch] = []
        unspent_s = most_s
        for num_ways in range(len(ways), 0, -1):
            way = ways[-num_ways]
            left_s = unspent_s / num_ways
            unspent_s -= left_s
            begun_s = time.perf_counter()
            ahead = self._ahead(tuned_rows, left_s) if way == "step" else []
            known = [*ahead]  # of fewer rows than the tuned size, and steps of it
            left_s = max(left_s / 2, left_s - (time.perf_counter() - begun_s))
            if way in self._too_long:
                self.failures[way] = self._too_long[way][1]
            row_s = self._row_s.get(way, 0.0)
            rows_left = RowsLeft(tuned_rows, tuned, row_s, is_fixed=way in fixed)
            left_s -= self._below(way, rows_left, rows_left.first, known, left_s)
            for rows in rows_left.above:
                if ahead and rows == tuned_rows:
                    continue
                call_s = self._row_s.get(way, 0.0) * rows
                num_rounds = self._rounds(way, call_s, left_s / 2)
                # Where the device waits for the host, which no race shows.
                is_short = is_gpu(self.device) and call_s < LONG_US / 1e6
                if rows == tuned_rows and is_short:
                    num_rounds = num_rounds or LEAST_ROUNDS
                has_room = rows == tuned_rows or self._has_room(rows / tuned_rows)
                if not (num_rounds and has_room):
                    break
                try:
                    new, spent_s = self._timed(rows, way, num_rounds)
                except (RuntimeError, ValueError, ProblemError) as error:
                    if rows == tuned_rows:
                        self.failures[way] = one_line(str(error), 200)
                    break  # memory; for more rows there is less
                left_s -= spent_s
                if way == "step" and rows == tuned_rows:
                    known += new  # a race decides about calls at the tuned size, not about steps
                else:
                    found += [at for turns in new for at in turns.all_found]
            left_s -= self._below(way, rows_left, rows_left.between, known, left_s)
            until_s = time.perf_counter() + left_s
            self._decide(known, way, until_s, tuned_rows)
            found += [at for turns in known for at in turns.all_found]
            unspent_s += max(0.0, until_s - time.perf_counter())
        return found

    def _below(
        self,
        way: Way,
        rows_left: RowsLeft,
        following: Callable[[], int | None],
        known: list[InTurns],
        most_s: float,
    ) -> float:
        """Time one number of rows after the other, adding to `known`; return the seconds."""
        left_s = most_s
        while (rows := following()) is not None:
            num_rounds = self._rounds(way, rows_left.expected_s(rows), left_s / 2)
            if not num_rounds:
                rows_left.drop(rows)
                continue
            try:
                new, spent_s = self._timed(rows, way, num_rounds)
            except (RuntimeError, ValueError, ProblemError):
                rows_left.drop(rows)
                is_refusal = bool(known) and way not in self._too_long  # more rows are taken
                self.refuses_one |= rows == 1 and is_refusal
                continue
            known += new
            left_s -= spent_s
            call_s = new[0].found.baseline_us / 1e6
            rows_left.timed(rows, call_s, is_lost=any(turns.is_lost for turns in new))
            self._row_s.setdefault(way, call_s / rows)
        return most_s - left_s

    def on_ordinary(self, rows: int, way: Way, most_s: float) -> list[AtBatch]:
        """Time both once more, with weights as after training, which they keep, on normal inputs.

        Given inputs stand in for those of which the reference makes NaN, Inf or an error.
        Nothing where it would take longer than that.
        """
        num_rounds = self._rounds(way, self._row_s.get(way, 0.0) * rows, most_s)
        if not num_rounds:
            return []
        until_s = time.perf_counter() + most_s
        self.become_trained()
        with self.arithmetic(way):
            distribution = self._ordinary_at(rows)
        new, _ = self._timed(rows, way, num_rounds, distribution, ORDINARY)
        self._decide(new, way, until_s)
        return [at for turns in new for at in turns.all_found]

    def _ordinary_at(self, rows: int) -> Distribution:
        import torch

        inputs = self._problem.make_inputs(
            INPUT_SEED, distribution="normal", batch=rows, device=self.device
        )
        try:
            with torch.no_grad():
                made = self._problem.call(self._reference, inputs)
        except ProblemError:
            return "as_given"
        return "normal" if all(bool(y.isfinite().all()) for y in made) else "as_given"

    def _timed(
        self,
        rows: int,
        way: Way,
        num_rounds: int,
        distribution: Distribution = "as_given",
        data: str = "",
    ) -> tuple[list[InTurns], float]:
        """Return turns that were begun and the seconds they took; raises as `calls`.

        What first calls load or compile is none of that time.
        """
        calls = self.calls(rows, way, distribution)
        begun_s = time.perf_counter()
        new = self._turns(rows, way, calls, num_rounds, data)
        return new, time.perf_counter() - begun_s

    def _rounds(self, way: Way, call_s: float, most_s: float) -> int:
        """Return how many turns there is time for, if PyTorch's call takes so long; 0 for none."""
        num_calls = 1 + len(self._kernels.get(way, (0,)))
        for num_rounds in (FEW_ROUNDS, LEAST_ROUNDS):
            needed_s = seconds_of_turns(call_s, num_calls, num_rounds, is_gpu=is_gpu(self.device))
            if needed_s <= most_s:
                return num_rounds
        return 0

    def _decide(
        self, known: Sequence[InTurns], way: Way, until_s: float, tuned_rows: int = 0
    ) -> None:
        """Take more turns of what decides and is not clear, while there is time."""
        with self.arithmetic(way):
            while (turns := deciding(known, tuned_rows)) and time.perf_counter() < until_s:
                turns.take(FEW_ROUNDS)

    def _ahead(self, rows: int, most_s: float) -> list[InTurns]:
        """Return a few turns of steps of the tuned size, where these take no longer than that.

        What fewer rows say of them is little, and a file whose steps turn out to be slower when
        it is raced is checked and raced once more without them.
        """
        try:
            calls = self.calls(rows, "step")
            with self.arithmetic("step"):
                (step_us,) = ExposedTimer(self.device, 1).samples(numbered(calls[0]), 1)
            if not self._rounds("step", step_us / 1e6, most_s):
                return []
            return self._turns(rows, "step", calls, LEAST_ROUNDS)
        except (RuntimeError, ValueError, ProblemError):  # which is looked into later
            return []

    def become_trained(self) -> None:
        """Give both weights as after training, the same ones, once."""
        if self._is_trained:
            return
        self._is_trained = True
        for model in (self._reference, self._file):
            self._problem.randomise(model, WEIGHT_SEED, "trained")

    def calls(
        self, rows: int, way: Way, distribution: Distribution = "as_given"
    ) -> list[Callable[[], object]]:
        """Return the reference's call and each kernel's, which were made once; see `arithmetic`.

        Raises:
            ProblemError: there are no such inputs.
            RuntimeError: memory ran out, PyTorch takes too long (the gradient of a product of a
                row with a zero: some 10 s), or nothing has gradients (then without a message).
            ValueError: the reference takes no such inputs.
        """
        most_rows, why = self._too_long.get(way, (rows + 1, ""))
        if rows >= most_rows:
            raise RuntimeError(why)
        inputs = self._problem.make_inputs(
            INPUT_SEED, distribution=distribution, batch=rows, device=self.device
        )
        upstream = Upstream()
        theirs, mine = (
            step_of(model, upstream) if way == "step" else _call_of(model)
            for model in (self._reference, self._file)
        )
        kernels = self._kernels.get(way, (0,))
        functions = [theirs, *(self._by(kernel, mine) for kernel in kernels)]
        calls: list[Callable[[], object]]
        calls = [functools.partial(function, inputs) for function in functions]
        with self.arithmetic(way):
            took_s = _seconds(calls[0])
            if MOST_CALL_S < took_s < 4 * MOST_CALL_S:  # a first call may import or compile
                took_s = _seconds(calls[0])
            if took_s > MOST_CALL_S:
                why = f"PyTorch's own takes {took_s:.0f} s for {rows} rows: too long to be timed"
                # Where fewer rows take as long, nothing is tried a third time.
                few = 0 if way in self._too_long else math.ceil(rows * MOST_CALL_S / took_s)
                self._too_long[way] = (few, self._too_long.get(way, (0, why))[1])
                self._row_s.setdefault(way, took_s / rows)
                raise RuntimeError(why)
            for call in calls[1:]:
                call()
        return calls

    def _by(
        self, kernel: int, function: Callable[[Sequence[object]], object]
    ) -> Callable[[Sequence[object]], object]:
        """Return a call of the file that takes one of its kernels."""
        if not self._kernels:
            return function

        def call(inputs: Sequence[object]) -> object:
            self._take(kernel)
            return function(inputs)

        return call

    def _turns(
        self,
        rows: int,
        way: Way,
        calls: Sequence[Callable[[], object]],
        num_rounds: int,
        data: str = "",
    ) -> list[InTurns]:
        """Return turns that were begun: so many, on a GPU of an idle device too if it matters."""
        kinds = (False, True) if is_gpu(self.device) else (False,)
        found: list[InTurns] = []
        with self.arithmetic(way):
            for is_idle in kinds:
                if found and found[0].is_long:
                    break
                turns = InTurns(
                    calls, self.device, num_rows=rows, way=way, is_idle=is_idle,
                    kernels=self._kernels.get(way, (0,)), data=data,
                )  # fmt: skip
                turns.take(num_rounds)
                found.append(turns)
        return found

    @contextmanager
    def arithmetic(self, way: Way) -> Iterator[None]:
        """Have gradients for steps alone, the way's mode and the accuracy class's arithmetic."""
        import torch

        parts = [part for model in (self._reference, self._file) for part in model.modules()]
        modes = [part.training for part in parts]
        for part in parts if way == "eval" else ():
            part.training = False
        try:
            with torch.set_grad_enabled(way == "step"), math_mode(self._accuracy):
                yield
        finally:
            for part, mode in zip(parts, modes, strict=True):
                part.training = mode

    def _has_room(self, times: float) -> bool:
        """Whether memory holds so many times the inputs and outputs of the tuned size."""
        import torch

        given = self._problem.make_inputs(INPUT_SEED, device=self.device)
        with torch.no_grad():
            made = outputs_of(self._reference(*given))
        num_bytes = sum(getattr(x, "nbytes", 0) for x in (*given, *made))
        room = platform_of(self.device).free_bytes(self.device)
        room = usable_memory_bytes() if room is None else room
        return HELD_COPIES * times * num_bytes < SHARE_OF_MEMORY * room
