"""How a module is exercised, the candidate and the reference alike.

Arguments are laid out, outputs copied and bits added up by the producer for the candidate and by
the judge for the reference: what differs then comes from the candidate. What is done to the module
between its calls is in `history`.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tuner.check.crossing import Edits, GradientLayout, Script
from tuner.check.layouts import laid_out

if TYPE_CHECKING:
    import torch

__all__ = [
    "CHUNK_ELEMENTS",
    "OUTPUT_FACTORS",
    "accumulated",
    "arguments_of",
    "checksum_of",
    "checksums_of",
    "edit_before_backward",
    "gradients_of",
    "keys_of",
    "kind_of",
    "kinds_of",
    "leaves_of",
    "mode_of",
    "num_elements",
    "outputs_of",
    "recorded",
    "snapshot",
    "snapshots",
    "tensors_under",
    "with_tangents",
]

# An edited output hands its gradient on by this factor.
OUTPUT_FACTORS: dict[Edits, float] = {"output": 0.5, "output negated": -1.0}
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

    `sizes` gets the number of elements of each result.
    """
    if not is_wanted:
        yield
        return
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    def record(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operations.append(str(func).rpartition(".")[0])
        made = func(*args, **(kwargs or {}))
        if sizes is not None:
            sizes.extend(y.numel() for y in outputs_of(made) if isinstance(y, torch.Tensor))
        return made

    words = {
        "__torch_dispatch__": record,
        # Else the first operation imports all of dynamo: 1.2 s.
        "_should_skip_dynamo": classmethod(lambda cls: False),
    }
    recorder: Any = type("Recorder", (TorchDispatchMode,), words)
    with recorder():
        yield


def num_elements(problem: Any, model: torch.nn.Module, values: Sequence[Any]) -> int:
    """Return how many numbers a call takes and makes, those in between as well."""
    import torch

    sizes = [value.numel() for value in values if isinstance(value, torch.Tensor)]
    with recorded([], sizes=sizes):
        problem.call(model, values)
    return sum(sizes)


def kind_of(value: Any) -> str:
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

    A tuple's own class is not asked for its items: it could compute them when looked at.
    """
    for kind in (tuple, list):
        if issubclass(type(result), kind):
            return tuple(kind.__iter__(result))
    return (result,)


def kinds_of(result: Any) -> tuple[str, ...]:
    """Describe each output of a call, and a container where it holds one output alone."""
    outputs = outputs_of(result)
    is_wrapped = len(outputs) == 1 and outputs[0] is not result
    return tuple(kind_of(y) + (" in a tuple" if is_wrapped else "") for y in outputs)


def snapshot(output: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of an output, taken now."""
    import torch

    with torch.no_grad():
        return output.detach().clone(memory_format=torch.contiguous_format)


def snapshots(outputs: Sequence[Any]) -> list[torch.Tensor | None]:
    """Return a copy of each output, None for what is no tensor."""
    import torch

    return [snapshot(y) if isinstance(y, torch.Tensor) else None for y in outputs]


def leaves_of(model: torch.nn.Module, arguments: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return what a call is differentiated by: `input <i>` and parameters, by name.

    A parameter that is frozen during the call is not among them.
    """
    import torch

    inputs = {f"input {i}": x for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)}
    return {n: x for n, x in (inputs | dict(model.named_parameters())).items() if x.requires_grad}


def gradients_of(
    leaves: Mapping[str, torch.Tensor],
    outputs: Sequence[torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    layout: GradientLayout = "contiguous",
) -> dict[str, torch.Tensor]:
    """Return the gradients of a call by its leaves, without those that are not connected.

    The graph is kept, so that the same call can be differentiated again.

    Args:
        leaves: what to differentiate by, as `leaves_of` that call; they must require gradients.
        outputs: of the call.
        tensors: the question's; `grad.<k>` is the gradient that output k gets, in its shape.
        layout: of those in memory; "of_sum" gives the first row to all, as `sum(0)` does, and
            "of_row_sums" the first number of a row to all of it, as `sum(-1)`; "shared" is that
            of a sum with another tensor, which gets the same one, as `branch <k>`; "in_thread"
            takes them in a thread of its own.
    """
    import torch

    pairs = [(y, tensors[f"grad.{k}"]) for k, y in enumerate(outputs) if y.requires_grad]
    if layout in ("of_first", "of_last"):  # of several outputs, one alone is used
        pairs = pairs[:1] if layout == "of_first" else pairs[-1:]
    given = [g.to(y.dtype) for y, g in pairs]
    if layout == "of_sum":
        given = [g[:1].expand(g.shape) if g.ndim and len(g) else g for g in given]
    if layout == "of_row_sums":
        given = [g[..., :1].expand(g.shape) if g.ndim else g for g in given]
    if layout in ("transposed", "misaligned"):
        given = [laid_out(g, layout) for g in given]
    ends = [y for y, _ in pairs]
    wanted = dict(leaves)
    if layout == "shared":
        others = [torch.zeros_like(y).requires_grad_() for y in ends]
        # The factor's backward makes a gradient that is nobody's but the engine's.
        ends = [(y + other) * 1.0 for y, other in zip(ends, others, strict=True)]
        # Last, so that a backward that has edited it is found.
        wanted |= {f"branch {k}": other for k, other in enumerate(others)}

    def taken() -> Sequence[torch.Tensor | None]:
        found: Sequence[torch.Tensor | None] = torch.autograd.grad(
            ends, list(wanted.values()), given, allow_unused=True, retain_graph=True
        )
        return found

    if layout == "in_thread":
        with ThreadPoolExecutor(1) as pool:
            grads = pool.submit(taken).result()
    else:
        grads = taken()
    return {n: g for n, g in zip(wanted, grads, strict=True) if g is not None}


def with_tangents(
    called: Callable[..., Any],
    arguments: Sequence[Any],
    tensors: Mapping[str, torch.Tensor],
    call: int,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Call in forward mode; return the result, and the outputs' tangents (0 where they have none).

    Args:
        called: the module.
        arguments: of the call.
        tensors: the question's; `tangent.<call>.<i>` is that of input i, of its shape.
        call: the call's number.
    """
    import torch
    from torch.autograd import forward_ad

    # forward_ad.make_dual imports all decompositions first: 0.8 s in each process.
    make_dual = torch._VF._make_dual
    with forward_ad.dual_level() as level:
        given = [tensors.get(f"tangent.{call}.{i}") for i in range(len(arguments))]
        duals = [
            x if t is None else make_dual(x, t.clone(), level=level)
            for x, t in zip(arguments, given, strict=True)
        ]
        result = called(*duals)
        found = {}
        for j, y in enumerate(outputs_of(result)):
            if isinstance(y, torch.Tensor) and y.is_floating_point():
                tangent = forward_ad.unpack_dual(y).tangent
                made = torch.zeros_like(y) if tangent is None else tangent
                found[f"tangent{call}.output{j}"] = snapshot(made)
    return result, found


def edit_before_backward(
    edits: Edits,
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    model: torch.nn.Module,
) -> None:
    """Edit the outputs of a call in the graph, as `relu_` does, or what stands beside it."""
    import torch

    if edits in OUTPUT_FACTORS:
        for output in outputs:
            if output.requires_grad:
                output.mul_(OUTPUT_FACTORS[edits])
    if edits == "mode":
        model.train(not model.training)
    if edits == "weights":
        with torch.no_grad():
            parameters = list(model.parameters())
            # Of few: what the others tell of their edit must not speak for these.
            for parameter in [p for p in parameters if p.ndim > 1] or parameters:
                parameter.mul_(0.5)
    if edits == "input":
        with torch.no_grad():
            for value in arguments:
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.mul_(0.5)


def accumulated(
    leaves: Sequence[Mapping[str, torch.Tensor]],
    outputs: Sequence[Sequence[torch.Tensor]],
    tensors: Mapping[str, torch.Tensor],
    place: int,
    shared: list[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Return what calls add up in `.grad`, by leaf; one of them is scaled after each backward.

    Args:
        leaves: of each call, as `leaves_of`; their `.grad` are None, and are so again.
        outputs: of each call.
        tensors: the question's; `grad.<k>` is the gradient that output k gets.
        place: of the leaf whose gradient is scaled, as by a clipping of its own.
        shared: is told which of them share memory.
    """
    import torch

    memory: dict[int, str] = {}
    both = {name: leaf for each in leaves for name, leaf in each.items()}
    for results in outputs:
        pairs = [(y, tensors[f"grad.{k}"]) for k, y in enumerate(results) if y.requires_grad]
        torch.autograd.backward([y for y, _ in pairs], [g.to(y.dtype) for y, g in pairs])
        for name, leaf in sorted(both.items()):
            if leaf.grad is not None and leaf.grad.numel():
                at = leaf.grad.untyped_storage().data_ptr()
                if memory.setdefault(at, name) != name and shared is not None:
                    shared.append(f"the gradients of {memory[at]} and {name} share memory")
        have = [leaf for _, leaf in sorted(both.items()) if leaf.grad is not None]
        if have:
            have[place % len(have)].grad.mul_(3.0)
    grads = {n: leaf.grad.clone() for n, leaf in both.items() if leaf.grad is not None}
    for leaf in both.values():
        leaf.grad = None
    return grads


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
        with torch.inference_mode() if script.is_inference else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(default)


def checksums_of(model: torch.nn.Module, arguments: Sequence[Any]) -> dict[str, int]:
    """Return checksums of what a call must leave as it was: inputs and parameters."""
    import torch

    inputs = {
        f"input.{i}": value for i, value in enumerate(arguments) if isinstance(value, torch.Tensor)
    }
    weights = {f"weight.{name}": value for name, value in model.named_parameters()}
    return {name: checksum_of(value) for name, value in (inputs | weights).items()}


def checksum_of(tensor: torch.Tensor) -> int:
    """Return 64 bits that depend on a tensor's bits and their places; equal on one device."""
    import torch

    bits = tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if bits.device.type == "cpu":  # seven times as fast as the sum below
        memory = memoryview(bits.numpy())
        return zlib.crc32(memory) << 32 | zlib.adler32(memory)
    words = bits[: bits.numel() // 4 * 4]
    # Copied when the storage offset is no multiple of 4 bytes, which view() refuses.
    whole = (
        words.clone().view(torch.int32) if words.storage_offset() % 4 else words.view(torch.int32)
    )
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in (whole, bits[words.numel() :]):
        for start in range(0, part.numel(), CHUNK_ELEMENTS):
            chunk = part[start : start + CHUNK_ELEMENTS].to(torch.int64)
            place = torch.arange(start, start + chunk.numel(), device=tensor.device)
            total += (chunk * (2 * place + 1)).sum()
    return int(total)
