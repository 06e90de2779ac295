"""Parameters and buffers to which a module's constructor gives no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tuner.problem.dispatching import dispatched
from tuner.problem.reference import Problem

__all__ = ["require_initialised"]

# Operations of PyTorch that leave memory as they find it.
EMPTY = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
    "resize_",
}  # fmt: skip
MOST_NUMBERS = 2**24  # of a state; a larger one takes seconds to construct


def require_initialised(problem: Problem) -> None:
    """Refuse a reference whose constructor leaves memory as it finds it, as `torch.empty` does.

    A check compares modules that were constructed with the same seed, whose weights differ then.
    Not of a live module, whose weights are there, nor of a very large one.

    Raises:
        ProblemError: a parameter or a buffer has no values.
    """
    if problem.source.resolve() != Path(problem.path).resolve():
        return
    sizes = [x.numel() for x in problem.model_without_memory().state_dict().values()]
    if sum(sizes) > MOST_NUMBERS:
        return
    with _filled_memory():
        filled = _with_nan(problem)
    if not filled:
        return
    with _zeros_for_empty():
        own = _with_nan(problem)  # which the constructor gives
    if unset := filled - own:
        names = ", ".join(sorted(unset))
        raise problem.error(
            f"Model gives no values to {names}: its memory holds what was there before, so that "
            "two modules made with the same seed differ\n"
            "  next: give values in __init__, as by torch.zeros or torch.nn.init, also where "
            "they are loaded later"
        )


def _with_nan(problem: Problem) -> set[str]:
    """Return the names of parameters and buffers in which there is a NaN."""
    state = problem.make_model(0).state_dict()
    return {n for n, x in state.items() if x.is_floating_point() and bool(x.isnan().any())}


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Let PyTorch fill memory with NaN that is not initialised."""
    import torch

    was, warns = torch.are_deterministic_algorithms_enabled(), False
    if was:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)


def _zeros_for_empty() -> AbstractContextManager[Any]:
    """Let memory that is not initialised hold zeros: what was there before is a NaN by chance."""

    def run(function: Any, args: Any, kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        if function.overloadpacket.__name__ in EMPTY:
            made.zero_()
        return made

    return dispatched(run)
