"""The jobs of test_worker.py: well-behaved and otherwise."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

from tuner.evaluate.worker import Fault

STATE = {"prepared": ""}


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.hook = lambda: None


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def _channel_fd():
    """The channel's descriptor, as a hostile job would find it."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                return int(name)
        except OSError:
            continue
    raise RuntimeError("no socket")


def echo(payload, blobs):
    return payload, blobs


def recurse(payload, blobs):
    return recurse_again(payload, blobs)


def recurse_again(payload, blobs):  # by turns: Python shortens what calls itself
    return recurse(payload, blobs)


def warn(payload, blobs):
    warnings.warn(payload["text"], stacklevel=2)
    return {}, []


def length(payload, blobs):
    return {"lengths": [len(blob) for blob in blobs]}, []


def prepare(payload, blobs):
    STATE["prepared"] += payload["text"]
    return {}, []


def prepared(payload, blobs):
    return {"text": STATE["prepared"], "pid": os.getpid()}, []


def spin_in_a_thread(payload, blobs):
    """Answer, and go on using a processor."""

    def spin():
        while True:
            pass

    threading.Thread(target=spin, daemon=True).start()
    return {}, []


def segfault(payload, blobs):
    print("about to read address 0")
    ctypes.string_at(0)


def leak(payload, blobs):
    """Take memory and never give it back, as a fork if asked."""
    if payload["forks"] and os.fork():
        time.sleep(3600)
    kept = []
    while True:
        kept.append(b"x" * 2**24)
        time.sleep(0.005)  # 3 GB a second


def borrow(payload, blobs):
    """Use a device, which is a file: open at the start, and gone when somebody took it away."""
    with open(payload["device"], encoding="utf-8") as file:
        return {"read": file.read()}, []


def borrow_and_break(payload, blobs):
    os.unlink(payload["device"])
    raise Fault("the device does not answer")


def leave(payload, blobs):
    os._exit(payload["status"])


def leave_politely(payload, blobs):
    sys.exit(payload["status"])


def kill_self(payload, blobs):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(payload, blobs):
    print("hanging now")
    time.sleep(1000)


def start_grandchild(payload, blobs):
    """Start a process that sleeps, write its pid to a file, then do what `then` says."""
    process = subprocess.Popen(["sleep", "1000"], start_new_session=payload["setsid"])
    with open(payload["path"], "w") as file:
        file.write(str(process.pid))
    return JOBS[payload["then"]](payload, blobs)


def start_orphan(payload, blobs):
    """A grandchild in its own session whose own parent is gone."""
    script = "import os, subprocess, sys; p = subprocess.Popen(['sleep', '1000'], \
start_new_session=True); open(sys.argv[1], 'w').write(str(p.pid)); os._exit(0)"
    subprocess.run([sys.executable, "-c", script, payload["path"]], check=True)
    return JOBS[payload["then"]](payload, blobs)


def fork_and_crash(payload, blobs):
    """The forked process keeps the channel open after its parent's death."""
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)
    with open(payload["path"], "w") as file:
        file.write(str(pid))
    os.kill(os.getpid(), signal.SIGSEGV)


def print_a_lot(payload, blobs):
    for number in range(payload["lines"]):
        print(f"line {number} " + "x" * 1000)
    return {}, []


def print_forever(payload, blobs):
    while True:
        print("y" * 1000)


def raise_error(payload, blobs):
    raise {"value": ValueError("boo"), "pickle": Unpicklable("this", "that")}.get(
        payload["kind"], Unprintable()
    )


def fault(payload, blobs):
    raise Fault("an illegal memory access was encountered")


def close_channel(payload, blobs):
    os.close(_channel_fd())
    time.sleep(1000)


def garble(payload, blobs):
    os.write(_channel_fd(), payload["text"].encode())
    time.sleep(1000)


def answer_twice(payload, blobs):
    os.write(_channel_fd(), b"stray bytes")
    return {}, []


def no_json(payload, blobs):
    return {"set": {1, 2}}, []


def no_answer(payload, blobs):
    return None


def interrupt(payload, blobs):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    return {"survived": True}, []


def facts(payload, blobs):
    return {
        "variable": os.environ.get("TUNER_TEST_VARIABLE"),
        "is_leader": os.getpgid(0) == os.getpid() == os.getsid(0),
    }, []


def blas_threads(payload, blobs):
    """How many threads NumPy's own products take."""
    import numpy as np
    from threadpoolctl import threadpool_info

    np.ones((2, 2)) @ np.ones((2, 2))
    info = [pool for pool in threadpool_info() if "numpy" in pool["filepath"]]
    return {"threads": [pool["num_threads"] for pool in info]}, []


JOBS = {name: value for name, value in list(globals().items()) if callable(value)}


def run(job, payload, blobs):
    return JOBS[job](payload, blobs)
