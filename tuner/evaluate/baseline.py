"""The baseline's role in a race: the reference, timed beside contenders, judges their outputs."""

from __future__ import annotations

import json
import time

from tuner.check.calls import crossing
from tuner.check.judge.expected import Expected
from tuner.evaluate.child import Answer
from tuner.evaluate.giving import Giver
from tuner.evaluate.kept import wrong_element
from tuner.evaluate.oracle import Oracle
from tuner.evaluate.timed import Timed
from tuner.machine import gpu_memory
from tuner.problem.accuracy import math_mode
from tuner.problem.timed_data import GIVEN
from tuner.trial import to_json

__all__ = ["Baseline"]

AS_CONSTRUCTED = "the reference's own"  # values, in words
FEWEST_JUDGED = 3  # timed calls of one contender in one set of processes, however slow
JUDGED_S = 0.3  # then no further one is begun


class Baseline(Giver):
    """The reference that contenders are raced against."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle, to_many=True)
        self._problem = oracle.problem
        self._is_rough = False  # what timed calls are compared with
        self._timed = Timed(oracle.device, oracle.accuracy)
        self._timed.take_reference(oracle.problem)
        self.time_model, self.repeat = self._timed.time_model, self._timed.repeat
        self.time_steps = self._timed.time_steps
        self.operations, self.profile = self._timed.operations, self._timed.profile
        self.counted, self.rounding = self._timed.counted, self._timed.rounding

    def timing_set(self, name: str = GIVEN, path: str = "", lends: bool = False) -> Answer:
        """Return the weights and the rotating inputs that contenders are timed on.

        They are those of the workload of that name, with `path` the file of its tensors if it is
        one; `values` says what they are. What a call costs may depend on them, and on the mode,
        which goes with them. With `lends` contenders make rooms for large ones.
        """
        import torch

        values = AS_CONSTRUCTED
        self._rooms.clear()  # which hold what was given before
        if name != GIVEN:
            values = self._timed.take_data(self._problem, name, path)
        tensors = {f"state.{n}": t for n, t in self._timed.model.state_dict().items()}
        given = dict(enumerate(self._timed.inputs.given))
        tensors |= {f"input.{i}": x for i, x in given.items() if isinstance(x, torch.Tensor)}
        numbers = {f"0.{i}": x for i, x in given.items() if not isinstance(x, torch.Tensor)}
        mode: crossing.Mode = "train" if self._timed.model.training else "eval"
        script = crossing.Script(mode=mode, numbers=numbers)
        packed, blobs = self._packed(script, tensors, lends)
        return {**packed, "values": values}, blobs

    def _expected_of(self, call: int) -> Expected:
        """Compute what a timed call is expected to return; in vain in float64 once at most."""
        inputs = self._timed.inputs.of_call(call)
        self._timed.last = None  # nobody asks for it
        found = self._oracle.expected_of_call(
            self._timed.model, inputs, self._is_rough, self._timed.buffers_before
        )
        self._is_rough = found.is_rough
        self._timed.num_in_vain = self._oracle.num_in_vain
        return found

    def judge_timed(self, call: int, answer: str, blobs: list[memoryview]) -> Answer:
        """Give the verdict on the output that a contender gave to its timed call `call`."""
        given = self._oracle.unpacked(answer, blobs)
        with math_mode(self._oracle.accuracy):
            expected = self._expected_of(call)
            result = self._oracle.verdict(expected, given)
            is_rough = expected.is_rough
        del given, expected  # the next set of processes begins before this one has ended
        gpu_memory.free_unused(self._oracle.device)
        return {"result": json.loads(to_json(result)), "is_rough": is_rough}, ()

    def judge_kept(
        self,
        kept: str,
        numbers: list[int],
        kinds: list[str],
        drawn: list[int],
        blobs: list[memoryview],
    ) -> Answer:
        """Compare what was kept of some timed calls with the reference; the reason, or "".

        Args:
            kept: `positions.<j>` and `values.<j>` of output j, [call][element].
            numbers: of the calls, in the same order.
            kinds: of every call's outputs.
            drawn: which calls are compared, as places in `numbers`. Slow ones take turns until
                `JUDGED_S` are over; `FEWEST_JUDGED` are compared in any case.
            blobs: the tensors' bytes.
        """
        _, tensors = crossing.unpack(crossing.Script, kept, blobs, self._oracle.device)
        outputs = range(sum(name.startswith("values.") for name in tensors))
        start_s, is_rough = time.monotonic(), False
        for count, row in enumerate(drawn):
            if count >= FEWEST_JUDGED and time.monotonic() - start_s > JUDGED_S:
                break
            with math_mode(self._oracle.accuracy):
                expected = self._expected_of(numbers[row])
                positions, values = (
                    {f"call0.output{j}": tensors[f"{part}.{j}"][row] for j in outputs}
                    for part in ("positions", "values")
                )
                wrong = wrong_element(expected, kinds, positions, values, self._oracle.accuracy)
            is_rough |= expected.is_rough
            del expected
            gpu_memory.free_unused(self._oracle.device)
            if wrong:
                return {
                    "is_rough": is_rough,
                    "reason": f"the output of a timed call was wrong: {wrong} (timed call "
                    f"{row + 1} of {len(numbers)}, one of {len(drawn)} that were drawn after "
                    "all were over); was work left out while it was timed?",
                }, ()
        return {"reason": "", "is_rough": is_rough}, ()
