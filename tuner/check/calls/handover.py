"""How a module is given other weights, edited, loaded, assigned, replaced; or wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["GIVEN", "REFUSED", "edit", "edit_all", "empty", "replace", "said_of_loads"]


def edit(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Edit parameters in place, past the version counter."""
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.data.copy_(weights[name])  # .data: no version counter tells of it


def edit_all(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Edit parameters and buffers in place."""
    edit(model, weights)
    for name, buffer in model.named_buffers():
        if name in weights:
            buffer.data.copy_(weights[name])


def _load(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    model.load_state_dict(weights, strict=True)


def empty(model: torch.nn.Module, loose: Collection[str]) -> None:
    """Lose all that is not in the state_dict, which is loaded again.

    Buffers that the reference's leaves out, the `loose` ones, are put back, as whoever empties a
    reference has to do: of others nobody knows.
    """
    import torch

    held = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    device = next((t.device for t in state.values()), torch.device("cpu"))
    model.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        for name, buffer in model.named_buffers():
            if name in loose:
                buffer.copy_(held[name])
    model.load_state_dict(state, strict=True)


def _load_inside(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    import torch

    parent = torch.nn.Sequential(model)
    parent.load_state_dict({f"0.{name}": t for name, t in weights.items()}, strict=True)


def _assign(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    now = model.state_dict()
    own = {name: tensor.to(now[name].dtype, copy=True) for name, tensor in weights.items()}
    model.load_state_dict(own, strict=True, assign=True)


def _load_part(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    *_, last = ["", *(name for name, _ in model.named_children())]
    part = {n: t for n, t in weights.items() if n.partition(".")[0] != last}
    model.load_state_dict(part, strict=False)


def _edit_state(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        if name in weights:
            tensor.copy_(weights[name])


def _rebind(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """As parts of one vector, which `vector_to_parameters` and optimisers make of them."""
    import torch

    given = [(p, weights[n].to(p.dtype)) for n, p in model.named_parameters() if n in weights]
    for dtype in {value.dtype for _, value in given}:
        rebound = [(p, value) for p, value in given if value.dtype == dtype]
        head = rebound[0][1].new_zeros(2)  # one would be an odd place, where no complex view is
        vector = torch.cat([head, *(value.reshape(-1) for _, value in rebound)])
        parts = vector[2:].split([value.numel() for _, value in rebound])
        for (parameter, value), part in zip(rebound, parts, strict=True):
            parameter.data = part.view(value.shape)


def replace(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Put other parameters in the place of those that are named."""
    import torch

    for path, parameter in list(model.named_parameters()):
        if path in weights:
            place, _, name = path.rpartition(".")
            fresh = weights[path].to(parameter.dtype, copy=True)
            new = torch.nn.Parameter(fresh, requires_grad=parameter.requires_grad)
            setattr(model.get_submodule(place), name, new)


# By the action that gives them.
GIVEN: dict[str, Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], None]] = {
    "edit": edit,
    "edit all": edit_all,
    "load": _load,
    "load inside": _load_inside,
    "load part": _load_part,
    "edit state": _edit_state,
    "rebind": _rebind,
    "assign": _assign,
    "replace": replace,
}


# ---- loads that do not fit ------------------------------------------------------------------


REFUSED = "refused"


def said_of_loads(model: torch.nn.Module) -> list[str]:
    """Load what does not fit, with the values that a module has; say what each led to.

    Names of single numbers are not reported: batch normalisation adds its own counter where an old
    state_dict has none.
    """
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    names = [name for name, tensor in state.items() if tensor.ndim]
    some = next(iter(state.values()), None)
    cases = {"a key too many": {**state, "surplus": _one(some)}}
    if names:
        at = names[len(names) // 2]
        cases["a key too few"] = {name: t for name, t in state.items() if name != at}
        cases["another prefix"] = {f"inner.{name}": t for name, t in state.items()}
        cases["another shape"] = {**state, at: state[at].new_zeros((2, *state[at].shape))}
    return [
        f"load_state_dict{'' if is_strict else '(strict=False)'} of {what}: "
        + _said(model, case, is_strict, {*names})
        for what, case in cases.items()
        for is_strict in (True, False)
    ]


def _one(like: torch.Tensor | None) -> torch.Tensor:
    import torch

    return torch.zeros(1, device="cpu" if like is None else like.device)


def _said(
    model: torch.nn.Module, case: Mapping[str, torch.Tensor], is_strict: bool, names: set[str]
) -> str:
    try:
        found = model.load_state_dict(case, strict=is_strict)
    except Exception:
        return REFUSED
    missing = sorted(names & {*getattr(found, "missing_keys", ())})
    unexpected = [
        name
        for name in sorted(getattr(found, "unexpected_keys", ()))
        if name == "surplus" or name.removeprefix("inner.") in names
    ]
    return f"{len(missing)} missing {missing[:2]}, {len(unexpected)} unexpected {unexpected[:2]}"
