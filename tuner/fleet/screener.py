"""What an agent does for a search: candidates checked and timed, on its own device.

open         the task, the terms     --> the device's facts, the baseline's time
baseline                             --> its time, anew
screen       a candidate, its build  --> the outcome
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.runner import Runner, Terms
from tuner.fleet.anchors import factor
from tuner.fleet.fleet import OPEN, AttemptLost
from tuner.trial import Build, Candidate, from_json, to_json

__all__ = ["Screener"]


class Screener:
    """Screens candidates on one device.

    Args:
        device: `cpu` or `cuda:0`, as PyTorch calls it on this host.
        cores: that the worker keeps to, None for all.
        paused: keeps this host's builders quiet meanwhile.
        env: what the worker has in its environment in place of what the parent says.
    """

    def __init__(
        self,
        device: str,
        cores: tuple[int, ...] | None = None,
        paused: Callable[[], AbstractContextManager[None]] = nullcontext,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._device, self._cores, self._paused = device, cores, paused
        self._env = dict(env or {})
        self._runner: Runner | None = None
        self._is_closed = False

    def run(
        self, job: str, payload: Mapping[str, Any], files: Mapping[str, Path]
    ) -> dict[str, Any]:
        """Do one job.

        Raises:
            AttemptLost: the worker's process was killed from outside.
            WorkerError: the worker cannot be started any more.
            TunerError: the reference or the device cannot be used.
        """
        if job == OPEN:
            return self._open(payload, files)
        assert self._runner is not None  # an agent opens it first
        if job == "baseline":
            return {"baseline": _plain(self._runner.time_baseline())}
        candidate = from_json(Candidate, json.dumps(payload["candidate"]))
        build = from_json(Build, json.dumps(payload["build"]))
        build = replace(build, artefact=str(files[payload["artefact"]]))
        best_us = payload["best_us"]
        if best_us is not None:  # as the leading device would have it
            assert self._runner.baseline is not None  # timed at the start
            best_us /= factor(payload["lead_us"], self._runner.baseline.latency_us)
        outcome = self._runner.screen(candidate, build, best_us)
        if self._runner.was_killed:
            raise AttemptLost(outcome.reason)
        return {
            "outcome": _plain(replace(outcome, build=None)),
            "waited_s": self._runner.waited_s,
        }

    def close(self) -> None:
        """End the worker."""
        self._is_closed = True
        if self._runner is not None:
            self._runner.close()

    def _open(self, payload: Mapping[str, Any], files: Mapping[str, Path]) -> dict[str, Any]:
        spec = JobSpec(**payload["task"])
        here = str(files[Path(spec.reference).name])
        terms = Terms(**payload["terms"])
        others = {n: path and str(files[Path(path).name]) for n, path in terms.others.items()}
        self._runner = Runner(
            replace(spec, device=self._device, reference=here),
            replace(terms, others=others),
            env={**payload["env"], **self._env},
            cores=self._cores,
            paused=self._paused,
        )
        if self._is_closed:  # meanwhile
            self._runner.close()
        baseline = self._runner.start()
        return {"device": self._runner.described(), "baseline": _plain(baseline)}


def _plain(record: Any) -> Any:
    return json.loads(to_json(record))
