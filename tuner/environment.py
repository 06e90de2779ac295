"""What a run recorded of the machine and of how it was started: its `environment.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import AllowInfNan, ConfigDict, ValidationError

from tuner.errors import StorageError
from tuner.storage import storage_errors, write_whole
from tuner.trial import Value, from_json, to_json

__all__ = ["ENVIRONMENT_NAME", "Environment", "SessionRecord", "read_environment"]

ENVIRONMENT_NAME = "environment.json"

Number = int | Annotated[float, AllowInfNan(False)]


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """How the baseline was timed when a session began, which its trials are compared with.

    `devices` and `devices_together`: its latency in us on each device alone, and while all of
    them were at work.
    """

    from_trial: int
    baseline_us: Number | None = None
    baseline_noise: Number | None = None
    devices: Mapping[str, float] = field(default_factory=dict)
    devices_together: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Environment:
    """What a run recorded of the machine and of how it was started; empty where it did not.

    `device` and `earlier` are the JSON of a `Device` and an `Earlier`, `facts` what expressions
    may ask of the device, `machine` the versions that a time depends on. `flops` and `bytes` are
    of one call. `beside` are the names of the runs, in the same folder, of smaller sizes that are
    tuned for the same file. `in_flight` is how many candidates a search asks for at once.
    `tensors_sha256` are the hashes of the files of tensors that candidates are timed on, by name.
    `started_at` is in ISO 8601. `other`: keys of the file that are not known, or whose values are
    of another type.
    """

    __pydantic_config__ = ConfigDict(strict=True)

    tuner: str = ""
    device: Mapping[str, Any] = field(default_factory=dict)
    device_name: str = ""
    torch_name: str = ""
    facts: Mapping[str, Value] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    toolchain: str = ""
    op: str = ""
    title: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    accuracy: str = ""
    mode: str = ""
    flops: Number | None = None
    bytes: Number | None = None
    num_feasible: int | None = None
    num_cartesian: int | None = None
    config_folder: str = ""
    overrides: Mapping[str, Value] = field(default_factory=dict)
    command: str = ""
    started_at: str = ""
    earlier: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    tensors_sha256: Mapping[str, str] = field(default_factory=dict)
    in_flight: int | None = None
    baseline_us: Number | None = None
    baseline_noise: Number | None = None
    sessions: tuple[SessionRecord, ...] = ()
    other: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Environment:
        """Read what the JSON of an `environment.json` says, of whatever version of the tuner."""
        data = {_KEYS_WERE.get(key, key): value for key, value in data.items()}
        known = {key: value for key, value in data.items() if key in _KEYS}
        try:
            found = from_json(cls, json.dumps(known))
        except ValidationError as error:
            wrong = {item["loc"][0] for item in error.errors()}
            known = {key: value for key, value in known.items() if key not in wrong}
            found = from_json(cls, json.dumps(known))
        other = {key: value for key, value in data.items() if key not in known}
        return cls(**{key: getattr(found, key) for key in known}, other=other)

    @property
    def named_device(self) -> str:
        """What the device is called, however little was recorded; empty where nothing was."""
        return str(self.device.get("name") or self.device_name or self.torch_name)

    def entries(self) -> dict[str, Any]:
        """Return what was recorded as it stands in the file, JSON-able."""
        data = json.loads(to_json(self))
        kept = {key: data[key] for key in _KEYS if data[key] not in (None, "", {}, [])}
        return {**kept, **self.other}

    def write(self, folder: Path) -> None:
        """Write the file into the folder of a run, whole or not at all."""
        write_whole(folder / ENVIRONMENT_NAME, json.dumps(self.entries(), indent=1))


_KEYS_WERE = {"sittings": "sessions"}  # in earlier releases
_KEYS = [item.name for item in fields(Environment) if item.name != "other"]


def read_environment(folder: Path) -> Environment:
    """Read the file in the folder of a run.

    Raises:
        StorageError: it cannot be read, or is no JSON object.
    """
    path = folder / ENVIRONMENT_NAME
    with storage_errors(path):
        text = path.read_bytes()
    try:
        data = json.loads(text)
    except ValueError as error:  # also what is no UTF-8
        raise StorageError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise StorageError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return Environment.of(data)
