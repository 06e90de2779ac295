"""Functions that are called side by side, in a fork of this process each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

__all__ = ["called_in_forks"]

T = TypeVar("T")
_calls: Sequence[Callable[[], Any]] = ()  # what forks of this process find, one each


def called_in_forks(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return what functions without arguments return, in their order.

    This process must have no other thread. Where a fork ends without an answer it aborts as well:
    who started it sees the same as of that one.

    Raises:
        Exception: what the first of them raises that does.
    """
    global _calls
    _calls = calls
    try:
        with ProcessPoolExecutor(len(calls), get_context("fork")) as pool:
            return [*pool.map(_called, range(len(calls)))]
    except BrokenProcessPool:
        os.abort()


def _called(place: int) -> Any:
    return _calls[place]()
