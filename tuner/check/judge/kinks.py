"""What a gradient may be where rounding decides on which side of a kink a number lies.

The slope of a LeakyReLU jumps at 0, and a maximum hands its gradient to one of two neighbours. Of
millions of numbers one often lies nearer to such a kink than float32 can tell. Then float64 and an
honest float32 may be on two sides of it, a whole row of a gradient differs, and PyTorch's own
error says nothing of that where it was on the right side by chance.

So where gradients alone are beyond their limits the reference is played again in float64, with
each number that its forward makes moved by as much as float32 may have it wrong. No backward is
touched. An element of a gradient that jumps then may be anything between the least and the most
that was seen, or all of them together a sum of such jumps. All others are judged as before.
So it is with an output of which very few elements are beyond: a clamp after a sum that cancels.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tuner.check.calls.crossing import Report, Script
from tuner.check.calls.exercise import CHUNK_ELEMENTS
from tuner.check.judge.compare import Error, Limits, compare, errors_of
from tuner.check.judge.noise import each_result, noise
from tuner.check.judge.playing import played
from tuner.check.judge.wide_convolutions import exact_convolutions
from tuner.check.probes.probe import Probe
from tuner.check.questions.questions import weighted_model
from tuner.errors import says_no_memory
from tuner.machine import gpu_memory
from tuner.problem.accuracy import Accuracy, math_mode
from tuner.problem.draws import widened
from tuner.problem.reference import Problem
from tuner.trial import ProbeResult
from tuner.wording import one_line

if TYPE_CHECKING:
    import torch

__all__ = ["EXACT", "REACHES", "Replay", "errors_at_kinks", "note_at_kinks"]

# How far numbers are moved, in units of PyTorch's own rms error of that result. Each is played
# twice, with opposite signs, so that what is much nearer to a kink is on its other side in one of
# them; the short reach crosses few kinks at once, as a candidate does. A candidate may be twice as
# far off as PyTorch: what it has crossed then is crossed by one replay of three.
REACHES = (4.0, 8.0, 2.0, 8.0, 8.0, 8.0, 8.0)
# Of outputs alone, of which one element in a million may be at the other end of a clamp: it is
# off as the furthest of so many is, and a candidate may have four times PyTorch's own error. All
# numbers are moved by as much, so that none lies nearer by chance.
FAR_REACHES = (16.0, 32.0)
MOST_OFF = 8.0  # times the limit of an output: a replay that is further off is no allowed forward
UNKNOWN = 2.0**-22  # an error where float32 runs other operations than float64, relative
JUMP = 0.25  # of a limit: what an element must differ by between replays to be at a kink
MOST_FITTED_BYTES = 2**32  # of what replays differ by; beyond it sums of them are not tried
FITTED_FROM = 64  # elements for each replay
SAME = 1e-8  # relative: what replays that cross the same kinks differ by, squared
SAMPLED = 2**12  # elements of a result that its error is measured on
# Of the size around: what cancels down to less has few bits left in float64, too, and is then held
# by float32 by chance: one of four was at 2^-23.
LEFT = 2.0**-20
FEW = 16  # of which a root mean square says little
MOST_SAID = 120  # characters
# Of whole and half numbers: what is equal or at a kink is so exactly there, in many places, and is
# what they ask about. Behind a softmax, say, few are equal but for the order of sums.
EXACT = ("few_values", "dyadic", "constant_columns")
MOST_EXACT = 0.01  # of the elements that are judged
NEAR_BITS = 12  # left out in each second replay: equal but for float64's own order of sums
SPREADS = 0x1E3779B97F4A7C15  # odd: the golden ratio's digits, which spread bits upwards
MOST_FACTOR = 2.0  # of one replay's jumps, where several add up: a kink is crossed or not


@dataclass(frozen=True, slots=True)
class Result:
    """What an operation of a forward made: some elements, then how far float32 is off."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    elements: torch.Tensor
    error: float = math.inf  # rms
    relative: float = UNKNOWN  # the same of errors each over the size of what is around it


@dataclass(frozen=True, slots=True)
class Replay:
    """A probe that can be played again with the reference, as it was to learn what is expected."""

    problem: Problem
    probe: Probe
    script: Script
    tensors: dict[str, torch.Tensor] = field(repr=False)  # the question's
    accuracy: Accuracy
    device: Any
    models: dict[Any, Any] = field(repr=False)
    factor: float = 1.0  # that gradients are passed on by

    def measured(self) -> list[Result]:
        """Return how far each result of the forward is off in PyTorch's own arithmetic."""
        narrow: list[Result] = []
        wide: list[Result] = []

        def keep(func: Any, y: torch.Tensor) -> None:
            narrow.append(Result(tuple(y.shape), y.dtype, y.take(_places(y)).double()))

        def measure(func: Any, y: torch.Tensor) -> None:
            own = narrow[len(wide)] if len(wide) < len(narrow) else None
            if own is None or own.shape != tuple(y.shape):
                wide.append(Result(tuple(y.shape), y.dtype, y.new_empty(0)))
                return
            places = _places(y)
            size = _size_around(y).expand(y.shape).take(places)
            off = (own.elements - y.take(places))[size > 0]
            errors = [_rms(off), _rms(off / size[size > 0])]
            wide.append(Result(own.shape, own.dtype, y.new_empty(0), *errors))

        with math_mode(self.accuracy):
            self._play(False, lambda: each_result(keep))
        self._play(True, lambda: each_result(measure))
        return wide

    def moved(
        self, results: Sequence[Result], reach: float, seed: int
    ) -> tuple[Report, dict[str, torch.Tensor]]:
        """Play it in float64 with each number of the forward moved, at random.

        A negative `reach` moves by the opposite. A number that float32 holds exactly stays: it is
        a copy, a zero or the end of a range, which no rounding has made. Of whole and half numbers
        equal results are moved alike: which of them is the largest is no chance.
        """
        import torch

        generators: dict[Any, Any] = {}
        rest = iter(results)

        def move(func: Any, y: torch.Tensor) -> None:
            result = next(rest, None)
            if result is None or result.shape != tuple(y.shape) or not result.error:
                return
            if y.device not in generators:
                generators[y.device] = torch.Generator(y.device).manual_seed(seed)
            size = _size_around(y)
            if self.probe.distribution in EXACT:
                by = _drawn_by_value(y, seed).mul_(result.error * reach)
            else:
                by = torch.empty_like(y).uniform_(-1.0, 1.0, generator=generators[y.device])
                if abs(reach) in FAR_REACHES:
                    by.sign_()
                by.mul_((size * result.relative).clamp_(max=result.error) * reach)
            is_held = y.to(result.dtype).to(y.dtype) == y
            is_held &= (y == 0) | (y.abs() > LEFT * size)
            y.add_(by.masked_fill_(is_held, 0.0))

        return self._play(True, lambda: each_result(move))

    def rounded(self, seed: int) -> dict[str, torch.Tensor]:
        """Play it in PyTorch's own arithmetic, with the last bit of each result moved.

        That of each gradient which comes in moves as well: a bias's own is nothing but their sum.
        """
        with noise(ulps=1.0, seed=seed):
            moved = {n: t.clone() for n, t in self.tensors.items() if n.startswith("grad.")}
        play = replace(self, tensors={**self.tensors, **moved})
        with math_mode(self.accuracy):
            return play._play(False, lambda: noise(ulps=1.0, seed=seed))[1]

    def _play(
        self, is_exact: bool, around: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> tuple[Report, dict[str, torch.Tensor]]:
        model, _ = weighted_model(self.problem, self.probe, self.device, self.models)
        tensors, own = self.tensors, frozenset[int]()
        if is_exact:
            model = model.double()
            tensors = {name: widened(value) for name, value in tensors.items()}
            own = frozenset(id(t) for n, t in tensors.items() if t is not self.tensors[n])
        else:
            tensors = dict(tensors)
        with exact_convolutions(is_exact):
            report, answers = played(
                self.problem, model, self.script, tensors, self.probe, is_exact=is_exact, own=own,
                around=around,
            )  # fmt: skip
        if self.factor != 1.0:
            answers = {n: t * self.factor if n[:4] == "grad" else t for n, t in answers.items()}
        return report, answers


def errors_at_kinks(
    replay: Replay | None,
    got: Mapping[str, torch.Tensor],
    oracle: Mapping[str, torch.Tensor],
    unjudged: Mapping[str, torch.Tensor],
    limits: Mapping[str, Limits],
    accuracy: Accuracy,
) -> tuple[dict[str, Error], str]:
    """Return the errors of what is beyond its limits, beside what kinks let it be.

    Empty where that does not bring all of them within their limits, or where memory runs out: then
    with what was said of it, else with "".

    Args:
        replay: of the probe; None where it cannot be played again.
        got: those gradients and outputs of the answer, by name.
        oracle: what is expected.
        unjudged: elements that are not compared.
        limits: of all tensors.
        accuracy: the class of the check.
    """
    if replay is None:
        return {}, ""
    gpu_memory.free_unused(replay.device)
    try:
        return _errors_at_kinks(replay, got, oracle, unjudged, limits, accuracy), ""
    except (RuntimeError, MemoryError) as error:  # of a very large problem, or beside others
        said = f"{type(error).__name__}: {error}"
        if not says_no_memory(said):
            raise
        return {}, one_line(said, MOST_SAID)
    finally:
        gpu_memory.free_unused(replay.device)


def note_at_kinks(results: Sequence[ProbeResult]) -> tuple[str, ...]:
    """Say where a right module's gradients or outputs differ from float64 at kinks."""
    number = sum(result.is_at_kinks for result in results)
    if not number:
        return ()
    return (
        f"in {number} of {len(results)} probes a number lay so near a kink, as that of ReLU at 0, "
        "that rounding decides which of two answers is right; either was accepted",
    )


def _errors_at_kinks(
    replay: Replay,
    got: Mapping[str, torch.Tensor],
    oracle: Mapping[str, torch.Tensor],
    unjudged: Mapping[str, torch.Tensor],
    limits: Mapping[str, Limits],
    accuracy: Accuracy,
) -> dict[str, Error]:
    import torch

    if replay.probe.distribution in EXACT and _share_beyond(got, oracle, limits) > MOST_EXACT:
        return {}
    reaches = REACHES + (FAR_REACHES if all(n.startswith("call") for n in got) else ())
    low = {n: oracle[n].clone(memory_format=torch.contiguous_format) for n in got}
    high = {n: t.clone() for n, t in low.items()}
    held = sum(t.numel() * t.element_size() for t in low.values()) * 2 * len(reaches)
    jumps: dict[str, list[torch.Tensor]] = {n: [] for n in got if held <= MOST_FITTED_BYTES}
    results = replay.measured()
    for turn in range(2 * len(reaches)):
        reach = reaches[turn // 2] * (-1.0 if turn % 2 else 1.0)
        report, moved = replay.moved(results, reach, turn // 2)
        if report.error:
            return {}
        outputs = [name for name in oracle if name.startswith("call") and name not in got]
        errors = errors_of({n: moved[n] for n in outputs}, oracle, unjudged, accuracy)
        if not all(_is_near(errors[name], limits[name]) for name in outputs):
            continue
        for name in low.keys() & moved.keys():
            torch.fmin(low[name], moved[name], out=low[name])
            torch.fmax(high[name], moved[name], out=high[name])
        for name in jumps.keys() & moved.keys():
            jumps[name].append((moved[name] - oracle[name]).reshape(-1))
        del moved
        found: dict[str, Error] = {}
        for name, mine in got.items():
            limit = limits[name].max_abs
            want = _nearest(mine, oracle[name], low[name], high[name], limit)
            found[name] = compare(mine, want, unjudged.get(name), accuracy)
            if not limits[name].accepts(found[name]):
                break
        else:
            return found
    del low, high
    fitted = _fitted(got, oracle, jumps, limits)
    found = errors_of({n: got[n] for n in fitted}, fitted, unjudged, accuracy)
    is_right = len(found) == len(got) and all(limits[n].accepts(e) for n, e in found.items())
    return found if is_right else {}


def _share_beyond(
    got: Mapping[str, torch.Tensor],
    oracle: Mapping[str, torch.Tensor],
    limits: Mapping[str, Limits],
) -> float:
    """Return the share of elements that are further from what is expected than a limit."""
    num_beyond = num_all = 0
    for name, mine in got.items():
        num_beyond += int((mine - oracle[name]).abs_().gt(limits[name].max_abs).sum())
        num_all += mine.numel()
    return num_beyond / max(1, num_all)


def _is_near(error: Error, limits: Limits) -> bool:
    """Whether an output is such as a forward that is about right may have."""
    return (
        not error.num_misplaced
        and error.max_abs <= MOST_OFF * limits.max_abs
        and error.rms_abs <= MOST_OFF * limits.rms_abs
    )


def _nearest(
    got: torch.Tensor, want: torch.Tensor, low: torch.Tensor, high: torch.Tensor, limit: float
) -> torch.Tensor:
    """Return what is expected, and where it jumps by what a limit tells, what is nearest."""
    import torch

    flat = want.reshape(-1).clone()
    mine, least, most = got.reshape(-1), low.reshape(-1), high.reshape(-1)
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        at = slice(start, start + CHUNK_ELEMENTS)
        near = torch.minimum(torch.maximum(mine[at].to(flat.dtype), least[at]), most[at])
        flat[at] = torch.where(most[at] - least[at] > JUMP * limit, near, flat[at])
    return flat.reshape(want.shape)


def _fitted(
    got: Mapping[str, torch.Tensor],
    oracle: Mapping[str, torch.Tensor],
    jumps: Mapping[str, Sequence[torch.Tensor]],
    limits: Mapping[str, Limits],
) -> dict[str, torch.Tensor]:
    """Return what the jumps of all replays add up to where they come nearest to an answer.

    In front of several layers each kink changes all of a gradient, and a replay may cross two of
    them where the answer crossed one: then it is no nearer to the answer, but the difference of
    two replays is. One factor for each replay must do for all gradients at once, so that few
    elements are not enough to tell. What differs by as much as rounding makes is no jump: a large
    multiple of it would be any gradient of the same pattern.
    """
    import torch

    number = min((len(each) for each in jumps.values()), default=0)
    if not number or sum(t.numel() for t in got.values()) < FITTED_FROM * number:
        return {}
    sums: Any = 0.0
    for name, each in jumps.items():
        off = (got[name].double() - oracle[name]).reshape(-1)
        for jump in each:
            jump.masked_fill_(jump.abs() <= JUMP * limits[name].max_abs, 0.0)
        lines = torch.stack([*each, off]).div_(limits[name].max_abs).nan_to_num_(0.0, 0.0, 0.0)
        sums = sums + lines @ lines.t()
        del lines
    factors = torch.linalg.pinv(sums[:-1, :-1], hermitian=True, rtol=SAME) @ sums[:-1, -1]
    if not float(factors.abs().max()) <= MOST_FACTOR:
        return {}
    return {
        name: oracle[name] + sum(f * t for f, t in zip(factors, each, strict=True)).view_as(
            oracle[name]
        )
        for name, each in jumps.items()
    }  # fmt: skip


def _places(y: torch.Tensor) -> torch.Tensor:
    """Return the places of some elements; an odd step does not stay in one column."""
    import torch

    return torch.arange(0, y.numel(), (y.numel() // SAMPLED) | 1, device=y.device)


def _drawn_by_value(y: torch.Tensor, seed: int) -> torch.Tensor:
    """Return numbers within +-1 as if drawn, equal ones where float64 holds equal ones."""
    import torch

    drawn = y.double().contiguous().view(torch.int64) >> (NEAR_BITS * (seed % 2))
    for _ in range(2):  # products wrap around
        drawn = (drawn + seed) * SPREADS
        drawn = drawn ^ (drawn >> 29)
    return (drawn * SPREADS).to(y.dtype) / 2.0**63


def _rms(errors: torch.Tensor) -> float:
    """Return their root mean square, 0 where they are no numbers."""
    found = float(errors.square().mean().sqrt()) if errors.numel() else 0.0
    return found if math.isfinite(found) else 0.0


def _size_around(y: torch.Tensor) -> torch.Tensor:
    """Return the root mean square around each element, of a shape that broadcasts.

    The lesser one of its row's and its column's: either may be 2^20 times as large as others.
    """
    import torch

    norm = torch.linalg.vector_norm
    size = norm(y) / math.sqrt(y.numel())
    for dim in (0, y.ndim - 1) if y.ndim > 1 else ():
        number = y.numel() // y.shape[dim]
        if number >= FEW:
            others = [d for d in range(y.ndim) if d != dim]
            size = torch.minimum(size, norm(y, dim=others, keepdim=True) / math.sqrt(number))
    return torch.nan_to_num(size, nan=0.0, posinf=0.0)
