"""The reference as a process that judges holds it: what it expects, and the verdict."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.check import crossing, verdict
from tuner.check.expected import Expected, expected, expected_of_call
from tuner.check.modes import modes_of
from tuner.check.probe import Probe
from tuner.errors import ProblemError
from tuner.evaluate.modules import tagged
from tuner.problem.accuracy import Accuracy
from tuner.problem.reference import Problem, load_problem
from tuner.trial import ProbeResult

if TYPE_CHECKING:
    import torch

__all__ = ["Oracle"]


class Oracle:
    """A problem, and the accuracy that answers to it must have on a device."""

    def __init__(self, reference: str, sizes: dict[str, int], device: str, accuracy: str) -> None:
        self.device, self.accuracy = device, Accuracy.parse(accuracy)
        self.problem = load_problem(Path(reference), sizes)
        self.modes = _modes_of_file(self.problem)
        self._models: dict[Any, torch.nn.Module] = {}  # the reference's, by weights

    def about(self) -> dict[str, Any]:
        """Return what others must know of the problem."""
        return {
            "init_inputs": tagged(self.problem.init_inputs(0)),
            "num_rows": self.problem.num_rows(),
            "sizes": dict(self.problem.sizes),
            "sha256": self.problem.sha256,
            "is_training": self.is_training,
            "can_train": self.is_training or self._is_repeatable(),
        }

    @property
    def is_training(self) -> bool:
        """Whether the file leaves its module in training mode."""
        return self.modes[""]

    def _is_repeatable(self) -> bool:
        """Whether two calls in training mode give the same: no random numbers are drawn."""
        import torch

        model, inputs = self.problem.make_model(0).train(), self.problem.make_inputs(0)
        with torch.no_grad():
            one, other = (self.problem.call(copy.deepcopy(model), inputs) for _ in range(2))
        return all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True)
        )

    def expected(self, probe: Probe) -> Expected:
        """Compute what a probe expects."""
        return expected(self.problem, probe, self.accuracy, self.device, models=self._models)

    def expected_of_call(self, model: torch.nn.Module, inputs: list[Any]) -> Expected:
        """Compute what one call of a module like `model` expects."""
        return expected_of_call(self.problem, model, inputs, self.accuracy)

    def unpacked(self, answer: str, blobs: list[memoryview]) -> crossing.Answer:
        """Return a producer's answer, on the device."""
        report, tensors = crossing.unpack(crossing.Report, answer, blobs, self.device)
        return crossing.Answer(report, tensors)

    def verdict(self, expected: Expected, answer: crossing.Answer) -> ProbeResult:
        """Give the verdict on an answer."""
        return verdict.judge(expected, answer, self.accuracy)


def _modes_of_file(problem: Problem) -> dict[str, bool]:
    """Return the modes in which a file leaves its module, without its weights if possible."""
    try:
        return modes_of(problem.make_model(0, "meta", is_quick=True))
    except ProblemError:
        return modes_of(problem.make_model(0))
