"""What the agents of test_fleet.py do: jobs in a process of each agent's own, which can be killed.

Every job that begins, and every one that ends, is a line of `journal` in the folder of the job
`open`: so a test sees what was executed, whatever was reported to the parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tuner.errors import WorkerError
from tuner.fleet.fleet import AttemptLost
from tuner.fleet.wire import Blobs

CHILD = """
import json, sys, time
for line in sys.stdin:
    job = json.loads(line)
    time.sleep(job["seconds"])
    print(json.dumps({"value": 2 * job["value"]}), flush=True)
"""


class Doubling:
    """Doubles numbers, each after some seconds."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.folder = Path()
        self.child: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()

    def run(self, job, payload, files):
        if job == "open":
            self.folder = Path(payload["folder"])
            self.write("open")
            return {"pid": self.started().pid, "agent": os.getpid()}
        if job == "read":
            return {"text": files[payload["name"]].read_text()}
        if job == "make":
            made = self.folder / f"made-{os.getpid()}"
            made.write_text(payload["text"])
            return {"digest": Blobs(Path(payload["blobs"])).adopt(made)}
        if job == "raise":
            raise WorkerError("the device is gone") if payload["is_gone"] else ValueError("no")
        child = self.started()
        self.write(f"begin {payload['value']} {child.pid}")
        try:
            child.stdin.write(json.dumps(payload) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()  # ends with the process, too
        except (OSError, ValueError):
            answer = ""
        if not answer:
            child.wait()
            raise AttemptLost("killed by signal 9 (SIGKILL)")
        self.write(f"end {payload['value']}")
        if payload.get("dies") and self.may_die():
            os.kill(os.getpid(), signal.SIGKILL)  # between finishing and delivering
        return json.loads(answer)

    def may_die(self) -> bool:
        """Only the first agent dies."""
        try:
            (self.folder / "dead").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def started(self):
        with self.lock:
            if self.child is None or self.child.poll() is not None:
                self.reap()
                self.child = subprocess.Popen(
                    [sys.executable, "-S", "-c", CHILD],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,  # it may be killed in the middle of a line
                    text=True,
                )
            return self.child

    def write(self, what: str) -> None:
        with (self.folder / "journal").open("a") as file:
            file.write(f"{time.monotonic()} {self.device} {what}\n")

    def reap(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            for pipe in (self.child.stdin, self.child.stdout):
                with contextlib.suppress(OSError):  # what it did not read any more
                    pipe.close()

    def close(self):
        with self.lock:
            self.reap()
