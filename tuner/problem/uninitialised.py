"""Parameters and buffers to which a module's constructor gives no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tuner.problem.reference import Problem

__all__ = ["require_initialised"]

MOST_TRIES = 4
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
        filled = given = _with_nan(problem)
    for _ in range(MOST_TRIES):  # in which memory may hold NaN by chance
        given = given & _with_nan(problem) if given else given
    if unset := filled - given:
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
    found = {n for n, x in state.items() if x.is_floating_point() and bool(x.isnan().any())}
    for x in state.values():  # the next module is given the same memory, most often
        with suppress(RuntimeError, NotImplementedError):  # a subclass may have no storage
            x.untyped_storage().fill_(0)
    return found


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
