"""What crosses between hosts: jobs and replies as JSON text, files as bytes named by their digest.

No pickles: who holds the other end may send garbage, but no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tuner.fleet.fleet import Failure, Job, Lost, Reply

__all__ = ["Blobs", "Garbled", "digest_of", "event_from", "event_text", "job_from", "job_text"]


class Garbled(Exception):
    """What came is no message of ours."""


def digest_of(data: bytes) -> str:
    """Return the sha256 of some bytes, by which a blob is named."""
    return hashlib.sha256(data).hexdigest()


def job_text(job: Job, digests: Mapping[str, str], reply_to: str) -> str:
    """Return a job as text.

    Args:
        job: in question.
        digests: of its files, by their names.
        reply_to: where its reply goes.
    """
    fields = {**asdict(job), "files": dict(digests)}
    return json.dumps({"job": fields, "reply_to": reply_to})


def job_from(text: str, blobs: Blobs) -> tuple[Job, str]:
    """Return a job with its files in place, and where its reply goes.

    Raises:
        Garbled: it is not a job, or a blob of it is not there.
    """
    try:
        fields = json.loads(text)
        job, reply_to = fields["job"], str(fields["reply_to"])
        digests = {str(name): str(digest) for name, digest in job.pop("files").items()}
        return Job(**job, files=blobs.placed(digests)), reply_to
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Garbled(f"not a job: {error}") from error


def event_text(event: Reply | Lost) -> str:
    """Return a reply, or the end of a device, as text."""
    return json.dumps({type(event).__name__.lower(): asdict(event)})


def event_from(text: object) -> Reply | Lost:
    """Return what `event_text` gave.

    Raises:
        Garbled: it is something else.
    """
    try:
        ((kind, fields),) = json.loads(str(text)).items()
        if kind == "lost":
            return Lost(str(fields["device"]), str(fields["reason"]))
        failure = fields.pop("failure")
        return Reply(**fields, failure=Failure(**failure) if failure else None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Garbled(f"not a reply: {error}") from error


class Blobs:
    """Files of an agent's host by their digests, shared by its agents.

    Args:
        folder: where they are kept; made when the first one comes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def missing(self, digests: Sequence[str]) -> list[str]:
        """Return which of them are not here."""
        return [digest for digest in digests if not (self._folder / digest).is_file()]

    def add(self, digest: str, data: bytes) -> None:
        """Keep a blob.

        Raises:
            Garbled: these are not its bytes.
        """
        if digest_of(data) != digest:
            raise Garbled(f"a blob is not {digest[:12]}..., as it is named")
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(data)
        os.replace(file.name, self._folder / digest)

    def adopt(self, path: Path) -> str:
        """Keep a file as a blob; return its digest. Where it can be, it is not copied."""
        digest = digest_of(path.read_bytes())
        if self.missing([digest]):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as aside:
                made = Path(aside) / digest
                try:
                    os.link(path, made)
                except OSError:  # another file system
                    shutil.copyfile(path, made)
                os.replace(made, self._folder / digest)
        return digest

    def placed(self, digests: Mapping[str, str]) -> dict[str, Path]:
        """Return each file under its own name, beside the others, in a folder of their own.

        Raises:
            Garbled: a name leads elsewhere, or a blob is not here, or was damaged.
        """
        listing = digest_of(json.dumps(sorted(digests.items())).encode())
        folder = self._folder / "placed" / listing
        for name, digest in digests.items():
            if Path(name).name != name or name in ("", ".", ".."):
                raise Garbled(f"{name!r} is not the name of a file")
            if not (folder / name).is_file():
                data = self.read(digest)
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                    file.write(data)
                os.replace(file.name, folder / name)
        return {name: folder / name for name in digests}

    def read(self, digest: str) -> bytes:
        """Return the bytes of a blob.

        Raises:
            Garbled: it is not here, or was damaged.
        """
        try:
            data = (self._folder / digest).read_bytes()
        except OSError as error:
            raise Garbled(f"blob {digest[:12]}... is not here") from error
        if digest_of(data) != digest:
            raise Garbled(f"blob {digest[:12]}... is damaged")
        return data
