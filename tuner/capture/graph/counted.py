"""What a call sets on a module: numbers, of which a record holds one, and tensors."""

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

__all__ = [
    "Changed",
    "changed_by_calls",
    "refusal_of",
    "require_none_set",
    "tensors_held",
    "versions_of",
]


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


def versions_of(model: torch.nn.Module) -> dict[str, int]:
    """Return how often PyTorch counted an edit of each buffer."""
    return {name: b._version for name, b in model.named_buffers(remove_duplicate=False)}


def tensors_held(model: torch.nn.Module) -> dict[tuple[str, str], tuple[str, object]]:
    """Return the tensors that are attributes or buffers, by path and name, with their place."""
    import torch

    return {
        (path, name): (where, value)
        for path, part in model.named_modules()
        for where, held in (("attribute", vars(part)), ("buffer", part._buffers))
        for name, value in held.items()
        if isinstance(value, torch.Tensor)
    }


def require_none_set(
    problem: Problem, model: torch.nn.Module, before: dict[tuple[str, str], tuple[str, object]]
) -> None:
    """Refuse a module whose forward set a tensor since then: the exported file's would not.

    Raises:
        CaptureError: it names the line that sets it, if the file has one, and what to do.
    """
    for (path, name), (where, value) in tensors_held(model).items():
        if before.get((path, name), ("", None))[1] is value:
            continue
        place, attribute = _place_of(problem, type(model.get_submodule(path)).__name__, path, name)
        advice = f"write it in place, {attribute}.copy_(...)"
        if where != "buffer":
            advice = "return it, make it in the constructor, or leave it out"
            if f"{name}_g" in vars(model.get_submodule(path))["_parameters"] or hasattr(
                model.get_submodule(path), f"{name}_u"
            ):
                advice = "take it from torch.nn.utils.parametrizations, which sets none"
        raise CaptureError(
            f"{place}: Model.forward sets the {where} {attribute} to another tensor, which a file "
            f"of kernels does not\n  next: {advice}"
        )


def refusal_of(problem: Problem, changed: Changed) -> CaptureError:
    """Return the error of a module whose record depends on such an attribute."""
    place, attribute = _place_of(problem, changed.kind, changed.path, changed.name)
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


def _place_of(problem: Problem, kind: str, path: str, name: str) -> tuple[str, str]:
    """Return where the file writes an attribute, as far as that is known, and how it is called."""
    line = _line_of(problem, kind, name)
    place = f"{problem.source}:{line}" if line else str(problem.source)
    return place, ".".join(filter(None, ["self", path, name]))


def _line_of(problem: Problem, kind_name: str, attribute: str) -> int:
    """Return the line outside of the constructor that writes the attribute, 0 if none does."""
    tree = ast.parse(problem.source.read_text(encoding="utf-8"))
    kinds = [node for node in tree.body if getattr(node, "name", "") == kind_name]
    for kind in kinds:
        for part in ast.walk(kind):
            if not isinstance(part, ast.FunctionDef) or part.name == "__init__":
                continue
            written = [node for node in ast.walk(part) if isinstance(node, ast.Attribute)]
            for node in written:
                if isinstance(node.ctx, ast.Store) and node.attr == attribute:
                    return node.lineno
    return 0
