"""What a file keeps of its modules outside them: by their place in memory, or by a number."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["read_elsewhere", "successor", "tables_of", "use"]

NUM_OTHERS = 3  # what a call itself makes may take the first place that gets free
MOST_TRIES = 2
_TABLES = (
    dict, list, set, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
)  # fmt: skip


def tables_of(model: Any) -> list[tuple[Any, list[Any]]]:
    """Return the tables that a module's file and its classes hold, each with its keys."""
    room = vars(sys.modules[type(model).__module__])
    classes = [
        c for c in room.values() if isinstance(c, type) and c.__module__ == room["__name__"]
    ]
    return [
        (value, list(value))
        for place in (room, *map(vars, classes))
        for name, value in list(place.items())
        if isinstance(value, _TABLES) and name[:2] != "__"
    ]


def read_elsewhere(model: Any, tables: list[tuple[Any, list[Any]]]) -> Any:
    """Save a module and read it where its file's tables are as they were when it was not there.

    What came into them since then is dropped, as in another process that has imported the file.
    """
    import torch

    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    for table, before in tables:
        if isinstance(table, list):
            del table[len(before) :]
            continue
        for key in [key for key in table if key not in before]:
            if isinstance(table, (set, weakref.WeakSet)):
                table.discard(key)
            else:
                del table[key]
    return torch.load(memory, weights_only=False)


def use(model: Any, arguments: Sequence[Any]) -> None:
    """Call a module in both modes, without gradients; whether it refuses is not asked here."""
    import torch

    with torch.no_grad(), contextlib.suppress(Exception):
        for is_on in (True, False):
            model.train(is_on)(*arguments)


def successor(
    make: Callable[[], torch.nn.Module], make_other: Callable[[], torch.nn.Module]
) -> torch.nn.Module:
    """Return a module that lies where another one lay, which is no more, if that can be had.

    Args:
        make: makes the module.
        make_other: makes the other one, and uses it.
    """
    kept: list[torch.nn.Module] = []  # until the end, so that the next lies elsewhere
    while True:
        try:
            others = [make_other() for _ in range(NUM_OTHERS)]
        except Exception:  # it refuses such options, which another probe asks
            return make()
        places = {id(other) for other in others}
        last = weakref.ref(others[-1])
        others.clear()
        if last() is not None:
            gc.collect()
        model = make()
        if id(model) in places or len(kept) == MOST_TRIES:
            return model
        kept.append(model)
