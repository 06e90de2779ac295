"""Where each line of a rendered text stands in its template, and messages that name the text.

The text is rendered a second time with a mark at every line of the template and of all that it
includes; what is compiled, kept and exported never has any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

from tuner.kernel.rendering import environment_of

__all__ = ["in_template", "places_of"]

# Private-use characters, which no text means anything by.
_MARK = re.compile("\ue000([0-9]+):([0-9]+)\ue001")
# As g++ and Python ("source.cpp:57:"), and as nvcc ("source.cu(57):") name a line.
_NAMED = re.compile(r"\bsource\.(?:cpp|cu|py)(?::([0-9]+)(?::[0-9]+)?|\(([0-9]+)\))(?=:)")


class _Marked(Extension):
    """Puts a mark with file and line before each line that is text and no Jinja2."""

    def filter_stream(self, stream: TokenStream) -> Iterable[Token]:
        files: list[str] = self.environment.marked_files  # type: ignore[attr-defined]
        file = stream.filename or stream.name or ""
        if file not in files:
            files.append(file)
        number = files.index(file)
        for token in stream:
            if token.type == "variable_begin":  # a line may begin with an expression
                yield Token(token.lineno, "data", f"\ue000{number}:{token.lineno}\ue001")
            if token.type != "data":
                yield token
                continue
            lines = enumerate(token.value.split("\n"), token.lineno)
            # An empty line stays one, since `indent` and its like make that difference.
            marked = [w and f"\ue000{number}:{line}\ue001{w}" for line, w in lines]
            yield Token(token.lineno, "data", "\n".join(marked))


def places_of(
    path: Path, body: str, roots: Sequence[Path], variables: Mapping[str, Any], text: str
) -> list[str]:
    """Return `file:line` in the template for each line of a rendered text.

    Args:
        path: of the template, whose line numbers `body` has.
        body: the Jinja2 text.
        roots: the folders in which includes are looked up, in order.
        variables: with which it was rendered.
        text: the rendered text.

    Returns:
        One place a line; empty where the marks change what is rendered, as in a text that
        measures parts of itself.
    """
    environment = environment_of(tuple(roots)).overlay(extensions=[_Marked])
    files: list[str] = []
    environment.extend(marked_files=files)
    try:
        code = environment.compile(body, filename=str(path))
        template = jinja2.Template.from_code(environment, code, dict(environment.globals))
        marked = template.render(variables)
    except Exception:  # without marks it renders; the place is all that is lost
        return []
    lines, places, last = [], [], str(path)
    for line in marked.split("\n"):
        last = _place_in(line, files) or last
        lines.append(_MARK.sub("", line))
        places.append(last)
    first = next((number for number, line in enumerate(lines) if line), 0)
    return places[first:] if "\n".join(lines[first:]) == text else []


def _place_in(line: str, files: Sequence[str]) -> str:
    """Return what the last mark before the line's first word says; empty where there is none."""
    at, found = 0, ""
    for mark in _MARK.finditer(line):
        if line[at : mark.start()].strip():
            break
        at, found = mark.end(), f"{files[int(mark[1])]}:{mark[2]}"
    return found


def in_template(message: str, places: Sequence[str]) -> str:
    """Return a compiler's message with lines of the template in place of the rendered text's."""

    def place(match: re.Match[str]) -> str:
        line = int(match[1] or match[2])
        return places[line - 1] if 0 < line <= len(places) else match[0]

    return _NAMED.sub(place, message)
