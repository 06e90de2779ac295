"""Whether a reference draws random numbers, and in which modes: what it says there is chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from tuner.check.calls.crossing import Mode
from tuner.check.calls.history import set_mode
from tuner.check.probes.probe import Modes
from tuner.errors import ProblemError
from tuner.machine.platforms import is_gpu
from tuner.problem.draws import seed_everything
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["modes_of"]

FEW_ROWS = 4  # a whole batch would take longer, and draws as well
NUM_DRAWS = 4  # that are compared: rare random events may all be absent from one
ADVICE = {
    ("train", False): "tune and verify it in eval mode, where dropout does nothing: --mode eval",
    ("eval", False): "tune and verify it in training mode: --mode train",
    ("train", True): "draw them in get_inputs() and pass them to forward",
    ("eval", True): "draw them in get_inputs() and pass them to forward",
}


def modes_of(problem: Problem, device: str) -> Modes:
    """Return the mode that a problem is asked in, and in which modes its answers are chance.

    Raises:
        ProblemError: they are in its own mode, or the reference cannot be made.
    """
    model = problem.make_model(0, device, is_quick=True)
    modes: tuple[Mode, ...] = ("train", "eval", "frozen", "thawed")
    own: Literal["train", "eval"] = "train" if model.training else "eval"
    random = tuple(mode for mode in modes if _is_random(problem, model, mode, device))
    if own in random:
        name = "training" if own == "train" else "eval"
        advice = ADVICE[own, {"train", "eval"} <= {*random}]
        raise problem.error(
            f"Model.forward draws random numbers in {name} mode, so no answer can be judged; "
            f"expected the same answer for the same inputs\n  next: {advice}"
        )
    return Modes(own, random)


def _is_random(problem: Problem, model: torch.nn.Module, mode: Mode, device: str) -> bool:
    """Whether calls in a mode draw numbers that their answers depend on."""
    import torch

    set_mode(model, mode)
    has_own_state = is_gpu(device)
    start = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[device] if has_own_state else []), torch.no_grad():
        inputs = _inputs(problem, model, device)
        answers: list[tuple[torch.Tensor, ...]] = []
        for draw in range(NUM_DRAWS):
            seed_everything(draw)
            before = _state(device)
            for buffer, value in start:
                buffer.copy_(value)
            try:
                answers.append(problem.call(model, inputs))
            except ProblemError:  # what it raises the probes will tell
                return False
            if torch.equal(before, _state(device)):
                return False
    first, *others = answers
    return not all(_is_same(a, b) for other in others for a, b in zip(first, other, strict=True))


def _inputs(problem: Problem, model: torch.nn.Module, device: str) -> Sequence[Any]:
    """Return inputs of few rows, or as given where the reference refuses those."""
    try:
        inputs = problem.make_inputs(0, batch=FEW_ROWS, device=device)
        problem.call(model, inputs)
    except ProblemError:
        return problem.make_inputs(0, device=device)
    return inputs


def _state(device: str) -> torch.Tensor:
    import torch

    own = torch.get_rng_state()
    return torch.cat([own, torch.cuda.get_rng_state(device)]) if is_gpu(device) else own


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    if one.shape != other.shape:
        return False
    return bool(torch.allclose(one, other, 1e-3, 1e-3, equal_nan=True))
