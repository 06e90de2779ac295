"""Spaces with a recorded time for every configuration: read them, without a device.

Three sources become the same `Recording`: a Kernel Tuner cache file, a results file in the
community's T4 format, and a run directory of ours. Searching a recording costs no device time,
so that samplers can be compared on it (`replay`) and later runs can start from it.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.errors import InputError
from tuner.run import open_run
from tuner.search.t4 import LOWER_BOUND, MS
from tuner.space.constraints import Parameter
from tuner.space.expression import Expression
from tuner.space.search_space import SearchSpace
from tuner.trial import Params, Status, Value

__all__ = ["Recording", "read_recording"]

MAX_BYTES = 2**30  # of JSON text; the largest published space has 150 MB
# A time from here on stands for "failed" in older Kernel Tuner caches, which wrote 1e20.
MAX_MS = 1e19
_Naming = Callable[[Params], Params]
_UNITS_US = {"s": 1e6, "seconds": 1e6, "ms": 1e3, "milliseconds": 1e3, "us": 1.0, "ns": 1e-3}
_FAILURES = {
    "InvalidConfig": Status.CONSTRAINTS,
    "CompilationFailedConfig": Status.COMPILE,
    "RuntimeFailedConfig": Status.RUNTIME,
}


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A space and what became of each of its configurations; `n` is `space.num_feasible`.

    Attributes:
        name: the file's or run's name, without endings.
        kernel: what was tuned, as the source calls it; empty where it does not say.
        device: where; empty where the source does not say.
        space: exactly the recorded configurations are feasible in it, in order of declaration.
        keys: by config id, the configuration's key in the source: the
            values in the source's own order, joined by commas (nothing for an absent one).
        latency_us: float64 (n,), NaN where the configuration failed.
        is_bound: bool (n,), where measuring was stopped early: the configuration is slower than
            `latency_us` says, nobody knows by how much.
        statuses: n T4 statuses.
    """

    name: str
    kernel: str
    device: str
    space: SearchSpace
    keys: tuple[str, ...]
    latency_us: NDArray[np.float64]
    is_bound: NDArray[np.bool_]
    statuses: tuple[Status, ...]

    @property
    def known_us(self) -> NDArray[np.float64]:
        """Latencies that were measured to the end, NaN for the others."""
        return np.where(self.is_bound, np.nan, self.latency_us)


def read_recording(path: Path, now: _Naming = dict) -> Recording:
    """Read a Kernel Tuner cache or T4 file (`.json`, `.json.gz`), or a run directory.

    Args:
        path: of the file or folder.
        now: gives a configuration under today's names, which may differ from the recorded ones.

    Raises:
        InputError: `path` is none of these, is damaged, or holds no configuration that ran.
        StorageError: it is a run directory that cannot be read.
    """
    if path.is_dir():
        return _read_run(path, now)
    data = _load(path)
    if isinstance(data, dict) and isinstance(data.get("cache"), dict):
        return _read_cache(path, data, now)
    if isinstance(data, dict) and isinstance(data.get("results"), list):
        return _read_t4(path, data, now)
    raise InputError(
        f"{path}: no recorded space\n"
        "  expected a JSON object with `cache` (Kernel Tuner) or `results` (T4), or a run folder"
    )


# ---- from text to JSON ----------------------------------------------------------------------


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_packed else path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file or run folder") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"{path}: more than {MAX_BYTES >> 20} MiB of JSON")
    try:
        text = raw.decode("utf-8")
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            return _load_open(text, error)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None


def _load_open(text: str, error: json.JSONDecodeError) -> Any:
    """Read a cache that its tuner left open: no closing brackets, perhaps a half last line."""
    whole, _, _ = text.rstrip().rpartition("\n")
    for kept in (text, whole):
        try:
            return json.loads(kept.rstrip().rstrip(",") + "}}")
        except json.JSONDecodeError:
            continue
    raise error


# ---- the three sources ----------------------------------------------------------------------


@dataclass(slots=True)
class _Entry:
    key: str  # as in the source; empty where it has none
    params: Mapping[str, Value]
    status: Status
    latency_us: float  # NaN where it failed
    is_bound: bool = False


def _read_cache(path: Path, data: Mapping[str, Any], now: _Naming) -> Recording:
    declared = data.get("tune_params")
    declared = declared if isinstance(declared, dict) else {}
    names = data.get("tune_params_keys", list(declared))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path}: `tune_params_keys` is not a list of names")
    entries = []
    for key, row in data["cache"].items():
        place = f"{path}: cache[{key!r}]"
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected an object, got {type(row).__name__}")
        params = now(_params({name: row.get(name) for name in names}, place))
        if "time" not in row:
            raise InputError(f"{place}: no `time`; only recordings of time can be searched")
        latency_us = _latency_us(row["time"], MS)
        status = Status.CORRECT
        if math.isnan(latency_us):
            status = _FAILURES.get(str(row["time"]), Status.RUNTIME)
        entries.append(_Entry(key, params, status, latency_us))
    device, kernel = (str(data.get(name) or "") for name in ("device_name", "kernel_name"))
    return _recording(path, _stem(path), kernel, device, entries, declared)


def _read_t4(path: Path, data: Mapping[str, Any], now: _Naming) -> Recording:
    entries = []
    for number, row in enumerate(data["results"]):
        place = f"{path}: results[{number}]"
        if not isinstance(row, dict) or not isinstance(row.get("configuration"), dict):
            raise InputError(f"{place}: expected an object with `configuration`")
        params = now(_params(row["configuration"], place))
        try:
            status = Status(row.get("invalidity", "correct"))
        except ValueError:
            known = ", ".join(Status)
            raise InputError(
                f"{place}: unknown invalidity {row['invalidity']!r}\n  known: {known}"
            ) from None
        latency_us = math.nan
        if status is Status.CORRECT:
            latency_us = _objective_us(row, place)
            status = Status.RUNTIME if math.isnan(latency_us) else status
        is_bound = status is Status.CORRECT and _is_bound(row)
        entries.append(_Entry("", params, status, latency_us, is_bound))
    metadata = data.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    device, kernel, name = (
        str(metadata.get(name) or "") for name in ("device_name", "kernel_name", "run")
    )
    return _recording(path, name or _stem(path), kernel, device, entries, {})


def _read_run(path: Path, now: _Naming) -> Recording:
    run = open_run(path)
    trials = run.trials()
    environment = run.environment()
    entries = []
    for trial in trials:
        latency_us = trial.outcome.latency_us
        measured = trial.outcome.measurement
        entries.append(
            _Entry(
                "",
                now(trial.params),
                trial.outcome.status,
                math.nan if latency_us is None else latency_us,
                measured is not None and measured.is_censored,
            )
        )
    return _recording(path, path.name, environment.op, environment.device_name, entries, {})


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".json")


def _params(row: Mapping[str, Any], place: str) -> dict[str, Value]:
    for name, value in row.items():
        if not _is_value(value):
            raise InputError(f"{place}: {name} is {value!r}, expected a number, boolean or word")
    return dict(row)


def _latency_us(value: Any, unit_us: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value * unit_us if is_number and 0 < value < MAX_MS else math.nan


def _objective_us(row: Mapping[str, Any], place: str) -> float:
    objectives = row.get("objectives", ["time"])
    measured = row.get("measurements")
    for entry in measured if isinstance(measured, list) else []:
        if isinstance(entry, dict) and entry.get("name") in objectives:
            unit_us = _UNITS_US.get(entry.get("unit") or "ms")
            if unit_us is not None:
                return _latency_us(entry.get("value"), unit_us)
    raise InputError(
        f"{place}: no measurement of {objectives} with a unit of time ({', '.join(_UNITS_US)})"
    )


def _is_bound(row: Mapping[str, Any]) -> bool:
    """Whether the file is ours and says that the time is a lower bound."""
    measured = row.get("measurements")
    entries = measured if isinstance(measured, list) else []
    return any(
        isinstance(entry, dict) and entry.get("name") == LOWER_BOUND and entry.get("value") == 1
        for entry in entries
    )


# ---- from entries to a space ----------------------------------------------------------------


def _recording(
    path: Path,
    name: str,
    kernel: str,
    device: str,
    entries: Sequence[_Entry],
    declared: Mapping[str, Any],
) -> Recording:
    """Sort the entries into a space; of equal configurations the first counts."""
    if not any(e.status is Status.CORRECT and not e.is_bound for e in entries):
        raise InputError(f"{path}: no configuration that ran, of {len(entries)} recorded")
    parameters, rows = _parameters(entries, declared)
    names = [parameter.name for parameter in parameters]
    _, first = np.unique(rows, axis=0, return_index=True)  # in order of declaration
    kept = [entries[index] for index in first]
    return Recording(
        name=name,
        kernel=kernel,
        device=device,
        space=SearchSpace.listed(parameters, rows[first]),
        keys=tuple(entry.key or _key(entry.params, names) for entry in kept),
        latency_us=np.array([entry.latency_us for entry in kept]),
        is_bound=np.array([entry.is_bound for entry in kept], dtype=bool),
        statuses=tuple(entry.status for entry in kept),
    )


def _key(params: Mapping[str, Value], names: Sequence[str]) -> str:
    return ",".join(str(params.get(name, "")) for name in names)


def _parameters(
    entries: Sequence[_Entry], declared: Mapping[str, Any]
) -> tuple[list[Parameter], NDArray[np.int64]]:
    """Return the parameters, and for each entry (rows) the indices of its values."""
    names: dict[str, None] = {}
    for entry in entries:
        names.update(dict.fromkeys(entry.params))
    parameters, columns = [], []
    for name in names:
        drawn = [entry.params.get(name) for entry in entries]
        seen = {value for value in drawn if value is not None}
        listed = declared.get(name)
        is_listed = isinstance(listed, list) and seen <= set(filter(_is_value, listed))
        values = tuple(dict.fromkeys(listed)) if is_listed else tuple(sorted(seen, key=_rank))  # type: ignore[arg-type]
        value_index: dict[Value | None, int] = {value: i for i, value in enumerate(values)}
        value_index[None] = len(values)
        columns.append(np.array([value_index[value] for value in drawn]))
        parameters.append(Parameter(name, values))
    rows = np.stack(columns, axis=1)
    for index, parameter in enumerate(parameters):
        is_there = rows[:, index] < len(parameter.values)
        if not is_there.all():
            when = Expression.parse(_condition(parameters, rows, index, is_there))
            parameters[index] = Parameter(parameter.name, parameter.values, when)
    return parameters, rows


def _is_value(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, bool | int | str)


def _rank(value: Value) -> tuple[bool, Value]:
    return isinstance(value, str), value  # numbers first, then words


def _condition(
    parameters: Sequence[Parameter],
    rows: NDArray[np.int64],
    index: int,
    is_there: NDArray[np.bool_],
) -> str:
    """Guess for what the parameter `index` exists: certain values of one that always does.

    `True` where no single parameter tells; then nothing more is said than that it may be absent.
    """
    for other, parameter in enumerate(parameters):
        value_indices = rows[:, other]
        if other == index or (value_indices == len(parameter.values)).any():
            continue
        with_it, without = (
            set(value_indices[is_there].tolist()),
            set(value_indices[~is_there].tolist()),
        )
        if not with_it & without:
            text = f"{parameter.name} in {[parameter.values[i] for i in sorted(with_it)]}"
            if len(text) <= 1000 and parameter.name.isidentifier():
                return text
    return "True"
