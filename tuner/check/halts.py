"""Where a candidate raised, and what."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

__all__ = ["Halted", "stage"]


class Halted(Exception):
    """The candidate raised: `stage` is where, `message` what it said."""

    def __init__(self, stage: str, error: BaseException) -> None:
        self.stage = stage
        frames = traceback.extract_tb(error.__traceback__)
        place = f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""
        self.message = f"{type(error).__name__}: {str(error).strip() or 'no message'}{place}"
        super().__init__(self.message)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Give what is raised inside this name, as what the candidate answers."""
    try:
        yield
    except Halted:
        raise
    except (Exception, SystemExit) as error:
        # Whatever a candidate raises is its answer, not our failure.
        raise Halted(name, error) from None
