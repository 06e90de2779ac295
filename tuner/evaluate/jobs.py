"""What runs inside a worker: the jobs of `handle`, by name.

One child serves one role at a time, each with the jobs that belong to it:

    any role     describe, warm_up   the device and the machine
    compiler     import_file         one of our own exports
    screening    prepare, screen     the user's own candidates, checked and timed in place
                 time_baseline
    judge        prepare, ask,       holds the reference; draws inputs, gives the verdict
                 weights, judge
    baseline     prepare, repeat,    holds the reference; is timed, judges timed outputs
                 time_model,
                 timing_set,
                 judge_timed
    producer     load, receive,      holds one stranger; only produces tensors and times
                 answer, time_model,
                 take_timing_set,
                 repeat,
                 timed_output

Payloads and answers are JSON; tensors travel as raw bytes beside it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.check import probes, produce, verdict
from tuner.check.exercise import outputs_of, snapshot
from tuner.check.expected import Expected, expected, expected_of_call
from tuner.check.majority import by_majority, redrawn
from tuner.check.surroundings import changed, functions, replaced, settings
from tuner.errors import InputError, ProblemError
from tuner.evaluate.channel import Blob
from tuner.evaluate.fit import Fit
from tuner.evaluate.inputs import RotatingInputs
from tuner.evaluate.measure import measure
from tuner.evaluate.modules import (
    constructed,
    differentiable,
    free_build_lock,
    fused,
    imported,
    module_of,
    notes_on,
    tagged,
    untagged,
)
from tuner.evaluate.process import available_bytes
from tuner.evaluate.timers import CpuTimer, CudaTimer, Timer
from tuner.evaluate.worker import Fault
from tuner.kernel.binding import BoundOp, bind
from tuner.machine.device import describe
from tuner.machine.doctor import environment
from tuner.problem.accuracy import Accuracy, math_mode
from tuner.problem.reference import Problem, load_problem
from tuner.trial import (
    Argument,
    Candidate,
    Check,
    Measurement,
    ProbeResult,
    Tensor,
    from_json,
    to_json,
)

if TYPE_CHECKING:
    import torch

__all__ = ["handle"]

SETTLE_S = 0.03  # until the threads of the process that had its turn before sleep
NUM_UNTIMED = 2  # calls of each turn that are not timed
KEPT_SHARE = 0.25  # of the memory that is free, for what a judge expects of its probes
WEIGHT_SEED = 20_000  # of the weights that are timed; probes draw their own
Answer = tuple[dict[str, Any], Sequence[Blob]]


class _Session:
    """The state of one child: what it was told to prepare or to load."""

    def __init__(self) -> None:
        self.device = ""
        self.accuracy = Accuracy()
        self.problem: Problem | None = None
        self.timer: Timer | None = None
        self.model: torch.nn.Module | None = None  # what is timed: the reference, or a candidate
        self.inputs = RotatingInputs([])  # that it is timed on
        self.last_output: tuple[int, Any] | None = None  # of `repeat`
        self.expected: dict[str, Expected] = {}
        self.kept: dict[probes.Probe, Expected] = {}  # for the next contender
        self.room_bytes = 0  # left for them
        self.tokens: dict[Any, str] = {}  # of weights that questions refer to, by their place
        self.weights_of: dict[str, torch.Tensor] = {}  # by token
        self.received: dict[str, torch.Tensor] = {}
        self.is_own_seed = True
        self.models: dict[Any, torch.nn.Module] = {}  # the reference's, by weights
        self.module: dict[str, Any] = {}  # the namespace of the family's ModelNew
        self.candidate_model: torch.nn.Module | None = None
        self.make_model: Callable[[], torch.nn.Module] | None = None
        self.functions: dict[str, Any] = {}  # PyTorch's, before a stranger was imported
        self.changes: tuple[str, ...] = ()  # to PyTorch's settings, by the calls of `repeat`

    # ---- any role -----------------------------------------------------------------------------

    def describe(self, device: str) -> Answer:
        found = describe(device)
        return {
            "device": json.loads(to_json(found)),
            "torch_name": found.torch_name,
            "facts": found.facts(),
            "environment": environment(found),
        }, ()

    def warm_up(self, device: str) -> Answer:
        """Import PyTorch and open the device."""
        import torch

        torch.zeros(1, device=device)
        return {}, ()

    def sizes(
        self,
        reference: str,
        sizes: dict[str, int],
        arguments: str,
        model_new: str,
        model_file: str,
        outputs: str,
        also: Sequence[str] = (),
        **_: Any,
    ) -> Answer:
        """Find the named sizes by letting the family's module call a stand-in for its operator.

        `screening` are those of every batch that screening asks for, the problem's own first.
        What is wrong with the module, or with it beside the reference, is found here as well.
        """
        problem = load_problem(Path(reference), sizes)
        declared = [from_json(Argument, json.dumps(a)) for a in json.loads(arguments)]
        made = [from_json(Tensor, json.dumps(tensor)) for tensor in json.loads(outputs)]
        fit = Fit(problem, Path(model_file), model_new, declared, made, tuple(also))
        module = fit.names()
        model = fit.model(module)
        found = fit.sizes(module, model, problem.make_inputs(0))
        screening = [found]
        for batch in {p.batch for p in probes.screening_probes(0, problem.num_rows())} - {None}:
            with suppress(InputError):  # a batch that the problem does not take
                inputs = problem.make_inputs(0, batch=batch)
                screening.append(fit.sizes(module, model, inputs))
        fit.rehearse(module, model)
        return {"sizes": found, "screening": screening}, ()

    # ---- the problem: screening and judge -----------------------------------------------------

    def prepare(
        self,
        reference: str,
        sizes: dict[str, int],
        device: str,
        accuracy: str,
        screening_seed: int | None = None,
        is_timed: bool = True,
        model_new: str = "",
        **_: Any,
    ) -> Answer:
        """Load the reference; compute what screening probes expect; get ready to time."""
        self.device, self.accuracy = device, Accuracy.parse(accuracy)
        self.problem = load_problem(Path(reference), sizes)
        self.models = {}
        self.room_bytes = int(KEPT_SHARE * _free_bytes(device))
        if screening_seed is not None:
            num_rows = self.problem.num_rows()
            for probe in probes.screening_probes(screening_seed, num_rows):
                self.expected[probe.name] = self._expected(probe)
        if model_new:
            self.module = module_of(model_new)
        if is_timed:
            self._get_timer(device)
            self.model = self.problem.make_model(WEIGHT_SEED, device)
            self.inputs = RotatingInputs(self.problem.make_inputs(WEIGHT_SEED, device=device))
        return {
            "init_inputs": tagged(self.problem.init_inputs(0)),
            "num_rows": self.problem.num_rows(),
            "sizes": dict(self.problem.sizes),
            "sha256": self.problem.sha256,
        }, ()

    def _get_timer(self, device: str) -> None:
        self.timer = _timer(device)
        self.timer.renew = lambda call: self.inputs.renew(call)

    def _expected(self, probe: probes.Probe) -> Expected:
        assert self.problem is not None
        return expected(self.problem, probe, self.accuracy, self.device, models=self.models)

    # ---- screening ----------------------------------------------------------------------------

    def screen(
        self,
        candidate: str,
        artefact: str,
        budget_s: float,
        max_noise: float,
        stop_above_us: float | None,
    ) -> Answer:
        """Check one of the user's own candidates in place, then time it if it is right."""
        subject = from_json(Candidate, candidate)
        start_s = time.perf_counter()
        operator = bind(subject.plan, subject.language, Path(artefact))
        with _spoilt_by_cuda_errors(self.device):
            checked, has_raised = self._screened(operator)
            checked_s = time.perf_counter()
            data: dict[str, Any] = {
                "check": json.loads(to_json(checked)),
                "has_raised": has_raised,
                "check_s": checked_s - start_s,
            }
            if checked.is_accepted:
                measured = self._timed(operator, budget_s, max_noise, stop_above_us)
                data["measurement"] = json.loads(to_json(measured))
                if not measured.is_censored:  # what cannot win need not be looked at again
                    again = self._checked_again(operator)
                    data["after_timing"] = "" if again.is_accepted else again.reason
                data["measure_s"] = time.perf_counter() - checked_s
        operator.unload()
        return data, ()

    def _screened(self, operator: BoundOp) -> tuple[Check, bool]:
        """Return the verdict, and whether it is that the candidate raised."""
        results, has_raised = [], False
        make = self._candidate_model(operator)
        with math_mode(self.accuracy):
            for expected in self.expected.values():
                answer = produce.answer(make, expected.question)
                result = verdict.judge(expected, answer, self.accuracy)
                results.append(self._in_other_draws(make, expected.probe, result))
                if not results[-1].is_accepted:
                    has_raised = bool(answer.report.error) and not expected.error
                    break
        return verdict.merge(results, self.accuracy, is_thorough=False), has_raised

    def _in_other_draws(
        self, make: Callable[[], torch.nn.Module], probe: probes.Probe, first: ProbeResult
    ) -> ProbeResult:
        """Let a near miss not be decided by the one draw that screens all candidates."""

        def ask(draw: int) -> ProbeResult:
            if draw == 0:
                return first
            expected = self._expected(redrawn(probe, draw))
            answer = produce.answer(make, expected.question)
            return verdict.judge(expected, answer, self.accuracy)

        return by_majority(ask)

    def _candidate_model(self, operator: BoundOp) -> Callable[[], torch.nn.Module]:
        """Return the family's module around an operator: one object for all candidates."""
        assert self.problem is not None
        self.module |= fused(operator)
        if self.candidate_model is None:
            self.candidate_model = constructed(
                self.module["ModelNew"], self.problem.init_inputs(0), self.device
            )
        model = self.candidate_model
        return lambda: model

    def _timed(
        self, operator: BoundOp, budget_s: float, max_noise: float, stop_above_us: float | None
    ) -> Measurement:
        assert self.model is not None
        model = self._candidate_model(operator)().train()
        model.load_state_dict(self.model.state_dict())
        return self._measure(model, budget_s, max_noise, stop_above_us, is_bound_here=True)

    def _checked_again(self, operator: BoundOp) -> ProbeResult:
        """Judge one more output of the module that was just timed, in the state that left it."""
        import torch

        model = self._candidate_model(operator)()

        def ask(_: int) -> ProbeResult:
            call = self.inputs.fresh_call()
            answer = produce.answer_of_call(model, model(*self.inputs.of_call(call)))
            return verdict.judge(self._expected_of_call(call), answer, self.accuracy)

        with torch.no_grad(), math_mode(self.accuracy):
            return by_majority(ask)

    def _expected_of_call(self, call: int) -> Expected:
        assert self.problem is not None and self.model is not None
        inputs = self.inputs.of_call(call)
        return expected_of_call(self.problem, self.model, inputs, self.accuracy)

    def time_baseline(self, budget_s: float, max_noise: float) -> Answer:
        """Time the reference as a candidate is timed."""
        assert self.model is not None
        return {
            "measurement": json.loads(
                to_json(self._measure(self.model, budget_s, max_noise, None))
            )
        }, ()

    def _measure(
        self,
        model: Any,
        budget_s: float,
        max_noise: float,
        stop_above_us: float | None,
        is_bound_here: bool = False,
    ) -> Measurement:
        import torch

        assert self.timer is not None
        self.timer.is_bound_here = is_bound_here
        inputs = self.inputs
        with torch.no_grad(), math_mode(self.accuracy):
            return measure(
                self.timer,
                lambda i: model(*inputs[i]),
                budget_s=budget_s,
                max_noise=max_noise,
                stop_above_us=stop_above_us,
            )

    # ---- judge --------------------------------------------------------------------------------

    def ask(self, probe: str) -> Answer:
        """Draw a probe's inputs and weights; return the question for the producer.

        Weights are the bulk of a question, and many questions share theirs: `known` refers to
        them by tokens.
        """
        asked = from_json(probes.Probe, probe)
        found = self.expected[asked.name] = self._expected_once(asked)
        tensors, known = dict(found.question.tensors), {}
        for name in [n for n in tensors if n.startswith(("state.", "edit."))]:
            tensor = tensors.pop(name)
            place = (tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape)
            token = self.tokens.setdefault(place, f"{name}#{len(self.tokens)}")
            self.weights_of[token] = tensor  # kept, so that its memory stays its own
            known[name] = token
        text, blobs = probes.pack(found.question.script, tensors)
        return {"question": text, "known": known}, blobs

    def _expected_once(self, probe: probes.Probe) -> Expected:
        """Compute what a probe expects, or find it where an earlier contender was asked the same.

        At full size a float64 oracle is most of a probe's time.
        """
        if probe in self.kept:
            return self.kept[probe]
        found = self._expected(probe)
        tensors = {**found.question.tensors, **found.oracle}
        size = sum(t.numel() * t.element_size() for n, t in tensors.items() if n[:5] != "state")
        if size <= self.room_bytes:
            self.room_bytes -= size
            self.kept[probe] = found
        return found

    def weights(self, tokens: list[str]) -> Answer:
        """Return the weights that questions refer to by these tokens."""
        text, blobs = probes.pack(probes.Script(), {t: self.weights_of[t] for t in tokens})
        return {"question": text}, blobs

    def judge(self, probe: str, answer: str, blobs: list[memoryview]) -> Answer:
        """Give the verdict on a producer's answer to the probe that was asked last."""
        expected = self.expected.pop(from_json(probes.Probe, probe).name)
        report, tensors = probes.unpack(probes.Report, answer, blobs, self.device)
        with math_mode(self.accuracy):
            result = verdict.judge(expected, probes.Answer(report, tensors), self.accuracy)
        return {"result": json.loads(to_json(result))}, ()

    def timing_set(self, has_other_values: bool = False) -> Answer:
        """Return the weights and the rotating inputs that contenders are timed on.

        They are as the reference makes them, or others: weights all of them random, inputs from a
        normal distribution. What a call costs may depend on them.
        """
        assert self.problem is not None and self.model is not None
        if has_other_values:
            self.problem.randomise(self.model, WEIGHT_SEED)
            self.inputs = RotatingInputs([])  # first, since there may be no memory for both
            self.inputs = RotatingInputs(self._other_inputs())
        tensors = {f"state.{n}": t for n, t in self.model.state_dict().items()}
        tensors |= {f"input.{i}": x for i, x in enumerate(self.inputs.given)}
        text, blobs = probes.pack(probes.Script(), tensors)
        return {"question": text}, blobs

    def _other_inputs(self) -> list[Any]:
        """Return normal inputs, or the reference's own where it refuses them."""
        import torch

        assert self.problem is not None and self.model is not None
        others = self.problem.make_inputs(WEIGHT_SEED, distribution="normal", device=self.device)
        try:
            with torch.no_grad():
                self.problem.call(copy.deepcopy(self.model), others)
        except ProblemError:
            return self.problem.make_inputs(WEIGHT_SEED, device=self.device)
        return others

    def judge_timed(self, call: int, answer: str, blobs: list[memoryview]) -> Answer:
        """Give the verdict on the output that a contender gave to its timed call `call`."""
        report, tensors = probes.unpack(probes.Report, answer, blobs, self.device)
        with math_mode(self.accuracy):
            expected = self._expected_of_call(call)
            result = verdict.judge(expected, probes.Answer(report, tensors), self.accuracy)
        return {"result": json.loads(to_json(result))}, ()

    # ---- producer -----------------------------------------------------------------------------

    def load(
        self,
        device: str,
        accuracy: str,
        init_inputs: list[Any],
        file: str | None = None,
        candidate: str | None = None,
        artefact: str = "",
        model_new: str = "",
        reference: str = "",
        compile_mode: str = "",
        sizes: dict[str, int] | None = None,
    ) -> Answer:
        """Import a stranger's file, or bind a built candidate into its family's module.

        With `compile_mode` it is the reference itself, compiled by PyTorch.

        `notes` name what its text tells, which is read before it runs.
        """
        self.device, self.accuracy = device, Accuracy.parse(accuracy)
        self._get_timer(device)  # before the import, which may patch what it is made of
        arguments = untagged(init_inputs)
        if compile_mode:
            problem = load_problem(Path(reference), sizes or {})
            self.make_model = lambda: _compiled(problem, device, compile_mode)
            return {"notes": []}, ()
        notes = []
        if file is not None:
            self.functions = functions()
            notes = notes_on(Path(file).read_text(errors="replace"), sizes or {})
            free_build_lock(Path(file))
            module = vars(imported(Path(file)))
        else:
            assert candidate is not None
            subject = from_json(Candidate, candidate)
            module = module_of(model_new)
            operator = bind(subject.plan, subject.language, Path(artefact))
            assert self.timer is not None
            self.timer.is_bound_here = True
            module |= {**fused(operator), "fused_op": differentiable(operator, module)}
        if not callable(module.get("ModelNew")):
            raise ProblemError(f"{file}: no class ModelNew")
        # Weights that are replaced at once need not be drawn on the CPU: seconds for large ones.
        self.make_model = lambda: constructed(
            module["ModelNew"], arguments, device, is_quick=not self.is_own_seed
        )
        return {"notes": notes}, ()

    def receive(self, question: str, blobs: list[memoryview]) -> Answer:
        """Keep weights that later questions refer to."""
        _, tensors = probes.unpack(probes.Script, question, blobs)
        self.received |= tensors
        return {}, ()

    def import_file(self, file: str) -> Answer:
        """Import one of our own exported files, which compiles it."""
        free_build_lock(Path(file))
        imported(Path(file))
        return {}, ()

    def answer(self, question: str, known: dict[str, str], blobs: list[memoryview]) -> Answer:
        """Answer one question of the judge; `known` refers to weights that were received."""
        assert self.make_model is not None
        script, tensors = probes.unpack(probes.Script, question, blobs)
        tensors |= {name: self.received[token] for name, token in known.items()}
        # Always a copy: what the candidate does to its weights must not reach the next question.
        tensors = {name: t.to(self.device, copy=True) for name, t in tensors.items()}
        self.is_own_seed = script.own_seed is not None
        with math_mode(self.accuracy), _spoilt_by_cuda_errors(self.device):
            found = produce.answer(self.make_model, probes.Question(script, tensors))
            report = self._with_changes(found.report)
            text, answers = probes.pack(report, found.tensors)
        return {"answer": text}, answers

    def _with_changes(self, report: probes.Report, more: Sequence[str] = ()) -> probes.Report:
        changes = (*report.changes, *more, *replaced(self.functions))
        return dataclasses.replace(report, changes=changes)

    def take_timing_set(self, question: str, blobs: list[memoryview]) -> Answer:
        """Get ready to be timed on the judge's weights and inputs."""
        assert self.make_model is not None
        _, tensors = probes.unpack(probes.Script, question, blobs, self.device)
        state = {n[6:]: t for n, t in tensors.items() if n.startswith("state.")}
        inputs = [t for n, t in tensors.items() if n.startswith("input.")]
        self.is_own_seed = False
        self.model = self.make_model().train()
        self.model.load_state_dict(state)
        self.inputs = RotatingInputs(inputs)
        return {}, ()

    # ---- judge and producer -------------------------------------------------------------------

    def time_model(self, num_samples: int) -> Answer:
        """Return that many samples of one call's time; the caller interleaves processes.

        Untimed calls come first: after its turn, another process's OpenMP threads spin for some
        10 ms on the cores that this one needs, and what it left in the caches is gone.
        """
        import torch

        assert self.model is not None and self.timer is not None
        model, inputs = self.model, self.inputs
        throttled_before = self.timer.num_throttled
        preempted_before, start_s = _num_preempted(), time.perf_counter()
        with torch.no_grad(), math_mode(self.accuracy), _spoilt_by_cuda_errors(self.device):
            time.sleep(SETTLE_S)
            self.timer.samples(lambda i: model(*inputs[i]), NUM_UNTIMED)
            samples = self.timer.samples(lambda i: model(*inputs[i]), num_samples)
        return {
            "samples_us": samples,
            "is_cold": self.timer.is_cold,
            "num_throttled": self.timer.num_throttled - throttled_before,
            # A stranger may have patched the clock: no time is no reason to fail here.
            "preempted_per_s": (_num_preempted() - preempted_before)
            / max(time.perf_counter() - start_s, SETTLE_S),
        }, ()

    def repeat(self, num_calls: int) -> Answer:
        """Call back to back, and copy the last output at once; the caller holds the clock."""
        import torch

        assert self.model is not None
        model, inputs = self.model, self.inputs
        with torch.no_grad(), math_mode(self.accuracy), _spoilt_by_cuda_errors(self.device):
            before = settings()
            time.sleep(SETTLE_S)
            if not num_calls:
                return {}, ()  # what asking costs by itself
            for _ in range(num_calls):
                call = inputs.fresh_call()
                result = model(*inputs.of_call(call))
            outputs = outputs_of(result)
            copies = tuple(snapshot(y) if isinstance(y, torch.Tensor) else y for y in outputs)
            is_bare = len(outputs) == 1 and outputs[0] is result
            self.last_output = call, copies[0] if is_bare else copies
            self.changes = tuple(changed(before))
        return {}, ()

    def timed_output(self) -> Answer:
        """Return the output of the last call of `repeat`, with that call's number."""
        assert self.model is not None and self.last_output is not None
        call, outputs = self.last_output
        found = produce.answer_of_call(self.model, outputs)
        text, blobs = probes.pack(self._with_changes(found.report, self.changes), found.tensors)
        return {"call": call, "answer": text}, blobs


# ---- the device ---------------------------------------------------------------------------------


def _compiled(problem: Problem, device: str, mode: str) -> torch.nn.Module:
    """Return the reference, compiled at its first call, with the keys of its own state."""
    model = problem.make_model(WEIGHT_SEED, device)
    model.compile(mode=mode, dynamic=False)
    return model


def _timer(device: str) -> Timer:
    if device.startswith("cuda"):
        return CudaTimer(int(device.partition(":")[2] or 0))
    return CpuTimer(l3_bytes=describe(device).l3_bytes)


def _num_preempted() -> int:
    """Return how often the system took the processor from a thread of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _free_bytes(device: str) -> int:
    """Return the memory that is free where the tensors of that device live."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


@contextmanager
def _spoilt_by_cuda_errors(device: str) -> Iterator[None]:
    """Raise Fault when the device no longer answers: the context is lost with all in it."""
    try:
        yield
        _synchronize(device)
    except Exception as error:
        try:
            _synchronize(device)
        except Exception as sticky:
            raise Fault(f"{type(error).__name__}: {error}") from sticky
        raise


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


_SESSION = _Session()


def handle(job: str, payload: dict[str, Any], blobs: list[memoryview]) -> Answer:
    """Run one job of this child; payload entries are the job's arguments."""
    run: Callable[..., Answer] = getattr(_SESSION, job)
    if job in ("answer", "judge", "judge_timed", "receive", "take_timing_set"):
        return run(**payload, blobs=blobs)
    return run(**payload)
