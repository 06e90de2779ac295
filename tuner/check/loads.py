"""What loading a wrong state_dict leads to: a refusal, or the names of what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["REFUSED", "said_of_loads"]

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
