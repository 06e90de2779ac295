"""The reference as a process that judges holds it: what it expects, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.check.calls import crossing, lending
from tuner.check.judge import verdict
from tuner.check.judge.expected import Expected, expected
from tuner.check.judge.timed_call import expected_of_call
from tuner.check.probes.probe import Probe
from tuner.errors import ProblemError, says_no_memory
from tuner.evaluate.modules import packed
from tuner.machine import gpu_memory
from tuner.machine.host import usable_memory_bytes
from tuner.problem.accuracy import Accuracy
from tuner.problem.modes import TuneMode
from tuner.problem.packages import modules_beside
from tuner.problem.reference import load_problem
from tuner.storage import sha256_of
from tuner.trial import ProbeResult

if TYPE_CHECKING:
    import torch

__all__ = ["Oracle"]

HUGE_SHARE = 0.15  # of all memory, beside which steps and outputs in float64 do not fit


class Oracle:
    """A problem, and the accuracy that answers to it must have on a device."""

    def __init__(
        self,
        reference: str,
        sizes: dict[str, int],
        device: str,
        accuracy: str,
        mode: TuneMode = "as_given",
    ) -> None:
        self.device, self.accuracy = device, Accuracy.parse(accuracy)
        self.problem = load_problem(Path(reference), sizes, mode)
        self._models: dict[Any, Any] = {}  # the reference's, by weights
        self.num_in_vain = 0  # times that memory ran out for a timed call in float64

    def about(self) -> dict[str, Any]:
        """Return what others must know of the problem."""
        return {
            "beside": {
                str(file): sha256_of(file) for file in modules_beside(self.problem.path).values()
            },
            "init_inputs": packed(self.problem),
            "num_rows": self.problem.num_rows(),
            "sizes": dict(self.problem.sizes),
            "sha256": self.problem.sha256,
        }

    def expected(self, probe: Probe) -> Expected:
        """Compute what a probe expects."""
        return expected(self.problem, probe, self.accuracy, self.device, models=self._models)

    def expected_of_call(
        self,
        model: torch.nn.Module,
        inputs: list[Any],
        is_rough: bool = False,
        buffers_before: Mapping[str, torch.Tensor] | None = None,
    ) -> Expected:
        """Compute what one call of a module like `model` expects, as `timed_call` says.

        Where there is no memory for float64, and the call is so large that a contender which holds
        little of it is not to blame, what PyTorch itself answers stands for it; with `is_rough` it
        does in any case.

        Raises:
            ProblemError: the reference fails, or there is no memory.
        """
        call = partial(
            expected_of_call, self.problem, model, inputs, self.accuracy,
            buffers_before=buffers_before,
        )  # fmt: skip
        if is_rough:
            return call(is_rough=True)
        num_before = 0

        def note() -> None:
            nonlocal num_before
            num_before = gpu_memory.num_shortages(self.device)

        try:
            return call(on_wide=note)
        except (ProblemError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
            if not (says_no_memory(said) and self._is_huge(inputs)):
                raise
        gpu_memory.free_unused(self.device)  # of what failed
        self.num_in_vain += gpu_memory.num_shortages(self.device) - num_before
        return call(is_rough=True)

    def _is_huge(self, inputs: list[Any]) -> bool:
        """Whether the inputs, in float64, are much of all memory."""
        wide = sum(8 * value.numel() for value in inputs if hasattr(value, "numel"))
        total = gpu_memory.total_bytes(self.device) or usable_memory_bytes()
        return bool(wide > HUGE_SHARE * total)

    def forget_weights(self) -> None:
        """Give up all modules but the first; they are drawn again when needed."""
        import torch

        drawn = [n for n, m in self._models.items() if isinstance(m, torch.nn.Module)]
        for name in set(drawn) - {"initial"}:
            del self._models[name]

    def unpacked(
        self, answer: str, blobs: list[memoryview], borrowed: lending.Borrowed | None = None
    ) -> crossing.Answer:
        """Return a producer's answer, on the device; some of it may lie in `borrowed` memory."""
        report, tensors = crossing.unpack(
            crossing.Report, answer, blobs, self.device, borrowed=borrowed
        )
        return crossing.Answer(report, tensors)

    def verdict(self, expected: Expected, answer: crossing.Answer) -> ProbeResult:
        """Give the verdict on an answer."""
        return verdict.judge(expected, answer, self.accuracy)
