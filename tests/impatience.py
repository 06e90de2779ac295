"""What a tuner need not wait for here: a candidate that hangs, and a machine that other tests use.

A search takes a hang for one after seconds; who answers has minutes, however busy the machine is.
A race does not wait long for a moment in which no other program runs. As a program it is `tune`
with that; where a test asks for it, the search waits at a trial for as long as a file is there,
or shares the CPU with what is timed, as beside a GPU.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from types import ModuleType

from rows_of_tests import FEW_ROWS

from tuner.capture import rows_tried
from tuner.evaluate import evaluator, raced_steps, racing, runner, verifier
from tuner.machine.host import has_many_cores
from tuner.planning import schedule
from tuner.verification import verification

NAMED = "own work, training"  # asked among few probes, too
EVERY_NUMBER_OF_ROWS = rows_tried._TRIED
__all__ = [
    "EVERY_NUMBER_OF_ROWS", "few_probes", "few_rows", "held_at_a_trial", "main", "no_rest",
    "soon_a_hang",
]  # fmt: skip


def replaced(room: ModuleType, **values: object) -> None:
    """Give a room's names other values; one that it no longer has would change nothing."""
    for name, value in values.items():
        assert hasattr(room, name), f"{room.__name__} has no {name}"
        setattr(room, name, value)


def no_rest() -> None:
    """Let races go on on a machine that is never quiet, and be short: no test asks who wins."""
    replaced(racing, BURST_S=0.01, MIN_ROUNDS=4, MOST_WARM_UP_S=0.05)
    replaced(racing, MOST_PREEMPTED_PER_S=math.inf)
    replaced(raced_steps, NUM_ROUNDS=2)
    replaced(schedule, MORE_PROCESSES=0)
    whole = racing.Racer.race
    racing.Racer.race = lambda self, contenders, *, num_processes, seconds, **more: whole(
        self,
        contenders,
        num_processes=min(num_processes, 2),  # the least that an interval needs
        seconds=min(seconds, 0.02),
        **more,
    )


def few_probes() -> None:
    """Ask an eighth of the probes where FEW_PROBES is set: by tests of what is around a check.

    On few cores one pair of processes asks them.

    Its value may be what names of probes begin with that are asked too, between semicolons.
    Where UNPROFILED is, the winner's call is not looked at kernel by kernel.
    """
    every = verifier.thorough_probes

    def few(*args, **kwargs):
        probes = every(*args, **kwargs)
        if "FEW_PROBES" not in os.environ:
            return probes
        first, more = probes[:10], probes[10:]
        named = (NAMED, *os.environ["FEW_PROBES"].split(";"))
        return [
            *first,
            *(p for n, p in enumerate(more) if n % 9 == 0 or p.name.startswith(named)),
        ]

    replaced(verifier, thorough_probes=few)
    if not has_many_cores():  # which pytest's workers share: a second pair would only start
        replaced(verifier, PAIRS=1)
    looked_at = verification.profile_into

    def profile_seldom(*args):
        return "left out" if "UNPROFILED" in os.environ else looked_at(*args)

    replaced(verification, profile_into=profile_seldom)


def few_rows() -> None:
    """Let a capture call a forward at few numbers of rows, and not at 65: a third of its CPU.

    test_rows_tried.py asks what each of them tells.
    """
    replaced(rows_tried, _TRIED=FEW_ROWS)


def soon_a_hang() -> None:
    """Take a candidate whose mode is `hang` for one soon."""
    screened = runner.Runner._screened

    def impatient(self, payload):
        mode = json.loads(payload["candidate"])["params"].get("mode")
        runner.SCREEN_TIMEOUT_S = 4.0 if mode == "hang" else 600.0
        try:
            return screened(self, payload)
        finally:
            runner.SCREEN_TIMEOUT_S = 600.0

    runner.SCREEN_TIMEOUT_S = 600.0
    runner.Runner._screened = impatient


def _num_written() -> int:
    return sum(path.read_bytes().count(b"\n") for path in Path("runs").glob("*/trials.jsonl"))


def held_at_a_trial() -> None:
    """Let a search wait at trial HOLD_FROM for as long as the file HOLD is there."""
    finish = evaluator.DeviceEvaluator.finish

    def held(self, pending, number, best_us):
        # By what is written: trials are finished in the order in which they were built.
        while _num_written() >= int(os.environ.get("HOLD_FROM", "999")):
            if not os.path.exists(os.environ["HOLD"]):
                break
            time.sleep(0.02)
        return finish(self, pending, number, best_us)

    evaluator.DeviceEvaluator.finish = held


def main() -> None:
    """Be an impatient `tune`."""
    from tuner.command.cli import main as tune

    no_rest()
    few_probes()
    few_rows()
    soon_a_hang()
    held_at_a_trial()
    if "OVERLAPS" in os.environ:
        runner.Runner.is_apart = True
    tune()
