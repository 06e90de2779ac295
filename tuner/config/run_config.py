"""The config as a whole: read the file, apply the command line, check all of it.

    load_config(path, overrides)    read, check all of it, or raise one ConfigError
    config.problem_at(place, text)  a problem found later, at its line

Nothing of the machine is looked at, except whether the files that a config names are there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from tuner.config.document import (
    Document,
    Places,
    read_document,
    require_keys,
    validated,
)
from tuner.config.quantities import by_name, parse_rows, problem_of_rows
from tuner.config.schema import (
    Effort,
    File,
    MeasureSection,
    ProblemSection,
    SearchSection,
    Section,
)
from tuner.config.space_section import read_parameters
from tuner.errors import ConfigError, did_you_mean
from tuner.problem.accuracy import Accuracy
from tuner.problem.timed_data import GIVEN
from tuner.run import Run
from tuner.space.constraints import Constraint, Parameter
from tuner.storage import sha256_of
from tuner.trial import Value

__all__ = ["Listed", "RunConfig", "config_of", "load_config", "parse_config"]

MAX_BYTES = 2**20  # of a config; the longest honest one is a few kilobytes
OVERRIDES = {  # what the command line may set, and where it stands in the file
    "device": "device",
    "mode": "problem.mode",
    "batch": "problem.sizes.batch",
    "accuracy": "accuracy",
    "workloads": "workloads",
    "time": "time",
    "effort": "effort",
    "sampler": "search.sampler",
    "trials": "search.trials",
    "timeout": "search.timeout",
    "seed": "search.seed",
    "stop_slow": "measure.stop_slow",
}


@dataclass(frozen=True, slots=True)
class Listed:
    """A size with several values, each of which is tuned, the smallest first."""

    name: str
    values: tuple[int, ...]

    def words(self, size: int) -> str:
        """One of the values in words, as `batch = 64`."""
        return f"{self.name} = {size}"


class RunConfig(Section):
    """A config that is in order.

    Attributes:
        path: the file, as the user named it.
        text: the file as read.
        space: the declared parameters; `template` is among them where the file lists it.
        others: the data that the file is for beside the given ones, by name, with the path of a
            file of tensors or ""; its speed-up is the least over all of them.
        tensors_sha256: the hash of each of these files as it was when this was read.
        constraints: with `path:line` as their origin.
        listed: the size of which several values are tuned, None where each has one. Of these
            `problem` has the largest, unless another one was named.
        base: the folder that paths in the file are relative to.
        places: where each part of the file stands.
    """

    path: Path
    text: str = Field(repr=False)
    base: Path = Field(repr=False)
    problem: ProblemSection
    listed: Listed | None = None
    device: str
    accuracy: Accuracy
    others: Mapping[str, str]
    tensors_sha256: Mapping[str, str]
    space: tuple[Parameter, ...]
    constraints: tuple[Constraint, ...]
    time_s: float | None
    effort: Effort
    search: SearchSection
    measure: MeasureSection
    places: Places = Field(repr=False)

    def at(self, size: int) -> RunConfig:
        """Return the config for one value of the size that has several."""
        assert self.listed is not None
        sizes = {**self.problem.sizes, self.listed.name: size}
        problem = self.problem.model_copy(update={"sizes": sizes})
        return self.model_copy(update={"problem": problem})

    @property
    def workloads(self) -> tuple[str, ...]:
        """The names of all data that the file is for, the given ones first."""
        return (GIVEN, *self.others)

    def problem_at(
        self, place: str, message: str, *, known: Sequence[str] = (), hint: str = ""
    ) -> str:
        """Format a problem with what stands at `place`, for a ConfigError.

        Args:
            place: a path such as `space.block_m` or `constraints[2].expr`; the line is that of
                the nearest part of it that the file has.
            message: what is wrong.
            known: the names that would be right.
            hint: the next step, without `hint: ` before it.
        """
        lines = [message]
        lines += [f"  known: {', '.join(known)}"] if known else []
        lines += [f"  hint: {hint.removeprefix('hint: ')}"] if hint else []
        return self.places.located(place, "\n".join(lines))


def load_config(
    path: Path | str, overrides: Mapping[str, Value] | None = None, *, base: Path | None = None
) -> RunConfig:
    """Read a config.

    Args:
        path: the YAML file.
        overrides: other values for the keys of `OVERRIDES`, such as device, time or trials,
            as text of the command line or as numbers; None and absent mean the file's. `size` is
            the one to take of a size that has several.
        base: the folder that paths in the file are relative to; the file's own by default.

    Raises:
        ConfigError: with every problem there is.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file{_similar(path)}"]) from None
    except IsADirectoryError:
        raise ConfigError([f"{path}: a folder\n  expected: a YAML file in it"]) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError([f"{path}: cannot be read: {reason}"]) from None
    if len(content) > MAX_BYTES:
        raise ConfigError([f"{path}: larger than 1 MiB, so no config"])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = f"byte {content[error.start]:#04x}"
        raise ConfigError([f"{path}:{line}: not UTF-8 text ({byte})"]) from None
    return parse_config(text, path, overrides, base=base)


def _similar(path: Path) -> str:
    try:
        names = [
            entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")
        ]
    except OSError:
        return ""
    hint = did_you_mean(path.name, names)
    return f"\n  {hint}" if hint else ""


def config_of(run: Run, overrides: Mapping[str, Value] | None = None) -> RunConfig:
    """Return a run's own config, with what its command line had changed."""
    environment = run.environment()
    changed = {**environment.overrides, **(overrides or {})}
    return load_config(run.config_path, changed, base=Path(environment.config_folder))


def parse_config(
    text: str,
    path: Path,
    overrides: Mapping[str, Value] | None = None,
    *,
    base: Path | None = None,
) -> RunConfig:
    """Read a config from its text; `path` names it in messages. Otherwise as `load_config`."""
    base = path.parent if base is None else base
    document = read_document(path, text)
    if not require_keys(document, File):
        raise document.error()
    given = dict(overrides or {})
    size = given.pop("size", None)
    _override(document, given)
    listed = _listed(document, size)
    file = validated(document, File)
    space = read_parameters(document)
    problem = _resolved(document, file.problem, base) if file is not None else None
    search = _warm_started(document, file.search, base) if file is not None else None
    others = _others(document, file.workloads, base, listed) if file is not None else {}
    if document.problems or file is None or problem is None or search is None:
        raise document.error()
    constraints = [
        Constraint(entry.expr, entry.why, f"{path}:{document.places.line(f'constraints[{i}]')}")
        for i, entry in enumerate(file.constraints)
    ]
    return RunConfig(
        path=path,
        text=text,
        base=base,
        problem=problem,
        listed=listed,
        device=file.device,
        accuracy=file.accuracy,
        others=others,
        tensors_sha256={name: sha256_of(Path(file)) for name, file in others.items() if file},
        space=space,
        constraints=tuple(constraints),
        time_s=file.time_s,
        effort=file.effort,
        search=search,
        measure=file.measure,
        places=document.places,
    )


def _override(document: Document, overrides: Mapping[str, Value | None]) -> None:
    for name, value in overrides.items():
        if value is None:
            continue
        if name not in OVERRIDES:
            raise ValueError(f"{name} is not one of {', '.join(OVERRIDES)}")
        if name in ("trials", "seed") and isinstance(value, str):
            value = int(value) if re.fullmatch(r"-?[0-9]{1,18}", value.strip()) else value
        *sections, key = OVERRIDES[name].split(".")
        holder = document.data
        for section in sections:
            holder = holder.setdefault(section, {})
        if not isinstance(holder, dict):
            continue
        document.places.set_by(f"--{name}", OVERRIDES[name])
        holder[key] = value
        if name == "batch":
            holder[key] = 1
            try:
                rows = parse_rows(value)
                holder[key] = rows if len(rows) > 1 else rows[0]
            except ValueError as error:
                document.report(OVERRIDES[name], str(error))


def _listed(document: Document, size: Value | None) -> Listed | None:
    """Take the size that has several values, of which one is left in its place."""
    problem = document.data.get("problem") if isinstance(document.data, dict) else None
    sizes = problem.get("sizes") if isinstance(problem, dict) else None
    if not isinstance(sizes, dict):
        return None
    lists = {name: values for name, values in sizes.items() if isinstance(values, list)}
    if len(lists) > 1:
        document.report(
            "problem.sizes",
            f"expected one size with several values, got {len(lists)}: {', '.join(lists)}\n"
            "  hint: several are tuned of the number of rows alone",
        )
    found = None
    for name, values in lists.items():
        place, words = f"problem.sizes.{name}", f"[{', '.join(map(str, values))}]"
        sizes[name] = 1  # where there is a problem, it is reported once
        if not values or not all(type(v) is int and 0 < v < 2**63 for v in values):
            document.report(place, f"expected whole numbers above 0, got {words}")
        elif wrong := problem_of_rows(values):
            document.report(place, wrong)
        elif size is not None and size not in values:
            document.report(place, f"expected one of {words}, got {size}")
        else:
            sizes[name] = max(values) if size is None else size
            found = Listed(name, tuple(sorted(values))) if len(values) > 1 else None
    return found


def _resolved(document: Document, problem: ProblemSection, base: Path) -> ProblemSection:
    """Make the paths relative to where we are, and look whether they exist."""
    reference = base / problem.reference if problem.reference is not None else None
    if reference is not None and not _is_there(reference, Path.is_file):
        document.report("problem.reference", f"no such file: {str(reference)!r}")
    folders = tuple(base / folder for folder in problem.templates)
    for i, folder in enumerate(folders):
        if not _is_there(folder, Path.is_dir):
            document.report(f"problem.templates[{i}]", f"no such folder: {str(folder)!r}")
    return problem.model_copy(update={"reference": reference, "templates": folders})


def _others(
    document: Document, workloads: Sequence[str], base: Path, listed: Listed | None
) -> dict[str, str]:
    """Return workloads beside the given one, with the path of a file of tensors or ""."""
    try:
        found = by_name(workloads, base)
    except ValueError as error:
        document.report("workloads", str(error))
        return {}
    del found[GIVEN]
    for path in map(Path, filter(None, found.values())):
        if not _is_there(path, Path.is_file):
            document.report("workloads", f"no such file of tensors: {str(path)!r}")
        if listed is not None:
            document.report(
                "workloads",
                f"{path.name}: its tensors have one number of rows, got {listed.name} = "
                f"{', '.join(map(str, listed.values))}\n  hint: tune for one of these values",
            )
    return found


def _warm_started(document: Document, search: SearchSection, base: Path) -> SearchSection:
    """Make the paths of earlier runs relative to where we are, and look whether they exist."""
    paths = tuple(base / path for path in search.warm_start)
    for i, path in enumerate(paths):
        if not _is_there(path, Path.exists):
            place = f"search.warm_start[{i}]"
            document.report(place, f"no such run folder or file: {str(path)!r}")
    return search.model_copy(update={"warm_start": paths})


def _is_there(path: Path, test: Callable[[Path], bool]) -> bool:
    try:
        return test(path)
    except (OSError, ValueError):  # too long, or with a null character
        return False
