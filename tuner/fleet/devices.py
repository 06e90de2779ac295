"""Several devices as what a search talks to: each candidate is screened by any of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tuner.at_work import AtWork
from tuner.errors import DeviceError, InputError, TunerError, WorkerError, error_of
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.runner import Terms
from tuner.fleet.anchors import Anchors, Off
from tuner.fleet.dispatch import QUEUED, Dispatch, JobRaised, Opening
from tuner.fleet.fleet import AttemptLost, Fleet
from tuner.machine.device import Device
from tuner.machine.limits import LIMITS
from tuner.machine.platforms import is_gpu
from tuner.trial import Build, Candidate, Measurement, Outcome, Status, from_json, to_json

__all__ = ["FleetDevices"]

OPEN_LIMIT_S = 900.0  # imports, the float64 oracle of a large problem, the baseline; twice
SCREEN_LIMIT_S = 900.0  # a candidate and the baseline, each twice; other tuners' turns; restarts
UNKNOWN = "unknown"  # a driver that does not tell its version
# In all of a run, as far as they are known.
SAME = ("kind", "name", "capability", "num_sms", "num_cores", "simd_bits", "driver")


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
        spec: JobSpec,
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
        self._anchors: Anchors | None = None  # once all were timed
        self._facts: dict[str, Mapping[str, Any]] = {}  # of each device that was opened
        self._device = device
        self._num_devices = num_devices
        self._on_change = on_change
        self._waited_s: dict[str, float] = {}
        payload = {"task": spec.payload(), "terms": asdict(terms), "env": dict(env)}
        reference = Path(spec.reference)
        tensors = [Path(path) for path in terms.others.values() if path]
        if reference.name in (path.name for path in tensors):
            raise InputError(
                f"{reference.name}: a file of tensors has the reference's name\n"
                "  next: give it another one; agents tell them apart by their names"
            )
        opening = Opening(
            lambda name: payload,
            {path.name: path for path in (*tensors, reference)},
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

    @property
    def baselines_us(self) -> Mapping[str, float]:
        """The baseline's time on each device, alone, at its start."""
        return {} if self._anchors is None else self._anchors.alone_us

    @property
    def together_us(self) -> Mapping[str, float]:
        """The same while all of them worked."""
        return {} if self._anchors is None else self._anchors.together_us

    def at_work(self) -> list[AtWork]:
        """Return what each device is at; one that is lost has no slots."""
        now = self._dispatch.at_work()
        gone = dict.fromkeys(set(self._facts) - set(now), (0, 0))
        return [AtWork(name, "device", *slots) for name, slots in sorted({**now, **gone}.items())]

    def start(self) -> Measurement:
        """Wait for the devices; time the baseline on each, alone, and then on all together.

        Raises:
            TunerError: none of them can be used; this is why the first one cannot.
        """
        self._dispatch.wait_for_devices(self._num_devices, OPEN_LIMIT_S)
        names = list(self.names)
        for name in names[1:]:
            if other := _other(self._facts[name], self._facts[names[0]], tuple(LIMITS)):
                self._dispatch.leave_out(name, f"it is limited otherwise than {names[0]}: {other}")
        alone: dict[str, Measurement] = {}
        for name in (name for name in names if name in self.names):
            alone |= self._timed([name])
        if not alone:
            raise self._why_none()
        self._anchors = anchors = Anchors(alone, leaves_out=is_gpu(self._device.kind))
        for off in anchors.off_at_start():
            self._tell(off)
        if len(self.names) > 1:
            for off in anchors.worked_together(self._timed(list(anchors.alone_us))):
                self._tell(off)
        return next(iter(alone.values()))

    def _timed(self, names: Sequence[str]) -> dict[str, Measurement]:
        """Time the baseline on some devices at once; those that are lost meanwhile are absent."""
        calls = {
            name: self._dispatch.call("baseline", {}, limit_s=SCREEN_LIMIT_S, device=name)
            for name in names
        }
        found: dict[str, Measurement] = {}
        for name, call in calls.items():
            with suppress(DeviceError):  # it was lost meanwhile, and said so
                found[name] = from_json(Measurement, json.dumps(_result(call)["baseline"]))
        return found

    def _tell(self, off: Off) -> None:
        """Name a device that differs in speed; leave it out where its times cannot be compared."""
        assert self._anchors is not None
        if off.is_too_far and len(self.names) > 1:
            self._anchors.leave(off.device)
            self._dispatch.leave_out(off.device, f"{off.words}: their times cannot be compared")
        else:
            self._on_change(off.device, f"warning: {off.words}")

    def screen(self, candidate: Candidate, build: Build, best_us: float | None) -> Outcome:
        """Check a candidate that is built, and time it, on any device.

        Raises:
            TunerError: no device is left.
        """
        assert build.artefact is not None and self._anchors is not None
        artefact = Path(build.artefact)
        payload = {
            "candidate": json.loads(to_json(candidate)),
            "build": json.loads(to_json(build)),
            "artefact": artefact.name,
            "best_us": best_us,
            "lead_us": self._anchors.lead_us,
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
        measured = outcome.measurement
        if measured is not None and (anchor_us := measured.anchor_us) is not None:
            if off := self._anchors.noted(reply["on"], anchor_us, self.names):
                self._tell(off)
            measured = replace(measured, to_lead=self._anchors.to_lead(reply["on"]))
        return replace(outcome, build=build, measurement=measured, device=reply["on"])

    def close(self) -> None:
        """End the agents' work for this run."""
        self._dispatch.close()

    def _refusal(self, name: str, reply: Mapping[str, Any]) -> str:
        there, anchors = reply["device"], self._anchors
        if other := _other(there, json.loads(to_json(self._device)), SAME):
            return f"it is of another kind than the run's device: {other}"
        self._facts[name] = there
        if anchors is None:
            return ""
        lead = self._facts[anchors.lead]  # it joins those that are compared already
        if other := _other(there, lead, tuple(LIMITS)):
            return f"it is limited otherwise than {anchors.lead}: {other}"
        baseline = from_json(Measurement, json.dumps(reply["baseline"]))
        off = anchors.joined(name, baseline)
        if off is not None and off.is_too_far:
            anchors.leave(name)
            return f"{off.words}: their times cannot be compared"
        if off is not None:
            self._on_change(name, f"warning: {off.words}")
        return ""

    def _why_none(self) -> TunerError:
        for error in self._dispatch.refused.values():
            return error_of(error.kind, error.message, str(error))
        return WorkerError("no device of the fleet answers\n  next: `tune doctor`, on its host")


def _other(there: Mapping[str, Any], ours: Mapping[str, Any], whats: Sequence[str]) -> str:
    """Say in what two devices differ, as far as both are known; nothing where in none."""
    unreported = (None, UNKNOWN)
    known = [w for w in whats if there.get(w) not in unreported and ours.get(w) not in unreported]
    other = [w for w in known if there[w] != ours[w]]
    return ", ".join(f"{w} {there[w]} instead of {ours[w]}" for w in other)


def _result(call: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = call.result()
        return found
    except JobRaised as error:
        raise error_of(error.kind, error.message, str(error)) from error
