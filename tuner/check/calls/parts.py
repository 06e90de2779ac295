"""What is done to the parts of a module: wrapped, derived, tied, converted, resized."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tuner.problem.returned import rebuilt

if TYPE_CHECKING:
    import torch

__all__ = [
    "alike",
    "copied",
    "derive",
    "is_norm",
    "keep_norms",
    "parametrize",
    "resize",
    "set_training",
    "tie",
    "tie_as",
    "tied_as",
    "vectors",
    "wrap",
]

# A module has a dozen of them, for hooks, whose general way to a copy is most of the time of one.
EMPTY = (dict, OrderedDict, set)
MORE_OUTPUTS = 3  # of a Linear that takes another's place
Next = Callable[[list[str]], str]  # picks a name; "" where there is none


def copied(model: torch.nn.Module, *, is_wide: bool = False) -> torch.nn.Module:
    """Return a deep copy, also of a module on which a call has left what autograd has made.

    PyTorch copies only tensors that are no results; what is one becomes a number of the copy. One
    that `is_wide` is in float64, as `double` makes it, of which weights are copied once.
    """
    import torch

    made: dict[int, Any] = {}
    for weight in model.parameters() if is_wide else ():
        if type(weight) is torch.nn.Parameter and weight.is_floating_point():
            wide = weight.detach().to(torch.float64, copy=True)  # also one that is float64
            made[id(weight)] = torch.nn.Parameter(wide, weight.requires_grad)
    for value in (value for part in model.modules() for value in vars(part).values()):
        if isinstance(value, torch.Tensor) and not value.is_leaf:
            made[id(value)] = value.detach().clone()
        elif type(value) in EMPTY and not value and not getattr(value, "__dict__", None):
            made[id(value)] = type(value)()
    found = copy.deepcopy(model, made)
    return found.double() if is_wide else found


def _child(
    model: torch.nn.Module, pick: Next, kind: Callable[[torch.nn.Module], bool]
) -> torch.nn.Module | None:
    """Return the next submodule of a kind, at any depth; None where there is none."""
    paths = [n for n, m in model.named_modules() if n and kind(m)]
    return model.get_submodule(pick(paths)) if paths else None


def wrap(model: torch.nn.Module, pick: Next) -> None:
    """Give a submodule another forward, as an adapter such as LoRA's does."""
    child = _child(model, pick, lambda m: not list(m.children()))
    if child is None:
        return
    old: Any = type(child)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _adapted(old.forward(self, *args, **kwargs))

    child.__class__ = type(f"Adapted{old.__name__}", (old,), {"forward": forward})


def derive(model: torch.nn.Module) -> None:
    """Make a module one of a user's class, derived from its own with another forward.

    Raises:
        TypeError: it was traced or scripted: its class is PyTorch's own.
    """
    import torch

    old: Any = type(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"no class with another forward can be derived from a {old.__name__}")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _adapted(old.forward(self, *args, **kwargs))

    model.__class__ = type(f"Derived{old.__name__}", (old,), {"forward": forward})


def _adapted(result: Any) -> Any:
    """Return other numbers for what a submodule gives: a tensor, or tuples as an LSTM's."""
    import torch

    def adapted(value: Any) -> Any:
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        return 0.5 * value + 0.25 if is_number else value

    return rebuilt(adapted, result)


def parametrize(model: torch.nn.Module, pick: Next) -> None:
    """Halve a weight of a submodule by `torch.nn.utils.parametrize`."""
    import torch
    from torch.nn.utils import parametrize as by_pytorch

    module: Any = torch.nn.Module
    halved = type("Halved", (module,), {"forward": lambda self, weight: 0.5 * weight})
    child = _child(model, pick, lambda m: "weight" in dict(m.named_parameters(recurse=False)))
    if child is not None:
        by_pytorch.register_parametrization(child, "weight", halved())


def alike(model: torch.nn.Module) -> list[list[str]]:
    """Return the names of parameters of one shape and type, where they are several."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        groups[parameter.shape, parameter.dtype, parameter.requires_grad].append(name)
    return [names for names in groups.values() if len(names) > 1]


def tie(model: torch.nn.Module, pick: Next) -> None:
    """Put a parameter in the place of its neighbour among those of its shape, matrices first."""
    groups = sorted(alike(model), key=lambda names: -model.get_parameter(names[0]).ndim)
    pairs = [pair for names in groups[:1] for pair in itertools.pairwise(names)]
    if not pairs:
        return
    chosen = pick([other for _, other in pairs])
    one = next(first for first, other in pairs if other == chosen)
    place, _, name = chosen.rpartition(".")
    setattr(model.get_submodule(place), name, model.get_parameter(one))


def tied_as(model: torch.nn.Module) -> dict[str, str]:
    """Return, for each name of a parameter, the first name that the same one has."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def tie_as(model: torch.nn.Module, tied: dict[str, str]) -> None:
    """Tie parameters as they are in another module, of which `tied_as` tells; untie others."""
    import torch

    for name, first in tied.items():
        now = tied_as(model)
        if name not in now or now[name] == first:
            continue
        own = model.get_parameter(first)
        if name == first:  # one of its own, no longer another's
            own = torch.nn.Parameter(own.detach().clone(), own.requires_grad)
        place, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(place), attribute, own)


def vectors(model: torch.nn.Module) -> list[str]:
    """Return the names of biases; of other vectors where there are none."""
    found = [name for name, p in model.named_parameters() if p.ndim == 1 and len(p) > 1]
    return [name for name in found if "bias" in name.rpartition(".")[2]] or found


def set_training(model: torch.nn.Module, pick: Next, whose: str, is_on: bool) -> None:
    """Set the attribute `training` itself, which `train` and `eval` do not see.

    Args:
        model: the module.
        pick: which part, by its path.
        whose: "own" for the module's alone, "part" for the next part's, else each one's.
        is_on: what it becomes.
    """
    parts = dict(model.named_modules())
    inner = [name for name in parts if name]
    chosen = {"own": [""], "part": [pick(inner)] if inner else []}.get(whose, list(parts))
    for name in chosen:
        parts[name].training = is_on


def resize(model: torch.nn.Module, path: str) -> None:
    """Put a Linear with more outputs in the place of one, as a new head is."""
    import torch

    if not path:
        return
    new: Any = copied(model.get_submodule(path))
    more = min(MORE_OUTPUTS, new.out_features)
    new.out_features += more
    for name, old in list(new.named_parameters()):
        values = torch.cat([old.detach(), -0.5 * old.detach()[:more]])
        setattr(new, name, torch.nn.Parameter(values, requires_grad=old.requires_grad))
    place, _, name = path.rpartition(".")
    setattr(model.get_submodule(place), name, new)


def is_norm(part: torch.nn.Module) -> bool:
    """Whether a part is a normalisation, by its name."""
    return "norm" in type(part).__name__.lower() and not list(part.children())


def keep_norms(model: torch.nn.Module) -> None:
    """Leave normalisations in float32, as training in mixed precision does."""
    for part in model.modules():
        if is_norm(part):
            part.float()
