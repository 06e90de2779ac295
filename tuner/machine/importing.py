"""Where our processes import from: what the tuner's own process does, less the current folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["import_from", "import_path", "user_path"]


_added: list[str] = []  # folders of the last file


def import_from(*folders: Path) -> None:
    """Let this process, and those that it starts, find what lies in folders of a user's file.

    They come last: a `json.py` beside the file is what nobody else means. Those of the file
    before are left out again, whose `layers.py` is another one.
    """
    sys.path[:] = user_path()
    _added[:] = dict.fromkeys(str(folder.resolve()) for folder in folders)
    sys.path += _added


def user_path() -> list[str]:
    """Return what this process imports from, but for folders of a user's file."""
    is_last = _added and sys.path[-len(_added) :] == _added
    return sys.path[: -len(_added)] if is_last else [*sys.path]


def import_path(entries: Sequence[str]) -> list[str]:
    """Return what a process of ours imports from: all these folders but the current one.

    A `json.py` or `torch.py` in the folder where the tuner was started is not ours. The current
    folder stays where the tuner itself or installed packages are, in a checkout of the tuner, and
    where it is a user's file's, or the last: there nothing is looked for that any other has.

    Args:
        entries: as in `sys.path` or `PYTHONPATH`; "" is the current folder.
    """
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it is gone
        here = ""
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    is_installed = os.path.basename(here) in ("site-packages", "dist-packages")
    folders = [os.path.abspath(entry) if entry else here for entry in entries]
    kept = [
        folder
        for folder in dict.fromkeys(folders)
        if folder and (os.path.realpath(folder) != here or here == ours or is_installed)
    ]
    last = _added or [folder for folder in folders[-1:] if folder]
    return [*(folder for folder in kept if folder not in last), *last]
