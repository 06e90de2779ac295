"""A process that has imported what `tune` imports, and is one command after another.

Each line on stdin is a command as JSON: `args`, `cwd`, `env`, and where its output goes, `out` and
`err`. Its exit code is the answer, a line on stdout. Imports cost 0.7 s of CPU, and each of the
fork servers that have imported PyTorch two seconds: here the next command finds them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from typing import Any

import impatience

import tuner.machine.doctor
import tuner.review.comparing
import tuner.review.report
import tuner.review.run_index
import tuner.session.tuning  # noqa: F401
from tuner.command.cli import main


def serve() -> None:
    """Run each command until stdin ends."""
    for line in sys.stdin:
        print(code_of(json.loads(line)), flush=True)


def code_of(command: dict[str, Any]) -> int:
    """Run a command; return its exit code, and to what was before."""
    folder, environment, path = os.getcwd(), dict(os.environ), list(sys.path)
    kept = [os.dup(fd) for fd in (0, 1, 2)]
    become(command)
    try:
        main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except Exception:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, old in enumerate(kept):
            os.dup2(old, fd)
            os.close(old)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
    return code


def become(command: dict[str, Any]) -> None:
    """Take over the command's folder, environment, arguments and output."""
    os.chdir(command["cwd"])
    sys.path[0] = os.getcwd()  # as of `python -m tuner`
    os.environ.clear()
    os.environ.update(command["env"])
    sys.argv = ["tune", *command["args"]]
    read, new = os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for fd, path, flags in (
        (0, os.devnull, read),
        (1, command["out"], new),
        (2, command["err"], new),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, fd)
        os.close(opened)


if __name__ == "__main__":
    impatience.no_rest()
    impatience.few_probes()
    impatience.few_rows()
    impatience.soon_a_hang()
    impatience.held_at_a_trial()
    gc.freeze()  # no command need look for garbage among what was imported
    serve()
