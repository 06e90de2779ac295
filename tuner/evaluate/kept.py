"""A few elements of every output of every timed call, and what they must be.

The contender's process draws the positions when a call has returned, and hands over what it kept
when all calls are over. Which calls are compared is drawn afterwards, in another process.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.calls.crossing import Script, pack
from tuner.check.calls.exercise import kinds_of, outputs_of
from tuner.check.judge.compare import compare, limits_of
from tuner.check.judge.expected import Expected
from tuner.check.judge.luck import FEW, MOST_LUCK
from tuner.evaluate.child import Answer
from tuner.evaluate.inputs import REPEATED_FROM
from tuner.machine.platforms import is_gpu
from tuner.problem.accuracy import Accuracy

if TYPE_CHECKING:
    import torch

__all__ = ["NUM_ELEMENTS", "Keeper", "missing_calls", "wrong_element"]

NUM_ELEMENTS = 16  # kept of each output of each call
# A kept element may be as far beyond its limit as a near miss of a probe, which other draws would
# decide: what a call left out is much further away.
NEAR_MISS = 4.0

BLOCK_CALLS = 2048  # whose elements share memory

Key = tuple[Any, ...]  # what outputs are, cheaper to compute than their description


class Keeper:
    """Keeps elements of outputs; made before a stranger's file is imported.

    PyTorch's and the system's functions are bound here, so that one that is replaced later is
    not called.
    """

    def __init__(self, device: str) -> None:
        import numpy as np
        import torch

        self._is_cuda = is_gpu(device)
        self._urandom, self._numpy = os.urandom, np
        self._tensor, self._from_numpy = torch.Tensor, torch.from_numpy
        self._as_strided, self._index_select = torch.as_strided, torch.index_select
        self._strided = torch.strided
        self.clear()

    def clear(self) -> None:
        """Forget all calls: those that follow are given other inputs."""
        self._numbers: list[int] = []
        self._usual: Key | None = None  # of the first call's outputs
        self._kinds: tuple[str, ...] = ()
        self._odd: tuple[str, ...] | None = None  # of the first call that returned others
        self._plain: list[int] = []  # which outputs are tensors with strides
        self._blocks: list[list[tuple[Any, torch.Tensor]]] = []  # positions, values of an output

    def keep(self, call: int, result: Any) -> None:
        """Copy `NUM_ELEMENTS` random elements of each output of a call that has just returned.

        On a GPU the copy is enqueued on the current stream, and nothing is waited for: work that
        goes on elsewhere is not done yet when it is looked at.

        Args:
            call: its number, which tells what inputs it had.
            result: what it returned. Elements are kept of plain tensors alone.
        """
        outputs = outputs_of(result)
        key = (type(result), *(self._key_of(output) for output in outputs))
        row = len(self._numbers) % BLOCK_CALLS
        if self._usual is None:
            self._usual, self._kinds = key, kinds_of(result)
            plain = [j for j, y in enumerate(outputs) if type(y) is self._tensor]
            self._plain = [j for j in plain if outputs[j].layout is self._strided]
        elif key != self._usual and self._odd is None:
            self._odd = kinds_of(result)
        self._numbers.append(call)
        if self._odd is not None:
            return
        if row == 0:
            self._blocks.append([self._block(outputs[j]) for j in self._plain])
        for j, (positions, values) in zip(self._plain, self._blocks[-1], strict=True):
            if outputs[j].numel():
                self._copy(outputs[j], positions[row], values[row])

    def _block(self, output: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Return memory for the positions and elements of an output of the next calls.

        Small memory of each call's own would lie between the outputs of the calls: an operator
        of 85 us took 127 us, since its allocations no longer fell into the same place.
        """
        shape = (BLOCK_CALLS, NUM_ELEMENTS if output.numel() else 0)
        return self._numpy.zeros(shape, dtype=self._numpy.int64), output.new_zeros(shape)

    def _key_of(self, output: Any) -> Key:
        if not isinstance(output, self._tensor):
            return (type(output),)
        return (
            type(output), output.dtype, output.shape, output.device, output.requires_grad,
            output.is_inference(),
        )  # fmt: skip

    def _copy(self, output: torch.Tensor, positions: Any, values: torch.Tensor) -> None:
        """Draw positions in the flattened output, and copy the elements there.

        They are found by their place in memory: a flat view of any strides would be a copy.
        """
        np = self._numpy
        output = output.detach().resolve_neg()
        drawn = np.frombuffer(self._urandom(8 * NUM_ELEMENTS), dtype=np.uint64)
        positions[:] = drawn % np.uint64(output.numel())
        offsets, extent = positions, output.numel()
        if not output.is_contiguous():
            offsets, rest, extent = np.zeros_like(positions), positions, 1
            for length, stride in zip(output.shape[::-1], output.stride()[::-1], strict=True):
                offsets = offsets + rest % length * stride
                rest, extent = rest // length, extent + (length - 1) * stride
        flat = self._as_strided(output, (extent,), (1,), output.storage_offset())
        index = self._from_numpy(offsets)
        if self._is_cuda:  # pinned, else the copy could wait for what is enqueued before it
            index = index.pin_memory().to(output.device, non_blocking=True)
        self._index_select(flat, 0, index, out=values)

    def kept(self) -> Answer:
        """Return what was kept, as one tensor for all calls' elements of an output.

        `numbers` are the calls', `kinds` those of the first call, and `odd` tells of the first
        call that returned another kind ("" where there is none; then no elements are returned).
        `positions.<j>` and `values.<j>` are [call][element] of output j.
        """
        import torch

        tensors: dict[str, torch.Tensor] = {}
        if self._odd is None and self._blocks:
            count = len(self._numbers)
            for place, j in enumerate(self._plain):
                positions = self._numpy.concatenate([block[place][0] for block in self._blocks])
                values = torch.cat([block[place][1] for block in self._blocks])
                tensors[f"positions.{j}"] = self._from_numpy(positions)[:count]
                tensors[f"values.{j}"] = values[:count]
        text, blobs = pack(Script(), tensors)
        return {
            "numbers": self._numbers,
            "kinds": list(self._kinds),
            "odd": "" if self._odd is None else ", ".join(self._odd),
            "kept": text,
        }, blobs


def missing_calls(numbers: Sequence[int], num_asked: int) -> str:
    """Return why the calls that elements were kept of cannot be all that were asked for.

    Args:
        numbers: of the calls that something was kept of.
        num_asked: how many calls the process was asked for; it may have made more.
    """
    twice = [number for number, count in Counter(numbers).items() if count > 1]
    if twice:
        return f"timed call {twice[0]} was reported twice; each call has one output"
    for is_repeated in (False, True):
        own = sorted(n for n in numbers if (n >= REPEATED_FROM) == is_repeated)
        if own and own[-1] - own[0] + 1 != len(own):
            missing = own[-1] - own[0] + 1 - len(own)
            return f"of {missing} timed calls no output was kept; one of every call is expected"
    if len(numbers) < num_asked:
        return (
            f"of {num_asked - len(numbers)} of {num_asked} timed calls no output was kept; "
            "one of every call is expected"
        )
    return ""


def wrong_element(
    expected: Expected,
    kinds: Sequence[str],
    positions: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    accuracy: Accuracy,
) -> str:
    """Compare kept elements of one call with the reference's; return what is wrong, or nothing.

    Args:
        expected: of that call.
        kinds: of its outputs.
        positions: of elements in the flattened outputs, by the output's name ("call0.output0").
        values: those elements.
        accuracy: the class whose limits hold.
    """
    if tuple(kinds) != expected.report.kinds[0]:
        return f"it returned {', '.join(kinds)}; expected {', '.join(expected.report.kinds[0])}"
    for number, (name, oracle) in enumerate(expected.oracle.items()):
        if name not in positions or name not in values:
            return f"nothing was kept of output {number + 1}; some elements are expected"
        places, got = positions[name], values[name]
        if len(places) != len(got) or len(places) != min(
            NUM_ELEMENTS, NUM_ELEMENTS * oracle.numel()
        ):
            return f"{len(got)} elements were kept of output {number + 1}; expected {NUM_ELEMENTS}"
        if not len(places):
            continue
        if got.dtype != expected.dtypes[name] or not 0 <= int(places.min()) <= int(
            places.max()
        ) < (oracle.numel()):
            return f"what was kept of output {number + 1} is not of that output"
        want = oracle.reshape(-1)[places]
        mask = expected.unjudged.get(name)
        unjudged = None if mask is None else mask.reshape(-1)[places]
        dtype = str(expected.dtypes[name]).removeprefix("torch.")
        baseline = expected.baseline[name]
        limits = limits_of(name, baseline, expected.num_rows, accuracy, dtype=dtype)
        error = compare(got, want, unjudged, accuracy)
        # The limit of the root mean square is one of a whole output; 16 elements may exceed it.
        near = MOST_LUCK if oracle.numel() <= FEW else NEAR_MISS  # PyTorch's luck with a number
        if limits.excess(dataclasses.replace(error, rms_abs=0.0)) > near:
            difference = (got.double() - want.double()).abs().nan_to_num(float("inf"))
            if unjudged is not None:
                difference = difference.masked_fill(unjudged, 0.0)
            at = int(difference.argmax())
            return (
                f"element {int(places[at])} of output {number + 1}: got {got[at].item():.9g}, "
                f"expected {want[at].item():.9g}"
            )
    return ""
