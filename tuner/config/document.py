"""A YAML text as plain data that knows its lines, as records, and all that is wrong with it.

Configs, lists of problems, `op.yaml` and the heads of templates are read here. A problem reads
`FILE:LINE: PLACE: message`, then indented `known: ...` and `hint: ...`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from tuner.errors import ConfigError, did_you_mean

__all__ = [
    "Document", "Places", "keys_of", "read_document", "require_keys", "shown", "validated",
    "value_of", "with_known",
]  # fmt: skip

MAX_NODES = 200_000  # of YAML; read in a second or two
MAX_NUMBER_LENGTH = 100  # characters; YAML's patterns take quadratic time on a long one
MAX_DEPTH = 20  # levels of YAML; the schema has 5

_M = TypeVar("_M", bound=BaseModel)


@dataclass(slots=True)
class Places:
    """Where each part of a config stands.

    Attributes:
        path: the file, as the user named it.
        lines: by place, such as `space.block_m` or `constraints[2].expr`, counted from 1.
        options: by place, the option of the command line that gave the value instead.
        elsewhere: by place, the other text that it came from, and its place there.
    """

    path: Path
    lines: dict[str, int] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    elsewhere: dict[str, tuple[Places, str]] = field(default_factory=dict)

    def set_by(self, option: str, place: str) -> None:
        """Note that an option of the command line gave the value at `place`."""
        self.options[place] = option
        self.lines[place] = 0  # before the file's own problems

    def line(self, place: str) -> int:
        """Return the line of `place`, or of the nearest part of it that the file has."""
        while place and place not in self.lines:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        return self.lines.get(place, 1)

    def located(self, place: str, message: str) -> str:
        """Return `FILE:LINE: PLACE: message`, or `OPTION: message`."""
        if place in self.options:
            return f"{self.options[place]}: {message}"
        whole = re.match(r"\w+(\.[^.[]+|\[\d+\])?", place)
        if whole and whole[0] in self.elsewhere:
            other, there = self.elsewhere[whole[0]]
            return other.located(there + place[whole.end() :], message)
        return f"{self.path}:{self.line(place)}: " + (f"{place}: {message}" if place else message)


@dataclass(slots=True)
class Document:
    """Plain data, where every part of it stands, and the problems found in it."""

    places: Places
    data: Any = None
    problems: list[tuple[int, str]] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)  # places with a problem of the YAML itself

    def report(self, place: str, message: str) -> None:
        """Add a problem, unless the YAML at that place was one already."""
        if place not in self.unread:
            self.problems.append((self.places.line(place), self.places.located(place, message)))

    def report_yaml(self, line: int, place: str, message: str) -> None:
        """Add a problem of the YAML itself."""
        where = f"{place}: " if place else ""
        self.problems.append((line, f"{self.places.path}:{line}: {where}{message}"))
        self.unread.add(place)

    def error(self) -> ConfigError:
        """Return the error, for the caller to raise, that tells every problem, by line."""
        in_order = sorted(self.problems, key=lambda problem: problem[0])
        return ConfigError(list(dict.fromkeys(text for _, text in in_order)))


class _Stop(Exception):
    """The YAML cannot be read further."""


class _Reader:
    """Composes a document from PyYAML's events, so that depth, size and aliases are bounded."""

    def __init__(self, document: Document, loader: Any) -> None:
        self.document = document
        self.loader = loader  # its methods have no types
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
            return  # empty: there is no data
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
        self.document.places.lines.setdefault(place, line)
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
                raise self._stop(line, f"{place + ': ' if place else ''}{shown(key)} as a key")
            inner = f"{place}.{key}" if place else key
            if key in pairs:
                first = self.document.places.lines[inner]
                message = f"written twice, first in line {first}"
                self.document.report_yaml(line, inner, message)
                self._node(inner, depth + 1)
                continue
            self.document.places.lines[inner] = line
            pairs[key] = self._node(inner, depth + 1)
        self.loader.get_event()
        return pairs

    def _scalar(self, event: yaml.ScalarEvent, place: str, line: int) -> Any:
        text = event.value
        if event.style or event.tag is not None or len(text) > MAX_NUMBER_LENGTH:
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
        quoted = shown(text)
        message = f"YAML takes {quoted.strip(chr(39))} for {what}"
        hint = f"write {instead}, or {quoted} in quotes for the word"
        self.document.report_yaml(line, place, f"{message}\n  hint: {hint}")


def read_document(path: Path, text: str) -> Document:
    """Read YAML as plain data with lines; what is wrong with it is in the document's problems.

    Args:
        path: names the text in messages.
        text: of one YAML document, in which aliases, tags and keys written twice are refused.
    """
    with suppress(yaml.YAMLError, ValueError):  # in C, for a tenth of the time
        return _read(Document(Places(path)), getattr(yaml, "CSafeLoader", yaml.SafeLoader), text)
    document = Document(Places(path))
    try:  # what is wrong, the reader in Python says best
        _read(document, yaml.SafeLoader, text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        context = f" {error.context}" if error.context else ""
        line = mark.line + 1 if mark else 1
        hint = "quote texts that hold ': ', '#' or a bracket"
        message = f"not YAML: {error.problem}{context}\n  hint: {hint}"
        document.report_yaml(line, "", message)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        character = error.character
        refused = chr(character) if isinstance(character, int) else character
        document.report_yaml(line, "", f"not YAML: the character {refused!a}")
    except (ValueError, OverflowError):  # PyYAML's chr() of an escape beyond Unicode
        document.report_yaml(1, "", "not YAML: an escape that is no character")
    return document


def _read(document: Document, loader: Any, text: str) -> Document:
    with suppress(_Stop):
        _Reader(document, loader(text)).read()
    return document


# ---- as records, or what does not fit in our words ------------------------------------------

_EXPECTED = {
    "bool_type": "true or false",
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
    "literal_error": "{expected}",
}


def keys_of(model: type[BaseModel]) -> list[str]:
    """Return the keys of a section, as the file has them."""
    return [info.alias or name for name, info in model.model_fields.items()]


def require_keys(document: Document, model: type[BaseModel]) -> bool:
    """Whether the document is a mapping; where it is none, and read, that is reported."""
    if isinstance(document.data, dict):
        return True
    if not document.problems:
        is_empty = document.data is None
        got = (
            "nothing is written here" if is_empty else f"expected keys, got {shown(document.data)}"
        )
        document.report("", f"{got}\n  known: {', '.join(keys_of(model))}")
    return False


def validated(document: Document, model: type[_M]) -> _M | None:
    """Return the document's data as a record; None where a problem was reported instead."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        for item in error.errors():
            _report_item(document, model, item)
    return None


def _report_item(document: Document, model: type[BaseModel], item: Any) -> None:
    kind, context = item["type"], item.get("ctx", {})
    parts, data = [], document.data
    for part in item["loc"]:  # some name which of several types was tried
        is_there = part in data if isinstance(data, dict) else isinstance(data, list)
        if is_there or kind == "missing":
            parts.append(part)
            data = data[part] if is_there else None
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts).lstrip(".")
    if kind == "missing":
        field = _model_at(model, parts[:-1]).model_fields.get(str(parts[-1]))
        expected = field.description if field is not None else None
        document.report(place, "missing" + (f"\n  expected: {expected}" if expected else ""))
    elif kind == "extra_forbidden":
        key, known = str(parts[-1]), keys_of(_model_at(model, parts[:-1]))
        document.report(place, with_known(f"unknown key {key!r}", key, known))
    elif kind == "value_error":
        document.report(place, str(context["error"]))
    elif kind in _EXPECTED:
        expected = _EXPECTED[kind].format(**context)
        document.report(place, f"expected {expected}, got {shown(item['input'])}")
    else:
        document.report(place, f"{item['msg']}, got {shown(item['input'])}")


def _model_at(model: type[BaseModel], place: Sequence[str | int]) -> type[BaseModel]:
    """Return the model of the mapping at `place`."""
    for key in place:
        field = model.model_fields.get(str(key))
        kinds = (field.annotation, *get_args(field.annotation)) if field is not None else ()
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                model = kind
    return model


def value_of(text: str) -> Any:
    """Return what a text is as a value of YAML.

    Raises:
        ValueError: it is none.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def shown(value: object) -> str:
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


def with_known(message: str, word: str, known: Sequence[str]) -> str:
    """Return the message that `word` is unknown, with the words known and the nearest of them."""
    lines = [message, f"  known: {', '.join(known)}"]
    hint = did_you_mean(word, known)
    return "\n".join([*lines, f"  {hint}"] if hint else lines)
