"""What is expected of a candidate: a probe's question, its oracle, the baseline's own error."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.check.arguments import draw_tangents, inputs_of_calls
from tuner.check.compare import SMALL_BATCH, Error, errors_of, repeats
from tuner.check.crossing import Action, Question, Report, Script
from tuner.check.exercise import recorded
from tuner.check.gradients import OUTPUT_FACTORS
from tuner.check.kinks import Replay
from tuner.check.noise import is_noisy, noise
from tuner.check.parts import copied
from tuner.check.playing import played
from tuner.check.probe import Probe
from tuner.check.questions import script_of, weighted_model
from tuner.check.refusals import fewer_rows, is_odd, lies_otherwise, refuses_layout, tamer
from tuner.check.undecided import disputed_in, is_near_overflow, of_order, undefined
from tuner.check.wide_convolutions import exact_convolutions
from tuner.errors import ProblemError, says_no_memory
from tuner.machine import gpu_memory
from tuner.machine.platforms import is_gpu
from tuner.problem.accuracy import Accuracy, math_mode
from tuner.problem.draws import widened
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["Expected", "expected", "rows_of"]

MULTIPLYING = frozenset({"aten.prod", "aten.cumprod"})  # many numbers, each with all others
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
    known = {} if models is None else models
    model, tensors = weighted_model(problem, probe, device, known)
    fewer = fewer_rows(problem, probe, model, device) if probe.is_tall else None
    if fewer is not None:
        less = dataclasses.replace(probe, is_tall=False, batch=fewer)
        return expected(problem, less, accuracy, device, models=known)
    arguments = inputs_of_calls(problem, probe, device, model)
    script = script_of(problem, probe, arguments, tensors, known, device)
    if script.is_forward:
        draw_tangents(arguments, tensors, probe, model)
    wide = copied(model).double()
    others = [(way, around, copied(model)) for way, around in _other_ways(probe, script, device)]
    start = {name: buffer.detach().clone() for name, buffer in wide.named_buffers()}
    with math_mode(accuracy):
        report, baseline = played(problem, model, script, tensors, probe)
    if says_no_memory(report.error):  # the judge's own: with fewer rows it can tell
        raise ProblemError(report.error)
    num_rows = rows_of(arguments[0])
    if report.stage == "gradients" and probe.edits:
        return _without_edits(problem, probe, accuracy, device, known)
    has_none = report.stage == "gradients" and is_odd(probe)  # as LayerNorm of no rows, on a GPU
    if has_none or (report.error and script.is_forward):  # not all operations have that mode
        plain = dataclasses.replace(probe, gradients="")
        return expected(problem, plain, accuracy, device, models=known)
    if report.error and probe.mapped:  # what looks at values, or edits buffers, cannot be
        return expected(
            problem, dataclasses.replace(probe, mapped=""), accuracy, device, models=known
        )
    if report.error and probe.mode == "cumulative":  # its own `momentum` has to be a number
        plain = dataclasses.replace(probe, mode="train")
        return expected(problem, plain, accuracy, device, models=known)
    tame = tamer(probe) if report.error else None
    if tame is not None:
        return expected(problem, tame, accuracy, device, models=known)
    if report.error and not is_odd(probe):
        raise ProblemError(report.error)
    if report.error:
        return _beyond_reference(problem, probe, wide, Question(script, tensors), report, num_rows)
    if probe.is_random:  # its numbers are chance, the candidate's as well
        return Expected(probe, Question(script, tensors), num_rows, {}, {}, report)
    sizes = tuple(t.numel() * t.element_size() for n, t in baseline.items() if n[:5] == "call0")
    script = dataclasses.replace(script, output_bytes=sizes)
    wide_tensors = {name: widened(value) for name, value in tensors.items()}
    own = frozenset(id(t) for n, t in wide_tensors.items() if t is not tensors[n])
    with exact_convolutions():
        wide_report, oracle = played(
            problem, wide, script, wide_tensors, probe, is_exact=True, own=own
        )
    if wide_report.error:
        raise _without_float64(problem, model, wide_report.error)
    if probe.distribution == "vast" and any(
        is_near_overflow(t, oracle[n]) for n, t in baseline.items()
    ):
        smaller = dataclasses.replace(probe, distribution="vast_terms")
        return expected(problem, smaller, accuracy, device, models=known)
    of_place = undefined if probe.has_zeros else None
    if _depends_on_order(problem, model, arguments[0], (baseline, oracle), known):
        of_place = of_order
    del wide, wide_tensors  # with gradients, four times the bytes of the weights
    if of_place is None:
        unjudged = disputed_in(baseline, oracle)
    else:
        masks = {n: of_place(t, oracle[n]) for n, t in baseline.items()}
        unjudged = {n: mask for n, mask in masks.items() if mask is not None}
    errors = errors_of(baseline, oracle, unjudged, accuracy)
    errors = _beside_something(problem, probe, errors, arguments[0], known)
    _require_stable(problem, probe, errors)
    dtypes = {name: t.dtype for name, t in baseline.items()}
    is_repeated = not probe.wants_same_bits or repeats(baseline, oracle)
    baseline.clear()
    for way, around, again in others:
        with math_mode(accuracy), around:
            _, moved = played(problem, again, way, tensors, probe, is_laid=True)
        moved = {name: tensor for name, tensor in moved.items() if name in errors}
        for name, error in errors_of(moved, oracle, unjudged, accuracy).items():
            most = max(errors[name].max_abs, error.max_abs)
            rms = max(errors[name].rms_abs, error.rms_abs)
            errors[name] = dataclasses.replace(errors[name], max_abs=most, rms_abs=rms)
    momenta = {f"{n}." if n else "": m for n, m in _momenta(model).items()}
    gpu_memory.free_unused(device)  # float64 temporaries
    return Expected(
        probe, Question(script, tensors), num_rows, oracle, errors, report, unjudged, momenta,
        start, dtypes, repeats=is_repeated,
        drawn=known["drawn"] if script.own_seed is not None else 0,
        may_refuse=refuses_layout(problem, model, probe, arguments[0]),
        replay=Replay(problem, probe, script, tensors, accuracy, device, known),
    )  # fmt: skip


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


def _depends_on_order(
    problem: Problem,
    model: torch.nn.Module,
    values: Sequence[Any],
    answers: Sequence[Mapping[str, torch.Tensor]],
    known: dict[Any, Any],
) -> bool:
    """Whether answers have NaN or Inf about which the order of products may decide.

    A scan by blocks has an order of its own. A NaN of the inputs comes through in any order.
    """
    import torch

    if not _multiplies(problem, model, values, known):  # as nearly all: no number is looked at
        return False
    made = [y for answer in answers for y in answer.values() if y.is_floating_point()]
    given = [x for x in (*values, *model.parameters()) if isinstance(x, torch.Tensor)]
    is_finite = all(bool(torch.isfinite(y).all()) for y in made)
    return not is_finite and not any(bool(torch.isnan(x).any()) for x in given)


def _multiplies(
    problem: Problem, model: torch.nn.Module, values: Sequence[Any], known: dict[Any, Any]
) -> bool:
    """Whether a module multiplies many numbers, each with all others; `known` keeps the answer."""
    import torch

    if "multiplies" not in known:
        operations: list[str] = []
        with contextlib.suppress(ProblemError), torch.no_grad(), recorded(operations):
            problem.call(copied(model), values)
            known["multiplies"] = not MULTIPLYING.isdisjoint(operations)
    multiplies: bool = known.get("multiplies", False)
    return multiplies


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


def _without_edits(
    problem: Problem, probe: Probe, accuracy: Accuracy, device: Any, models: dict[Any, Any]
) -> Expected:
    """Return what is expected where the reference refuses a backward after an edit.

    The candidate must refuse it as well, or give the gradients of the values as they were.
    """
    plain = dataclasses.replace(probe, edits="")
    found = expected(problem, plain, accuracy, device, models=models)
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
