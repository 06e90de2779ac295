"""The YAML file as a RunConfig: every error at once, with line, path and a suggestion.

    load_config(path, overrides)   read, check all of it, or raise one ConfigError
    check_names(config, ...)       the names in it, once template family and device are known
    config.problem_at(path, text)  a problem found later, at its line

A problem reads `FILE:LINE: PATH: message`, then indented `known: ...` and `hint: ...`.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)

from tuner.errors import ConfigError, ExpressionError, did_you_mean
from tuner.problem.accuracy import Accuracy
from tuner.space.constraints import Constraint, Parameter
from tuner.space.expression import WORD, Expression, unknown_name
from tuner.trial import Value

__all__ = [
    "DEVICE_FACTS",
    "SAMPLER_NAMES",
    "MeasureSection",
    "ProblemSection",
    "RunConfig",
    "SearchSection",
    "StopSection",
    "check_names",
    "load_config",
    "parse_accuracy",
    "parse_config",
    "parse_device",
    "parse_duration",
    "parse_fraction",
]

MAX_BYTES = 2**20  # of a config; the longest honest one is a few kilobytes
MAX_NODES = 50_000  # of YAML; PyYAML reads about 50 000 in a second
MAX_NUMBER_LENGTH = 100  # characters; YAML's patterns take quadratic time on a long one
MAX_DEPTH = 20  # levels of YAML; the schema has 5
MAX_VALUES = 10_000  # of one parameter

SAMPLER_NAMES = (
    "surrogate",
    "tpe",
    "random",
    "grid",
)  # those of samplers.py, which imports Optuna
OVERRIDES = {  # what the command line may set, and where it stands in the file
    "device": "device",
    "accuracy": "accuracy",
    "sampler": "search.sampler",
    "trials": "search.trials",
    "timeout": "search.timeout",
    "seed": "search.seed",
}
DEVICE_FACTS = (  # of any kind of device; each device has those of its kind
    "device.kind",
    "device.memory_bytes",
    "device.l2_bytes",
    "device.capability",
    "device.num_sms",
    "device.smem_bytes_max",
    "device.smem_bytes_sm",
    "device.regs_per_sm",
    "device.max_threads_per_sm",
    "device.max_threads_per_block",
    "device.warp_size",
    "device.has_triton",
    "device.num_cores",
    "device.simd_bits",
    "device.l3_bytes",
)
_WORDS_OF_OTHERS = """
    alignas alignof and_eq asm auto bitand bitor bool case catch char compl concept const
    consteval constexpr constinit const_cast decltype default delete do double dynamic_cast enum
    explicit export extern false float friend goto inline int int64_t long mutable namespace new
    noexcept not_eq nullptr operator or_eq private protected public register reinterpret_cast
    requires restrict short signed sizeof static static_assert static_cast struct switch
    this thread_local throw true typedef typeid typename union unsigned using virtual
    void volatile wchar_t xor xor_eq main std blockIdx blockDim gridDim threadIdx warpSize
    block call extends filter include is loop macro none self set
    device params op sizes stream num_threads min max abs cdiv log2
"""  # of C++ and CUDA, of Jinja, and of our own expressions and calls
_RESERVED = frozenset([*keyword.kwlist, *_WORDS_OF_OTHERS.split()])


# ---- values written as text -----------------------------------------------------------------

_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:h|ms|us|m|s))+")


def parse_duration(value: object) -> float:
    """Read `1h30m`, `10m`, `90s`, `20ms` or a number of seconds; return seconds.

    Raises:
        ValueError: it is none of these, or not positive.
    """
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) < 1e12 else math.nan
    elif isinstance(value, str) and _DURATION.fullmatch(text := value.replace(" ", "")):
        parts = re.findall(r"(\d+(?:\.\d+)?)(h|ms|us|m|s)", text)
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    elif isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value.strip()):
        seconds = float(value)
    if 0.0 < seconds < math.inf:
        return seconds
    raise ValueError(f"expected a time such as 10m, 90s, 1h or 20ms, got {_shown(value)}")


def parse_fraction(value: object) -> float:
    """Read `0.5%`, or the same as the number 0.005; return 0.005.

    Raises:
        ValueError: it is neither, or not above 0 and at most one half.
    """
    fraction = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        fraction = float(value) if abs(value) < 1e12 else math.nan
    elif isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value)):
        fraction = float(match[1]) / 100
    if 0.0 < fraction <= 0.5:
        return fraction
    expected = "expected a share above 0% and at most 50%, such as 0.5% (or 0.005)"
    raise ValueError(f"{expected}, got {_shown(value)}")


def parse_accuracy(value: object) -> Accuracy:
    """Read `float32`, `tf32`, `1e-4,1e-4` (rtol, atol) or a mapping with rtol and atol.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, Accuracy):
        return value
    if not isinstance(value, str | Mapping):
        raise ValueError(f"expected float32, tf32 or rtol and atol, got {_shown(value)}")
    try:
        return Accuracy.parse(value)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("accuracy: ")) from None


def parse_device(value: object) -> str:
    """Read `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda|cuda:\d{1,3}", value):
        return value
    raise ValueError(f"expected auto, cpu, cuda or cuda:N, got {_shown(value)}")


def _sampler(value: object) -> str:
    if value in SAMPLER_NAMES:
        return str(value)
    lines = [f"unknown sampler {_shown(value)}", f"  known: {', '.join(SAMPLER_NAMES)}"]
    hint = did_you_mean(str(value), SAMPLER_NAMES)
    raise ValueError("\n".join([*lines, f"  {hint}"] if hint else lines))


def _in_flight(value: object) -> int | None:
    if value is None or value == "auto":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1024:
        return value
    raise ValueError(f"expected auto or a whole number from 1 to 1024, got {_shown(value)}")


def _expression(value: object) -> Expression:
    if isinstance(value, Expression):
        return value
    if not isinstance(value, str):
        raise ValueError(f"expected an expression as text, got {_shown(value)}")
    try:
        return Expression.parse(value)
    except ExpressionError as error:
        raise ValueError(str(error)) from None


def _reason(value: object) -> str:
    if isinstance(value, str) and (text := " ".join(value.split())) and text.isprintable():
        return text
    raise ValueError(f"expected the reason as text, got {_shown(value)}")


def _op(value: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]+", value):
        return value
    raise ValueError(f"expected the name of a template family, got {_shown(value)}")


def _short(limit_s: float) -> Callable[[float], float]:
    def check(seconds: float) -> float:
        if seconds > limit_s:
            raise ValueError(f"expected at most {limit_s:g} s (20ms is 20 ms), got {seconds:g} s")
        return seconds

    return check


def _shown(value: object) -> str:
    """Show a value as the file has it, shortened."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case bool():
            return str(value).lower()
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- the schema -----------------------------------------------------------------------------


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class ProblemSection(_Section):
    """What to compute; paths are absolute or relative to the working folder, ready to open."""

    op: Annotated[StrictStr, AfterValidator(_op)]
    reference: Path | None = None
    sizes: dict[StrictStr, Annotated[StrictInt, Field(gt=0, lt=2**63)]] = {}
    templates: tuple[Path, ...] = ()


class StopSection(_Section):
    """Stop once the best is probably within a share of the optimum (0.02 for 2 %)."""

    within: Annotated[float, BeforeValidator(parse_fraction)] = 0.02
    confidence: Annotated[StrictFloat, Field(ge=0.5, lt=1.0)] = 0.9


class SearchSection(_Section):
    """How to search, and for how long; `in_flight` None means that the machine decides.

    `warm_start` are runs and recordings to start from, paths as for the problem's.
    """

    sampler: Annotated[str, BeforeValidator(_sampler)] = "surrogate"
    trials: Annotated[StrictInt, Field(ge=1, le=10_000_000)] = 200
    timeout_s: Annotated[float, BeforeValidator(parse_duration)] = Field(
        default=600.0, alias="timeout"
    )
    seed: Annotated[StrictInt, Field(ge=0, lt=2**31)] = 0
    in_flight: Annotated[int | None, BeforeValidator(_in_flight)] = None
    warm_start: tuple[Path, ...] = ()
    stop: StopSection | None = None


CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class MeasureSection(_Section):
    """How long and how exactly to measure; `max_noise` is a share, 0.005 for 0.5 %.

    With `torch_compile`, a mode of PyTorch's compiler, the reference compiled by it is raced with
    the exported file.
    """

    screen_s: Annotated[float, BeforeValidator(parse_duration), AfterValidator(_short(10))] = (
        Field(default=0.02, alias="screen")
    )
    finalists_s: Annotated[float, BeforeValidator(parse_duration), AfterValidator(_short(100))] = (
        Field(default=0.2, alias="finalists")
    )
    max_noise: Annotated[float, BeforeValidator(parse_fraction)] = 0.005
    num_finalists: Annotated[StrictInt, Field(ge=1, le=100)] = 3
    num_processes: Annotated[StrictInt, Field(ge=2, le=100)] = 5
    torch_compile: CompileMode | None = None


class _ConstraintEntry(_Section):
    expr: Annotated[Expression, BeforeValidator(_expression)]
    why: Annotated[str, BeforeValidator(_reason)]


class _File(_Section):
    problem: ProblemSection
    device: Annotated[str, BeforeValidator(parse_device)] = "auto"
    accuracy: Annotated[Accuracy, BeforeValidator(parse_accuracy)] = Accuracy()
    space: dict[str, Any] = {}
    constraints: tuple[_ConstraintEntry, ...] = ()
    search: SearchSection = SearchSection()
    measure: MeasureSection = MeasureSection()


class RunConfig(_Section):
    """A config that is in order.

    Attributes:
        path: the file, as the user named it.
        text: the file as read.
        space: the declared parameters; `template` is among them where the file lists it.
        constraints: with `path:line` as their origin.
    """

    path: Path
    text: str = Field(repr=False)
    base: Path = Field(repr=False)
    problem: ProblemSection
    device: str
    accuracy: Accuracy
    space: tuple[Parameter, ...]
    constraints: tuple[Constraint, ...]
    search: SearchSection
    measure: MeasureSection
    places: dict[str, int] = Field(repr=False)

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
        return _located(self.path, self.places, place, "\n".join(lines))

    def overridden(self, overrides: Mapping[str, Value]) -> RunConfig:
        """Return the config with other values; see `load_config`."""
        return parse_config(self.text, self.path, overrides, base=self.base)


# ---- YAML to plain data with lines ----------------------------------------------------------


@dataclass(slots=True)
class _Document:
    """Plain data, the line of every part of it, and the problems found while reading."""

    path: Path
    data: Any = None
    places: dict[str, int] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)  # places with a problem of the YAML itself

    def report(self, place: str, message: str) -> None:
        """Add a problem, unless the YAML at that place was one already."""
        if place not in self.unread:
            text = _located(self.path, self.places, place, message)
            self.problems.append((_line(self.places, place), text))

    def report_yaml(self, line: int, place: str, message: str) -> None:
        """Add a problem of the YAML itself."""
        where = f"{place}: " if place else ""
        self.problems.append((line, f"{self.path}:{line}: {where}{message}"))
        self.unread.add(place)


class _Stop(Exception):
    """The YAML cannot be read further."""


def _line(places: Mapping[str, int], place: str) -> int:
    while place and place not in places:
        place = place[: max(place.rfind("."), place.rfind("["), 0)]
    return places.get(place, 1)


def _located(path: Path, places: Mapping[str, int], place: str, message: str) -> str:
    line = _line(places, place)
    option = next((f"--{n}" for n, p in OVERRIDES.items() if p == place and line == 0), None)
    if option is not None:
        return f"{option}: {message}"
    return f"{path}:{line}: " + (f"{place}: {message}" if place else message)


class _Reader:
    """Composes a document from PyYAML's events, so that depth, size and aliases are bounded."""

    def __init__(self, document: _Document, text: str) -> None:
        self.document = document
        self.loader: Any = yaml.SafeLoader(text)  # its methods have no types
        self.num_nodes = 0

    def read(self) -> None:
        """Read the one document of the stream.

        Raises:
            yaml.YAMLError: the text is not YAML.
            _Stop: it is refused; the document holds the problem.
        """
        loader = self.loader
        loader.get_event()  # the stream's start
        if loader.check_event(yaml.StreamEndEvent):
            raise self._stop(1, "the file is empty\n  expected: problem, space, ...")
        loader.get_event()
        self.document.data = self._node("", 0)
        loader.get_event()  # the document's end
        if not loader.check_event(yaml.StreamEndEvent):
            line = loader.peek_event().start_mark.line + 1
            raise self._stop(line, "a second document; one file holds one config")

    def _stop(self, line: int, message: str) -> _Stop:
        self.document.report_yaml(line, "", message)
        return _Stop()

    def _node(self, place: str, depth: int) -> Any:
        event = self.loader.get_event()
        line = event.start_mark.line + 1
        self.document.places.setdefault(place, line)
        self.num_nodes += 1
        if isinstance(event, yaml.AliasEvent):
            raise self._stop(line, f"aliases (*{event.anchor}) are refused; write the values out")
        if depth > MAX_DEPTH:
            raise self._stop(line, f"nested deeper than {MAX_DEPTH} levels")
        if self.num_nodes > MAX_NODES:
            raise self._stop(line, f"more than {MAX_NODES} values")
        if event.tag not in (None, "tag:yaml.org,2002:str"):
            message = f"the tag {event.tag!r} is refused; write plain values"
            self.document.report_yaml(line, place, message)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(place, depth)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(place, depth)
        return self._scalar(event, place, line)

    def _sequence(self, place: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self.loader.check_event(yaml.SequenceEndEvent):
            items.append(self._node(f"{place}[{len(items)}]", depth + 1))
        self.loader.get_event()
        return items

    def _mapping(self, place: str, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while not self.loader.check_event(yaml.MappingEndEvent):
            event = self.loader.get_event()
            line = event.start_mark.line + 1
            if not isinstance(event, yaml.ScalarEvent):
                raise self._stop(line, f"{place + ': ' if place else ''}a key that is no word")
            key = event.value
            if not key.isprintable() or not 0 < len(key) <= 100:
                raise self._stop(line, f"{place + ': ' if place else ''}{_shown(key)} as a key")
            inner = f"{place}.{key}" if place else key
            if key in pairs:
                first = self.document.places[inner]
                message = f"written twice, first in line {first}"
                self.document.report_yaml(line, inner, message)
                self._node(inner, depth + 1)
                continue
            self.document.places[inner] = line
            pairs[key] = self._node(inner, depth + 1)
        self.loader.get_event()
        return pairs

    def _scalar(self, event: yaml.ScalarEvent, place: str, line: int) -> Any:
        text = event.value
        if event.style is not None or event.tag is not None or len(text) > MAX_NUMBER_LENGTH:
            return text  # quoted, or no number
        if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", text):
            return float(text)  # 1e-4 is a number, which YAML 1.1 takes for a word
        if re.fullmatch(r"[-+]?(0|[1-9][0-9]{0,99})", text):
            return int(text)
        tag = self.loader.resolve(yaml.ScalarNode, text, (True, False))
        kind = tag.rpartition(":")[2]
        if kind == "null":
            return None
        if kind == "bool":
            if text.lower() not in ("true", "false"):
                self._trap(line, place, text, "a boolean", "true or false")
                return text
            return text.lower() == "true"
        if kind == "float" and re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+)", text):
            return float(text)
        if kind in ("int", "float"):  # 010, 0x1f, 1:30, 1_000, .inf
            self._trap(line, place, text, "a number in a notation of its own", "a decimal number")
        return text

    def _trap(self, line: int, place: str, text: str, what: str, instead: str) -> None:
        shown = _shown(text)
        message = f"YAML takes {shown.strip(chr(39))} for {what}"
        hint = f"write {instead}, or {shown} in quotes for the word"
        self.document.report_yaml(line, place, f"{message}\n  hint: {hint}")


def _read_document(path: Path, text: str) -> _Document:
    document = _Document(path)
    try:
        _Reader(document, text).read()
    except _Stop:
        pass
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        context = f" {error.context}" if error.context else ""
        line = mark.line + 1 if mark else 1
        document.report_yaml(line, "", f"not YAML: {error.problem}{context}")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        character = error.character
        shown = chr(character) if isinstance(character, int) else character
        document.report_yaml(line, "", f"not YAML: the character {shown!a}")
    except (ValueError, OverflowError):  # PyYAML's chr() of an escape beyond Unicode
        document.report_yaml(1, "", "not YAML: an escape that is no character")
    return document


# ---- plain data to a RunConfig --------------------------------------------------------------


def load_config(
    path: Path | str, overrides: Mapping[str, Value] | None = None, *, base: Path | None = None
) -> RunConfig:
    """Read a config.

    Args:
        path: the YAML file.
        overrides: other values for device, accuracy, sampler, trials, timeout or seed, as text
            of the command line or as numbers; None and absent mean the file's.
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


def parse_config(
    text: str,
    path: Path,
    overrides: Mapping[str, Value] | None = None,
    *,
    base: Path | None = None,
) -> RunConfig:
    """Read a config from its text; `path` names it in messages. Otherwise as `load_config`."""
    base = path.parent if base is None else base
    document = _read_document(path, text)
    data = document.data
    if not isinstance(data, dict):
        if not document.problems:
            known = ", ".join(_keys(_File))
            got = "the file is empty" if data is None else f"expected keys, got {_shown(data)}"
            document.report("", f"{got}\n  known: {known}")
        raise _config_error(document)
    _override(document, overrides or {})
    file: _File | None = None
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        for item in error.errors():
            _report_item(document, item)
    declared = data.get("space")
    space = _parameters(document, declared) if isinstance(declared, dict) else ()
    problem = _resolved(document, file.problem, base) if file is not None else None
    search = _warm_started(document, file.search, base) if file is not None else None
    if document.problems or file is None or problem is None or search is None:
        raise _config_error(document)
    constraints = [
        Constraint(entry.expr, entry.why, f"{path}:{_line(document.places, f'constraints[{i}]')}")
        for i, entry in enumerate(file.constraints)
    ]
    return RunConfig(
        path=path,
        text=text,
        base=base,
        problem=problem,
        device=file.device,
        accuracy=file.accuracy,
        space=space,
        constraints=tuple(constraints),
        search=search,
        measure=file.measure,
        places=document.places,
    )


def _config_error(document: _Document) -> ConfigError:
    in_order = sorted(document.problems, key=lambda problem: problem[0])
    return ConfigError(list(dict.fromkeys(text for _, text in in_order)))


def _override(document: _Document, overrides: Mapping[str, Value | None]) -> None:
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
        if isinstance(holder, dict):
            holder[key] = value
            document.places[OVERRIDES[name]] = 0  # stands for the command line


def _resolved(document: _Document, problem: ProblemSection, base: Path) -> ProblemSection:
    """Make the paths relative to where we are, and look whether they exist."""
    reference = base / problem.reference if problem.reference is not None else None
    if reference is not None and not _is_there(reference, Path.is_file):
        document.report("problem.reference", f"no such file: {str(reference)!r}")
    folders = tuple(base / folder for folder in problem.templates)
    for i, folder in enumerate(folders):
        if not _is_there(folder, Path.is_dir):
            document.report(f"problem.templates[{i}]", f"no such folder: {str(folder)!r}")
    return problem.model_copy(update={"reference": reference, "templates": folders})


def _warm_started(document: _Document, search: SearchSection, base: Path) -> SearchSection:
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


# ---- what pydantic says, in our words -------------------------------------------------------

_SECTIONS: dict[str, type[_Section]] = {
    "": _File,
    "problem": ProblemSection,
    "constraints[]": _ConstraintEntry,
    "search": SearchSection,
    "search.stop": StopSection,
    "measure": MeasureSection,
}
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
    "path_type": "a path",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
}


def _keys(section: type[_Section]) -> list[str]:
    return [info.alias or name for name, info in section.model_fields.items()]


def _report_item(document: _Document, item: Any) -> None:
    parts = [part for part in item["loc"] if part != "[key]"]
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts).lstrip(".")
    kind, context = item["type"], item.get("ctx", {})
    if kind == "missing":
        document.report(place, "missing")
    elif kind == "extra_forbidden":
        names = "".join("[]" if isinstance(part, int) else f".{part}" for part in parts[:-1])
        parent = names.removeprefix(".")
        known = _keys(_SECTIONS[parent])
        lines = [f"unknown key {str(parts[-1])!r}", f"  known: {', '.join(known)}"]
        hint = did_you_mean(str(parts[-1]), known)
        document.report(place, "\n".join([*lines, f"  {hint}"] if hint else lines))
    elif kind == "value_error":
        document.report(place, str(context["error"]))
    elif kind in _EXPECTED:
        expected = _EXPECTED[kind].format(**context)
        document.report(place, f"expected {expected}, got {_shown(item['input'])}")
    else:
        document.report(place, f"{item['msg']}, got {_shown(item['input'])}")


# ---- the space ------------------------------------------------------------------------------

_FORMS = ("values", "range", "pow2")


def _parameters(document: _Document, declared: Mapping[str, Any]) -> tuple[Parameter, ...]:
    parameters = []
    for name, form in declared.items():
        place = f"space.{name}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            document.report(place, "a parameter's name is made of letters, digits and _")
        elif name in _RESERVED or name.startswith("__"):
            document.report(place, f"{name!r} means something else in a template; rename it")
        if isinstance(form, list):
            values, when = _values(document, place, form), None
        elif isinstance(form, dict):
            values = _spread(document, place, form)
            when = _when(document, f"{place}.when", form["when"]) if "when" in form else None
        else:
            expected = "a list of values, or a mapping with values, range or pow2"
            document.report(place, f"expected {expected}, got {_shown(form)}")
            continue
        if name == "template":
            _check_template(document, place, values, when)
        parameters.append(Parameter(name, values, when))
    return tuple(parameters)


def _check_template(
    document: _Document, place: str, values: Sequence[Value], when: Expression | None
) -> None:
    if when is not None:
        document.report(f"{place}.when", "every configuration has a template; it takes no when")
    for value in values:
        if not isinstance(value, str):
            document.report(place, f"expected names of templates, got {_shown(value)}")


def _spread(document: _Document, place: str, form: Mapping[str, Any]) -> tuple[Value, ...]:
    """Return the values that a mapping describes."""
    known = [*_FORMS, "when", *(["step"] if "range" in form else [])]
    for key in form:
        if key not in known:
            hint = did_you_mean(key, known)
            lines = [f"unknown key {key!r}", f"  known: {', '.join(known)}"]
            document.report(f"{place}.{key}", "\n".join([*lines, f"  {hint}"] if hint else lines))
    forms = [key for key in _FORMS if key in form]
    if len(forms) != 1:
        got = " and ".join(forms) or "none"
        document.report(place, f"expected one of values, range and pow2, got {got}")
        return ()
    inner = f"{place}.{forms[0]}"
    if forms[0] == "values":
        if isinstance(form["values"], list):
            return _values(document, inner, form["values"])
        document.report(inner, f"expected a list, got {_shown(form['values'])}")
        return ()
    bounds = form[forms[0]]
    if not isinstance(bounds, list) or len(bounds) != 2 or not all(map(_is_whole, bounds)):
        document.report(inner, f"expected two whole numbers [first, last], got {_listed(bounds)}")
        return ()
    if bounds[0] > bounds[1]:
        document.report(inner, f"the first, {bounds[0]}, is above the last, {bounds[1]}")
        return ()
    if forms[0] == "pow2":
        return _powers(document, inner, bounds)
    return _range(document, place, bounds, form.get("step", 1))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _listed(value: object) -> str:
    if isinstance(value, list) and len(value) <= 4:
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    return _shown(value)


def _range(
    document: _Document, place: str, bounds: Sequence[int], step: object
) -> tuple[Value, ...]:
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        message = f"expected a whole number of at least 1, got {_shown(step)}"
        document.report(f"{place}.step", message)
        return ()
    values = range(bounds[0], bounds[1] + 1, step)
    if (bounds[1] - bounds[0]) // step >= MAX_VALUES:
        document.report(f"{place}.range", f"more than {MAX_VALUES} values; give a larger step")
        return ()
    return tuple(values)


def _powers(document: _Document, place: str, bounds: Sequence[int]) -> tuple[Value, ...]:
    for bound in bounds:
        if bound < 1 or bound & (bound - 1):
            document.report(place, f"expected powers of two, got {bound}")
            return ()
    return tuple(2**e for e in range(bounds[0].bit_length() - 1, bounds[1].bit_length()))


def _values(document: _Document, place: str, values: Sequence[Any]) -> tuple[Value, ...]:
    if not values:
        document.report(place, "a parameter needs at least one value")
    if len(values) > MAX_VALUES:
        document.report(place, f"more than {MAX_VALUES} values")
        return ()
    good: dict[Value, None] = {}
    for i, value in enumerate(values):
        if not _is_value(value):
            document.report(f"{place}[{i}]", f"{_VALUE_FORM}, got {_shown(value)}")
        elif value in good:
            document.report(f"{place}[{i}]", f"the value {_shown(value)} is there twice")
        else:
            good[value] = None
    return tuple(good)


_VALUE_FORM = "expected a number, true, false, or a word of letters, digits and _ . -"


def _is_value(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= 100 and WORD.fullmatch(value) is not None
    return isinstance(value, bool | int | float) and -(2**63) < value < 2**63


def _when(document: _Document, place: str, when: object) -> Expression | None:
    """Read an expression, or a mapping from parameters to the values they must have."""
    text = when
    if isinstance(when, dict):
        terms = []
        for name, wanted in when.items():
            members = wanted if isinstance(wanted, list) else [wanted]
            if not members or not all(_is_value(member) for member in members):
                document.report(f"{place}.{name}", f"{_VALUE_FORM}, or a list of them")
                return None
            test = f"in {members!r}" if isinstance(wanted, list) else f"== {wanted!r}"
            terms.append(f"{name} {test}")
        text = " and ".join(terms)
    if not isinstance(text, str):
        expected = "a mapping from parameters to values, or an expression"
        document.report(place, f"expected {expected}, got {_shown(when)}")
        return None
    try:
        return Expression.parse(text)
    except ExpressionError as error:
        document.report(place, str(error))
        return None


# ---- names, once the family and the device are known ----------------------------------------


def check_names(
    config: RunConfig,
    *,
    sizes: Sequence[str],
    facts: Sequence[str],
    parameters: Sequence[str],
) -> None:
    """Check every name of the config.

    Args:
        config: as read.
        sizes: names of the problem's sizes.
        facts: names of the device's facts; those of another kind of device are known as well.
        parameters: names that the templates in use have as parameters.

    Raises:
        ConfigError: with every unknown size, parameter, and name in a `when` or constraint.
    """
    problems: list[tuple[int, str]] = []

    def report(place: str, message: str) -> None:
        problems.append((_line(config.places, place), config.problem_at(place, message)))

    for name in config.problem.sizes:
        if name not in sizes:
            report(f"problem.sizes.{name}", unknown_name(name, sizes))
    declared = [parameter.name for parameter in config.space]
    for name in declared:
        if name not in parameters and name != "template":
            message = unknown_name(name, parameters)
            report(f"space.{name}", message.replace("unknown name", "no template uses", 1))
    known = [*declared, *(["template"] if "template" not in declared else []), *sizes, *facts]
    rules = [(f"space.{p.name}.when", p.when) for p in config.space if p.when is not None]
    rules += [(f"constraints[{i}].expr", c.expression) for i, c in enumerate(config.constraints)]
    for place, rule in rules:
        for name in sorted(rule.names - {*known, *DEVICE_FACTS}):
            if name.startswith("device."):
                report(place, unknown_name(name, DEVICE_FACTS))
            elif name in parameters:
                hint = f"give {name} values under space"
                report(place, f"{name!r} is not among the parameters of space\n  hint: {hint}")
            else:
                report(place, unknown_name(name, known))
    if problems:
        in_order = sorted(problems, key=lambda problem: problem[0])
        raise ConfigError([text for _, text in in_order])
