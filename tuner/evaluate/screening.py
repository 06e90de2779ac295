"""The screening role in a worker: the user's own candidates, checked and timed in place."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tuner.check import produce
from tuner.check.calls import unasked
from tuner.check.calls.exercise import kinds_of, outputs_of
from tuner.check.judge import verdict
from tuner.check.judge.expected import Expected
from tuner.check.judge.refusals import extent_of
from tuner.check.probes import probes
from tuner.check.probes.majority import by_majority, redrawn
from tuner.check.probes.probe import Probe
from tuner.errors import ProblemError, says_no_memory
from tuner.evaluate.child import Answer
from tuner.evaluate.modules import arguments_for, constructed, fused, module_of
from tuner.evaluate.oracle import Oracle
from tuner.evaluate.process import free_bytes
from tuner.evaluate.timed import WEIGHT_SEED, Timed, spoilt_by_cuda_errors
from tuner.kernel.binding import BoundOp, bind
from tuner.machine import gpu_memory
from tuner.problem.accuracy import math_mode
from tuner.trial import Candidate, Check, Measurement, ProbeResult, from_json, to_json

if TYPE_CHECKING:
    import torch

__all__ = ["Screening"]

KEPT_SHARE = 0.15  # of a GPU's memory, for what is expected of each candidate
SHARE_OF_OTHERS = 0.2  # of the memory that is free, at most, for each of the other data


class Screening:
    """What is right and fast among candidates of one family, which share a process."""

    def __init__(self, oracle: Oracle, seed: int, model_new: str) -> None:
        self._oracle, self._problem = oracle, oracle.problem
        self._module = module_of(model_new)  # the namespace of the family's ModelNew
        self._model: torch.nn.Module | None = None
        self._operator: BoundOp | None = None  # of the candidate that is at work
        self._timed = Timed(oracle.device, oracle.accuracy)
        self._timed.take_reference(oracle.problem)
        self._others: dict[str, Timed] = {}  # the same on other data, once they were asked for
        self._were_others_asked = False
        mode: Literal["train", "eval"] = "train" if self._timed.model.training else "eval"
        extent = extent_of(oracle.problem, self._timed.model, oracle.device)
        self._asked = probes.screening_probes(seed, extent, mode)
        is_gpu = extent.device == "gpu"
        total_bytes = gpu_memory.total_bytes(oracle.device)
        self._room_bytes = KEPT_SHARE * total_bytes if is_gpu else math.inf
        self._kept: dict[Probe, Expected] = {}
        for probe in self._asked:  # a reference that cannot answer is no candidate's fault
            self._expected(probe)

    def screen(self, candidate: str, artefact: str) -> Answer:
        """Check one of the user's own candidates in place; it is kept to be timed, if it is right.

        Nothing is timed, so that other tuners may use the device meanwhile.
        """
        start_s = time.perf_counter()
        operator = self._bind(candidate, artefact)
        with spoilt_by_cuda_errors(self._oracle.device):
            checked, has_raised = self._screened(operator)
        if not checked.is_accepted:
            self._unbind()
        return {
            "check": json.loads(to_json(checked)),
            "has_raised": has_raised,
            "check_s": time.perf_counter() - start_s,
        }, ()

    def time_candidate(
        self,
        candidate: str,
        artefact: str,
        budget_s: float,
        max_noise: float,
        stop_above_us: float | None,
        near_us: float | None = None,
    ) -> Answer:
        """Time the candidate that was right, and check once more what it left.

        It is timed on the other data as well that the reference was timed on, if it takes no more
        than `near_us` on the given ones (None: however long it takes).
        """
        start_s = time.perf_counter()
        # Bound anew where it was timed before, or checked in a process that has ended.
        operator = self._operator or self._bind(candidate, artefact)
        data: dict[str, Any] = {}
        with spoilt_by_cuda_errors(self._oracle.device):
            measured = self._measured(self._timed, operator, budget_s, max_noise, stop_above_us)
            if not measured.is_censored:  # what cannot win need not be looked at again
                again = self._checked_again(operator)
                data["after_timing"] = "" if again.is_accepted else again.reason
                is_near = near_us is None or measured.latency_us <= near_us
                if is_near and again.is_accepted:
                    others_us = {
                        name: self._measured(other, operator, budget_s, max_noise, None).latency_us
                        for name, other in self._others.items()
                    }
                    measured = replace(measured, others_us=others_us)
            data["measurement"] = json.loads(to_json(measured))
        self._unbind()
        return data | {"measure_s": time.perf_counter() - start_s}, ()

    def _bind(self, candidate: str, artefact: str) -> BoundOp:
        self._unbind()  # one that was never timed
        subject = from_json(Candidate, candidate)
        self._operator = operator = bind(subject.plan, subject.language, Path(artefact))
        return operator

    def _unbind(self) -> None:
        if self._operator is not None:
            self._operator.unload()
            self._operator = None

    def time_baseline(
        self, budget_s: float, max_noise: float, others: Mapping[str, str] | None = None
    ) -> Answer:
        """Time the reference as a candidate is timed; say how often memory ran out until then.

        It is timed on `others` as well, where there is room for them: data by their names, with
        the path of a file of tensors or "".
        """
        found = self._timed.measure(self._timed.model, budget_s, max_noise, None)
        num_shortages = gpu_memory.num_shortages(self._oracle.device)
        if others and not self._were_others_asked:
            for name, path in others.items():
                if (taken := self._taken(name, path)) is not None:
                    self._others[name] = taken
            self._were_others_asked = True
        others_us = {
            name: other.measure(other.model, budget_s, max_noise, None).latency_us
            for name, other in self._others.items()
        }
        found = replace(found, others_us=others_us)
        return {"measurement": json.loads(to_json(found)), "num_shortages": num_shortages}, ()

    def _taken(self, name: str, path: str) -> Timed | None:
        """Return the reference to be timed on other data; None without room, or if it fails.

        Raises:
            ProblemError: a user's own tensors are none that it takes.
        """
        import torch

        device = self._oracle.device
        state = self._timed.model.state_dict().values()
        num_bytes = self._timed.inputs.num_bytes + sum(tensor.nbytes for tensor in state)
        if num_bytes > SHARE_OF_OTHERS * free_bytes(device):
            return None
        timed = Timed(device, self._oracle.accuracy)
        timed.take(self._problem.make_model(WEIGHT_SEED, device, is_quick=True), [])
        try:
            timed.take_data(self._problem, name, path)
            with torch.no_grad():
                self._problem.call(timed.model, timed.inputs[0])
        except ProblemError as error:  # even on its own inputs, with such weights; or no memory
            if path and not says_no_memory(str(error)):
                raise
            return None
        return timed

    def _screened(self, operator: BoundOp) -> tuple[Check, bool]:
        """Return the verdict, and whether it is that the candidate raised."""
        results, has_raised = [], False
        make = self._candidate_model(operator)
        with math_mode(self._oracle.accuracy):
            for probe in self._asked:
                expected = self._expected(probe)
                answer = produce.answer(make, expected.question)
                result = self._oracle.verdict(expected, answer)
                has_raised = bool(answer.report.error) and not expected.error
                del expected, answer  # before others are drawn
                results.append(self._on_fresh_inputs(make, probe, result))
                if not results[-1].is_accepted:
                    break
                has_raised = False
        gpu_memory.free_unused(self._oracle.device)
        return verdict.merge(results, self._oracle.accuracy, is_thorough=False), has_raised

    def _expected(self, probe: Probe) -> Expected:
        if probe in self._kept:
            return self._kept[probe]
        found = self._oracle.expected(probe)
        num_bytes = found.num_bytes()
        if num_bytes <= self._room_bytes:  # else each candidate's check computes it anew
            self._room_bytes -= num_bytes
            self._kept[probe] = found
        return found

    def _on_fresh_inputs(
        self, make: Callable[[], torch.nn.Module], probe: Probe, first: ProbeResult
    ) -> ProbeResult:
        """Let a near miss not be decided by the one draw that screens all candidates."""

        def ask(draw: int) -> ProbeResult:
            if draw == 0:
                return first
            expected = self._oracle.expected(redrawn(probe, draw))
            answer = produce.answer(make, expected.question)
            return self._oracle.verdict(expected, answer)

        return by_majority(ask)

    def _candidate_model(self, operator: BoundOp) -> Callable[[], torch.nn.Module]:
        """Return the family's module around an operator: one object for all candidates."""
        self._module |= fused(operator)
        if self._model is None:
            self._model = constructed(
                self._module["ModelNew"],
                arguments_for(self._problem, self._module, "model_new.py"),
                self._oracle.device,
                is_quick=True,  # each question brings weights
            )
        model = self._model
        return lambda: model

    def _measured(
        self,
        timed: Timed,
        operator: BoundOp,
        budget_s: float,
        max_noise: float,
        stop_above_us: float | None,
    ) -> Measurement:
        """Measure a candidate on the data of `timed`."""
        model = self._candidate_model(operator)().train(timed.model.training)
        model.load_state_dict(timed.model.state_dict())
        return timed.measure(model, budget_s, max_noise, stop_above_us, is_bound_here=True)

    def _checked_again(self, operator: BoundOp) -> ProbeResult:
        """Judge one more output of the module that was just timed, in the state that left it."""
        import torch

        model = self._candidate_model(operator)()

        def ask(_: int) -> ProbeResult:
            call = self._timed.inputs.fresh_call()
            result = model(*self._timed.inputs.of_call(call))
            answer = unasked.answer_of_call(model, outputs_of(result), kinds_of(result))
            del result  # a copy of it is judged, beside float64, which may fill a GPU's memory
            return self._oracle.verdict(self._expected_of_call(call), answer)

        with torch.no_grad(), math_mode(self._oracle.accuracy):
            return by_majority(ask)

    def _expected_of_call(self, call: int) -> Expected:
        inputs = self._timed.inputs.of_call(call)
        return self._oracle.expected_of_call(self._timed.model, inputs)
