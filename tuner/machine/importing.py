"""Where our processes import from: what the tuner's own process does, less the current folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["import_from", "import_path", "user_path"]


_added: list[str] = []  # the folder of the last file


def import_from(folder: Path) -> None:
    """Let this process, and those that it starts, find what lies in the folder of a user's file.

    It comes last: a `json.py` beside the file is what nobody else means. The folder of the file
    before is left out again, whose `layers.py` is another one.
    """
    if _added and sys.path[-1:] == _added:
        sys.path.pop()
    _added[:] = [str(folder.resolve())]
    sys.path += _added


def user_path() -> list[str]:
    """Return what this process imports from, but for the folder of a user's file."""
    return sys.path[:-1] if _added and sys.path[-1:] == _added else [*sys.path]


def import_path(entries: Sequence[str]) -> list[str]:
    """Return what a process of ours imports from: all these folders but the current one.

    A `json.py` or `torch.py` in the folder where the tuner was started is not ours. The current
    folder stays where the tuner itself or installed packages are, in a checkout of the tuner, and
    where it is the last, in which nothing is looked for that any other folder has.

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
    return list(dict.fromkeys([*kept, *filter(None, folders[-1:])]))
