"""Whether what a contender's timed calls returned is right, asked of the processes of a race."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import Any

from tuner.check.judge.refusals import unread
from tuner.check.probes.majority import by_majority
from tuner.errors import WorkerError
from tuner.evaluate.job_spec import asked
from tuner.evaluate.kept import missing_calls
from tuner.evaluate.timed import NUM_UNTIMED
from tuner.evaluate.worker import JobFailed, Reply, Worker
from tuner.trial import ProbeResult, from_json

__all__ = ["TimedCalls", "is_own_path"]

FEW_UNTIMED = 1  # of slow calls, which outlast the threads of the process before
MOST_JUDGED = 16  # calls of one contender in one set of processes
JOB_TIMEOUT_S = 300.0
# What costs next to nothing: views, and memory that is not written. Copies and conversions cost
# time and may be what a file spares, so they count.
FREE = {
    *("alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand"),
    *("lift_fresh", "new_empty", "permute", "select", "slice", "split", "squeeze", "t"),
    *("transpose", "unsqueeze", "view", "_unsafe_view"),
}


def is_own_path(theirs: Sequence[str], mine: Sequence[str]) -> bool:
    """Whether both ran the same operations in the same order, e.g. `aten.addmm`; views aside.

    Args:
        theirs: the reference's.
        mine: the contender's; none where they could not be traced.
    """
    theirs, mine = (
        [name for name in names if name.removeprefix("aten.") not in FREE]
        for names in (theirs, mine)
    )
    return bool(theirs) and theirs == mine


class TimedCalls:
    """Asks for calls, counts them, and has some of their outputs judged.

    `is_rough` says that PyTorch's own answer stood for float64 in some verdict.
    """

    def __init__(self) -> None:
        self.is_rough = False
        self._num_asked: Counter[Worker] = Counter()  # since the inputs were given

    def forget(self) -> None:
        """Count anew: the processes were given other inputs."""
        self._num_asked.clear()

    def burst(self, racer: Worker, num_samples: int, *, is_slow: bool = False) -> Reply:
        """Ask for that many samples, and fewer calls ahead of them that are not timed if slow."""
        num_untimed = FEW_UNTIMED if is_slow else NUM_UNTIMED
        self._num_asked[racer] += num_untimed + num_samples
        wanted = {"num_samples": num_samples, "num_untimed": num_untimed}
        return _asked_of(racer, "time_model", wanted)

    def steps(self, racer: Worker, num_samples: int) -> list[float] | str:
        """Ask for that many samples of a step of training; return why there are none else.

        That is "" where the module gives nothing that has a gradient.
        """
        data = _asked_of(racer, "time_steps", {"num_samples": num_samples}).data
        samples: list[float] | None = data["samples_us"]
        if samples is not None:
            return samples
        return f"{racer.name}: {data['reason']}" if data["reason"] else ""

    def repeat(self, racer: Worker, num_calls: int) -> None:
        """Ask for that many calls in a row."""
        self._num_asked[racer] += num_calls
        _asked_of(racer, "repeat", {"num_calls": num_calls})

    def last_output(self, judge: Worker, racer: Worker, lends: bool = False) -> str:
        """Judge the whole output of the last call of `repeat`; return what is wrong with it.

        `lends`: the judge can copy a GPU's tensors from the racer's process.
        """

        def ask(draw: int) -> ProbeResult:
            if draw:
                self.repeat(racer, 1)
            return self._verdict(judge, racer, lends)

        return by_majority(ask).reason

    def answer(self, judge: Worker, racer: Worker, lends: bool = False) -> ProbeResult | None:
        """Ask for one more call; return the verdict on its output, None where it was not read.

        `lends`: as for `last_output`.
        """
        self.repeat(racer, 1)
        found = self._verdict(judge, racer, lends)
        return None if isnan(found.rms_rel) else found

    def _verdict(self, judge: Worker, racer: Worker, lends: bool) -> ProbeResult:
        answer = _asked_of(racer, "timed_output", {"lends": lends})
        verdict = _judged(judge, "judge_timed", answer)
        _asked_of(racer, "give_up_output", {})  # beside others' it may be more than there is
        if isinstance(verdict, str):
            return ProbeResult("after timing", nan, nan, nan, nan, False, verdict)
        self.is_rough |= bool(verdict.data["is_rough"])
        return from_json(ProbeResult, json.dumps(verdict.data["result"]))

    def is_own_path(self, baseline: Worker, racer: Worker) -> bool:
        """Whether a call of the contender runs the reference's own operations."""
        theirs, mine = (
            [str(name) for name in _asked_of(each, "operations", {}).data["operations"]]
            for each in (baseline, racer)
        )
        return is_own_path(theirs, mine)

    def kept_outputs(self, judge: Worker, racer: Worker) -> str:
        """Judge elements of some calls' outputs; return what is wrong with them, or nothing.

        Which calls these are is drawn here, after all calls are over: every call that was timed
        may be among them.
        """
        answer = _asked_of(racer, "kept_outputs", {})
        numbers = [int(number) for number in answer.data["numbers"]]
        refusal = missing_calls(numbers, self._num_asked[racer])
        if refusal:
            return refusal
        if answer.data["odd"]:
            usual = ", ".join(answer.data["kinds"])
            return f"one timed call returned {answer.data['odd']}, the first one {usual}"
        drawn = secrets.SystemRandom().sample(range(len(numbers)), min(MOST_JUDGED, len(numbers)))
        more = {"numbers": numbers, "kinds": answer.data["kinds"], "drawn": drawn}
        verdict = _judged(
            judge, "judge_kept", Reply({"kept": answer.data["kept"], **more}, answer.blobs)
        )
        if isinstance(verdict, str):
            return verdict
        self.is_rough |= bool(verdict.data["is_rough"])
        return str(verdict.data["reason"])


def _asked_of(racer: Worker, job: str, payload: Mapping[str, Any]) -> Reply:
    """Run a job in a process of the race.

    Raises:
        WorkerError: it ended, before the job (a fresh one would hold no module) or in it.
    """
    if not racer.is_alive:
        raise WorkerError(f"{racer.name}: its process ended between two calls: {racer.ending()}")
    return asked(racer, job, payload)


def _judged(judge: Worker, job: str, answer: Reply) -> Reply | str:
    """Return the judge's reply, or why the answer cannot be read.

    Raises:
        WorkerError: the judge ended or did not answer: no fault of the contender.
    """
    if not judge.is_alive:
        raise WorkerError(
            f"the judge of the race ended: {judge.ending()}. This is an error of the machine, not "
            "a verdict on a module. Next: see whether memory ran out, then ask again"
        )
    try:
        return judge.call(job, answer.data, answer.blobs, timeout_s=JOB_TIMEOUT_S)
    except JobFailed as failure:
        return unread(failure.message)
