"""Builds that tests of templates share: each text is compiled once for all workers and threads."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tuner.trial import content_key

__all__ = ["GOLD", "built_once", "header_built_once"]

# To link with: 0.1 s less of each text. nvcc does not know it.
GOLD = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []


def built_once(source: str, ending: str, command: Sequence[str]) -> tuple[Path, str]:
    """Compile a text, unless that was done; return the library and what the compiler said.

    Two configurations may have the same text, and threads and workers of pytest-xdist ask at the
    same time: the first compiles, the others wait for it.

    Args:
        source: the text.
        ending: of the file that it is written to; texts of `.cpp` have headers in common.
        command: the compiler with its options but for `-o`, output and input.
    """
    with _folder_of(source, ending, *command) as folder:
        library, log = folder / "built.so", folder / "log.txt"
        if not library.exists():
            text, output = folder / f"source{ending}", folder / "half.so"
            text.write_text(source, encoding="utf-8")
            first = _precompiled(source, command) if ending == ".cpp" else []
            asked = [*command, *first, "-o", str(output), str(text)]
            done = subprocess.run(asked, capture_output=True, text=True)
            assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
            log.write_text(done.stderr, encoding="utf-8")
            output.rename(library)  # last: who finds it finds all of it
        return library, log.read_text(encoding="utf-8")


def _precompiled(source: str, command: Sequence[str]) -> list[str]:
    """Precompile the headers that a text begins with; return the options that have them included.

    They are nearly all of what the compiler reads, the same in most texts, and half of its work.
    Of the first text of its kind they are read as they stand.
    """
    found = re.match(r"(#include <\w+>\n)+", source)
    if found is None:
        return []
    with _folder_of(found[0], ".hpp", *command) as folder:
        header = folder / "begin.hpp"
        if not header.exists():
            header.write_text(found[0], encoding="utf-8")
            return []
    return header_built_once(header, command)


def header_built_once(header: Path, command: Sequence[str]) -> list[str]:
    """Precompile a header; return the options that have a text include it first.

    Args:
        header: C++ that each of many texts begins with.
        command: the compiler with the options that the texts get.
    """
    text = header.read_text(encoding="utf-8")
    with _folder_of(text, ".gch", *command) as folder:
        copy = folder / header.name
        made = copy.with_name(f"{copy.name}.gch")
        if not made.exists():
            copy.write_text(text, encoding="utf-8")
            half = folder / "half.gch"
            alone = [option for option in command if option != "-shared"]
            subprocess.run([*alone, "-x", "c++-header", "-o", half, copy], check=True)
            half.rename(made)
    return ["-include", str(copy)]


@contextmanager
def _folder_of(*key: str) -> Iterator[Path]:
    """A folder for what is made of that, which nobody else has meanwhile."""
    folder = Path(os.environ["TUNER_TESTS_BUILDS"]) / content_key(*key)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
