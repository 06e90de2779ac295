"""Builders of other hosts, for this host's `Builder`: what they compile lands in its cache.

They compile what this host would: the same compilers, flags and, for code of the `native`
processor, the same processor. Files come by their digests. What one of them has, of whatever run,
no other one compiles. What is lost with a host is made by another one, at last by this one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.at_work import AtWork
from tuner.errors import DeviceError
from tuner.fleet.compiling import reported_of
from tuner.fleet.dispatch import Dispatch, JobRaised, Opening
from tuner.fleet.fleet import AttemptLost, Fleet
from tuner.kernel.elsewhere import Elsewhere
from tuner.kernel.toolchain import Toolchain
from tuner.trial import Build, Candidate, Language, Status, from_json, to_json

__all__ = ["FleetBuilders"]

OPEN_LIMIT_S = 120.0  # asking compilers for their versions
FETCH_LIMIT_S = 60.0  # some MB
MARGIN_S = 60.0  # beyond what a compiler may take
MAX_TRIES = 3  # of one candidate, whose files are gone with the host that made them


class FleetBuilders(Elsewhere):
    """The builders of a cluster, those that join later too.

    Args:
        fleet: closed with this.
        run: name of the run.
        toolchain: of this host; one that compiles otherwise is left out.
        languages: that they are to compile.
        timeout_s: for one candidate.
        on_change: called with a host's name and what became of it, in words.
    """

    def __init__(
        self,
        fleet: Fleet,
        run: str,
        toolchain: Toolchain,
        languages: Sequence[Language],
        *,
        timeout_s: float,
        on_change: Callable[[str, str], None],
    ) -> None:
        self._languages = list(languages)
        self._limit_s = timeout_s + MARGIN_S
        self._ours = reported_of(toolchain, [str(name) for name in languages])
        self._held: dict[str, str] = {}  # who has a build, by its key
        self._known: set[str] = set()  # hosts that were opened
        self._num_begun = 0
        self._change = threading.Lock()
        payload = {
            "kind": toolchain.kind,
            "capability": toolchain.capability,
            "languages": self._languages,
            "timeout_s": timeout_s,
        }
        opening = Opening(lambda name: payload, limit_s=OPEN_LIMIT_S, refusal=self._refusal)
        self._dispatch = Dispatch(fleet, run, opening, on_change=on_change, patience_s=0.0)

    @property
    def num_slots(self) -> int:
        """How many builds they do at a time, at present."""
        return self._dispatch.num_slots

    def at_work(self) -> list[AtWork]:
        """Return how many of each host's builders are busy; a host that is lost has none."""
        now = self._dispatch.at_work()
        gone = dict.fromkeys(self._known - set(now), (0, 0))
        return [AtWork(name, "builders", *n) for name, n in sorted({**now, **gone}.items())]

    def begin(self, candidate: Candidate, key: str, *, is_held: bool) -> bool:
        """Take a slot for a build; whether there is one. With `is_held` only where one has it."""
        if candidate.language not in self._languages:
            return False
        if is_held and self._held.get(key) not in self._dispatch.devices:
            return False
        with self._change:
            if self._num_begun >= self.num_slots:
                return False
            self._num_begun += 1
            return True

    def make(self, candidate: Candidate, key: str, folder: Path) -> tuple[Build, bool] | None:
        """Fill a folder with what one of them compiles; None where this host has to.

        Returns:
            The build with relative paths, and whether to believe it later.
        """
        try:
            for _ in range(MAX_TRIES):
                try:
                    made = self._made(candidate, key, folder)
                except AttemptLost:  # the files are gone with the host
                    continue
                return made
            return None
        except (DeviceError, JobRaised):  # nobody is left, or nobody can
            return None
        finally:
            with self._change:
                self._num_begun -= 1

    def close(self) -> None:
        """End their work for this run; what is being made is not."""
        self._dispatch.close()

    def _made(self, candidate: Candidate, key: str, folder: Path) -> tuple[Build, bool] | None:
        held_by = self._held.get(key, "")
        call = self._dispatch.call(
            "build",
            {"candidate": json.loads(to_json(candidate))},
            limit_s=self._limit_s,
            device=held_by if held_by in self._dispatch.devices else "",
        )
        reply = call.result()
        build, is_final = from_json(Build, json.dumps(reply["build"])), bool(reply["is_final"])
        if build.key != key or (build.status is Status.COMPILE and not is_final):
            return None  # its compiler was killed, say
        for name in filter(None, (build.artefact, build.log)):
            data = self._dispatch.fetch(reply["on"], reply["files"][name], FETCH_LIMIT_S)
            (folder / Path(name).name).write_bytes(data)
        self._held[key] = reply["on"]
        return replace(build, host=reply["on"], started_at="", ended_at=""), is_final

    def _refusal(self, name: str, reply: Mapping[str, Any]) -> str:
        if reply["signatures"] != self._ours["signatures"]:
            other = [
                f"{what} {_shown(reply[what])} instead of {_shown(ours)}"
                for what, ours in self._ours.items()
                if what != "signatures" and reply[what] != ours
            ]
            return f"it compiles otherwise than this host: {'; '.join(other) or 'another tuner'}"
        self._held |= dict.fromkeys(reply["keys"], name)
        self._known.add(name)
        return ""


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(part) for part in value) or "none"
    return str(value)
