"""An exported file beside the reference at many numbers of rows, in turns, in one process."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tuner.by_batch import AtBatch, Way, batches_of, rows_won
from tuner.check.exercise import outputs_of
from tuner.errors import ProblemError
from tuner.evaluate.exposed import ExposedTimer
from tuner.evaluate.in_turns import FEW_CALLS, FEW_ROUNDS, LONG_US, InTurns, deciding, numbered
from tuner.evaluate.steps import step_of
from tuner.evaluate.timed import WEIGHT_SEED
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
SHARE_OF_ORDINARY = 0.25  # of the time


def _in_turn(tuned_rows: int, tuned: Sequence[int]) -> list[int]:
    """Return the numbers of rows that are timed: from the tuned size down, then from it up."""
    rows = batches_of(tuned_rows, tuned)
    fewer = [number for number in rows if number < tuned_rows]
    return [*reversed(fewer), *rows[len(fewer) :]]


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
                    (call_us,) = ExposedTimer(self.device, 1).samples(numbered(theirs), 1)
                self._row_s[way] = call_us / 1e6 / rows
        return rows

    def measured(
        self,
        ways: Sequence[Way],
        most_s: float,
        tuned: Sequence[int] = (),
        *,
        on_ordinary: bool = False,
    ) -> list[AtBatch]:
        """Time one number of rows after the other, from the tuned size down, while there is time.

        Below the fewest rows that were tuned it ends where PyTorch wins, as do a file's kernels;
        then more rows follow. What is left of the time goes to those that decide from where on
        kernels are taken. What memory has no room for, or the reference refuses, is left out.

        Args:
            ways: what is timed.
            most_s: seconds for all; what is compiled at first calls does not count.
            tuned: numbers of rows that are timed beside powers of two.
            on_ordinary: the fewest rows at which kernels win are timed on ordinary data as well.
        """
        tuned_rows = self._problem.num_rows()
        assert tuned_rows is not None
        found: list[AtBatch] = []
        kept_s = SHARE_OF_ORDINARY * most_s if on_ordinary else 0.0
        unspent_s = most_s - kept_s
        for num_ways in range(len(ways), 0, -1):
            way = ways[-num_ways]
            num_kernels = len(self._kernels.get(way, (0,)))
            left_s = unspent_s / num_ways
            last_s = self._row_s.get(way, 0.0)  # what a turn of one row took
            unspent_s -= left_s
            begun_s = time.perf_counter()
            ahead = self._ahead(tuned_rows, left_s) if way == "step" else []
            known = [*ahead]  # of fewer rows than the tuned size, and steps of it
            left_s = max(left_s / 2, left_s - (time.perf_counter() - begun_s))
            is_lost = False  # at the fewest rows that were timed, and so at fewer
            for rows in _in_turn(tuned_rows, tuned):
                if (ahead and rows == tuned_rows) or (is_lost and rows < tuned_rows):
                    continue
                if (1 + num_kernels) * LEAST_ROUNDS * last_s * rows > left_s:
                    if rows < tuned_rows:
                        continue
                    break
                if rows > tuned_rows and not self._has_room(rows / tuned_rows):
                    break
                try:
                    calls = self.calls(rows, way)
                    begun_s = time.perf_counter()
                    is_slow = 4 * FEW_ROUNDS * last_s * rows > left_s
                    new = self._turns(rows, way, calls, LEAST_ROUNDS if is_slow else FEW_ROUNDS)
                except (RuntimeError, ValueError, ProblemError) as error:
                    if rows == tuned_rows:
                        self.failures[way] = one_line(str(error), 200)
                    if rows >= tuned_rows:  # memory; for more rows there is less
                        break
                    continue
                if rows < tuned_rows or (way == "step" and rows == tuned_rows):
                    known += new  # a race decides about calls at the tuned size, not about steps
                else:
                    found += [at for turns in new for at in turns.all_found]
                if rows < min([tuned_rows, *tuned]):
                    is_lost = any(turns.is_lost for turns in new)
                left_s -= time.perf_counter() - begun_s
                last_s = sum(turns.found.baseline_us for turns in new) / 1e6 / rows
            until_s = time.perf_counter() + left_s
            with self.arithmetic(way):
                while (turns := deciding(known, tuned_rows)) and time.perf_counter() < until_s:
                    turns.take(FEW_ROUNDS)
            found += [at for turns in known for at in turns.all_found]
            unspent_s += max(0.0, until_s - time.perf_counter())
        if on_ordinary:
            found += self._on_ordinary(ways, min([tuned_rows, *tuned]), found, unspent_s + kept_s)
        return found

    def _on_ordinary(
        self, ways: Sequence[Way], tuned_rows: int, found: Sequence[AtBatch], most_s: float
    ) -> list[AtBatch]:
        """Time the fewest rows at which kernels win on ordinary data, and more where they lose."""
        self.become_trained()
        more: list[AtBatch] = []
        for num_ways, way in zip(range(len(ways), 0, -1), ways, strict=True):
            left_s = most_s / num_ways
            for rows in rows_won(found, tuned_rows, way):
                try:
                    calls = self.calls(rows, way, self._ordinary_at(rows))
                    begun_s = time.perf_counter()
                    new = self._turns(rows, way, calls, FEW_ROUNDS, ORDINARY)
                except (RuntimeError, ValueError, ProblemError):  # of this data alone
                    break
                until_s = begun_s + left_s
                with self.arithmetic(way):
                    while (turns := deciding(new)) and time.perf_counter() < until_s:
                        turns.take(FEW_ROUNDS)
                more += [at for turns in new for at in turns.all_found]
                spent_s = time.perf_counter() - begun_s
                left_s, most_s = left_s - spent_s, most_s - spent_s
                if left_s <= 0.0 or all(turns.found.is_won for turns in new):
                    break
        return more

    def _ordinary_at(self, rows: int) -> Distribution:
        """Return normal inputs, or given ones where the reference makes NaN or Inf of those."""
        import torch

        inputs = self._problem.make_inputs(
            WEIGHT_SEED, distribution="normal", batch=rows, device=self.device
        )
        with torch.no_grad():
            made = outputs_of(self._reference(*inputs))
        return "normal" if all(bool(y.isfinite().all()) for y in made) else "as_given"

    def _ahead(self, rows: int, most_s: float) -> list[InTurns]:
        """Return a few turns of steps of the tuned size, where these take no longer than that.

        What fewer rows say of them is little, and a file whose steps turn out to be slower when
        it is raced is checked and raced once more without them.
        """
        try:
            calls = self.calls(rows, "step")
            with self.arithmetic("step"):
                (step_us,) = ExposedTimer(self.device, 1).samples(numbered(calls[0]), 1)
            is_long = step_us >= LONG_US
            num_calls = ((1 if is_long else FEW_CALLS) + LEAST_ROUNDS) * len(calls)
            if is_gpu(self.device) and not is_long:  # and on an idle device
                num_calls += (FEW_CALLS + 3 * LEAST_ROUNDS) * len(calls)
            if num_calls * step_us / 1e6 > most_s:
                return []
            return self._turns(rows, "step", calls, LEAST_ROUNDS)
        except (RuntimeError, ValueError, ProblemError):  # which is looked into later
            return []

    def become_trained(self) -> None:
        """Give both weights as after training, the same ones."""
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
            WEIGHT_SEED, distribution=distribution, batch=rows, device=self.device
        )
        theirs, mine = (
            step_of(model) if way == "step" else _call_of(model)
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
                self._too_long[way] = (math.ceil(rows * MOST_CALL_S / took_s), why)
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

        given = self._problem.make_inputs(WEIGHT_SEED, device=self.device)
        with torch.no_grad():
            made = outputs_of(self._reference(*given))
        num_bytes = sum(getattr(x, "nbytes", 0) for x in (*given, *made))
        room = platform_of(self.device).free_bytes(self.device)
        room = usable_memory_bytes() if room is None else room
        return HELD_COPIES * times * num_bytes < SHARE_OF_MEMORY * room
