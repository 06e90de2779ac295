"""How a module is exercised, the candidate and the reference alike.

Arguments are laid out, outputs copied and bits added up by the producer for the candidate and by
the judge for the reference: what differs then comes from the candidate. What is done to the module
between its calls is in `history`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import xxhash

from tuner.check.calls.crossing import Script
from tuner.check.calls.layouts import opposite
from tuner.check.calls.lending import as_bytes
from tuner.problem.dispatching import dispatched
from tuner.problem.returned import is_plain, tensors_of, words_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "CHUNK_ELEMENTS",
    "DRAWN",
    "NAMED",
    "STAYS",
    "arguments_of",
    "asked_through",
    "called_with",
    "checksum_of",
    "checksums",
    "checksums_of",
    "keys_of",
    "kinds_of",
    "mode_of",
    "num_elements",
    "outputs_of",
    "read_at_once",
    "recorded",
    "snapshot",
    "snapshots",
    "stays",
    "tensors_under",
]

NONE: Mapping[str, Any] = MappingProxyType({})
NAMED = "in"  # how what kinds say of a container with names begins
STAYS = "what a call returned stays in memory when nobody has it any more"
DRAWN = "drawn by the constructor"  # the name of the checksum of what random numbers come next
FLOPS_OF_A_NUMBER = 512  # a CPU's core does them in the 10 ns that it takes for each number
# Of 8 bytes, of a row in a checksum: an odd number, so that a bit that changes in all of them does
# not vanish from their sum.
_ROW_WORDS = 4095
_ODD = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
CHUNK_ELEMENTS = 2**24  # 128 MB a float64 temporary; a comparison holds about six


def tensors_under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors named `<prefix>.<name>`, by name."""
    start = len(prefix) + 1
    return {n[start:]: t for n, t in tensors.items() if n.startswith(prefix + ".")}


def keys_of(model: torch.nn.Module) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return a model's state_dict as (name, dtype, shape)."""
    return [(n, str(t.dtype), tuple(t.shape)) for n, t in model.state_dict().items()]


def arguments_of(script: Script, tensors: Mapping[str, torch.Tensor], call: int) -> list[Any]:
    """Return one call's arguments as the question gives them, tensors and numbers."""
    source = 0 if script.is_repeated else call
    names = [f"{source}.{i}" for i in range(script.num_inputs)]
    return [
        script.numbers[name] if name in script.numbers else tensors[f"input.{name}"]
        for name in names
    ]


@contextlib.contextmanager
def recorded(
    operations: list[str], is_wanted: bool = True, sizes: list[int] | None = None
) -> Iterator[None]:
    """Add to `operations` what PyTorch's dispatcher runs inside, e.g. `aten.addmm`.

    `sizes` gets the number of elements of each result, and what its products amount to.
    """
    if not is_wanted:
        yield
        return
    import torch

    def record(func: Any, args: Any, kwargs: Any) -> Any:
        operations.append(str(func).rpartition(".")[0])
        made = func(*args, **kwargs)
        if sizes is not None:
            sizes.extend(y.numel() for y in outputs_of(made) if isinstance(y, torch.Tensor))
            sizes.append(_products_of(func, args, kwargs, made))
        return made

    with dispatched(record):
        yield


def _products_of(func: Any, args: Any, kwargs: Any, made: Any) -> int:
    """Return as how many numbers products count: on a GPU as none, they take no time."""
    import torch
    from torch.utils.flop_counter import flop_registry

    count = flop_registry.get(func._overloadpacket)
    if count is None or not isinstance(made, torch.Tensor) or made.device.type != "cpu":
        return 0
    return int(count(*args, **kwargs, out_val=made)) // FLOPS_OF_A_NUMBER


def num_elements(problem: Any, model: torch.nn.Module, values: Sequence[Any]) -> int:
    """Return how many numbers a call takes and makes, those in between and products as well."""
    import torch

    sizes = [value.numel() for value in values if isinstance(value, torch.Tensor)]
    with recorded([], sizes=sizes):
        problem.call(model, values)
    return sum(sizes)


def _kind_of(value: Any) -> str:
    """Describe an output: exact type, dtype, shape and device in one line."""
    import torch

    cls = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor:
        cls = f"subclass {cls}"
    if not isinstance(value, torch.Tensor):
        return cls
    dtype = str(value.dtype).removeprefix("torch.")
    # Where gradients are on, only those that are asked for tell what is connected.
    is_kept = value.requires_grad and not torch.is_grad_enabled()
    hint = ", with a graph of gradients though these are off" if is_kept else ""
    if value.is_inference() and not torch.is_inference_mode_enabled():
        hint += ", of no use to autograd (inference mode)"
    return f"{cls} {dtype}{list(value.shape)} on {value.device.type}{hint}"


def outputs_of(result: Any) -> tuple[Any, ...]:
    """Return what a call returned as a tuple.

    A container's own class is not asked for its items: it could compute them when looked at.
    """
    return tensors_of(result)


def kinds_of(result: Any) -> tuple[str, ...]:
    """Describe each output of a call; a container where it holds one alone, or has names."""
    outputs = outputs_of(result)
    has_names = not is_plain(result)  # by which a caller takes what a dictionary holds, say
    is_wrapped = not has_names and len(outputs) == 1 and outputs[0] is not result
    kinds = tuple(_kind_of(y) + (" in a tuple" if is_wrapped else "") for y in outputs)
    return (*kinds, f"{NAMED} {words_of(result)}") if has_names else kinds


def snapshot(output: torch.Tensor) -> torch.Tensor:
    """Return a contiguous and dense copy of an output, taken now."""
    import torch

    with torch.no_grad():
        if output.is_sparse:
            return output.detach().to_dense()
        return output.detach().clone(memory_format=torch.contiguous_format)


def snapshots(outputs: Sequence[Any]) -> list[torch.Tensor | None]:
    """Return a copy of each output, None for what is no tensor."""
    import torch

    return [snapshot(y) if isinstance(y, torch.Tensor) else None for y in outputs]


def called_with(called: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Make a call."""
    return called(*values)


def stays(called: Callable[..., Any], values: Sequence[Any]) -> bool:
    """Whether the memory of a call's results is still taken once nobody has them.

    Gradients are recorded, as in a validation without `no_grad`: what a graph keeps of its own
    result is beyond Python's collector.
    """
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    with torch.enable_grad():
        made = outputs_of(called_with(called, values))
    tensors = [y for y in made if isinstance(y, torch.Tensor) and y.layout == torch.strided]
    memory = [StorageWeakRef(y.untyped_storage()) for y in tensors]
    del made, tensors
    if not all(each.expired() for each in memory):
        gc.collect()
    return not all(each.expired() for each in memory)


def asked_through(model: torch.nn.Module, script: Script, call: int) -> Callable[..., Any]:
    """Return what a script calls: the module, a method of it, or one that tells attributes too."""
    called: Callable[..., Any] = model
    if script.methods:
        called = getattr(model, script.methods[call % len(script.methods)])
    if script.attributes:
        called = functools.partial(_with_attributes, model, script.attributes)
    return called


def _with_attributes(model: Any, names: Sequence[str], *arguments: Any) -> tuple[Any, ...]:
    outputs = outputs_of(model(*arguments))
    said = []
    for name in names:
        place, _, attribute = name.rpartition(".")
        said.append(getattr(model.get_submodule(place), attribute).detach().clone())
    return (*outputs, *said)


@contextlib.contextmanager
def mode_of(script: Script, is_exact: bool = False) -> Iterator[None]:
    """Set what surrounds each call of a script: inference mode, and the default dtype.

    The oracle (`is_exact`) keeps its own dtype, or it would lose digits.
    """
    import torch

    default = torch.get_default_dtype()
    try:
        if script.default_dtype and not is_exact:
            torch.set_default_dtype(getattr(torch, script.default_dtype))
        inference = torch.inference_mode() if script.is_inference else contextlib.nullcontext()
        with inference:
            yield
    finally:
        torch.set_default_dtype(default)


def checksums_of(
    model: torch.nn.Module, arguments: Sequence[Any], more: Mapping[str, torch.Tensor] = NONE
) -> dict[str, int]:
    """Return checksums of what a call must leave as it was: inputs, parameters and `more`."""
    import torch

    inputs = {
        f"input.{i}": value for i, value in enumerate(arguments) if isinstance(value, torch.Tensor)
    }
    weights = {f"weight.{name}": value for name, value in model.named_parameters()}
    return checksums({**more, **inputs, **weights})


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return `checksum_of` each; a GPU is waited for once, which takes as long as its sums."""
    import torch

    found = {name: _checksum(tensor) for name, tensor in tensors.items()}
    waiting = {name: sum_ for name, sum_ in found.items() if isinstance(sum_, torch.Tensor)}
    arrived = dict(zip(waiting, read_at_once([*waiting.values()]), strict=True))
    return {name: int(arrived.get(name, sum_)) for name, sum_ in found.items()}


def checksum_of(tensor: torch.Tensor) -> int:
    """Return 64 bits that depend on a tensor's bits and their places; equal on one device."""
    return int(_checksum(tensor))


def read_at_once(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return tensors of one shape and dtype as Python's numbers; a device is waited for once."""
    import torch

    found: list[Any] = [None] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        here = [n for n, tensor in enumerate(tensors) if tensor.device == device]
        numbers = torch.stack([tensors[n] for n in here]).tolist()
        for place, number in zip(here, numbers, strict=True):
            found[place] = number
    return found


def _checksum(tensor: torch.Tensor) -> torch.Tensor | int:
    """Return a checksum, on the device where that computes it."""
    tensor = tensor.detach()
    if tensor.is_neg() and tensor.is_floating_point():
        tensor = opposite(tensor._neg_view())
    bits = as_bytes(tensor.resolve_neg())
    if bits.device.type == "cpu":  # many times as fast as the sum below
        return xxhash.xxh3_64_intdigest(memoryview(bits.numpy()))
    return _summed(bits)


def _summed(bits: torch.Tensor) -> torch.Tensor | int:
    """Return a checksum of bytes by sums, as a GPU computes it and on that."""
    import torch

    words = bits[: bits.numel() // 8 * 8]
    # Copied when the storage offset is no multiple of 8 bytes, which view() refuses.
    is_odd = words.storage_offset() % 8 != 0
    whole = (words.clone() if is_odd else words).view(torch.int64)
    # Sums of rows and of columns read the memory twice; a weight for every word, ten times. A sum
    # in int64 of words of 32 bits would copy them to 64 first.
    width = _ROW_WORDS
    table = whole[: whole.numel() // width * width].view(-1, width)
    parts = [whole[table.numel() :], bits[words.numel() :].long(), table.sum(0), table.sum(1)]
    # Each weight is odd, so that the highest bit, as of a sign, would be lost between two of them:
    # it is mixed into the lower ones first.
    sums = [
        ((part ^ (part >> 32)) * _weights(seed, part.numel(), bits.device)).sum()
        for seed, part in enumerate(parts)
        if part.numel()
    ]
    return torch.stack(sums).sum() if sums else 0


@functools.lru_cache(256)  # a check asks for the same sizes hundreds of times
def _weights(start: int, number: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers of 64 bits; products wrap: neighbours differ in all of their bits."""
    import torch

    mixed = (torch.arange(start, start + number, device=device) + 1) * _ODD
    return (mixed ^ (mixed >> 29)) | 1
