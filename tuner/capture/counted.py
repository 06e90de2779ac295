"""Numbers of a module that each call changes: what a record of one call holds is one of them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Number
from typing import TYPE_CHECKING

from tuner.errors import CaptureError
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["Changed", "changed_by_calls", "refusal_of"]


@dataclass(frozen=True, slots=True)
class Changed:
    """An attribute that has another value after each call: its part's path and class, as text."""

    path: str
    kind: str
    name: str
    before: str
    after: str


def changed_by_calls(model: torch.nn.Module, call: Callable[[], object]) -> Changed | None:
    """Call a module once, and where that changes attributes once more; return one that both do.

    Numbers, words, and lists and dicts of these are looked at; tensors a record follows by itself.
    """
    before = _plain(model)
    call()
    first = _plain(model)
    if first == before:
        return None
    call()
    second = _plain(model)
    for (path, name), value in second.items():
        was = first.get((path, name), "")
        if value != was:
            kind = type(model.get_submodule(path)).__name__
            return Changed(path, kind, name, was, value)
    return None


def refusal_of(problem: Problem, changed: Changed) -> CaptureError:
    """Return the error of a module whose record depends on such an attribute."""
    line = _line_of(problem, changed)
    place = f"{problem.source}:{line}" if line else str(problem.source)
    attribute = ".".join(filter(None, ["self", changed.path, changed.name]))
    return CaptureError(
        f"{place}: Model.forward changes {attribute} with each call ({changed.before}, then "
        f"{changed.after}), and computes another thing then: a kernel would know the first value "
        f'alone\n  next: keep it in a buffer, self.register_buffer("{changed.name}", '
        "torch.tensor(0.0)), and change that in place"
    )


def _plain(model: torch.nn.Module) -> dict[tuple[str, str], str]:
    """Return the attributes that are looked at, as text, by path and name."""
    import torch

    def is_plain(value: object) -> bool:
        if isinstance(value, (list, tuple)):
            return all(map(is_plain, value))
        if isinstance(value, dict):
            return all(map(is_plain, value.values()))
        return isinstance(value, (Number, str))

    own = vars(torch.nn.Module())
    return {
        (path, name): repr(value)
        for path, part in model.named_modules()
        for name, value in vars(part).items()
        if name not in own and is_plain(value)
    }


def _line_of(problem: Problem, changed: Changed) -> int:
    """Return the line outside of the constructor that writes the attribute, 0 if none does."""
    tree = ast.parse(problem.source.read_text(encoding="utf-8"))
    kinds = [node for node in tree.body if getattr(node, "name", "") == changed.kind]
    for kind in kinds:
        for part in ast.walk(kind):
            if not isinstance(part, ast.FunctionDef) or part.name == "__init__":
                continue
            written = [node for node in ast.walk(part) if isinstance(node, ast.Attribute)]
            for node in written:
                if isinstance(node.ctx, ast.Store) and node.attr == changed.name:
                    return node.lineno
    return 0
