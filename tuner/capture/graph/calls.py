"""What PyTorch's record says of one call of an operator."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["is_assertion", "is_random", "is_view"]


def is_random(node: Any) -> bool:
    """Whether an operator draws numbers: by PyTorch's tag, but not with a probability of 0."""
    import torch

    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = [a.name for a in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if "dropout_p" in names:
        return bool(given.get("dropout_p", 0.0))
    if "train" in names and "dropout" in given and "hx" in names:  # recurrent layers
        return bool(given["dropout"] and given["train"])
    if node.target._opname in ("native_dropout", "dropout"):
        return bool(given["p"] and given["train"])
    return True


def is_assertion(node: Any) -> bool:
    """Whether an operator returns nothing: PyTorch's notes on dtypes that it relied on."""
    return node.target is not operator.getitem and not node.target._schema.returns


def is_view(node: Any) -> bool:
    """Whether as_strided gives the same elements in the same order, all of them."""
    before, after = node.args[0].meta["val"], node.meta["val"]
    is_whole = before.numel() == after.numel() and not after.storage_offset()
    return bool(is_whole and before.is_contiguous() and after.is_contiguous())
