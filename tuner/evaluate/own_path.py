"""Whether a timed module runs the reference's own operations: then no time is a speed-up."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["is_compiled", "is_own_path"]

# What costs next to nothing: views, and memory that is not written. Copies and conversions cost
# time and may be what a file spares, so they count.
_FREE = {
    *("alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand"),
    *("lift_fresh", "new_empty", "permute", "select", "slice", "split", "squeeze", "t"),
    *("transpose", "unsqueeze", "view", "_unsafe_view"),
}


def is_own_path(theirs: Sequence[str], mine: Sequence[str]) -> bool:
    """Whether both ran the same operations in the same order, e.g. `aten.addmm`; views aside.

    Args:
        theirs: the reference's.
        mine: the contender's; none where they could not be traced.
    """
    theirs, mine = (
        [name for name in names if name.removeprefix("aten.") not in _FREE]
        for names in (theirs, mine)
    )
    return bool(theirs) and theirs == mine


def is_compiled(model: Any) -> bool:
    """Whether something in this process is compiled by PyTorch: tracing would run it otherwise."""
    import torch

    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return True
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"]["unique_graphs"])
