"""The baseline's role in a race: the reference, timed beside contenders, judges their outputs."""

from __future__ import annotations

import copy
import json
from typing import Any

from tuner.check import crossing
from tuner.errors import ProblemError
from tuner.evaluate.child import Answer
from tuner.evaluate.inputs import RotatingInputs
from tuner.evaluate.oracle import Oracle
from tuner.evaluate.timed import WEIGHT_SEED, Timed
from tuner.problem.accuracy import math_mode
from tuner.trial import to_json

__all__ = ["Baseline"]


class Baseline:
    """The reference that contenders are raced against."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle, self._problem = oracle, oracle.problem
        self._timed = Timed(oracle.device, oracle.accuracy)
        self._timed.take_reference(oracle.problem)
        self.time_model, self.repeat = self._timed.time_model, self._timed.repeat

    def timing_set(self, has_other_values: bool = False) -> Answer:
        """Return the weights and the rotating inputs that contenders are timed on.

        They are as the reference makes them, or others: weights all of them random, inputs from a
        normal distribution. What a call costs may depend on them.
        """
        if has_other_values:
            self._problem.randomise(self._timed.model, WEIGHT_SEED)
            self._timed.inputs = RotatingInputs([])  # first, since there may be no memory for both
            self._timed.inputs = RotatingInputs(self._other_inputs())
        tensors = {f"state.{n}": t for n, t in self._timed.model.state_dict().items()}
        tensors |= {f"input.{i}": x for i, x in enumerate(self._timed.inputs.given)}
        text, blobs = crossing.pack(crossing.Script(), tensors)
        return {"question": text}, blobs

    def _other_inputs(self) -> list[Any]:
        """Return normal inputs, or the reference's own where it refuses them."""
        import torch

        others = self._problem.make_inputs(
            WEIGHT_SEED, distribution="normal", device=self._oracle.device
        )
        try:
            with torch.no_grad():
                self._problem.call(copy.deepcopy(self._timed.model), others)
        except ProblemError:
            return self._problem.make_inputs(WEIGHT_SEED, device=self._oracle.device)
        return others

    def judge_timed(self, call: int, answer: str, blobs: list[memoryview]) -> Answer:
        """Give the verdict on the output that a contender gave to its timed call `call`."""
        given = self._oracle.unpacked(answer, blobs)
        with math_mode(self._oracle.accuracy):
            inputs = self._timed.inputs.of_call(call)
            expected = self._oracle.expected_of_call(self._timed.model, inputs)
            result = self._oracle.verdict(expected, given)
        return {"result": json.loads(to_json(result))}, ()
