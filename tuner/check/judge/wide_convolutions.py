"""Convolutions of float64 on a GPU, and their gradients, as matrix products.

cuDNN has slow kernels for them: the transposed ones, which gradients of the others are as well,
took 0.9 of a H100's 60 TFLOPS (2026-11-25), and most of the time of a check. Here what lies under
the filter at each pixel is copied, of some pixels at a time, and one product convolves them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.check.judge.cumulative_products import linear_gradients
from tuner.problem.dispatching import dispatched

if TYPE_CHECKING:
    import torch

__all__ = ["by_products", "exact_convolutions"]

MOST_ELEMENTS = 2**27  # of a copy and of what it is multiplied to: 1 GiB
# Each group is products of its own, which are small where there are many, as in depthwise ones.
MOST_GROUPS = 8


@contextlib.contextmanager
def exact_convolutions(is_wanted: bool = True) -> Iterator[None]:
    """Convolve float64 on a GPU by products, for as long as it is entered.

    So are gradients of any order that are computed while it is entered.
    """
    import torch

    if not is_wanted or not torch.cuda.is_initialized():  # each operation would pass through it
        yield
        return
    with linear_gradients(), by_products("cuda"):
        yield


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the places of a filter lie: those of a `small` tensor's pixel, in a `big` one.

    A convolution gathers its small result from a big input. A transposed one scatters its small
    input into a big result, and so does the gradient of the other. A tensor is samples x channels
    x size, a weight small channels x big channels x places; each field has one number a direction.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def small_size(self, big: torch.Tensor, weight: torch.Tensor) -> list[int]:
        around = zip(big.shape[2:], weight.shape[2:], *self._numbers, strict=True)
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in around]

    def big_size(
        self, small: torch.Tensor, weight: torch.Tensor, more: Sequence[int]
    ) -> list[int]:
        around = zip(small.shape[2:], weight.shape[2:], *self._numbers, more, strict=True)
        return [(n - 1) * s - 2 * p + d * (k - 1) + m + 1 for n, k, s, p, d, m in around]

    def gathered(
        self, big: torch.Tensor, weight: torch.Tensor, size: Sequence[int]
    ) -> torch.Tensor:
        """Return the small tensor, of that size, that is convolved of a big one."""
        import torch

        small = big.new_empty(big.shape[0], weight.shape[0], *size)
        for part, columns in self._columns(big, weight, size):
            made = torch.matmul(weight.flatten(1), columns.flatten(2))
            small[part] = made.unflatten(2, columns.shape[2:])
        return small

    def weighted(
        self, small: torch.Tensor, big: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Return a weight's gradient; one of the small and the big tensor is a gradient, too."""
        import torch

        made = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        for part, columns in self._columns(big, weight, small.shape[2:]):
            under = columns.flatten(2).transpose(1, 2)
            made.view(len(weight), -1).add_(torch.matmul(small[part].flatten(2), under).sum(0))
        return made

    def scattered(
        self, small: torch.Tensor, weight: torch.Tensor, size: Sequence[int]
    ) -> torch.Tensor:
        """Return the big tensor of that size into which a small one goes.

        Of its pixels those that are a stride apart have the same places of the filter: they are a
        convolution of the small tensor by these, with a stride of 1. PyTorch's `fold` of one
        product's result took an H200 2.5 times as long as that product (2026-12-03).
        """
        import torch

        big = small.new_zeros(small.shape[0], weight.shape[1], *size)
        if not bool(weight.isfinite().all()):  # times zeros beside the small tensor it is NaN
            self._add_by_places(big, small, weight)
            return big
        each = map(_phases, small.shape[2:], *self._numbers, weight.shape[2:], size)
        for phases in itertools.product(*each):
            around = [n for phase in reversed(phases) for n in phase.around]
            filters = weight[(..., *(phase.places for phase in phases))]
            filters = filters.flip([*range(2, weight.ndim)]).transpose(0, 1)
            apart = tuple(phase.dilation for phase in phases)
            geometry = Geometry((1,) * len(phases), (0,) * len(phases), apart)
            padded = torch.nn.functional.pad(small, around)
            made = geometry.gathered(padded, filters, [phase.size for phase in phases])
            big[(..., *(phase.pixels for phase in phases))] = made
        return big

    def _add_by_places(self, big: torch.Tensor, small: torch.Tensor, weight: torch.Tensor) -> None:
        """Add to a big tensor what each place of the filter makes, of pixels that there are."""
        import torch

        for place in itertools.product(*map(range, weight.shape[2:])):
            taken, given = [], []
            for n, b, s, p, d, k in zip(
                small.shape[2:], big.shape[2:], *self._numbers, place, strict=True
            ):
                first = max(0, -((k * d - p) // s))
                end = max(first, min(n, (b - 1 + p - k * d) // s + 1))
                taken.append(slice(first, end))
                at = first * s + k * d - p
                given.append(slice(at, at + (end - first) * s, s))
            some = small[(..., *taken)]
            if some.numel():
                made = torch.matmul(weight[(..., *place)].t(), some.flatten(2))
                big[(..., *given)] += made.unflatten(2, some.shape[2:])

    @property
    def _numbers(self) -> tuple[tuple[int, ...], ...]:
        return self.stride, self.padding, self.dilation

    def _columns(
        self, big: torch.Tensor, weight: torch.Tensor, size: Sequence[int]
    ) -> Iterator[tuple[Part, torch.Tensor]]:
        """Yield parts of the small tensor, and what lies under the filter at each of its pixels.

        That is samples x (channels x places) x size.
        """
        import torch

        around = [n for p in reversed(self.padding) for n in (p, p)]
        # Padding by nothing would be a copy, of gigabytes.
        padded = (torch.nn.functional.pad(big, around) if any(around) else big).contiguous()
        apart = padded.stride()[2:]
        places = [d * n for d, n in zip(self.dilation, apart, strict=True)]
        steps = [s * n for s, n in zip(self.stride, apart, strict=True)]
        under = padded.as_strided(
            (*padded.shape[:2], *weight.shape[2:], *size), (*padded.stride()[:2], *places, *steps)
        )
        dims = len(size)
        for part in _parts((big.shape[0], weight.shape[0], *size), weight):
            rows = part[2]
            some = under[part[0]].narrow(2 + dims, rows.start, rows.stop - rows.start)
            yield part, some.flatten(1, 1 + dims)


Part = tuple[slice, slice, slice]  # samples, all channels, rows of the first direction


@dataclass(frozen=True, slots=True)
class _Phase:
    """Along one direction, pixels of a big tensor a stride apart, and what goes into them.

    `places` of the filter, `around`: how many pixels of zeros the small tensor has before and
    behind (negative: less of it), `dilation` of these places, last first, in it.
    """

    pixels: slice
    size: int
    places: slice
    around: tuple[int, int]
    dilation: int


def _phases(
    num_small: int, stride: int, padding: int, dilation: int, num_places: int, num_big: int
) -> list[_Phase]:
    """Return the pixels of a big tensor into which something goes, by their phase.

    By place k of the filter pixel n of the small tensor goes into pixel
    `n * stride + k * dilation - padding`.
    """
    found = []
    step = stride // math.gcd(stride, dilation)
    apart = step * dilation // stride
    for first in range(min(stride, num_big)):
        size = len(range(first, num_big, stride))
        fitting = [k for k in range(num_places) if (first + padding - k * dilation) % stride == 0]
        if not fitting:
            continue
        begin = (first + padding - fitting[-1] * dilation) // stride
        end = begin + size + (len(fitting) - 1) * apart
        if begin < num_small and end > 0:
            pixels, places = slice(first, None, stride), slice(fitting[0], None, step)
            found.append(_Phase(pixels, size, places, (-begin, end - num_small), apart))
    return found


def _parts(shape: Sequence[int], weight: torch.Tensor) -> Iterator[Part]:
    """Yield parts of a small tensor, for whose columns there is room, and for their products."""
    row = weight[0].numel() * math.prod(shape[3:])
    num_samples, num_rows = shape[0], shape[2]
    most_rows = max(1, MOST_ELEMENTS // max(1, row))
    most_samples = max(1, MOST_ELEMENTS // max(1, row * num_rows, weight.numel()))
    for sample in range(0, num_samples, most_samples):
        samples = slice(sample, min(sample + most_samples, num_samples))
        for first in range(0, num_rows, most_rows):
            yield samples, slice(None), slice(first, min(first + most_rows, num_rows))


def by_products(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a mode that convolves float64 by products on such devices."""
    import torch

    convolve = torch.ops.aten.convolution.default
    differentiate = torch.ops.aten.convolution_backward.default

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        made = None
        if func is convolve and _is_fitting(device, args[0], args[1], args[8]):
            made = _convolved(*args)
        elif func is differentiate and _is_fitting(device, args[1], args[2], args[9]):
            made = _differentiated(*args)
        return func(*args, **kwargs) if made is None else made

    return dispatched(run)


def _is_fitting(device: str, x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    import torch

    of_batches = x.ndim == weight.ndim and x.numel() > 0 and weight.numel() > 0
    is_wide = x.dtype == weight.dtype == torch.float64
    return is_wide and x.device.type == device and 0 < groups <= MOST_GROUPS and of_batches


def _convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    is_transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor | None:
    """Return what `aten.convolution` does; None where PyTorch says what is wrong."""
    dims = x.ndim - 2
    geometry = Geometry(_each(stride, dims), _each(padding, dims), _each(dilation, dims))
    num_channels = len(weight) if is_transposed else weight.shape[1] * groups
    if x.shape[1] != num_channels or len(weight) % groups:
        return None
    if is_transposed:
        more = _each(output_padding, dims)
        if any(map(operator.ge, more, map(max, geometry.stride, geometry.dilation))):
            return None
        size = geometry.big_size(x, weight, more)
    else:
        size = geometry.small_size(x, weight)
    num_made = weight.shape[1] * groups if is_transposed else len(weight)
    if min(size) < 1 or (bias is not None and bias.numel() != num_made):
        return None
    convolve = geometry.scattered if is_transposed else geometry.gathered
    tensors = x.chunk(groups, 1), weight.chunk(groups)
    made = _joined([convolve(*each, size) for each in zip(*tensors, strict=True)], 1)
    return made if bias is None else made.add_(bias.view(-1, *(1,) * dims))


def _differentiated(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    is_transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    is_wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Return what `aten.convolution_backward` does: gradients of input, weight and bias."""
    dims = x.ndim - 2
    geometry = Geometry(_each(stride, dims), _each(padding, dims), _each(dilation, dims))
    of_input = of_weight = of_bias = None
    inputs, weights, grads = x.chunk(groups, 1), weight.chunk(groups), grad.chunk(groups, 1)
    if is_wanted[0]:
        convolve = geometry.gathered if is_transposed else geometry.scattered
        made = [convolve(*each, x.shape[2:]) for each in zip(grads, weights, strict=True)]
        of_input = _joined(made, 1)
    if is_wanted[1]:
        small, big = (inputs, grads) if is_transposed else (grads, inputs)
        of_weight = _joined([*map(geometry.weighted, small, big, weights)], 0)
    if is_wanted[2]:
        of_bias = grad.sum([0, *range(2, grad.ndim)])
    return of_input, of_weight, of_bias


def _joined(made: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the tensors of groups as one; the only one as it is, since a copy takes gigabytes."""
    import torch

    return made[0] if len(made) == 1 else torch.cat(made, dim)


def _each(numbers: Sequence[int], dims: int) -> tuple[int, ...]:
    return (*numbers,) * (dims // len(numbers))
