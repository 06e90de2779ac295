"""What somebody noted of a run: free text in `notes.txt` of its folder, tags within it.

A word that begins with # is a tag. The file may be written with any editor, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import InputError
from tuner.storage import storage_errors, write_whole

__all__ = ["NOTES_NAME", "Note", "note_of", "write_note"]

NOTES_NAME = "notes.txt"
MAX_CHARS = 4_000
_TAG = re.compile(r"(?<!\S)#([\w.+-]*\w)")


@dataclass(frozen=True, slots=True)
class Note:
    """A run's note: all of it, and the tags in it in their order."""

    text: str = ""
    tags: tuple[str, ...] = ()


def note_of(folder: Path) -> Note:
    """Return the note of a run's folder; an empty one where there is none that can be read."""
    path = folder / NOTES_NAME
    try:
        if path.is_symlink() or not path.is_file():
            return Note()
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_CHARS).strip()
    except OSError:
        return Note()
    return Note(text, tuple(dict.fromkeys(_TAG.findall(text))))


def write_note(folder: Path, text: str) -> Note:
    """Write a run's note, or remove it where the text is empty; return it.

    Raises:
        InputError: it is too long.
        StorageError: it cannot be written.
    """
    if len(text) > MAX_CHARS:
        raise InputError(f"a note: expected at most {MAX_CHARS:,} characters, got {len(text):,}")
    path = folder / NOTES_NAME
    if text.strip():
        write_whole(path, text.strip() + "\n")
    else:
        with storage_errors(path):
            path.unlink(missing_ok=True)
    return note_of(folder)
