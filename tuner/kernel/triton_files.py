"""What Triton compiled: where it is kept, and how it comes into Triton's cache on another host.

Triton keeps each kernel in a folder named by all that shapes it: its text, its constants, the GPU,
and Triton itself to the byte. A folder that comes from elsewhere is thus found where Triton is the
same, and else never looked at.
"""

from __future__ import annotations

import io
import json
import os
import stat
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "KERNELS_FILE",
    "TRITON_CACHE",
    "at_fixed_lines",
    "folder_or",
    "pack",
    "unpack",
]

TRITON_CACHE = "TRITON_CACHE_DIR"  # the variable that Triton reads
KERNELS_FILE = "kernels.zip"  # beside an artefact that another host made
_GROUP = "__grp__"  # begins the name of a file that lists the paths of a kernel's others
_PATHS = "child_paths"  # its key, paths by names


def _triton_folder() -> Path:
    """Return the folder where Triton keeps kernels for this user, by content.

    What a search compiles is kept there, too: the exported file's processes find it, and so does
    who runs the file later.
    """
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # which need not exist
    return Path(os.environ.get(TRITON_CACHE) or Path(home) / ".triton" / "cache").absolute()


def folder_or(own: Path) -> Path:
    """Return Triton's folder; `own` where we cannot write to it, or others can.

    What is there is run. With `own` exported files compile once more what a search has compiled.
    """
    folder = _triton_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = folder.stat()
        with tempfile.TemporaryFile(dir=folder):
            # Many systems give each user a group, which may write to what the user makes.
            is_own_group = facts.st_gid == os.getegid()
            others = stat.S_IWOTH | (0 if is_own_group else stat.S_IWGRP)
            is_ours = facts.st_uid == os.geteuid() and not facts.st_mode & others
    except OSError:
        return own
    return folder if is_ours else own


def at_fixed_lines(names: dict[str, object]) -> None:
    """Let Triton's cache know kernels of a text by what they do, wherever they stand in it.

    It knows them by their line as well: what a search compiled would be compiled anew in the file
    that it becomes, and again whenever a line is added to that file's head.
    """
    for value in [*names.values()]:
        # The class of a kernel that is `launched` has an ending in a file of several kernels.
        is_wrapped = type(value).__name__.startswith("launched")
        kernel = vars(value)["kernel"] if is_wrapped else value
        if type(kernel).__name__ == "JITFunction":
            vars(kernel)["starting_line_number"] = 1


def pack(folders: Iterable[Path]) -> bytes:
    """Return folders of Triton's cache as one file.

    Raises:
        OSError: one is gone.
    """
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        for folder in sorted(folders):
            for path in sorted(folder.iterdir()):
                if path.is_file() and path.name != "lock":
                    file.write(path, f"{folder.name}/{path.name}")
    return data.getvalue()


def unpack(packed: Path, cache: Path) -> None:
    """Place packed folders in Triton's cache, where those that are there already stay.

    Raises:
        ValueError: it holds something else.
        OSError: as the file system says.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(packed) as file, tempfile.TemporaryDirectory(dir=cache) as aside:
        names = [name.split("/") for name in file.namelist()]
        if any(len(name) != 2 or not {"", ".", ".."}.isdisjoint(name) for name in names):
            raise ValueError(f"{packed.name} holds more than folders of Triton's cache")
        file.extractall(aside)
        for folder in {folder for folder, _ in names}:
            made, place = Path(aside) / folder, cache / folder
            for path in made.glob(f"{_GROUP}*"):
                listed = json.loads(path.read_text())[_PATHS]
                moved = {name: str(place / Path(at).name) for name, at in listed.items()}
                path.write_text(json.dumps({_PATHS: moved}))
            if any(place.glob(f"{_GROUP}*")):
                continue  # another build has the same kernel
            place.mkdir(exist_ok=True)
            for path in sorted(made.iterdir(), key=lambda path: path.name.startswith(_GROUP)):
                os.replace(path, place / path.name)  # a kernel is found by the last of its files
