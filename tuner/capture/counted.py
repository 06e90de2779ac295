"""What each call changes in a module that is no tensor, which no record of a call can hold."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from tuner.errors import CaptureError
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["require_same_settings"]


def require_same_settings(
    problem: Problem, model: torch.nn.Module, call: Callable[[], object]
) -> None:
    """Require that calls leave a module's settings alone, or give them one value for ever.

    Args:
        problem: the file's.
        model: of the file.
        call: calls it.

    Raises:
        CaptureError: an attribute has another value after each call.
    """
    before = _plain(model)
    call()
    first = _plain(model)
    if first == before:
        return
    call()
    for (path, name), value in _plain(model).items():
        was = first.get((path, name))
        if value != was:
            line = _line_of(problem, name)
            place = f"{problem.source}:{line}" if line else str(problem.source)
            attribute = ".".join(filter(None, ["self", path, name]))
            raise CaptureError(
                f"{place}: Model.forward changes {attribute} with each call ({was!r}, then "
                f"{value!r}), which is no tensor: a kernel would know the first value alone\n"
                f'  next: keep it in a buffer, self.register_buffer("{name}", torch.tensor(...)), '
                "and change that in place, or leave it out of forward"
            )


def _plain(model: torch.nn.Module) -> dict[tuple[str, str], object]:
    """Return copies of the attributes that are numbers, words or lists of these, by place."""
    import torch

    plain, own = (bool, int, float, str), vars(torch.nn.Module())

    def copied(value: object) -> object:
        if isinstance(value, (list, tuple)):
            return [item for item in value if isinstance(item, plain)]
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if isinstance(item, plain)}
        return value if isinstance(value, plain) else None

    return {
        (path, name): copied(value)
        for path, part in model.named_modules()
        for name, value in vars(part).items()
        if name not in own
    }


def _line_of(problem: Problem, name: str) -> int:
    """Return the line outside of constructors that writes an attribute of that name, 0 if none."""
    tree = ast.parse(problem.source.read_text(encoding="utf-8"))
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    return next(
        (
            node.lineno
            for function in functions
            if function.name != "__init__"
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and node.attr == name
        ),
        0,
    )
