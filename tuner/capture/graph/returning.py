"""Containers of what forward returns: taken away for a record, and written as Python."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.errors import CaptureError
from tuner.problem.reference import Problem
from tuner.problem.returned import is_plain, tensors_of, written

if TYPE_CHECKING:
    import torch

__all__ = ["Returns", "containers_text", "returned_text", "with_bare_tensors"]


@dataclass(slots=True)
class Returns:
    """How tensors stand in what forward returns: Python for `str.format`, "" for a bare tuple.

    `containers` are classes that it names, as `_CONTAINERS[0]` and so on.
    """

    text: str = ""
    containers: tuple[str, ...] = ()


@contextlib.contextmanager
def with_bare_tensors(model: torch.nn.Module, problem: Problem) -> Iterator[Returns]:
    """Let a module's forward return a tensor or a tuple of tensors, and say what it returned.

    PyTorch records no class that it does not know, such as a user's dataclass.

    Raises:
        CaptureError: what is returned is no tensor, or a class that another file cannot name.
    """
    import torch

    found = Returns()
    forward = model.forward

    @functools.wraps(forward)
    def bare(*values: Any, **named: Any) -> Any:
        result = forward(*values, **named)
        tensors = tensors_of(result)
        odd = next((type(x).__name__ for x in tensors if not isinstance(x, torch.Tensor)), "")
        if odd:
            raise CaptureError(
                f"{problem.source}: Model.forward returns {odd}; expected a tensor, or tensors in "
                "tuples, lists, dictionaries (by words or whole numbers) or dataclasses\n"
                "  next: return tensors only"
            )
        is_bare = is_plain(result) and type(result) is not list and len(tensors) > 1
        if is_bare or isinstance(result, torch.Tensor) or not tensors:
            return result
        names: list[str] = []

        def named_as(kind: type) -> str:
            name = _name_of(kind, problem)
            if name not in names:
                names.append(name)
            return f"_CONTAINERS[{names.index(name)}]"

        found.text = written(result, named_as)
        found.containers = tuple(names)
        return tensors

    model.forward = bare
    try:
        yield found
    finally:
        del model.forward


def returned_text(returns: str, values: Sequence[str]) -> str:
    """Return outputs as forward returns them, as Python."""
    if returns:
        return returns.format(*values)
    return values[0] if len(values) == 1 else f"({', '.join(values)},)"


def containers_text(containers: Sequence[str]) -> str:
    """Return the lines of a file that name the classes; none where there are none.

    They stand at its top, where no argument of forward has their names.
    """
    if not containers:
        return ""
    needs = (
        "from importlib import import_module\n\n" if "import_module(" in str(containers) else ""
    )
    return f"{needs}_CONTAINERS = ({', '.join(containers)},)  # of what forward returns\n"


def _name_of(kind: type, problem: Problem) -> str:
    """Return how a file that has the text of the module's file reaches a class."""
    own = vars(problem.module)
    for name, value in own.items():
        if value is kind:
            return name
    path = kind.__qualname__
    with contextlib.suppress(AttributeError):
        if operator.attrgetter(path)(problem.module) is kind:
            return path
    with contextlib.suppress(AttributeError, KeyError):
        if operator.attrgetter(path)(sys.modules[kind.__module__]) is kind:
            return f"import_module({kind.__module__!r}).{path}"
    raise CaptureError(
        f"{problem.source}: Model.forward returns an object of {path}, a class that no other file "
        "can name; expected one that a module has at its top\n"
        "  next: define the class outside of functions"
    )
