"""Builds that tests of templates share: each text is compiled once for all workers and threads."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tuner.trial import content_key

__all__ = ["built_once"]


def built_once(source: str, ending: str, command: Sequence[str]) -> tuple[Path, str]:
    """Compile a text, unless that was done; return the library and what the compiler said.

    Two configurations may have the same text, and threads and workers of pytest-xdist ask at the
    same time: the first compiles, the others wait for it.

    Args:
        source: the text.
        ending: of the file that it is written to.
        command: the compiler with its options but for `-o`, output and input.
    """
    folder = Path(os.environ["TUNER_TESTS_BUILDS"]) / content_key(source, ending, *command)
    folder.mkdir(parents=True, exist_ok=True)
    library, log = folder / "built.so", folder / "log.txt"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            text, output = folder / f"source{ending}", folder / "half.so"
            text.write_text(source, encoding="utf-8")
            asked = [*command, "-o", str(output), str(text)]
            done = subprocess.run(asked, capture_output=True, text=True)
            assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
            log.write_text(done.stderr, encoding="utf-8")
            output.rename(library)  # last: who finds it finds all of it
    return library, log.read_text(encoding="utf-8")
