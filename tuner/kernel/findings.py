"""What is wrong with a family's YAML texts: every error of a file, each with its line."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

from tuner.errors import ExpressionError, TemplateError
from tuner.space.expression import Expression, unknown_name

__all__ = ["Findings", "Place", "data_of", "line_of"]

Place = Sequence[str | int]  # keys and positions, from the top of a YAML text


def data_of(text: str) -> Any:
    """Read a YAML text: in C, for a tenth of the time; errors are told by the reader in Python.

    Raises:
        yaml.YAMLError: it is none.
    """
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        return yaml.safe_load(text)


def line_of(text: str, place: Place) -> int:
    """Return the line of a YAML text where the entry at `place`, or what holds it, begins."""
    node = yaml.compose(text, yaml.SafeLoader)
    line = 0
    for step in place:
        if isinstance(node, yaml.MappingNode):
            inside = [(key, value) for key, value in node.value if key.value == str(step)]
            if not inside:
                break
            line, node = inside[0][0].start_mark.line, inside[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            node = node.value[step]
            line = node.start_mark.line
    return line + 1


class Findings:
    """What is wrong with one YAML text, each with its line.

    Attributes:
        lines: the messages until now; a reader of the text below the head adds its own.
        parts: other texts, by file, whose entries were joined to those of this one.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.lines: list[str] = []
        self.parts: list[tuple[Path, str]] = []

    def add(self, place: Place, reason: str, hint: str = "") -> None:
        """Add what is wrong with the entry at `place`."""
        path, text, place = self._home(place)
        name = ".".join(map(str, place))
        self.lines.append(f"{path}:{line_of(text, place)}: {name}: {reason}")
        self.lines += [f"  {hint}"] if hint else []

    def judge(self, place: Place, text: str | None, known: Collection[str]) -> None:
        """Refuse an expression outside the grammar, or one with a name that is not known."""
        if text is None:
            return
        try:
            expression = Expression.parse(text)
        except ExpressionError as error:
            self.add(place, str(error))
            return
        for name in sorted(expression.names - set(known)):
            if not name.startswith("device."):
                self.add(place, f"{text!r}: {unknown_name(name, sorted(known))}")

    def _home(self, place: Place) -> tuple[Path, str, Place]:
        """Return the text that holds the entry, its file, and the place there."""
        kind, *rest = place
        for path, text in [(self.path, self.text), *self.parts] if rest else []:
            entries = (data_of(text) or {}).get(kind)
            if isinstance(entries, list) and isinstance(rest[0], int):
                if rest[0] < len(entries):
                    return path, text, [kind, *rest]
                rest[0] -= len(entries)
            elif isinstance(entries, dict) and rest[0] in entries:
                return path, text, [kind, *rest]
        return self.path, self.text, place

    def report(self) -> None:
        """Raise a TemplateError with all of it, if there is any."""
        if self.lines:
            raise TemplateError("\n".join(self.lines))
