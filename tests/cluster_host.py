"""A process that has imported `distributed`, and forks agents for test_fleet.py.

Importing it takes a second of CPU; each agent is a real process all the same. One
line of JSON on stdin asks for a process, one on stdout tells its number. Once it is ready it
writes that, or how it ended, to the file that it was given.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import distributed  # noqa: F401  # before the forks
from fleet_service import Doubling

from tuner.errors import TunerError
from tuner.fleet.agent import Service
from tuner.fleet.cluster import serve_agent
from tuner.fleet.compiling import Compiling
from tuner.fleet.screener import Screener
from tuner.fleet.wire import Blobs


def serve(what: dict) -> None:
    ready = Path(what["ready"])

    def write(text: str) -> None:
        ready.with_suffix(".new").write_text(text)
        ready.with_suffix(".new").rename(ready)

    def service(name: str) -> Service:
        if what["serves"] == "compiling":
            return Compiling(Path(what["cache"]), Blobs(Path(what["blobs"])), num_builders)
        return Doubling(name) if what["serves"] == "doubling" else Screener("cpu")

    certificate = Path(what["certificate"])
    num_builders = int(what.get("num_builders", 0))
    os.environ.update(what.get("env", {}))
    try:
        serve_agent(
            what["address"],
            certificate,
            what["name"],
            service,
            Path(what["blobs"]),
            lambda: write("ready"),
            num_builders,
        )
        write("the scheduler is gone")
    except TunerError as error:
        write(f"{type(error).__name__}: {error}")


signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        serve(json.loads(line))
        os._exit(0)
    print(pid, flush=True)
