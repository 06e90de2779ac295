"""Several devices as what a search talks to: each candidate is screened by any of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tuner import errors
from tuner.errors import DeviceError, TunerError, WorkerError
from tuner.evaluate.runner import Terms
from tuner.evaluate.task import Task
from tuner.fleet.dispatch import QUEUED, Dispatch, JobRaised, Opening
from tuner.fleet.fleet import AttemptLost, Fleet
from tuner.machine.device import Device
from tuner.machine.platforms import is_gpu
from tuner.trial import Build, Candidate, Measurement, Outcome, Status, from_json, to_json
from tuner.wording import percent

__all__ = ["FleetDevices"]

OPEN_LIMIT_S = 900.0  # imports, the float64 oracle of a large problem, the baseline; twice
SCREEN_LIMIT_S = 900.0  # a candidate and the baseline, each twice; other tuners' turns; restarts
FAR, TOO_FAR = 0.03, 0.10  # by which a device's baseline differs from the first one's
SAME = ("kind", "name", "capability", "num_sms", "num_cores", "simd_bits")  # in all of a run


class FleetDevices:
    """The devices of a fleet.

    Args:
        fleet: closed with this.
        run: name of the run.
        task: the problem; each agent puts its own device in it.
        terms: of the screening.
        env: what workers have in their environment besides their agent's.
        device: of which kind all must be.
        num_devices: how many are waited for at the start.
        most: devices that there may be, which is how many candidates are screened at once.
        patience_s: how long candidates wait while there is no device, in case one joins.
        on_change: called with a device's name and what became of it, in words.
    """

    def __init__(
        self,
        fleet: Fleet,
        run: str,
        task: Task,
        terms: Terms,
        *,
        env: Mapping[str, str],
        device: Device,
        num_devices: int,
        most: int,
        patience_s: float,
        on_change: Callable[[str, str], None],
    ) -> None:
        self.at_once = QUEUED * most
        self.overlaps = True
        self.is_apart = is_gpu(device.kind)
        self.baselines_us: dict[str, float] = {}  # each device's own, at its start
        self._device = device
        self._num_devices = num_devices
        self._on_change = on_change
        self._waited_s: dict[str, float] = {}
        payload = {"task": task.payload(), "terms": asdict(terms), "env": dict(env)}
        reference = Path(task.reference)
        opening = Opening(
            lambda name: payload,
            {reference.name: reference},
            limit_s=OPEN_LIMIT_S,
            refusal=self._refusal,
        )
        self._dispatch = Dispatch(fleet, run, opening, on_change=on_change, patience_s=patience_s)

    @property
    def waited_s(self) -> float:
        """Seconds for which each device was had by other tuners, at least."""
        return min(self._waited_s.values(), default=0.0)

    @property
    def names(self) -> Sequence[str]:
        """The devices that work for the run now."""
        return self._dispatch.devices

    def start(self) -> Measurement:
        """Wait for the devices; time the baseline on each, alone.

        Raises:
            TunerError: none of them can be used; this is why the first one cannot.
        """
        self._dispatch.wait_for_devices(self._num_devices, OPEN_LIMIT_S)
        if not self.names:
            raise self._why_none()
        alone: dict[str, Measurement] = {}
        for name in self.names:
            call = self._dispatch.call("baseline", {}, limit_s=SCREEN_LIMIT_S, device=name)
            with suppress(DeviceError):  # it was lost meanwhile, and said so
                alone[name] = from_json(Measurement, json.dumps(_result(call)["baseline"]))
        if not alone:
            raise self._why_none()
        self.baselines_us = {name: measured.latency_us for name, measured in alone.items()}
        self._compare(alone)
        return next(iter(alone.values()))

    def _compare(self, alone: Mapping[str, Measurement]) -> None:
        """Say which devices differ from the first in speed; leave out a GPU that does by much."""
        (first, lead), *others = alone.items()
        for name, measured in others:
            off = measured.latency_us / lead.latency_us - 1
            words = f"PyTorch's time is {percent(off)} off that on {first}"
            if abs(off) > max(TOO_FAR, 3 * lead.noise) and is_gpu(self._device.kind):
                self._dispatch.leave_out(name, f"{words}: their times cannot be compared")
                del self.baselines_us[name]
            elif abs(off) > max(FAR, lead.noise):
                self._on_change(name, f"warning: {words}")

    def screen(self, candidate: Candidate, build: Build, best_us: float | None) -> Outcome:
        """Check a candidate that is built, and time it, on any device.

        Raises:
            TunerError: no device is left.
        """
        assert build.artefact is not None
        artefact = Path(build.artefact)
        payload = {
            "candidate": json.loads(to_json(candidate)),
            "build": json.loads(to_json(build)),
            "artefact": artefact.name,
            "best_us": best_us,
        }
        call = self._dispatch.call(
            "screen", payload, {artefact.name: artefact}, limit_s=SCREEN_LIMIT_S
        )
        try:
            reply = _result(call)
        except AttemptLost as error:
            return Outcome(Status.RUNTIME, str(error), build)
        self._waited_s[reply["on"]] = reply["waited_s"]
        outcome = from_json(Outcome, json.dumps(reply["outcome"]))
        return replace(outcome, build=build, device=reply["on"])

    def close(self) -> None:
        """End the agents' work for this run."""
        self._dispatch.close()

    def _refusal(self, name: str, reply: Mapping[str, Any]) -> str:
        there, ours = reply["device"], json.loads(to_json(self._device))
        other = [what for what in SAME if there.get(what) != ours.get(what)]
        if other:
            found = ", ".join(
                f"{what} {there.get(what)} instead of {ours.get(what)}" for what in other
            )
            return f"it is of another kind than the run's device: {found}"
        self.baselines_us[name] = float(reply["baseline"]["latency_us"])
        return ""

    def _why_none(self) -> TunerError:
        for error in self._dispatch.refused.values():
            return _explained(error)
        return WorkerError("no device of the fleet answers\n  next: `tune doctor`, on its host")


def _result(call: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = call.result()
        return found
    except JobRaised as error:
        raise _explained(error) from error


def _explained(error: JobRaised) -> TunerError:
    """Return the error of ours that an agent met."""
    kind = getattr(errors, error.kind, None)
    if isinstance(kind, type) and issubclass(kind, TunerError) and kind is not errors.ConfigError:
        return kind(error.message)
    return WorkerError(str(error))
