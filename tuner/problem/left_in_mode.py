"""A reference that is asked for in another mode than its file leaves it in: `--mode`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tuner.errors import InputError

__all__ = ["file_in_mode", "known_mode", "text_in_mode"]

# The constructor keeps its signature: other values of its arguments are asked for, too.
_TEXT = """


def _left_in_mode(init):
    import functools

    @functools.wraps(init)
    def wrapped(self, *args, **kwargs):  # `tune --mode {mode}`
        init(self, *args, **kwargs)
        self.train({is_training})

    return wrapped


Model.__init__ = _left_in_mode(Model.__init__)
"""


def known_mode(mode: str | None) -> str | None:
    """Return a mode as it was given.

    Raises:
        InputError: it is neither train nor eval.
    """
    if mode not in (None, "train", "eval"):
        raise InputError(f"--mode: expected train or eval, got {mode}")
    return mode


def text_in_mode(text: str, mode: str | None) -> str:
    """Return a file's text with a `Model` that is left in that mode; None: the text as it is."""
    if mode is None:
        return text
    return text.rstrip() + _TEXT.format(mode=mode, is_training=mode == "train")


@contextlib.contextmanager
def file_in_mode(path: Path | None, mode: str | None) -> Iterator[Path | None]:
    """Give a file whose `Model` is left in that mode, for as long as the context lasts.

    Raises:
        InputError: the mode is unknown, or there is no such file to put into it.
    """
    if known_mode(mode) is None:
        yield path
        return
    if path is None or not path.is_file():
        raise InputError(f"--mode {mode}: expected a reference's file, got {path}")
    with tempfile.TemporaryDirectory(prefix="tuner-") as folder:
        written = Path(folder) / path.name
        written.write_text(text_in_mode(path.read_text(), mode))
        yield written
