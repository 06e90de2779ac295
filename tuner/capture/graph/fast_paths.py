"""What PyTorch's attention modules run in eval mode without gradients: one fused operation.

A recording does not see it: while it is made, they run as in training mode. Beside numbers near
the largest the two differ, and the fused one has no parts for which kernels could be generated.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tuner.capture.graph.tracing import fake_module
from tuner.problem.dispatching import dispatched
from tuner.problem.reference import Problem

__all__ = ["fast_paths"]

_FUSED = {"_transformer_encoder_layer_fwd", "_native_multi_head_attention"}


def fast_paths(problem: Problem) -> list[str]:
    """Return the fused operations of a call in eval mode without gradients, e.g. `aten.x`.

    Raises:
        CaptureError: the module or its inputs cannot be made.
    """
    import torch

    found: list[str] = []

    def watched(func: Any, args: Any, kwargs: Any) -> Any:
        name = str(func.overloadpacket)
        if name.rpartition(".")[2] in _FUSED and name not in found:
            found.append(name)
        return func(*args, **kwargs)

    with fake_module(problem, "eval") as (model, _, values, _):
        kinds = torch.nn.MultiheadAttention | torch.nn.TransformerEncoderLayer
        if not any(isinstance(part, kinds) for part in model.modules()):
            return []
        # What fails without gradients fails when it is checked, with its reason.
        with suppress(Exception), torch.no_grad(), dispatched(watched):
            model(*values)
    return found
