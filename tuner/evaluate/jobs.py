"""What runs inside a worker: the jobs of `handle`, by name.

One child serves one role at a time, each with the jobs that belong to it:

    any role     describe, warm_up   the device and the machine
    screening    prepare, screen     the user's own candidates, checked and timed in place
                 time_baseline
    judge        prepare, ask,       holds the reference; draws inputs, gives the verdict;
                 judge, time_model   times the baseline
                 judge_timed
    producer     load, answer,       holds one stranger; only produces tensors and times
                 time_model, repeat,
                 timed_output

Payloads and answers are JSON; tensors travel as raw bytes beside it.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tuner.check import probes, produce, verdict
from tuner.check.expected import Expected, expected, expected_of_call
from tuner.device import describe, environment
from tuner.errors import ProblemError
from tuner.evaluate.channel import Blob
from tuner.evaluate.measure import measure
from tuner.evaluate.timers import CpuTimer, CudaTimer, Timer
from tuner.evaluate.worker import Fault
from tuner.kernel.binding import BoundOp, bind, match_sizes
from tuner.problem import Accuracy, Problem, load_problem, math_mode
from tuner.trial import Argument, Candidate, Check, Measurement, ProbeResult, from_json, to_json

if TYPE_CHECKING:
    import torch

__all__ = ["handle"]

SETTLE_S = 0.03  # until the threads of the process that had its turn before sleep
NUM_UNTIMED = 2  # calls of each turn that are not timed
NUM_INPUT_SETS = 3  # rotated while timing, so that no call finds its own input in a cache
REPEATED_FROM = 2**40  # numbers of calls that no timer reaches
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, modulo 1, are spread evenly
WEIGHT_SEED = 20_000  # of the weights that are timed; probes draw their own
Answer = tuple[dict[str, Any], Sequence[Blob]]


class _Seen(Exception):
    """Carries the arguments that a module passed to its operator."""


class _Session:
    """The state of one child: what it was told to prepare or to load."""

    def __init__(self) -> None:
        self.device = ""
        self.accuracy = Accuracy()
        self.problem: Problem | None = None
        self.timer: Timer | None = None
        self.model: torch.nn.Module | None = None  # what is timed: the reference, or a candidate
        self.inputs = _Inputs([])  # that it is timed on
        self.last_output: tuple[int, tuple[Any, ...]] | None = None  # of `repeat`
        self.expected: dict[str, Expected] = {}
        self.sent: dict[Any, tuple[str, torch.Tensor]] = {}  # weights that the producer has
        self.received: dict[str, torch.Tensor] = {}
        self.is_own_seed = True
        self.models: dict[Any, torch.nn.Module] = {}  # the reference's, by weights
        self.module: dict[str, Any] = {}  # the namespace of the family's ModelNew
        self.candidate_model: torch.nn.Module | None = None
        self.make_model: Callable[[], torch.nn.Module] | None = None

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
        self, reference: str, sizes: dict[str, int], arguments: str, model_new: str, **_: Any
    ) -> Answer:
        """Find the named sizes by letting the family's module call a spy.

        `screening` are those of every batch that screening asks for, the problem's own first.
        """
        problem = load_problem(Path(reference), sizes)
        module = _module_of(model_new)
        module["fused_op"] = _spy
        model = _constructed(module["ModelNew"], problem.init_inputs(0), "cpu").train()
        declared = [from_json(Argument, json.dumps(a)) for a in json.loads(arguments)]
        found = _sizes_seen(model, problem.make_inputs(0), declared, reference)
        screening = [found]
        for batch in {p.batch for p in probes.screening_probes(0, problem.num_rows())} - {None}:
            with suppress(ProblemError):  # a batch that the problem does not take
                inputs = problem.make_inputs(0, batch=batch)
                screening.append(_sizes_seen(model, inputs, declared, reference))
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
        self.models, self.sent = {}, {}  # of an earlier contender, whose producer had them
        if screening_seed is not None:
            num_rows = self.problem.num_rows()
            for probe in probes.screening_probes(screening_seed, num_rows):
                self.expected[probe.name] = self._expected(probe)
        if model_new:
            self.module = _module_of(model_new)
        if is_timed:
            self._get_timer(device)
            self.model = self._reference_model()
            self.inputs = _Inputs(self.problem.make_inputs(WEIGHT_SEED, device=device))
        return {
            "init_inputs": _tagged(self.problem.init_inputs(0)),
            "num_rows": self.problem.num_rows(),
            "sizes": dict(self.problem.sizes),
            "sha256": self.problem.sha256,
        }, ()

    def _get_timer(self, device: str) -> None:
        self.timer = _timer(device)
        self.timer.renew = lambda call: self.inputs.renew(call)

    def _reference_model(self) -> torch.nn.Module:
        assert self.problem is not None
        model = self.problem.make_model(WEIGHT_SEED, self.device)
        return self.problem.randomise(model, WEIGHT_SEED)

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
        """Return the checked, and whether it is that the candidate raised."""
        results, has_raised = [], False
        make = self._candidate_model(operator)
        with math_mode(self.accuracy):
            for expected in self.expected.values():
                answer = produce.answer(make, expected.question)
                results.append(verdict.judge(expected, answer, self.accuracy))
                if not results[-1].is_accepted:
                    has_raised = bool(answer.report.error) and not expected.error
                    break
        return verdict.merge(results, self.accuracy, is_thorough=False), has_raised

    def _candidate_model(self, operator: BoundOp) -> Callable[[], torch.nn.Module]:
        """Return the family's module around an operator: one object for all candidates."""
        assert self.problem is not None
        self.module["fused_op"] = operator
        if self.candidate_model is None:
            self.candidate_model = _constructed(
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
        return self._measure(model, budget_s, max_noise, stop_above_us)

    def _checked_again(self, operator: BoundOp) -> ProbeResult:
        """Judge one more output of the module that was just timed, in the state that left it."""
        import torch

        model, call = self._candidate_model(operator)(), self.inputs.fresh_call()
        with torch.no_grad(), math_mode(self.accuracy):
            answer = produce.answer_of_call(model, model(*self.inputs.of_call(call)))
            return verdict.judge(self._expected_of_call(call), answer, self.accuracy)

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
        self, model: Any, budget_s: float, max_noise: float, stop_above_us: float | None
    ) -> Measurement:
        import torch

        assert self.timer is not None
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
        """Draw a probe's inputs and weights; return the question for the producer."""
        asked = from_json(probes.Probe, probe)
        found = self.expected[asked.name] = self._expected(asked)
        tensors, known = dict(found.question.tensors), {}
        for name in [n for n in tensors if n.startswith(("state.", "edit."))]:
            # Weights are the bulk of a question, and many questions share theirs.
            tensor = tensors[name]
            place = (tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape)
            if place in self.sent:
                known[name] = self.sent[place][0]
                del tensors[name]
            else:
                token = f"{name}#{len(self.sent)}"
                self.sent[place] = (token, tensor)  # kept, so that its memory stays its own
                tensors[token] = tensors.pop(name)
                known[name] = token
        text, blobs = probes.pack(found.question.script, tensors)
        return {"question": text, "known": known}, blobs

    def judge(self, probe: str, answer: str, blobs: list[memoryview]) -> Answer:
        """Give the verdict on a producer's answer to the probe that was asked last."""
        expected = self.expected.pop(from_json(probes.Probe, probe).name)
        report, tensors = probes.unpack(probes.Report, answer, blobs, self.device)
        with math_mode(self.accuracy):
            result = verdict.judge(expected, probes.Answer(report, tensors), self.accuracy)
        return {"result": json.loads(to_json(result))}, ()

    def timing_set(self) -> Answer:
        """Return the weights and the rotating inputs that contenders are timed on."""
        assert self.model is not None
        tensors = {f"state.{n}": t for n, t in self.model.state_dict().items()}
        tensors |= {f"input.{i}": x for i, x in enumerate(self.inputs.given)}
        text, blobs = probes.pack(probes.Script(), tensors)
        return {"question": text}, blobs

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
        sizes: dict[str, int] | None = None,
    ) -> Answer:
        """Import a stranger's file, or bind a built candidate into its family's module.

        `notes` name what its text tells, which is read before it runs.
        """
        self.device, self.accuracy = device, Accuracy.parse(accuracy)
        self._get_timer(device)  # before the import, which may patch what it is made of
        arguments = _untagged(init_inputs)
        notes = []
        if file is not None:
            notes = _notes_on(Path(file).read_text(errors="replace"), sizes or {})
            module = vars(_imported(Path(file)))
        else:
            assert candidate is not None
            subject = from_json(Candidate, candidate)
            module = _module_of(model_new)
            operator = bind(subject.plan, subject.language, Path(artefact))
            module["fused_op"] = _differentiable(operator, module)
        if not callable(module.get("ModelNew")):
            raise ProblemError(f"{file}: no class ModelNew")
        # Weights that are replaced at once need not be drawn on the CPU: seconds for large ones.
        self.make_model = lambda: _constructed(
            module["ModelNew"], arguments, device, is_quick=not self.is_own_seed
        )
        return {"notes": notes}, ()

    def answer(self, question: str, known: dict[str, str], blobs: list[memoryview]) -> Answer:
        """Answer one question of the judge; `known` names tensors that came with it or before."""
        assert self.make_model is not None
        script, tensors = probes.unpack(probes.Script, question, blobs)
        self.received |= {name: t for name, t in tensors.items() if name in known.values()}
        tensors = {name: t for name, t in tensors.items() if name not in known.values()}
        tensors |= {name: self.received[token] for name, token in known.items()}
        # Always a copy: what the candidate does to its weights must not reach the next question.
        tensors = {name: t.to(self.device, copy=True) for name, t in tensors.items()}
        self.is_own_seed = script.own_seed is not None
        with math_mode(self.accuracy), _spoilt_by_cuda_errors(self.device):
            found = produce.answer(self.make_model, probes.Question(script, tensors))
            text, answers = probes.pack(found.report, found.tensors)
        return {"answer": text}, answers

    def take_timing_set(self, question: str, blobs: list[memoryview]) -> Answer:
        """Get ready to be timed on the judge's weights and inputs."""
        assert self.make_model is not None
        _, tensors = probes.unpack(probes.Script, question, blobs, self.device)
        state = {n[6:]: t for n, t in tensors.items() if n.startswith("state.")}
        inputs = [t for n, t in tensors.items() if n.startswith("input.")]
        self.is_own_seed = False
        self.model = self.make_model().train()
        self.model.load_state_dict(state)
        self.inputs = _Inputs(inputs)
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
        with torch.no_grad(), math_mode(self.accuracy), _spoilt_by_cuda_errors(self.device):
            time.sleep(SETTLE_S)
            self.timer.samples(lambda i: model(*inputs[i]), NUM_UNTIMED)
            samples = self.timer.samples(lambda i: model(*inputs[i]), num_samples)
        return {
            "samples_us": samples,
            "is_cold": self.timer.is_cold,
            "num_throttled": self.timer.num_throttled - throttled_before,
        }, ()

    def repeat(self, num_calls: int) -> Answer:
        """Call back to back, and copy the last output at once; the caller holds the clock."""
        import torch

        assert self.model is not None
        model, inputs = self.model, self.inputs
        with torch.no_grad(), math_mode(self.accuracy), _spoilt_by_cuda_errors(self.device):
            time.sleep(SETTLE_S)
            if not num_calls:
                return {}, ()  # what asking costs by itself
            for _ in range(num_calls):
                call = inputs.fresh_call()
                result = model(*inputs.of_call(call))
            outputs = result if isinstance(result, tuple | list) else (result,)
            copies = tuple(
                produce.snapshot(y) if isinstance(y, torch.Tensor) else y for y in outputs
            )
            self.last_output = call, copies
        return {}, ()

    def timed_output(self) -> Answer:
        """Return the output of the last call of `repeat`, with that call's number."""
        assert self.model is not None and self.last_output is not None
        call, outputs = self.last_output
        found = produce.answer_of_call(self.model, outputs)
        text, blobs = probes.pack(found.report, found.tensors)
        return {"call": call, "answer": text}, blobs


# ---- modules ----------------------------------------------------------------------------------


def _spy(*args: Any) -> Any:
    raise _Seen(*args)


def _sizes_seen(
    model: Any, inputs: Sequence[Any], declared: Sequence[Argument], reference: str
) -> dict[str, int]:
    """Return the sizes with which a module calls the spy in place of its operator."""
    try:
        model(*inputs)
    except _Seen as seen:
        given = zip(declared, seen.args, strict=True)
        shapes = {a.name: tuple(v.shape) for a, v in given if a.shape is not None}
        try:
            return match_sizes(declared, shapes)
        except ValueError as error:
            raise ProblemError(f"{reference}: does not fit the operator: {error}") from error
    except (RuntimeError, ValueError, TypeError) as error:
        raise ProblemError(f"{reference}: does not fit the operator: {error}") from error
    raise ProblemError(
        f"{reference}: the operator's module never called its operator on these inputs\n"
        "  expected: inputs that the family's templates handle (dtype, rank, training mode)"
    )


def _module_of(model_new: str) -> dict[str, Any]:
    """Execute a family's module text in the namespace that an exported file gives it."""
    import torch

    module: dict[str, Any] = {
        "torch": torch,
        "nn": torch.nn,
        "F": torch.nn.functional,
        "__name__": "model_new",
    }
    exec(compile(model_new, "model_new.py", "exec"), module)
    return module


def _differentiable(operator: BoundOp, module: dict[str, Any]) -> Callable[..., Any]:
    """Give an operator its family's autograd formula, as an exported file registers it."""
    import torch

    parts = {
        "forward": staticmethod(operator),
        "setup_context": staticmethod(module["setup_context"]),
        "backward": staticmethod(module["backward"]),
    }
    function: Any = type("Fused", (torch.autograd.Function,), parts)
    apply: Callable[..., Any] = function.apply
    return apply


def _notes_on(text: str, sizes: Mapping[str, int]) -> list[str]:
    """Name what a stranger's file does to the sizes of the problem."""
    notes = []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # its import will say more
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        value = node.value if isinstance(node, ast.Assign) else None
        for target in targets:
            name = target.id if isinstance(target, ast.Name) else ""
            if name in sizes and isinstance(value, ast.Constant) and value.value != sizes[name]:
                notes.append(
                    f"it redefines {name} as {value.value!r}; it was asked at {sizes[name]}, "
                    "with inputs that it has no hand in"
                )
    return notes


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("stranger", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stranger"] = module
    spec.loader.exec_module(module)
    return module


def _constructed(
    kind: Any, init_inputs: Sequence[Any], device: str, *, is_quick: bool = False
) -> Any:
    """Construct a module on the CPU, as a user would, then move it; `is_quick` on the device."""
    import torch

    with torch.device(device if is_quick else "cpu"):
        return kind(*init_inputs).to(device)


class _Inputs:
    """The inputs that a module is timed on: each call finds other memory, and new content.

    Three sets rotate, the same rows in other orders. Before each call some numbers of its set's
    first row become what no earlier call had, so that an answer that was kept is never right.
    Both sides of a race know what call i was given, without asking each other.
    """

    def __init__(self, given: list[Any]) -> None:
        self.given = given
        self._sets = [given, *([_rolled(v, n) for v in given] for n in range(1, NUM_INPUT_SETS))]
        self._rows = [[_few_numbers(value) for value in values] for values in self._sets]
        self._kept = [[None if r is None else r.clone() for r in rows] for rows in self._rows]
        self._next = REPEATED_FROM

    def __getitem__(self, call: int) -> list[Any]:
        return self._sets[call % len(self._sets)]

    def renew(self, call: int) -> None:
        """Give the inputs of that call their content."""
        import torch

        if not self.given:
            return  # nothing is timed yet
        factor = 0.5 + (call * _GOLDEN) % 1.0  # never the same twice
        place = call % len(self._sets)
        for row, kept in zip(self._rows[place], self._kept[place], strict=True):
            if row is not None:
                torch.mul(kept, factor, out=row)

    def fresh_call(self) -> int:
        """Return a number that no call had, not even a timer's."""
        self._next += 1
        return self._next

    def of_call(self, call: int) -> list[Any]:
        """Return what that call is given, as it is until the next one of its set."""
        self.renew(call)
        return self[call]


def _rolled(value: Any, shift: int) -> Any:
    import torch

    return value.roll(shift, 0) if isinstance(value, torch.Tensor) and value.ndim > 0 else value


def _few_numbers(value: Any) -> Any:
    """Return a view of the first numbers of a floating-point tensor, None where it has none.

    Few, since PyTorch's thread pool must not wake up for them just before a call is timed.
    """
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return None
    while value.ndim > 1:
        value = value[0]
    return value[:1024] if value.ndim else None


def _timer(device: str) -> Timer:
    if device.startswith("cuda"):
        return CudaTimer(int(device.partition(":")[2] or 0))
    return CpuTimer(l3_bytes=describe(device).l3_bytes)


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


def _tagged(value: Any) -> Any:
    """Return constructor arguments as JSON that tells tuples from lists."""
    if isinstance(value, tuple):
        return {"tuple": [_tagged(item) for item in value]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ProblemError(
        f"get_init_inputs() gives a {type(value).__name__}; "
        "expected numbers, words, None, and lists or tuples of them"
    )


def _untagged(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(_untagged(item) for item in value["tuple"])
    return [_untagged(item) for item in value] if isinstance(value, list) else value


_SESSION = _Session()


def handle(job: str, payload: dict[str, Any], blobs: list[memoryview]) -> Answer:
    """Run one job of this child; payload entries are the job's arguments."""
    run: Callable[..., Answer] = getattr(_SESSION, job)
    if job in ("answer", "judge", "judge_timed", "take_timing_set"):
        return run(**payload, blobs=blobs)
    return run(**payload)
