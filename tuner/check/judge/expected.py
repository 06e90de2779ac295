"""What is expected of a candidate: a probe's question, its oracle, the baseline's own error."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.check.calls.crossing import Action, Question, Report, Script
from tuner.check.calls.gradients import OUTPUT_FACTORS
from tuner.check.calls.history import is_unread
from tuner.check.calls.parts import copied
from tuner.check.judge.compare import SMALL_BATCH, Error, errors_of, repeats
from tuner.check.judge.kinks import Replay
from tuner.check.judge.noise import is_noisy, noise
from tuner.check.judge.playing import played
from tuner.check.judge.refusals import (
    fewer_rows,
    is_odd,
    lies_otherwise,
    milder_than,
    refuses_layout,
)
from tuner.check.judge.undecided import (
    depends_on_order,
    disputed_in,
    is_near_overflow,
    meet_in_products,
    of_order,
    undefined,
)
from tuner.check.judge.wide_convolutions import exact_convolutions
from tuner.check.probes.probe import Probe
from tuner.check.questions.arguments import draw_tangents, inputs_of_calls
from tuner.check.questions.questions import script_of, weighted_model
from tuner.errors import ProblemError, says_no_memory
from tuner.machine import gpu_memory
from tuner.machine.platforms import is_gpu
from tuner.problem.accuracy import Accuracy, math_mode
from tuner.problem.draws import widened
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["Expected", "expected", "rows_of"]

NOTHING = 1e-12  # what float64 leaves of sums that cancel
UNSTABLE_RMS = 0.1  # a reference with this error against itself in float64 cannot be judged


@dataclass(frozen=True, slots=True)
class Expected:
    """The reference's side of one probe, to judge any number of candidates with.

    `oracle` is float64 (integers as they are); `baseline` the error of PyTorch's own answer.
    `error` is set when the reference itself raises; then so must the candidate, or give the
    answer of the oracle, where there is one.
    """

    probe: Probe
    question: Question
    num_rows: int
    oracle: dict[str, torch.Tensor]
    baseline: dict[str, Error]
    report: Report
    unjudged: dict[str, torch.Tensor] = field(default_factory=dict)
    momenta: dict[str, float] = field(default_factory=dict)
    start: dict[str, torch.Tensor] = field(default_factory=dict)  # buffers before the calls
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of the reference's answer
    repeats: bool = True  # the same input gives the same answer again
    drawn: int = 0  # the state of PyTorch's random numbers after the constructor, a checksum
    may_refuse: bool = False  # as the reference refuses such strides
    may_refuse_backward: bool = False  # as it does after such an edit
    error: str = ""
    replay: Replay | None = None  # for gradients that a kink may decide
    is_rough: bool = False  # the oracle is PyTorch's own answer

    def num_bytes(self, without: tuple[str, ...] = ()) -> int:
        """Return what its tensors take, but for those whose names begin with one of these."""
        tensors = {**self.question.tensors, **self.oracle}
        own = [t for name, t in tensors.items() if not name.startswith(without)]
        return sum(t.numel() * t.element_size() for t in own)


def expected(
    problem: Problem,
    probe: Probe,
    accuracy: Accuracy,
    device: str | torch.device = "cpu",
    *,
    models: dict[Any, Any] | None = None,
) -> Expected:
    """Compute one probe's question, its float64 oracle and the baseline's own error.

    `models` may be one dict for all probes of a check: constructing a model takes long.

    Raises:
        ProblemError: the reference fails in itself, or its answer cannot be judged.
    """
    accuracy.require_on(device)
    return _Reference(problem, accuracy, device, {} if models is None else models).expected(probe)


@dataclass(frozen=True, slots=True)
class _Reference:
    """The reference that probes are put to; `known` is the dict of a check's models."""

    problem: Problem
    accuracy: Accuracy
    device: str | torch.device
    known: dict[Any, Any]

    def expected(self, probe: Probe) -> Expected:
        """Put a probe to it; where it cannot be judged by that, a milder one."""
        while True:
            found = self._asked(probe)
            if isinstance(found, Expected):
                return found
            probe = found

    def _asked(self, probe: Probe) -> Expected | Probe:
        """Return what is expected, or the probe that is asked instead."""
        problem, device, known = self.problem, self.device, self.known
        model, tensors = weighted_model(problem, probe, device, known)
        fewer = fewer_rows(problem, probe, model, device) if probe.is_tall else None
        if fewer is not None:
            return dataclasses.replace(probe, is_tall=False, batch=fewer)
        arguments = inputs_of_calls(problem, probe, device, model)
        script = script_of(problem, probe, arguments, tensors, known, device)
        if script.is_forward:
            draw_tangents(arguments, tensors, probe, model)
        wide = copied(model, is_wide=True)
        ways = [(way, around, copied(model)) for way, around in _other_ways(probe, script, device)]
        start = {name: buffer.detach().clone() for name, buffer in wide.named_buffers()}
        with math_mode(self.accuracy):
            report, baseline = played(problem, model, script, tensors, probe)
        if says_no_memory(report.error):  # the judge's own: with fewer rows it can tell
            raise ProblemError(report.error)
        num_rows = rows_of(arguments[0])
        if report.stage == "gradients" and probe.edits:
            return self._without_edits(probe)
        milder = milder_than(probe, script, report)
        if milder is not None:
            return milder
        question = Question(script, tensors)
        if report.error and not is_odd(probe):
            raise ProblemError(report.error)
        if report.error:
            return _beyond_reference(problem, probe, wide, question, report, num_rows)
        if probe.is_random:  # its numbers are chance, the candidate's as well
            return Expected(probe, question, num_rows, {}, {}, report)
        sizes = [t.numel() * t.element_size() for n, t in baseline.items() if n[:5] == "call0"]
        script = dataclasses.replace(script, output_bytes=tuple(sizes))
        own = _Answer(probe, script, tensors, arguments[0], num_rows, model, report, baseline)
        oracle = self._oracle(own, wide)
        del wide  # with gradients, four times the bytes of the weights
        if probe.distribution == "vast" and any(
            is_near_overflow(t, oracle[n]) for n, t in baseline.items()
        ):
            return dataclasses.replace(probe, distribution="vast_terms")
        if probe.distribution == "extreme" and meet_in_products(
            problem, model, arguments[0], known
        ):
            return dataclasses.replace(probe, distribution="extreme_terms")
        return self._judged_by(own, oracle, start, ways)

    def _oracle(self, own: _Answer, wide: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the answer in float64."""
        tensors = {
            name: value if is_unread(name, own.script) else widened(value)
            for name, value in own.tensors.items()
        }
        used_up = frozenset(id(t) for n, t in tensors.items() if t is not own.tensors[n])
        with exact_convolutions():
            report, oracle = played(
                self.problem, wide, own.script, tensors, own.probe, is_exact=True, own=used_up
            )
        if report.error:
            raise _without_float64(self.problem, own.model, report.error)
        return oracle

    def _judged_by(
        self,
        own: _Answer,
        oracle: dict[str, torch.Tensor],
        start: dict[str, torch.Tensor],
        ways: Sequence[tuple[Script, contextlib.AbstractContextManager[Any], torch.nn.Module]],
    ) -> Expected:
        """Return what is expected, by PyTorch's own answer and the oracle.

        `ways` are PyTorch's others to the answer, each with a module of its own.
        """
        import torch

        problem, probe, baseline = self.problem, own.probe, own.baseline
        unjudged = self._unjudged(own, oracle)
        errors = errors_of(baseline, oracle, unjudged, self.accuracy)
        errors = _beside_something(problem, probe, errors, own.values, self.known)
        _require_stable(problem, probe, errors)
        dtypes = {name: t.dtype for name, t in baseline.items()}
        is_wide = torch.float64 in dtypes.values()
        is_repeated = not probe.wants_same_bits or repeats(baseline, oracle)
        baseline.clear()
        for way, around, again in ways:
            # cuDNN, whose error is known by now, takes up to a second for one in float64.
            with math_mode(self.accuracy), exact_convolutions(is_wide), around:
                _, moved = played(problem, again, way, own.tensors, probe, is_laid=True)
            moved = {name: tensor for name, tensor in moved.items() if name in errors}
            for name, error in errors_of(moved, oracle, unjudged, self.accuracy).items():
                errors[name] = _larger(errors[name], error)
        momenta = {f"{n}." if n else "": m for n, m in _momenta(own.model).items()}
        gpu_memory.free_unused(self.device)  # float64 temporaries
        return Expected(
            probe, Question(own.script, own.tensors), own.num_rows, oracle, errors, own.report,
            unjudged, momenta, start, dtypes, repeats=is_repeated,
            drawn=self.known["drawn"] if own.script.own_seed is not None else 0,
            may_refuse=refuses_layout(problem, own.model, probe, own.values),
            replay=Replay(
                problem, probe, own.script, own.tensors, self.accuracy, self.device, self.known
            ),
        )  # fmt: skip

    def _unjudged(self, own: _Answer, oracle: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the elements of answers that are not judged, as masks."""
        baseline = own.baseline
        of_place = undefined if own.probe.has_zeros else None
        answers = baseline, oracle
        if depends_on_order(self.problem, own.model, own.values, answers, self.known):
            of_place = of_order
        if of_place is None:
            return disputed_in(baseline, oracle)
        masks = {n: of_place(t, oracle[n]) for n, t in baseline.items()}
        return {n: mask for n, mask in masks.items() if mask is not None}

    def _without_edits(self, probe: Probe) -> Expected:
        """Return what is expected where the reference refuses a backward after an edit.

        The candidate must refuse it as well, or give the gradients of the values as they were.
        """
        found = self.expected(dataclasses.replace(probe, edits=""))
        script = dataclasses.replace(found.question.script, edits=probe.edits)
        question = Question(script, found.question.tensors)
        # An edited output passes its gradient on by that factor, where nothing was kept of it.
        factor = OUTPUT_FACTORS.get(probe.edits, 1.0)
        oracle = {n: t * factor if n.startswith("grad") else t for n, t in found.oracle.items()}
        replay = found.replay and dataclasses.replace(found.replay, factor=factor)
        return dataclasses.replace(
            found, probe=probe, question=question, oracle=oracle, may_refuse_backward=True,
            replay=replay,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the reference itself answers a probe with, in its own arithmetic.

    `values` are the arguments of the first call.
    """

    probe: Probe
    script: Script
    tensors: dict[str, torch.Tensor]
    values: Sequence[Any]
    num_rows: int
    model: torch.nn.Module
    report: Report
    baseline: dict[str, torch.Tensor]


def _larger(one: Error, other: Error) -> Error:
    """Return an error as large as both."""
    most, rms = max(one.max_abs, other.max_abs), max(one.rms_abs, other.rms_abs)
    return dataclasses.replace(one, max_abs=most, rms_abs=rms)


def _without_float64(problem: Problem, model: torch.nn.Module, said: str) -> ProblemError:
    """Return why nothing can be judged where the reference does not run in float64."""
    if says_no_memory(said):
        num_bytes = sum(getattr(value, "nbytes", 0) for value in model.state_dict().values())
        next_ = (
            f"its weights take {num_bytes / 2**30:.1f} GiB, and a file is judged beside them and "
            "their gradients in float64, of several calls at once: tune it on a device with more "
            "memory, or with smaller sizes"
        )
        return problem.error(f"memory ran out for the float64 run: {said}\n  next: {next_}")
    return problem.error(
        f"the float64 run of the reference fails: {said}\n  next: forward has to run in float64 "
        "too: give the tensors that it makes the type of those that they meet, as by "
        "torch.zeros(..., dtype=x.dtype)"
    )


def _other_ways(
    probe: Probe, script: Script, device: Any
) -> list[tuple[Script, contextlib.AbstractContextManager[Any]]]:
    """Return what else is PyTorch's own way to the answer, as exact as which a contender must be.

    With a weight that begins at an odd place, as a part of a vector does, a GPU's convolution does
    not take TF32, which it takes with the same numbers elsewhere.
    """
    ways: list[tuple[Script, contextlib.AbstractContextManager[Any]]] = []
    if is_noisy(probe):
        ways.append((script, noise(probe.distribution == "far")))
    elif lies_otherwise(probe.layout):  # a norm of an expanded row is summed less well
        ways.append((script, contextlib.nullcontext()))
    if is_gpu(device) and any("rebind" in actions for actions in script.before):
        before = tuple(
            tuple[Action, ...]("assign" if action == "rebind" else action for action in actions)
            for actions in script.before
        )
        ways.append((dataclasses.replace(script, before=before), contextlib.nullcontext()))
    return ways


def _beyond_reference(
    problem: Problem,
    probe: Probe,
    wide: torch.nn.Module,
    question: Question,
    report: Report,
    num_rows: int,
) -> Expected:
    """Return what is expected where the reference refuses: the same, or the right answer.

    The float64 run knows the right answer where it is the types alone that are refused.
    """
    oracle: dict[str, torch.Tensor] = {}
    if probe.layout in ("float64", "mixed") or probe.dtype:
        exact = {name: widened(value) for name, value in question.tensors.items()}
        with exact_convolutions():
            _, oracle = played(problem, wide, question.script, exact, probe, is_exact=True)
    return Expected(probe, question, num_rows, oracle, {}, report, error=report.error)


def rows_of(arguments: Sequence[Any]) -> int:
    """Return dim 0 of the first tensor; without one, a number that is no small batch."""
    import torch

    return next(
        (int(x.shape[0]) for x in arguments if isinstance(x, torch.Tensor) and x.ndim), SMALL_BATCH
    )


def _momenta(model: torch.nn.Module) -> dict[str, float]:
    found = ((name, getattr(m, "momentum", None)) for name, m in model.named_modules())
    return {name: float(m) for name, m in found if isinstance(m, float)}


def _require_stable(problem: Problem, probe: Probe, errors: Mapping[str, Error]) -> None:
    for name, error in errors.items():
        is_usual = probe.distribution == "as_given" and name.startswith("call")
        if is_usual and probe.batch is None and error.rms_rel > UNSTABLE_RMS:
            why = "does it draw random numbers?\n"
            why += "  next: if it has dropout, --mode eval, in which that does nothing"
            if error.largest < NOTHING:  # as the mean of what a norm without weights gives
                why = (
                    f"in float64 it is at most {error.largest:.1g}: is it 0 for all inputs?\n"
                    "  next: nothing of it can be computed faster than by not computing it"
                )
            raise problem.error(
                "the reference's own answer differs from its float64 answer by "
                f"{error.rms_rel:.2g} (rms, relative), so nothing can be judged by it; {why}"
            )


def _beside_something(
    problem: Problem,
    probe: Probe,
    errors: dict[str, Error],
    values: Sequence[Any],
    known: dict[Any, Any],
) -> dict[str, Error]:
    """Return errors, beside what a result is with other weights where it is 0 with the first.

    As the mean of a norm whose weights are all 1: what rounding leaves of it is judged by the size
    of what is added up.
    """
    if probe.weights not in ("initial", "own"):
        return errors
    nothing = {
        name: error
        for name, error in errors.items()
        if name.startswith("call") and error.largest < NOTHING and error.rms_rel > UNSTABLE_RMS
    }
    if nothing and "something" not in known:
        import torch

        model = problem.randomise(copied(known["initial"]), probe.seed_weights, "random").double()
        wide = [widened(x) if isinstance(x, torch.Tensor) else x for x in values]
        with torch.no_grad(), exact_convolutions():
            made = [y for y in problem.call(model, wide) if y.is_floating_point() and y.numel()]
        known["something"] = max((float(y.abs().max()) for y in made), default=0.0)
    if not nothing or known["something"] < NOTHING:
        return errors
    size = known["something"]
    of = {n: dataclasses.replace(e, largest=size, rms_value=size) for n, e in nothing.items()}
    return errors | of
