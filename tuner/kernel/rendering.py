"""Jinja2 texts: what they expect from outside, and what they render to.

Sandboxed and strict: an undefined variable is an error, with the file and line of its use.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from tuner.errors import TemplateError, did_you_mean

__all__ = ["environment_of", "free_variables", "rendered"]


def free_variables(path: Path, body: str, roots: Sequence[Path]) -> dict[str, str]:
    """Return the variables that a text and all it includes expect from outside.

    Args:
        path: of the text's file, whose line numbers the text has.
        body: the Jinja2 text.
        roots: the folders in which includes are looked up, in order.

    Returns:
        By name, the `file:line` of its first use.

    Raises:
        TemplateError: a text is not Jinja2, or what it includes is not there.
    """
    try:
        return _undeclared(environment_of(tuple(roots)), path, body, frozenset(), set())
    except jinja2.TemplateSyntaxError as error:
        place = error.filename or str(path)
        raise TemplateError(f"{place}:{error.lineno}: {error.message}") from error


def rendered(path: Path, body: str, roots: Sequence[Path], variables: Mapping[str, Any]) -> str:
    """Render a text with the variables; arguments and errors are those of `free_variables`.

    Raises:
        TemplateError: also whatever the text does wrong while it renders.
    """
    environment = environment_of(tuple(roots))
    try:
        code = _compiled(body, str(path))
        text = jinja2.Template.from_code(environment, code, dict(environment.globals))
        return text.render(variables).lstrip("\n")
    except Exception as error:  # the text may also divide by zero, include itself, ...
        raise _render_error(path, roots, error) from error


@functools.lru_cache(64)
def _compiled(body: str, filename: str) -> CodeType:
    return environment_of(()).compile(body, filename=filename)


def _undeclared(
    environment: jinja2.Environment,
    path: Path,
    source: str,
    declared: frozenset[str],
    seen: set[str],
) -> dict[str, str]:
    """Return the variables that a text and all it includes expect from outside.

    Each with the file and line of its first use. `declared` is what the texts that include this
    one have set themselves.
    """
    uses, sets, includes = _words_of(source, str(path))
    names = {name: f"{path}:{line}" for name, line in uses.items() if name not in declared}
    inner = declared | sets
    for line, included in includes:
        if included in seen:
            continue
        seen.add(included)
        assert environment.loader is not None
        try:
            text, file, _ = environment.loader.get_source(environment, included)
        except jinja2.TemplateNotFound as error:
            hint = did_you_mean(included, environment.list_templates())
            raise TemplateError(
                f"{path}:{line}: includes {included!r}, which does not exist\n"
                f"  {hint or 'next: look into templates/_lib'}"
            ) from error
        found = _undeclared(environment, Path(file or included), text, inner, seen)
        names = {**found, **names}
    return names


@functools.lru_cache(256)
def _words_of(
    source: str, filename: str
) -> tuple[dict[str, int], frozenset[str], list[tuple[int, str]]]:
    """Return what a text alone expects from outside, each with the line of its first use.

    Then the names that it sets, and the texts that it includes, with their lines.
    """
    tree = environment_of(()).parse(source, filename=filename)
    words = list(tree.find_all(jinja2.nodes.Name))
    uses = {
        name: min(w.lineno for w in words if w.name == name and w.ctx == "load")
        for name in jinja2.meta.find_undeclared_variables(tree)
    }
    kinds = (jinja2.nodes.Include, jinja2.nodes.Import, jinja2.nodes.FromImport)
    includes = [
        (node.lineno, included)
        for node in tree.find_all(kinds)
        # Where it is not a word, it is known when rendered.
        if isinstance(included := getattr(getattr(node, "template", None), "value", None), str)
    ]
    return uses, frozenset(w.name for w in words if w.ctx != "load"), includes


@functools.lru_cache(16)
def environment_of(roots: tuple[Path, ...]) -> jinja2.Environment:
    """Return what reads templates: sandboxed and strict; lines of tags alone leave none.

    It keeps what included texts were compiled to, while they are the same: half of rendering.
    """
    return jinja2.sandbox.SandboxedEnvironment(
        loader=jinja2.FileSystemLoader([str(root) for root in roots]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _render_error(path: Path, roots: Sequence[Path], error: Exception) -> TemplateError:
    """Name the file and line of the text that the error came from: Jinja2 keeps them in frames."""
    place = str(path)
    for frame in traceback.extract_tb(error.__traceback__):
        if any(Path(frame.filename).is_relative_to(root) for root in roots):
            place = f"{frame.filename}:{frame.lineno}"
    if isinstance(error, jinja2.TemplateNotFound):
        return TemplateError(f"{place}: includes {error.name!r}, which does not exist")
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return TemplateError(f"{place}: does not render: {kind}{error}")
