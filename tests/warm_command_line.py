"""A process that has imported what `tune` imports, and is one command after another.

Each line on stdin is a command as JSON: `args`, `cwd`, `env`, and where its output goes, `out` and
`err`. Its exit code is the answer, a line on stdout. Imports cost 0.7 s of CPU, and each of the
fork servers that have imported PyTorch two seconds: here the next command finds them. The first
of these is a fork of that of the tests, whose socket is the argument.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import impatience

import tuner.machine.doctor
import tuner.review.comparing
import tuner.review.report
import tuner.review.run_index
import tuner.session.tuning  # noqa: F401
from tuner.command.cli import main
from tuner.machine import forkserver


def serve() -> None:
    """Run each command until stdin ends."""
    for line in sys.stdin:
        print(code_of(json.loads(line)), flush=True)


def forks_of(lent: socket.socket) -> None:
    """Let servers for the environment that this process began with be forks of a lent one."""
    whole, own = forkserver._Server._start, read_at_load(os.environ)

    def start(self: Any, env: Mapping[str, str], theirs: socket.socket) -> None:
        if read_at_load(env) == own:
            with theirs:
                forkserver._send(lent, {"serve": True}, (theirs.fileno(),))
        else:
            whole(self, env, theirs)

    forkserver._Server._start = start


def read_at_load(env: Mapping[str, str]) -> dict[str, str]:
    """Return what a server is for, but for Python's own: it has none of it, or always the same."""
    names = [n for n in forkserver.READ_AT_LOAD if n != "PYTHON"]
    return {name: value for name, value in env.items() if name.startswith(tuple(names))}


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
    forks_of(socket.socket(fileno=int(sys.argv[1])))
    impatience.no_rest()
    impatience.few_probes()
    impatience.few_rows()
    impatience.soon_a_hang()
    impatience.held_at_a_trial()
    gc.freeze()  # no command need look for garbage among what was imported
    serve()
