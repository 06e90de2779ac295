"""A process that has imported what `tune` imports, and forks for every command it is told.

Each line on stdin is a command as JSON: `args`, `cwd`,
`env`, and where its output goes, `out` and `err`. Its exit code is the answer, a line on stdout.
A fork is a process of its own, like any `tune`, but need not spend 0.7 s of CPU on imports. With
`stays` the command runs in this process: its fork servers, which have imported PyTorch, serve the
next one as well.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import tuner.machine.doctor
import tuner.review.report
import tuner.review.shelf
import tuner.review.versus
import tuner.tuning  # noqa: F401
from tuner.cli import main


def serve() -> dict[str, Any] | None:
    """Fork for each command until stdin ends: the command in the fork, None in the end."""
    for line in sys.stdin:
        if json.loads(line)["stays"]:
            print(stayed(json.loads(line)), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            return json.loads(line)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(code, flush=True)
    return None


def stayed(command: dict[str, Any]) -> int:
    """Run a command here; return its exit code, and to what was before."""
    folder, environment, path = os.getcwd(), dict(os.environ), list(sys.path)
    kept = [os.dup(fd) for fd in (0, 1, 2)]
    become(command)
    try:
        main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
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
    command = serve()
    if command is not None:
        become(command)
        main()
