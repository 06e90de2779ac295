"""How far rounding can move an answer: each result of a reference's run moved by its last bits.

A gradient in which large terms cancel is exact where PyTorch's own operation happens to subtract
what it has just computed, and off by the rounding of those terms in any other order of the same
sums. The baseline's own error says nothing of that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tuner.check.calls.exercise import outputs_of
from tuner.check.judge.cumulative_products import linear_gradients
from tuner.check.probes.probe import Probe
from tuner.problem.dispatching import dispatched

if TYPE_CHECKING:
    import torch

__all__ = ["UNUSUAL", "each_result", "is_noisy", "noise"]

# Where softmaxes saturate, or deviations from a mean are small beside it.
UNUSUAL = (
    "offset", "heavy_tailed", "late_rows", "wide_range", "wide_columns", "huge", "tiny",
    "constant_columns",
)  # fmt: skip
# Convolutions have ways of their own, and products by how their operands lie.
REORDERED = (
    "channels_last", "chunked", "reversed", "rows inside", "transposed", "transposed padded",
    "transposed cut",
)  # fmt: skip
ALIKE = ("same", "shared")  # two inputs that are one: differences of them are zero, or nearly
FEW_ROWS = 33
MANY_CALLS = 12
MOST_ULPS = 4  # another order of sums, and steps that PyTorch does not take
# Numbers drawn on a CPU, where each takes 7 ns, as long as ten of what a judge does with it: then
# they are repeated. A prime, so that none is at the same place of each row.
PERIOD = 65_521


def is_noisy(probe: Probe) -> bool:
    """Whether what a probe asks for may be sums of terms that cancel, or remember other sums."""
    has_few = probe.batch is not None and probe.batch < FEW_ROWS and not probe.is_reduced
    is_unusual = bool(probe.gradients) or has_few or probe.layout != "contiguous"
    is_close = bool(probe.gradients) and has_few
    return (
        probe.layout in (*REORDERED, *ALIKE)
        or probe.layout == "mixed"  # a part of which is float32
        or probe.is_touched
        or (bool(probe.at_once) and probe.calls > MANY_CALLS)  # one of them is off by chance
        or probe.has_zeros  # after which normalisations divide by what rounding has left
        or probe.dtype == "float64"  # after calls in float32, which buffers of answers remember
        or (probe.distribution in UNUSUAL and is_unusual)
        or (probe.distribution in ("normal", "dyadic") and is_close)
    )


@contextlib.contextmanager
def noise(keeps_copies: bool = False, *, ulps: float = MOST_ULPS, seed: int = 0) -> Iterator[None]:
    """Move each floating-point number that an operation makes inside, at random.

    With `keeps_copies` a copy stays as it is: where what is far from 0 is brought near to it, the
    last bits of an input are most of the answer.
    """
    import torch

    def move(func: Any, y: torch.Tensor) -> None:
        if keeps_copies and func is torch.ops.aten.clone.default:
            return
        eps = ulps * torch.finfo(y.dtype).eps
        generator = generators.get(y.device)
        if generator is None:
            generators[y.device] = generator = torch.Generator(y.device)
            generator.manual_seed(seed or generator.initial_seed())
        if y.is_cpu and y.numel() > PERIOD:
            few = torch.empty(PERIOD, dtype=y.dtype).uniform_(-eps, eps, generator=generator)
            drawn = few.add_(1.0).repeat(-(-y.numel() // PERIOD))[: y.numel()].view(y.shape)
        else:
            drawn = torch.empty_like(y).uniform_(-eps, eps, generator=generator).add_(1.0)
        y.mul_(drawn)

    generators: dict[Any, Any] = {}
    with linear_gradients(), each_result(move):
        yield


def each_result(
    look: Callable[[Any, torch.Tensor], None],
) -> contextlib.AbstractContextManager[Any]:
    """Show each operation inside, and each new floating-point tensor it makes; `look` may edit it.

    What an operation edits or views is not new.
    """
    import torch

    def looked_at(func: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        for y, said in zip(outputs_of(made), func._schema.returns, strict=False):
            is_number = isinstance(y, torch.Tensor) and y.is_floating_point() and not y.is_sparse
            # Zeros of autograd's forward mode have no memory: to read them ends the process.
            is_held = is_number and y.numel() and not torch._is_zerotensor(y)
            if is_held and said.alias_info is None:
                look(func, y)
        return made

    return dispatched(looked_at)
