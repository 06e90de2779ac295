"""`tune` as a user runs it: a process, its exit code, what it prints.

A test that asks what a command says or makes gets it from a process that has imported the tuner
and was other commands before (`warm_command_line`); `is_fresh` makes it a process from scratch.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from tuner.machine import forkserver

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 1200.0  # one command on a machine as busy as can be: only a hang takes longer
# The real command line, but for what it waits for.
IMPATIENT = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from impatience import main
del sys.path[0]
main()
"""
# Of PyTorch's own operations: the baselines of tests are small, and cores belong to other tests.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Said:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


def command(*args: object, is_impatient: bool = False) -> list[str]:
    program = ["-c", IMPATIENT] if is_impatient else ["-m", "tuner"]
    return [sys.executable, *program, *map(str, args)]


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **(changes or {})}


def tune(
    *args: object,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    is_fresh: bool = False,
) -> Said:
    """Run `tune ARGS` to its end; it never shows a traceback."""
    if is_fresh:
        done = subprocess.run(
            command(*args),
            cwd=cwd,
            env=environment(env),
            capture_output=True,
            timeout=TIMEOUT_S,
        )
        said = Said(done.returncode, done.stdout.decode(), done.stderr.decode())
    else:
        said = _said_by(_warm(), list(map(str, args)), cwd, env)
    assert "Traceback" not in said.out + said.err, said.out + said.err
    return said


def tune_until(
    is_due: Callable[[], bool],
    *args: object,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    then: Callable[[], None] = lambda: None,
) -> Said:
    """Run `tune ARGS`, press Ctrl-C when it is due, and do something else `then`."""
    server = _warm()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(_said_by, server, list(map(str, args)), cwd, env)
        wait_for(lambda: ended.done() or is_due())
        assert not ended.done(), ended.result()
        server.send_signal(signal.SIGINT)
        then()
        return ended.result()


_idle: list[subprocess.Popen[bytes]] = []  # as many as ever worked at a time


@atexit.register
def _end_servers() -> None:
    for server in _idle:
        server.communicate()  # closes its stdin, which ends it


def _warm() -> subprocess.Popen[bytes]:
    try:
        return _idle.pop()
    except IndexError:
        variables = environment(ONE_THREAD)
        first = forkserver._server_for({**os.environ, **ONE_THREAD, **forkserver.SETTINGS})
        fork = forkserver._Server(variables, first)
        with fork._socket as lent:
            program = [sys.executable, str(Path(__file__).with_name("warm_command_line.py"))]
            return subprocess.Popen(
                [*program, str(lent.fileno())],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[lent.fileno()],
            )


def _said_by(
    server: subprocess.Popen[bytes], args: list[str], cwd: Path, env: Mapping[str, str] | None
) -> Said:
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out.txt", Path(folder) / "err.txt"
        variables = environment({**ONE_THREAD, **(env or {})})
        where = {"cwd": str(cwd), "env": variables, "out": str(out), "err": str(err)}
        asked = {"args": args, **where}
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(asked).encode() + b"\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], TIMEOUT_S)[0]:
            server.kill()
            raise subprocess.TimeoutExpired(["tune", *args], TIMEOUT_S)
        code = int(server.stdout.readline())
        _idle.append(server)
        return Said(code, out.read_text(), err.read_text())


def started(
    *args: object, cwd: Path, env: Mapping[str, str] | None = None, is_impatient: bool = False
) -> subprocess.Popen[bytes]:
    """Start `tune ARGS` with its output in `cwd`/out.txt and err.txt."""
    with (cwd / "out.txt").open("wb") as out, (cwd / "err.txt").open("wb") as err:
        return subprocess.Popen(
            command(*args, is_impatient=is_impatient),
            cwd=cwd,
            env=environment(env),
            stdout=out,
            stderr=err,
        )


def wait_for(is_so: Callable[[], bool], timeout_s: float = 240.0) -> None:
    """Wait until something is so; the limit is for what never will be, and no measure of speed.

    It is below the 300 s of a test, so that the line that waited is shown.
    """
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def all_children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def are_gone(processes: list[psutil.Process]) -> bool:
    """Whether none is left but for zombies, which somebody else has to reap."""

    def is_left(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(map(is_left, processes))
