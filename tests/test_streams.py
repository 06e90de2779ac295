"""What a program prints to may be closed, full, of few characters, or read by nobody."""

from __future__ import annotations

import subprocess
import sys

import pytest

TUNE = [sys.executable, "-c", "from tuner.command.cli import run; run()", "runs"]


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("{} >&-", 0, ""),
        ("{} > /dev/full", 3, "error: what is printed cannot be written"),
        ("{} | {{ exec 0<&-; sleep 2; }}; exit ${{PIPESTATUS[0]}}", 130, ""),
        ("PYTHONIOENCODING=ascii {} > /dev/null", 0, ""),
    ],
)
def test_the_program_ends_with_words_and_a_code_of_its_own(shell, code, said, tmp_path):
    command = " ".join(f"'{word}'" for word in TUNE)
    done = subprocess.run(
        ["bash", "-c", shell.format(command)], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert said in done.stderr
