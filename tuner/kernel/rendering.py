"""Jinja2 texts: what they expect from outside, and what they render to.

Sandboxed and strict: an undefined variable is an error, with the file and line of its use.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
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
        return _undeclared(environment_of(roots), path, body, frozenset(), set())
    except jinja2.TemplateSyntaxError as error:
        place = error.filename or str(path)
        raise TemplateError(f"{place}:{error.lineno}: {error.message}") from error


def rendered(path: Path, body: str, roots: Sequence[Path], variables: Mapping[str, Any]) -> str:
    """Render a text with the variables; arguments and errors are those of `free_variables`.

    Raises:
        TemplateError: also whatever the text does wrong while it renders.
    """
    environment = environment_of(roots)
    try:
        code = environment.compile(body, filename=str(path))
        text = jinja2.Template.from_code(environment, code, dict(environment.globals))
        return text.render(variables).lstrip("\n")
    except Exception as error:  # the text may also divide by zero, include itself, ...
        raise _render_error(path, roots, error) from error


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
    tree = environment.parse(source, filename=str(path))
    words = list(tree.find_all(jinja2.nodes.Name))
    names: dict[str, str] = {}
    for name in jinja2.meta.find_undeclared_variables(tree) - declared:
        uses = [word.lineno for word in words if word.name == name and word.ctx == "load"]
        names[name] = f"{path}:{min(uses)}"
    inner = declared | {word.name for word in words if word.ctx != "load"}
    kinds = (jinja2.nodes.Include, jinja2.nodes.Import, jinja2.nodes.FromImport)
    for node in tree.find_all(kinds):
        included = getattr(
            getattr(node, "template", None), "value", None
        )  # not a word: known when rendered
        if not isinstance(included, str) or included in seen:
            continue
        seen.add(included)
        assert environment.loader is not None
        try:
            text, file, _ = environment.loader.get_source(environment, included)
        except jinja2.TemplateNotFound as error:
            hint = did_you_mean(included, environment.list_templates())
            raise TemplateError(
                f"{path}:{node.lineno}: includes {included!r}, which does not exist\n"
                f"  {hint or 'next: look into templates/_lib'}"
            ) from error
        found = _undeclared(environment, Path(file or included), text, inner, seen)
        names = {**found, **names}
    return names


def environment_of(roots: Sequence[Path]) -> jinja2.Environment:
    """Return what reads templates: sandboxed and strict; lines of tags alone leave none."""
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
