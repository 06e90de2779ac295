"""Recurrent networks as one call each: their shapes, without a step for each place in time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tuner.capture.graph.graph import Graph

if TYPE_CHECKING:
    import torch

__all__ = ["is_recurrent", "recurrent_by_shape"]

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def is_recurrent(graph: Graph) -> bool:
    """Whether it calls a recurrent network."""
    return any(node.op.removeprefix("aten.") in _NAMES for node in graph.nodes)


@contextlib.contextmanager
def recurrent_by_shape() -> Iterator[None]:
    """Let recurrent networks on fake tensors give shapes alone, in this process, while entered.

    PyTorch computes these from a loop over time: six layers of an LSTM over 512 places took
    minutes to record. What is recorded is the same one call; gradients cannot be.
    """
    import torch
    from torch._decomp import decomposition_table

    kinds = torch._C.DispatchKey
    keys = (kinds.CompositeImplicitAutograd, kinds.Autograd, kinds.Meta)
    ops = [getattr(torch.ops.aten, name).input for name in _NAMES]
    places = [(op, key) for op in ops for key in keys]
    before = [(op, key, op.py_kernels.get(key)) for op, key in places]
    # Fake tensors of PyTorch 2.11 look here first; a state has one dimension too many there.
    decomposed = {op: decomposition_table[op] for op in ops if op in decomposition_table}

    def put(op: Any, key: Any, kernel: Any) -> None:
        if kernel is None:
            op.py_kernels.pop(key, None)
        else:
            op.py_kernels[key] = kernel
        op._dispatch_cache.clear()

    for op, key in places:
        put(op, key, _shapes)
    decomposition_table.update(dict.fromkeys(decomposed, _shapes))
    try:
        yield
    finally:
        decomposition_table.update(decomposed)
        for op, key, kernel in before:
            put(op, key, kernel)


def _shapes(x: torch.Tensor, hx: Any, *others: Any) -> tuple[torch.Tensor, ...]:
    """Return empty tensors as a network gives them: what each place makes, and the last states.

    `others` are params, has_biases, num_layers, dropout, train, bidirectional, batch_first.
    """
    states = hx if isinstance(hx, list | tuple) else [hx]
    directions = 2 if others[5] else 1
    made = x.new_empty((*x.shape[:-1], directions * states[0].shape[-1]))
    return (made, *(state.new_empty(state.shape) for state in states))
