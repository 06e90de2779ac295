"""What an agent that lends builders does for a search: candidates compiled on its host.

open         what compiles for the run   --> this host's compilers, what is built already
build        a candidate                 --> the build; its files, by digest, are fetched then
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.errors import StorageError, ToolchainError, WorkerError
from tuner.fleet.fleet import OPEN, AttemptLost
from tuner.fleet.wire import Blobs, digest_of
from tuner.kernel.builder import Builder
from tuner.kernel.cache import keys_of, load
from tuner.kernel.toolchain import Toolchain
from tuner.kernel.triton_build import REPORT_FILE, AheadBuild
from tuner.kernel.triton_files import KERNELS_FILE, TRITON_CACHE, pack
from tuner.trial import Build, Candidate, Status, from_json, to_json

__all__ = ["Compiling", "reported_of"]


def reported_of(toolchain: Toolchain, languages: list[str]) -> dict[str, Any]:
    """Return what two hosts must have in common to compile the same, JSON-able.

    Where Triton is another one, or absent, they still compile all else the same.
    """
    return {
        "Triton": toolchain.triton or "none",
        "compilers": [text for path, text in toolchain.versions],
        "flags": [*toolchain.cpp_flags, *toolchain.device_flags],
        "processor": toolchain.cpu,
        "variables": [list(pair) for pair in toolchain.variables],
        "signatures": {name: toolchain.signature(name) for name in languages},  # type: ignore[arg-type]
    }


class Compiling:
    """Builders of this host, several at a time.

    Args:
        cache_dir: where builds are kept, as those of this host's own runs.
        blobs: where what was built waits to be fetched.
        num_builders: how many compile at a time.
    """

    def __init__(self, cache_dir: Path, blobs: Blobs, num_builders: int) -> None:
        self._cache_dir, self._blobs, self._num_builders = cache_dir, blobs, num_builders
        self._builder: Builder | None = None
        self._is_closed = False

    def run(
        self, job: str, payload: Mapping[str, Any], files: Mapping[str, Path]
    ) -> dict[str, Any]:
        """Do one job, of several threads.

        Raises:
            AttemptLost: the builders were closed meanwhile.
            ToolchainError: no compiler for this run is here.
            WorkerError: nothing can be built here any more, as on a full disk.
        """
        if job == OPEN:
            return self._open(payload)
        assert self._builder is not None  # an agent opens it first
        candidate = from_json(Candidate, json.dumps(payload["candidate"]))
        try:
            build = self._builder.submit(candidate).result()
            paths = [Path(path) for path in (build.artefact, build.log) if path is not None]
            digests = {path.name: self._blobs.adopt(path) for path in paths}
            kernels = _kernels(self._builder, build) if candidate.language == "triton" else None
            if kernels is not None:
                digests[KERNELS_FILE] = digest_of(kernels)
                self._blobs.add(digests[KERNELS_FILE], kernels)
        except CancelledError as error:
            raise AttemptLost("its builders were closed") from error
        except (StorageError, ToolchainError, OSError) as error:
            raise WorkerError(f"nothing can be built: {error}") from error
        is_final = load(self._builder.cache_dir / build.key) is not None
        artefact = Path(build.artefact).name if build.artefact is not None else None
        reported = replace(build, artefact=artefact, log=Path(build.log).name)
        return {"build": json.loads(to_json(reported)), "is_final": is_final, "files": digests}

    def close(self) -> None:
        """End the compilers."""
        self._is_closed = True
        if self._builder is not None:
            self._builder.close()

    def _open(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        languages = list(payload["languages"])
        native = [name for name in languages if name != "triton"]
        toolchain = Toolchain.find(payload["kind"], payload["capability"], native or languages)
        self._builder = Builder(
            toolchain,
            self._cache_dir,
            num_workers=self._num_builders,
            timeout_s=payload["timeout_s"],
            triton_sizes=payload["triton_sizes"],
        )
        if self._is_closed:  # meanwhile
            self._builder.close()
        return {**reported_of(toolchain, languages), "keys": keys_of(self._cache_dir)}


def _kernels(builder: Builder, build: Build) -> bytes | None:
    """Return what Triton's cache holds of a build, packed; None where nothing or too little."""
    if build.status is not Status.CORRECT:
        return None
    try:
        report = from_json(AheadBuild, (builder.cache_dir / build.key / REPORT_FILE).read_bytes())
        if len(report.folders) < len(report.kernels):  # built before folders were noted
            return None
        return pack(Path(builder.environment[TRITON_CACHE]) / name for name in report.folders)
    except FileNotFoundError:  # somebody emptied Triton's cache
        return None
