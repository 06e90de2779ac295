"""Builders of other hosts, for this host's `Builder`: what they compile lands in its cache.

They compile what this host would: the same compilers, flags and, for code of the `native`
processor, the same processor. Files come by their digests. What one of them has, of whatever run,
no other one compiles. What is lost with a host is made by another one, at last by this one.

Triton's kernels are compiled by those that have this host's Triton, without a GPU; the C++ that
launches them needs the driver's library, and is compiled where that is. A Triton text that holds
CUDA C++ is compiled by this host.
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
from tuner.kernel.binding import CUDA_CODE
from tuner.kernel.elsewhere import Elsewhere
from tuner.kernel.toolchain import Toolchain
from tuner.kernel.triton_files import KERNELS_FILE
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
        triton_sizes: as a `Builder`'s; without sizes Triton's kernels are left to this host.
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
        triton_sizes: Sequence[Mapping[str, int]] = (),
        timeout_s: float,
        on_change: Callable[[str, str], None],
    ) -> None:
        self._languages = list(languages)
        self._on_change = on_change
        self._limit_s = timeout_s + MARGIN_S
        self._ours = reported_of(toolchain, [str(name) for name in languages])
        self._no_triton: set[str] = set()  # hosts that have another Triton, or none
        self._held: dict[str, str] = {}  # who has a build, by its key
        self._known: set[str] = set()  # hosts that were opened
        self._num_begun = 0
        self._change = threading.Lock()
        payload = {
            "kind": toolchain.kind,
            "capability": toolchain.capability,
            "languages": self._languages,
            "triton_sizes": [dict(sizes) for sizes in triton_sizes],
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
        if candidate.language not in self._languages or not self._able(candidate.language):
            return False
        if candidate.language == "triton" and f"\n{CUDA_CODE} = " in candidate.source:
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

    def _able(self, language: Language) -> dict[str, float]:
        """Return the hosts that compile a language, with the share of their builders at work."""
        now = self._dispatch.at_work().items()
        unable = self._no_triton if language == "triton" else ()
        return {name: busy / slots for name, (slots, busy) in now if name not in unable}

    def _made(self, candidate: Candidate, key: str, folder: Path) -> tuple[Build, bool] | None:
        device, able = self._held.get(key, ""), self._able(candidate.language)
        if device not in able:
            device = ""  # any
            if candidate.language == "triton":
                if not able:
                    return None
                device = min(able, key=lambda name: able[name])
        call = self._dispatch.call(
            "build",
            {"candidate": json.loads(to_json(candidate))},
            limit_s=self._limit_s,
            device=device,
        )
        reply = call.result()
        build, is_final = from_json(Build, json.dumps(reply["build"])), bool(reply["is_final"])
        if build.key != key or (build.status is Status.COMPILE and not is_final):
            return None  # its compiler was killed, say
        names = [build.artefact, build.log]
        if candidate.language == "triton" and build.status is Status.CORRECT:
            if KERNELS_FILE not in reply["files"]:
                return None
            names.append(KERNELS_FILE)
        for name in filter(None, names):
            data = self._dispatch.fetch(reply["on"], reply["files"][name], FETCH_LIMIT_S)
            (folder / Path(name).name).write_bytes(data)
        self._held[key] = reply["on"]
        return replace(build, host=reply["on"], started_at="", ended_at=""), is_final

    def _refusal(self, name: str, reply: Mapping[str, Any]) -> str:
        theirs, ours = reply["signatures"], self._ours["signatures"]
        other = [language for language in ours if theirs[language] != ours[language]]
        self._no_triton -= {name}
        if other == ["triton"] != list(ours):
            self._no_triton |= {name}
            words = f"Triton {reply.get('Triton')} instead of {self._ours['Triton']}"
            self._on_change(name, f"compiles all but Triton's kernels: {words}")
        elif other:
            other = [
                f"{what} {_shown(reply.get(what))} instead of {_shown(ours)}"
                for what, ours in self._ours.items()
                if what != "signatures" and reply.get(what) != ours
            ]
            return f"it compiles otherwise than this host: {'; '.join(other) or 'another tuner'}"
        self._held |= dict.fromkeys(reply["keys"], name)
        self._known.add(name)
        return ""


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(part) for part in value) or "none"
    return str(value)
