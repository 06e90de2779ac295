"""The judge's half of a check: what is expected, and the verdict on the answers.

    judge's process                          producer's process (imports the candidate)
    expected(problem, probe) -> Expected
        .question ---- pack / unpack ---->  answer(make_candidate, question) -> Answer
    judge(expected, answer)  <--------------------- pack / unpack ----
        -> ProbeResult ... merge -> Check

For screening both halves may share a process; then nothing is packed, and what is expected is
computed once for all candidates. `probes` holds what is asked and what crosses, `produce` the
other half.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.errors import ProblemError
from tuner.probes import OWN_WEIGHTS_SEED, Answer, Probe, Question, Report, Script
from tuner.problem import Accuracy, Problem, math_mode, widened
from tuner.produce import (
    CHUNK_ELEMENTS,
    arguments_of,
    checksum_of,
    checksums_of,
    edit_weights,
    gradients_of,
    keys_of,
    kind_of,
    laid_out,
    set_mode,
    snapshot,
)
from tuner.trial import Check, ProbeResult

if TYPE_CHECKING:
    import torch

__all__ = ["Expected", "expected", "judge", "merge"]

ULP = 2.0**-24  # half the distance between 1 and the next float32
FLOOR_ULPS = 16  # an error below this many ULP of the largest value is always accepted
SMALL_BATCH = 32  # below it the float32 class allows 4x instead of 2x the baseline's error
GRADIENT_FACTOR = 4.0  # gradients: times the baseline's own largest error, in every class
GRADIENT_FLOOR_ULPS = 64  # and this many ULP of the largest gradient of all tensors
UNSTABLE_RMS = 0.1  # a reference with this error against itself in float64 cannot be judged


# ---- what is expected -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Error:
    """How one tensor differs from float64; absolute, over the elements finite in both."""

    max_abs: float = 0.0
    rms_abs: float = 0.0
    largest: float = 0.0  # of the float64 value
    rms_value: float = 0.0
    num_misplaced: int = 0  # NaN or Inf at other places than in the reference
    num_beyond: int = 0  # elements beyond atol + rtol * |value|, tolerance class only

    @property
    def rms_rel(self) -> float:
        return self.rms_abs / self.rms_value if self.rms_value else self.rms_abs


@dataclass(frozen=True, slots=True)
class Expected:
    """The reference's side of one probe, to judge any number of candidates with.

    `oracle` is float64 (integers as they are); `baseline` the error of PyTorch's own answer.
    `error` is set when the reference itself raises; then so must the candidate.
    """

    probe: Probe
    question: Question
    num_rows: int
    oracle: dict[str, torch.Tensor]
    baseline: dict[str, _Error]
    report: Report
    unjudged: dict[str, torch.Tensor] = field(default_factory=dict)
    momenta: dict[str, float] = field(default_factory=dict)
    start: dict[str, torch.Tensor] = field(default_factory=dict)  # buffers before the calls
    error: str = ""


def expected(
    problem: Problem,
    probe: Probe,
    accuracy: Accuracy,
    device: str | torch.device = "cpu",
    *,
    models: dict[Any, torch.nn.Module] | None = None,
) -> Expected:
    """Compute one probe's question, its float64 oracle and the baseline's own error.

    `models` may be one dict for all probes of a check: constructing a model takes long.

    Raises:
        ProblemError: the reference fails in itself, or its answer cannot be judged.
    """
    import torch

    accuracy.require_on(device)
    known = {} if models is None else models
    model, tensors = _weighted_model(problem, probe, device, known)
    arguments = _inputs_of_calls(problem, probe, device)
    script = _script_of(problem, probe, arguments, tensors)
    wide = copy.deepcopy(model).double()
    start = {name: buffer.detach().clone() for name, buffer in wide.named_buffers()}
    with math_mode(accuracy):
        report, baseline = _reference_answer(problem, model, script, tensors, probe)
    num_rows = _rows_of(arguments[0])
    if report.error:
        return Expected(
            probe, Question(script, tensors), num_rows, {}, {}, report, error=report.error
        )
    sizes = tuple(t.numel() * t.element_size() for n, t in baseline.items() if n[:5] == "call0")
    script = dataclasses.replace(script, output_bytes=sizes)
    wide_tensors = {name: widened(value) for name, value in tensors.items()}
    wide_report, oracle = _reference_answer(problem, wide, script, wide_tensors, probe)
    if wide_report.error:
        raise problem.error(f"the float64 run of the reference fails: {wide_report.error}")
    unjudged = {
        n: mask for n, t in baseline.items() if (mask := _disputed(t, oracle[n])) is not None
    }
    errors = {n: _compare(t, oracle[n], unjudged.get(n), accuracy) for n, t in baseline.items()}
    _require_stable(problem, probe, errors)
    momenta = {f"{n}." if n else "": m for n, m in _momenta(model).items()}
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # of the float64 temporaries, 3 GB for the flagship
    return Expected(
        probe, Question(script, tensors), num_rows, oracle, errors, report, unjudged, momenta,
        start,
    )  # fmt: skip


def _weighted_model(
    problem: Problem, probe: Probe, device: Any, models: dict[Any, torch.nn.Module]
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a copy of the reference with the probe's weights, and them for the question.

    The question's tensors are those of `models`, which nobody edits: at 8192 x 8192 a copy for
    each probe would be 268 MB.
    """
    if "initial" not in models:
        models["initial"] = problem.make_model(OWN_WEIGHTS_SEED, device)
    key: Any = "initial"
    if probe.weights in ("random", "dyadic"):
        key = (probe.weights, probe.seed_weights)
        if key not in models:
            kind: Any = probe.weights
            fresh = copy.deepcopy(models["initial"])
            models[key] = problem.randomise(fresh, probe.seed_weights, kind)
    tensors = {}
    if probe.weights != "own":
        tensors = {f"state.{n}": t.detach() for n, t in models[key].state_dict().items()}
    if probe.edits_weights:
        edit = ("edit", probe.seed_weights)
        if edit not in models:
            fresh = copy.deepcopy(models["initial"])
            models[edit] = problem.randomise(fresh, probe.seed_weights + 1)
        edits = models[edit].named_parameters()
        tensors.update((f"edit.{n}", p.detach()) for n, p in edits)
    model = copy.deepcopy(models[key])
    set_mode(model, probe.mode)
    return model, tensors


def _inputs_of_calls(problem: Problem, probe: Probe, device: Any) -> list[list[Any]]:
    """Return each call's arguments; those of "repeated" calls are given once."""
    import torch

    first = problem.make_inputs(
        probe.seed_inputs, distribution=probe.distribution, batch=probe.batch, device=device
    )

    def shaped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.ndim:
            return value
        if probe.layout == "expanded":
            return value[..., :1].expand(value.shape).contiguous()
        if probe.layout == "float64":
            return value.double()
        if probe.layout == "too_wide":
            return torch.cat([value, value[..., :1]], dim=-1)
        return value

    first = [shaped(value) for value in first]
    calls = 1 if probe.inputs == "repeated" else probe.calls
    change = _nudged if probe.inputs == "nudged" else _varied
    return [[change(value, call) if call else value for value in first] for call in range(calls)]


def _varied(value: Any, call: int) -> Any:
    """Return other content with other statistics, far from any earlier call's."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.ndim:
        return value
    return value.flip(0) * (1.0 + 0.5 * call) + 0.25 * call


def _nudged(value: Any, call: int) -> Any:
    """Return the same content but for one element, past the middle."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return value
    changed = value.clone()
    at = (2 * value.numel() // 3 + 5 * call) % value.numel()
    changed.view(-1)[at] = -3.0 * changed.view(-1)[at] - 1.0
    return changed


def _script_of(
    problem: Problem,
    probe: Probe,
    arguments: Sequence[Sequence[Any]],
    tensors: dict[str, torch.Tensor],
) -> Script:
    """Return the script; puts `input.*` into `tensors`."""
    import torch

    numbers: dict[str, Any] = {}
    for call, values in enumerate(arguments):
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                tensors[f"input.{call}.{i}"] = value
            elif value is None or isinstance(value, (bool, int, float, str)):
                numbers[f"{call}.{i}"] = value
            else:
                raise problem.error(
                    f"get_inputs() gives a {type(value).__name__} as input {i}; "
                    "expected tensors and numbers"
                )
    return Script(
        calls=probe.calls,
        num_inputs=len(arguments[0]),
        is_overwritten=probe.inputs == "overwritten",
        is_repeated=probe.inputs == "repeated",
        edits_weights=probe.edits_weights,
        mode=probe.mode,
        gradients=probe.gradients,
        layout=probe.layout,
        has_nan_memory=probe.has_nan_memory,
        has_side_stream=probe.has_side_stream,
        own_seed=OWN_WEIGHTS_SEED if probe.weights == "own" else None,
        numbers=numbers,
    )


def _reference_answer(
    problem: Problem,
    model: torch.nn.Module,
    script: Script,
    tensors: dict[str, torch.Tensor],
    probe: Probe,
) -> tuple[Report, dict[str, torch.Tensor]]:
    """Play the script with the reference; draws `grad.*` into `tensors` when they are missing."""
    import torch

    answers: dict[str, torch.Tensor] = {}
    kinds: list[tuple[str, ...]] = []
    keys = tuple(keys_of(model))
    values: list[Any] = []
    outputs: tuple[torch.Tensor, ...] = ()
    for call in range(script.calls):
        if call == 1 and script.edits_weights:
            edit_weights(model, tensors)
        values = [laid_out(v, "contiguous") for v in arguments_of(script, tensors, call)]
        if script.gradients:
            values = [_as_leaf(value) for value in values]
        with torch.set_grad_enabled(script.gradients):
            try:
                outputs = problem.call(model, values)
            except ProblemError as error:
                is_odd = probe.layout in ("float64", "too_wide") or probe.batch is not None
                if call or not is_odd:
                    raise
                return Report(error=str(error), stage="call 1", keys=keys), {}
        kinds.append(tuple(kind_of(output) for output in outputs))
        answers.update((f"call{call}.output{j}", snapshot(y)) for j, y in enumerate(outputs))
    answers.update((f"buffer.{n}", b.detach().clone()) for n, b in model.named_buffers())
    if script.gradients:
        _draw_output_gradients(outputs, tensors, probe)
        if any(y.requires_grad for y in outputs):
            answers.update(gradients_of(model, values, outputs, tensors))
    return Report(keys=keys, kinds=tuple(kinds), checksums=checksums_of(model, values)), answers


def _as_leaf(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _draw_output_gradients(
    outputs: Sequence[torch.Tensor], tensors: dict[str, torch.Tensor], probe: Probe
) -> None:
    import torch

    for k, y in enumerate(outputs):
        if y.is_floating_point() and f"grad.{k}" not in tensors:
            generator = torch.Generator(y.device).manual_seed(probe.seed_inputs + 7)
            tensors[f"grad.{k}"] = torch.randn(
                y.shape, generator=generator, device=y.device, dtype=y.dtype
            )


def _rows_of(arguments: Sequence[Any]) -> int:
    """Return dim 0 of the first tensor; without one, a number that is no small batch."""
    import torch

    return next(
        (int(x.shape[0]) for x in arguments if isinstance(x, torch.Tensor) and x.ndim), SMALL_BATCH
    )


def _momenta(model: torch.nn.Module) -> dict[str, float]:
    found = ((name, getattr(m, "momentum", None)) for name, m in model.named_modules())
    return {name: float(m) for name, m in found if isinstance(m, float)}


def _disputed(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    """Return where the baseline is NaN or infinite and float64 is not, or the other way."""
    import torch

    if not got.is_floating_point():
        return None
    mask = (torch.isnan(got) != torch.isnan(want)) | (torch.isinf(got) != torch.isinf(want))
    return mask if bool(mask.any()) else None


def _require_stable(problem: Problem, probe: Probe, errors: Mapping[str, _Error]) -> None:
    for name, error in errors.items():
        is_usual = probe.distribution == "as_given" and name.startswith("call")
        if is_usual and probe.batch is None and error.rms_rel > UNSTABLE_RMS:
            raise problem.error(
                "the reference's own answer differs from its float64 answer by "
                f"{error.rms_rel:.2g} (rms, relative), so nothing can be judged by it; "
                "does it draw random numbers?"
            )


# ---- compare --------------------------------------------------------------------------------


def _compare(
    got: torch.Tensor,
    want: torch.Tensor,
    unjudged: torch.Tensor | None = None,
    accuracy: Accuracy | None = None,
    *,
    tells_nan_from_inf: bool = True,
) -> _Error:
    """Compare on the device in chunks; one synchronisation a tensor."""
    import torch

    if not want.is_floating_point():
        return _Error(num_misplaced=int((got != want).sum()))
    sums = torch.zeros(7, dtype=torch.float64, device=want.device)
    for g, w, skip in _chunks(got, want, unjudged):
        error, is_misplaced = _differences(g, w, skip)
        if not tells_nan_from_inf:
            is_misplaced &= torch.isfinite(g) | torch.isfinite(w)
        value = torch.where(torch.isfinite(w), w.abs(), 0.0)
        beyond = torch.zeros((), dtype=torch.float64, device=want.device)
        if accuracy is not None and accuracy.kind == "tolerance":
            beyond = (error > accuracy.atol + accuracy.rtol * value).sum().double()
        sums[0] = torch.maximum(sums[0], error.max())
        sums[1] += error.square().sum()
        sums[2] = torch.maximum(sums[2], value.max())
        sums[3] += value.square().sum()
        sums[4] += is_misplaced.sum()
        sums[5] += beyond
        sums[6] += error.numel()
    max_abs, square, largest, square_value, misplaced, beyond_count, count = sums.tolist()
    count = max(1.0, count)
    return _Error(
        max_abs, math.sqrt(square / count), largest, math.sqrt(square_value / count),
        int(misplaced), int(beyond_count),
    )  # fmt: skip


def _chunks(
    got: torch.Tensor, want: torch.Tensor, unjudged: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield flat float64 pieces of both, small enough for several temporaries."""
    g, w = got.reshape(-1), want.reshape(-1)
    skip = None if unjudged is None else unjudged.reshape(-1)
    for start in range(0, w.numel(), CHUNK_ELEMENTS):
        piece = slice(start, start + CHUNK_ELEMENTS)
        yield g[piece].double(), w[piece].double(), None if skip is None else skip[piece]


def _differences(
    got: torch.Tensor, want: torch.Tensor, skip: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the absolute error (0 where either is not finite) and where NaN or Inf is amiss."""
    import torch

    is_both_finite = torch.isfinite(got) & torch.isfinite(want)
    error = torch.where(is_both_finite, (got - want).abs(), 0.0)
    is_same = is_both_finite | (got == want) | (torch.isnan(got) & torch.isnan(want))
    if skip is not None:
        error = torch.where(skip, 0.0, error)
        is_same = is_same | skip
    return error, ~is_same


@dataclass(frozen=True, slots=True)
class _Limits:
    """How large the error of one tensor may be, and why (for the message)."""

    max_abs: float
    rms_abs: float
    why: str
    is_elementwise: bool = False  # no element beyond atol + rtol * |value| is enough as well

    def accepts(self, error: _Error) -> bool:
        if error.num_misplaced:
            return False
        if self.is_elementwise and not error.num_beyond:
            return True
        return error.max_abs <= self.max_abs and error.rms_abs <= self.rms_abs


def _limits(name: str, baseline: _Error, num_rows: int, accuracy: Accuracy) -> _Limits:
    """Return the limits of an output or a buffer by the class of accuracy.

    - float32: twice PyTorch float32's own rms and max error on this probe (4 times for batches
      under 32), or 16 * 2^-24 of the largest value, whichever is larger;
    - tf32: once PyTorch TF32's own, with the same floor. Two equally good kernels that sum in
      another order differ by chance: the rms by 1 %, the largest error of millions by 10 % (seen
      on an H200 between PyTorch's own algorithms), so 1.02 and 1.25 times are taken as once;
      twice for buffers, whose few elements leave the ratio of two maxima more to chance;
    - tolerance: every element within atol + rtol * |value|, or all within twice the baseline's
      own largest error (which is more where the baseline leaves the tolerance, as on x + 100);
      for buffers, |value| is that of the largest element.
    """
    infinite = float("inf")
    is_buffer = name.startswith("buffer.")
    if accuracy.kind == "tolerance":
        limit = 2.0 * baseline.max_abs
        if not is_buffer:
            return _Limits(limit, infinite, accuracy.label, is_elementwise=True)
        limit = max(limit, accuracy.atol + accuracy.rtol * baseline.largest)
        return _Limits(limit, infinite, f"{accuracy.label} of the largest value")
    factor = rms_factor = 4.0 if num_rows < SMALL_BATCH else 2.0
    if accuracy.kind == "tf32":
        factor, rms_factor = (2.0, 2.0) if is_buffer else (1.25, 1.02)
    floor = FLOOR_ULPS * ULP * baseline.largest
    own = f"{factor:g} x PyTorch {accuracy.kind}'s own {baseline.max_abs:.3g}"
    why = own if factor * baseline.max_abs >= floor else f"16 x 2^-24 of {baseline.largest:.3g}"
    return _Limits(
        max(factor * baseline.max_abs, floor), max(rms_factor * baseline.rms_abs, floor), why
    )


def _gradient_limits(baseline: _Error, largest_of_all: float, accuracy: Accuracy) -> _Limits:
    """Return the limits of a gradient.

    4 times the baseline's own largest error, or 64 * 2^-24 of the tensor's largest element; in
    the tolerance class at least atol + 10 * rtol of it. A gradient that is mathematically 0 (of
    a bias in front of a batch normalisation) has no size of its own, and is compared
    absolutely: with the largest element of all gradients.
    """
    is_zero = baseline.largest < 1e-10 * largest_of_all
    largest = largest_of_all if is_zero else baseline.largest
    limit = max(GRADIENT_FACTOR * baseline.max_abs, GRADIENT_FLOOR_ULPS * ULP * largest)
    if accuracy.kind == "tolerance":
        limit = max(limit, accuracy.atol + 10.0 * accuracy.rtol * largest)
    return _Limits(limit, float("inf"), f"PyTorch's own {baseline.max_abs:.3g}")


# ---- the verdict ----------------------------------------------------------------------------


def judge(expected: Expected, answer: Answer, accuracy: Accuracy) -> ProbeResult:
    """Judge one answer: how it behaved, what it returned, how near to float64 it is."""
    probe = expected.probe
    reason = _judge_refusal(expected, answer)
    if reason is not None:
        return ProbeResult(probe.name, 0.0, 0.0, 0.0, 0.0, reason == "", _told(probe, reason))
    reason = _judge_form(expected, answer)
    if reason:
        return ProbeResult(
            probe.name, math.inf, math.inf, *_baseline_of(expected), False, _told(probe, reason)
        )
    errors = {
        # A poisoned buffer may be NaN or infinite: that depends on how sums are merged.
        name: _compare(
            _received(answer, want, name),
            want,
            expected.unjudged.get(name),
            accuracy,
            tells_nan_from_inf=not name.startswith("buffer."),
        )
        for name, want in expected.oracle.items()
        if name in answer.tensors
    }
    reason = (
        _judge_behaviour(expected, answer)
        or _judge_values(expected, answer, errors, accuracy)
        or _judge_gradients(expected, answer, errors, accuracy)
        or _judge_bits(expected, answer)
    )
    outputs = [error for name, error in errors.items() if name.startswith("call")]
    worst = max(outputs, key=lambda error: error.max_abs, default=_Error())
    rms_rel = max((error.rms_rel for error in outputs), default=0.0)
    return ProbeResult(
        probe.name, rms_rel, worst.max_abs, *_baseline_of(expected), not reason,
        _told(probe, reason),
    )  # fmt: skip


def _told(probe: Probe, reason: str) -> str:
    if not reason:
        return ""
    return f"{probe.name}: {reason}" + (f" ({probe.tells})" if probe.tells else "")


def _baseline_of(expected: Expected) -> tuple[float, float]:
    outputs = [error for name, error in expected.baseline.items() if name.startswith("call")]
    return (
        max((error.rms_rel for error in outputs), default=0.0),
        max((error.max_abs for error in outputs), default=0.0),
    )


def _received(answer: Answer, want: torch.Tensor, name: str) -> torch.Tensor:
    return answer.tensors[name].to(want.device)


def _judge_refusal(expected: Expected, answer: Answer) -> str | None:
    """Return None to judge on, "" to accept as it is, or why it is rejected."""
    report, probe = answer.report, expected.probe
    if expected.error and not report.error:
        # The reference's answer at such a batch is unknown, so any answer may be right.
        is_beyond_reference = probe.layout == "contiguous" and (probe.batch or 0) >= 2
        if is_beyond_reference:
            return ""
        return f"it returned an answer where the reference raises: {expected.error}"
    if not report.error:
        return None
    is_call = report.stage.startswith("call")
    if is_call and (expected.error or probe.may_refuse):
        return ""
    if report.stage == "load":
        return f"it does not load the reference's state_dict: {_shortened(report.error)}"
    if report.stage == "build":
        return f"ModelNew(*get_init_inputs()) raised {_shortened(report.error)}"
    return f"it raised in {report.stage}: {_shortened(report.error)}"


def _shortened(text: str, limit: int = 600) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]} ... ({len(text) - limit} characters more)"


def _judge_form(expected: Expected, answer: Answer) -> str:
    """Judge the state_dict's keys and the outputs' number, type, dtype, shape and device."""
    report, reference = answer.report, expected.report
    mine, theirs = dict(_by_name(report.keys)), dict(_by_name(reference.keys))
    for name in theirs:
        if mine.get(name) != theirs[name]:
            found = mine.get(name, "missing")
            return f"state_dict: {name!r} is {found}; the reference's is {theirs[name]}"
    extra = [name for name in mine if name not in theirs]
    if extra:
        return f"state_dict: {extra[0]!r} is not in the reference's"
    for call, kinds in enumerate(reference.kinds):
        got = report.kinds[call] if call < len(report.kinds) else ()
        if got != kinds:
            is_disguised = any(not kind.startswith("torch.Tensor ") for kind in got)
            hint = ": a lazy or disguised tensor?" if is_disguised else ""
            return (
                f"call {call + 1} returned {', '.join(got) or 'nothing'}; "
                f"expected {', '.join(kinds)}{hint}"
            )
    for name, want in expected.oracle.items():
        got_tensor = answer.tensors.get(name)
        if got_tensor is None and not name.startswith("grad."):
            return f"{_label(name)} is missing from the answer"
        if got_tensor is not None and got_tensor.shape != want.shape:
            return f"{_label(name)} has shape {list(got_tensor.shape)}, not {list(want.shape)}"
        # Announced kinds were compared above; the received bytes must be of that kind as well.
        if got_tensor is not None and got_tensor.is_complex():
            return f"{_label(name)} is {got_tensor.dtype}"
    return ""


def _by_name(
    keys: Sequence[tuple[str, str, tuple[int, ...]]],
) -> Iterator[tuple[str, str]]:
    for name, dtype, shape in keys:
        yield name, f"{dtype.removeprefix('torch.')}{list(shape)}"


def _judge_behaviour(expected: Expected, answer: Answer) -> str:
    """Judge what must hold whatever the values: memory, edits, late work."""
    report = answer.report
    if report.aliases:
        return report.aliases[0]
    for name, checksum in expected.report.checksums.items():
        if report.checksums.get(name) == checksum:
            continue
        kind, _, rest = name.partition(".")
        if kind == "input":
            return f"input {rest} was edited by the call"
        is_own = expected.question.script.own_seed is not None
        if is_own and report.checksums.get(f"drawn.{name}") != checksum:
            return (
                f"{rest} differs from the reference's initial value: with the same seed, the "
                "constructor must draw the same random numbers in the same order"
            )
        return f"the weight {rest} was edited by the call"
    for name, tensor in answer.tensors.items():
        if name.startswith("call") and report.checksums.get(f"late.{name}") != checksum_of(tensor):
            return (
                f"{_label(name)} changed after the call had returned: a later call or another "
                "thread or stream writes to it"
            )
    return ""


def _judge_values(
    expected: Expected, answer: Answer, errors: Mapping[str, _Error], accuracy: Accuracy
) -> str:
    """Judge outputs and buffers by the class of accuracy."""
    for name, error in errors.items():
        if name.startswith("grad."):
            continue
        baseline = expected.baseline[name]
        limits = _limits(name, baseline, expected.num_rows, accuracy)
        if not limits.accepts(error):
            where = _offence(expected, answer, name, error, limits, accuracy)
            diagnosis = _diagnosis(expected, answer, name, error)
            return where + (f"; {diagnosis}" if diagnosis else "")
    return ""


def _judge_gradients(
    expected: Expected, answer: Answer, errors: Mapping[str, _Error], accuracy: Accuracy
) -> str:
    names = [name for name in expected.oracle if name.startswith("grad.")]
    if names and answer.report.is_detached:
        return "the output is detached: it has no gradient, and nothing was raised"
    largest = max((expected.baseline[name].largest for name in names), default=0.0)
    for name in names:
        if name not in errors:
            return f"{_label(name)} is missing: the output does not depend on it"
        limits = _gradient_limits(expected.baseline[name], largest, accuracy)
        error = errors[name]
        if not limits.accepts(error):
            return _offence(expected, answer, name, error, limits, accuracy)
    return ""


def _judge_bits(expected: Expected, answer: Answer) -> str:
    if not expected.probe.wants_same_bits:
        return ""
    for name, tensor in answer.tensors.items():
        if name.startswith("call1."):
            first = answer.tensors[name.replace("call1.", "call0.", 1)]
            if checksum_of(first) != checksum_of(tensor):
                return (
                    "the same input twice gave different bits, but the candidate is declared "
                    "deterministic"
                )
    return ""


def _label(name: str) -> str:
    """Return what a tensor of the answer is called in a message."""
    kind, _, rest = name.partition(".")
    if kind.startswith("call"):
        which = "" if rest == "output0" else f" {int(rest.removeprefix('output')) + 1}"
        return f"output{which} of call {int(kind[4:]) + 1}"
    return f"gradient of {rest}" if kind == "grad" else f"buffer {rest}"


def _offence(
    expected: Expected,
    answer: Answer,
    name: str,
    error: _Error,
    limits: _Limits,
    accuracy: Accuracy,
) -> str:
    """Say which element is the first beyond its limit, by how much, and what the limit was."""
    want = expected.oracle[name]
    got = _received(answer, want, name)
    label = _label(name)
    if not want.is_floating_point():
        at = int((got != want).reshape(-1).nonzero()[0])
        return (
            f"{label}{_index(at, want)}: got {got.reshape(-1)[at].item()}, "
            f"expected {want.reshape(-1)[at].item()}"
        )
    at, share = _first_beyond(expected, got, name, error, limits, accuracy)
    g, w = float(got.reshape(-1)[at]), float(want.reshape(-1)[at])
    text = f"{label}{_index(at, want)}: got {g:.9g}, expected {w:.9g}"
    if error.num_misplaced:
        return f"{text}; {error.num_misplaced} elements have NaN or Inf at other places"
    if limits.is_elementwise:
        return (
            f"{text}, error {abs(g - w):.3g}; {share:.3g} % of elements are beyond {limits.why}, "
            f"and the largest error {error.max_abs:.3g} is beyond 2 x PyTorch's own "
            f"{limits.max_abs / 2:.3g}"
        )
    if error.max_abs > limits.max_abs:
        return (
            f"{text}, error {abs(g - w):.3g} with limit {limits.max_abs:.3g} ({limits.why}); "
            f"largest {error.max_abs:.3g}, {share:.3g} % of elements are beyond"
        )
    return (
        f"{label}: rms error {error.rms_abs:.3g} with limit {limits.rms_abs:.3g}; the largest "
        f"error is {error.max_abs:.3g}, at {_index(at, want)}: got {g:.9g}, expected {w:.9g}"
    )


def _first_beyond(
    expected: Expected,
    got: torch.Tensor,
    name: str,
    error: _Error,
    limits: _Limits,
    accuracy: Accuracy,
) -> tuple[int, float]:
    """Return the flat index of the first offending element, and the percentage of them."""
    want = expected.oracle[name]
    start, first, worst, total = 0, None, (-1.0, 0), 0
    for g, w, skip in _chunks(got, want, expected.unjudged.get(name)):
        difference, is_misplaced = _differences(g, w, skip)
        is_bad = is_misplaced
        if not error.num_misplaced:
            limit: Any = limits.max_abs
            if limits.is_elementwise:
                limit = accuracy.atol + accuracy.rtol * w.abs()
            is_bad = difference > limit
        count = int(is_bad.sum())
        if count and first is None:
            first = start + int(is_bad.int().argmax())
        total += count
        worst = max(worst, (float(difference.max()), start + int(difference.argmax())))
        start += g.numel()
    return (worst[1] if first is None else first), 100.0 * total / max(1, start)


def _index(flat: int, tensor: torch.Tensor) -> str:
    places = []
    for size in reversed(tensor.shape):
        places.append(flat % size)
        flat //= size
    return f"[{', '.join(str(place) for place in reversed(places))}]"


# ---- name the mistake where it can be told --------------------------------------------------


def _diagnosis(expected: Expected, answer: Answer, name: str, error: _Error) -> str:
    want = expected.oracle[name]
    got = _received(answer, want, name)
    if name.startswith("buffer."):
        return _buffer_diagnosis(expected, name, got)
    return _output_diagnosis(expected, answer, name, got, error)


def _output_diagnosis(
    expected: Expected, answer: Answer, name: str, got: torch.Tensor, error: _Error
) -> str:
    import torch

    want = expected.oracle[name]
    if answer.report.num_threads_left:
        return f"{answer.report.num_threads_left} threads outlived the call: a late write?"
    call, _, which = name.partition(".")
    number = int(call[4:])
    for earlier in range(number):
        if torch.equal(got, _received(answer, want, f"call{earlier}.{which}")):
            changed = "weights" if expected.probe.edits_weights else "input"
            return (
                f"the output of call {number + 1} equals that of call {earlier + 1} although the "
                f"{changed} changed: memoised, or replayed"
            )
    is_poisoned = expected.probe.distribution in ("nan_row", "inf_element")
    if not is_poisoned and bool((torch.isnan(got) & torch.isfinite(want)).any()):
        return (
            "NaN where a number is expected: part of the output was never written, or memory "
            "was read that was never written"
        )
    if error.num_misplaced:
        return "NaN and Inf must come through as they do in the reference" if is_poisoned else ""
    if got.numel() > 1 and bool((got == got.reshape(-1)[0]).all()):
        return "every element is the same: a constant output"
    return _place_diagnosis(expected, name, got) or _precision_diagnosis(expected, name, error)


def _place_diagnosis(expected: Expected, name: str, got: torch.Tensor) -> str:
    """Tell whether only some rows (dim 0) or columns (last dim) are wrong, as of a tail."""
    want = expected.oracle[name]
    if want.ndim < 2 or not want.numel():
        return ""
    floor = FLOOR_ULPS * ULP * expected.baseline[name].largest
    is_bad = (got - want).abs() > max(4.0 * expected.baseline[name].max_abs, floor)
    flat = is_bad.reshape(-1, want.shape[-1])
    for what, lines in (
        ("row", is_bad.flatten(1).any(1)),
        ("column", flat.any(0)),
    ):
        at = lines.nonzero().reshape(-1).tolist() if int(lines.sum()) * 2 < len(lines) else []
        if at and at[-1] - at[0] == len(at) - 1:
            which = f"{what} {at[0]} is" if len(at) == 1 else f"{what}s {at[0]} to {at[-1]} are"
            return f"only {which} wrong: a part that was never written?"
    return ""


def _precision_diagnosis(expected: Expected, name: str, error: _Error) -> str:
    """Tell operands of fewer bits from plainly wrong values, on well-behaved inputs."""
    if expected.probe.distribution not in ("as_given", "normal", "heavy_tailed"):
        return ""
    if error.rms_rel < 4.0 * expected.baseline[name].rms_rel or not error.rms_rel:
        return ""
    if error.max_abs > 8.0 * error.rms_abs:  # rounding is spread evenly; a mistake is not
        return ""
    bits = -math.log2(error.rms_rel)
    for low, high, what in ((7.0, 10.5, "bfloat16"), (10.5, 14.0, "float16 or TF32")):
        if low <= bits < high:
            return (
                f"an rms error of 2^-{bits:.1f} is that of {what} operands: a lower precision "
                "than declared"
            )
    return ""


def _buffer_diagnosis(expected: Expected, name: str, got: torch.Tensor) -> str:
    import torch

    want = expected.oracle[name]
    start = expected.start[name.removeprefix("buffer.")]
    if not want.is_floating_point():
        return "the calls were not counted" if torch.equal(got, start) else ""
    if torch.equal(got.double(), start.to(torch.float32).double()):
        return "the running statistics were not updated"
    if expected.probe.mode == "eval":
        return "eval mode must not change the stored statistics"
    momentum = next(
        (m for prefix, m in expected.momenta.items() if name.startswith(f"buffer.{prefix}")), None
    )
    rows = expected.num_rows
    if momentum is not None and expected.probe.calls == 1 and rows > 1:
        # unbiased = biased * B / (B - 1), so a biased update lacks momentum * unbiased / B.
        unbiased = (want - (1.0 - momentum) * start) / momentum
        biased = want - momentum * unbiased / rows
        if bool(((got - biased).abs() <= 0.05 * (want - biased).abs() + 1e-6 * want.abs()).all()):
            return "it looks biased: the variance is off by the factor B/(B-1)"
    return ""


def merge(results: Sequence[ProbeResult], accuracy: Accuracy, is_thorough: bool) -> Check:
    """Return the verdict over all probes: the first reason, and which other probes failed."""
    rejected = [result for result in results if not result.is_accepted]
    if not results:
        return Check(False, accuracy.label, "nothing was asked", (), is_thorough)
    reason = ""
    if rejected:
        reason = rejected[0].reason
        others = [result.probe for result in rejected[1:]]
        if others:
            shown = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
            reason += f"; also rejected on {len(others)} of {len(results) - 1} others: {shown}"
    return Check(not rejected, accuracy.label, reason, tuple(results), is_thorough)
