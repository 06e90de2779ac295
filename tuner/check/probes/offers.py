"""What a class offers beside `forward`: methods, attributes that a call sets, a head."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.calls.parts import copied, resize
from tuner.errors import ProblemError
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = [
    "attributes_of", "gives_itself", "heads_of", "methods_of", "takes_numbers",
]  # fmt: skip

MOST = 4  # of each are asked
MOST_TRIED = 6  # parts that may be a head


def methods_of(problem: Problem, model: torch.nn.Module, values: Sequence[Any]) -> tuple[str, ...]:
    """Return the public methods that take what `forward` takes, by the same names, and answer.

    What takes anything else may save a file or train: it is not called.
    """
    import torch

    cls = type(model)
    mro = cls.__mro__[: cls.__mro__.index(torch.nn.Module)]
    names = {n: None for kind in mro for n, x in vars(kind).items() if inspect.isfunction(x)}
    usual = dir(torch.nn.Module)
    model = copied(model)
    own = [n for n in names if n[:1] != "_" and n not in usual and n != "forward"]
    wanted = _arguments_of(cls.forward)
    found = [
        name
        for name in own
        if _arguments_of(getattr(cls, name)) == wanted
        and _answers(problem, getattr(model, name), values)
    ]
    return tuple(found[:MOST])


def _arguments_of(function: Any) -> list[tuple[str, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind) for p in found]


def _answers(problem: Problem, called: Any, values: Sequence[Any]) -> bool:
    import torch

    try:
        with torch.no_grad():
            problem.call(called, values)
    except ProblemError:
        return False
    return True


def attributes_of(
    problem: Problem, model: torch.nn.Module, values: Sequence[Any]
) -> tuple[str, ...]:
    """Return the paths of tensors that a call leaves as public attributes of a module's parts."""
    called = copied(model)
    before = {name: id(value) for name, value in _tensors_of(called).items()}
    if not _answers(problem, called, values):
        return ()
    now = _tensors_of(called)
    # What lies in no state_dict and was there before is the constructor's.
    found = [name for name, value in now.items() if before.get(name) != id(value)]
    return tuple(found[:MOST])


def gives_itself(problem: Problem, model: torch.nn.Module, values: Sequence[Any]) -> bool:
    """Whether a call returns memory that the module goes on with: an edit of it is the user's."""
    import torch

    called = copied(model)
    outputs: list[torch.Tensor] = []
    with contextlib.suppress(ProblemError), torch.no_grad():
        outputs = [*problem.call(called, values), *problem.call(called, values)]
    own = [*called.buffers(), *_tensors_of(called).values()]
    places = [y.untyped_storage().data_ptr() for y in outputs if y.numel()]
    number = len(places) // 2
    again = set(places[:number]) & set(places[number:])
    return bool(again or {x.untyped_storage().data_ptr() for x in own} & set(places))


def _tensors_of(model: torch.nn.Module) -> dict[str, Any]:
    import torch

    return {
        f"{path}.{name}" if path else name: value
        for path, part in model.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor) and name[:1] != "_"
    }


def heads_of(problem: Problem, model: torch.nn.Module, values: Sequence[Any]) -> tuple[str, ...]:
    """Return the paths of Linears with which, at another size, the reference works; last first."""
    import torch

    linears = [n for n, part in model.named_modules() if n and type(part) is torch.nn.Linear]
    found, model = [], copied(model) if linears else model
    for path in linears[::-1][:MOST_TRIED]:
        place, _, name = path.rpartition(".")
        old = model.get_submodule(path)
        resize(model, path)
        if _answers(problem, model, values):
            found.append(path)
        setattr(model.get_submodule(place), name, old)
    return tuple(found[:MOST])


def takes_numbers(model: torch.nn.Module, values: Sequence[Any]) -> bool:
    """Whether floats are among the arguments of `forward`, given or as defaults."""
    words = list(inspect.signature(type(model).forward).parameters.values())[1:]
    return any(isinstance(x, float) for x in [*values, *(p.default for p in words[len(values) :])])
