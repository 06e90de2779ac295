"""The gradients of a module's calls: by what, with what edits, in which of autograd's ways."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tuner.check.calls.crossing import Edits, GradientLayout, Script
from tuner.check.calls.exercise import checksums, outputs_of, snapshot
from tuner.check.calls.layouts import laid_out
from tuner.check.calls.surroundings import changed, settings

if TYPE_CHECKING:
    import torch

__all__ = [
    "IS_SPARSE",
    "OUTPUT_FACTORS",
    "Kept",
    "accumulated",
    "dense",
    "differentiated",
    "edit_before_backward",
    "gradients_of",
    "leaves_of",
    "watched",
    "with_tangents",
]

# An edited output hands its gradient on by this factor.
OUTPUT_FACTORS: dict[Edits, float] = {"output": 0.5, "output negated": -1.0}
IS_SPARSE = "is a sparse tensor"  # how what is said of such a gradient ends
HELD = 0.75  # what every `.grad` is filled with


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
            takes them in a thread of its own, "in_graph" so that they can be differentiated.
    """
    import torch

    pairs = [(y, tensors[f"grad.{k}"]) for k, y in enumerate(outputs) if y.requires_grad]
    # Of several outputs, one alone is used, or those between the first and the last.
    used = {"of_first": pairs[:1], "of_last": pairs[-1:], "of_inner": pairs[1:-1] or pairs[:1]}
    pairs = used.get(layout, pairs)
    given = [g.to(y.dtype) for y, g in pairs]
    if layout == "of_sum":
        given = [g[:1].expand(g.shape) if g.ndim and len(g) else g for g in given]
    if layout == "of_row_sums":
        given = [g[..., :1].expand(g.shape) if g.ndim else g for g in given]
    if layout in ("transposed", "misaligned", "transposed cut", "channels_last", "chunked"):
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
            ends, list(wanted.values()), given, allow_unused=True, retain_graph=True,
            create_graph=layout == "in_graph",
        )  # fmt: skip
        return found

    if layout == "in_thread":
        with ThreadPoolExecutor(1) as pool:
            grads = pool.submit(taken).result()
    else:
        grads = taken()
    if layout == "in_graph":
        grads = [None if g is None else g.detach() for g in grads]
    return {n: g for n, g in zip(wanted, grads, strict=True) if g is not None}


def dense(grads: Mapping[str, torch.Tensor], said: list[str]) -> dict[str, torch.Tensor]:
    """Return gradients as dense tensors; `said` gets which were sparse, as an embedding's are.

    An optimizer takes one kind and not the other, so the kind is a part of the answer.
    """
    said += [f"the gradient of {name} {IS_SPARSE}" for name, g in grads.items() if g.is_sparse]
    return {name: g.to_dense() if g.is_sparse else g for name, g in grads.items()}


def with_tangents(
    made: Callable[[Any, list[Any]], Any],
    model: Any,
    arguments: Sequence[Any],
    tensors: Mapping[str, torch.Tensor],
    call: int,
    of_weights: bool,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Call in forward mode; return the result, and the outputs' tangents (0 where they have none).

    Args:
        made: makes a call of what is called with arguments.
        model: what is called.
        arguments: of the call.
        tensors: the question's; `tangent.<call>.<i>` is that of input i, of its shape, and
            `tangent.<name>` that of a parameter.
        call: the call's number.
        of_weights: the parameters have tangents, which are lent to the module; else the inputs.
    """
    import torch
    from torch.autograd import forward_ad

    # forward_ad.make_dual imports all decompositions first: 0.8 s in each process.
    make_dual = torch._VF._make_dual
    with forward_ad.dual_level() as level:

        def dual(x: Any, name: str) -> Any:
            t = tensors.get(f"tangent.{name}")
            return x if t is None else make_dual(x, t.to(x.dtype, copy=True), level=level)

        if of_weights:
            lent = {n: dual(p.detach(), n) for n, p in model.named_parameters()}
            called = functools.partial(torch.func.functional_call, model, lent)
            result = made(lambda *values: called(values), list(arguments))
        else:
            result = made(model, [dual(x, f"{call}.{i}") for i, x in enumerate(arguments)])
        found = {}
        for j, y in enumerate(outputs_of(result)):
            if isinstance(y, torch.Tensor) and y.is_floating_point():
                tangent = forward_ad.unpack_dual(y).tangent
                tangent = torch.zeros_like(y) if tangent is None else tangent
                found[f"tangent{call}.output{j}"] = snapshot(tangent)
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
    if edits == "rows":
        rows = next((len(x) for x in arguments if isinstance(x, torch.Tensor) and x.ndim), 0)
        fewer = [
            x.detach()[: rows // 2].clone()
            if isinstance(x, torch.Tensor) and x.ndim and len(x) == rows
            else x
            for x in arguments
        ]
        with contextlib.suppress(Exception):  # where the first dimension is no batch
            model(*fewer)
    if edits == "weights":
        with torch.no_grad():
            parameters = list(model.parameters())
            # Of few: what the others tell of their edit must not speak for these.
            for parameter in [p for p in parameters if p.ndim > 1] or parameters:
                parameter.mul_(0.5)
    if edits in ("input", "integers"):
        with torch.no_grad():
            for value in arguments:
                if not isinstance(value, torch.Tensor):
                    continue
                if value.is_floating_point() and edits == "input":
                    value.mul_(0.5)
                if not value.is_floating_point() and edits == "integers":
                    value.copy_(value.reshape(-1).roll(1).view(value.shape))  # as legal as before


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
        shared: which of them share memory is added to it.
    """
    import torch

    memory = {
        tensors[f"grad.{k}"].untyped_storage().data_ptr(): f"what comes to output {k}"
        for k, _ in enumerate(outputs[0])
        if f"grad.{k}" in tensors
    }
    both = {name: leaf for each in leaves for name, leaf in each.items()}
    for results in outputs:
        pairs = [(y, tensors[f"grad.{k}"]) for k, y in enumerate(results) if y.requires_grad]
        torch.autograd.backward([y for y, _ in pairs], [g.to(y.dtype) for y, g in pairs])
        for name, leaf in sorted(both.items()):
            if leaf.grad is not None and leaf.grad.numel() and not leaf.grad.is_sparse:
                at = leaf.grad.untyped_storage().data_ptr()
                if memory.setdefault(at, name) != name and shared is not None:
                    shared.append(f"the gradients of {memory[at]} and {name} share memory")
        have = [leaf for _, leaf in sorted(both.items()) if leaf.grad is not None]
        if have:
            have[place % len(have)].grad.mul_(3.0)
    grads = {n: snapshot(leaf.grad) for n, leaf in both.items() if leaf.grad is not None}
    for leaf in both.values():
        leaf.grad = None
    return grads


def _other(grad: torch.Tensor, again: int) -> torch.Tensor:
    """Return the incoming gradient of a further backward, about as large as the first one's."""
    mirrored = grad.flip(0) if grad.ndim and again % 2 else grad
    return mirrored * (1 + again / 8)


def differentiated(
    script: Script,
    leaves: Mapping[str, torch.Tensor],
    outputs: Sequence[torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    k: int,
    changes: list[str],
) -> dict[str, torch.Tensor]:
    """Return the gradients of a call, as the script wants them taken, by their names in an answer.

    Args:
        script: the question's.
        leaves: of the call, as `leaves_of`.
        outputs: of the call.
        tensors: the question's; `grad.<k>` is the gradient that output k gets.
        k: how many backwards came before.
        changes: what a backward changed unasked, and what is sparse, is added to it.
    """
    if script.holds_grads:
        return _beside_grads(leaves, outputs, tensors, script.first_place, changes)
    order = script.backward[: k + 1]
    again = k if script.keeps_gradients else order.count(order[-1]) - 1 if k < len(order) else 0
    if again:  # another one, or what an earlier backward of that call kept would do
        tensors = {n: _other(t, again) if n[:5] == "grad." else t for n, t in tensors.items()}
    found = dense(gradients_of(leaves, outputs, tensors, script.gradient_layout), changes)
    return {f"grad{k}.{name}": grad for name, grad in found.items()}


class Kept:
    """Gradients that somebody keeps: no later backward may write where they are."""

    def __init__(self) -> None:
        self._held: list[tuple[str, torch.Tensor, int]] = []

    def keep(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Take what a backward returned."""
        sums = checksums(grads)
        self._held += [(name, grad, sums[name]) for name, grad in grads.items()]

    def rewritten(self) -> list[str]:
        """Say which one is no longer what it was."""
        now = checksums({str(place): grad for place, (_, grad, _) in enumerate(self._held)})
        kept = zip(self._held, now.values(), strict=True)
        found = [name for (name, _, before), checksum in kept if checksum != before]
        return [
            f"the gradient of {name.partition('.')[2]} that backward "
            f"{int(name.partition('.')[0][4:]) + 1} of {len(self._held)} gave was written again "
            "by a later one"
            for name in found[:1]
        ]


@contextlib.contextmanager
def watched(
    given: Mapping[str, torch.Tensor], model: torch.nn.Module, changes: list[str]
) -> Iterator[None]:
    """Say what a backward inside has changed that is not its own.

    Random numbers are drawn before: who sets back what the call found there is known by that.

    Args:
        given: the incoming gradients, by name.
        model: the module, whose parameters have no `.grad`.
        changes: what was found is added to it.
    """
    import torch

    before = checksums(given)
    for device in {torch.device("cpu"), *(t.device for t in given.values())}:
        torch.rand((), device=device)
    set_to = settings()
    yield
    changes += [
        f"the backward edited the incoming gradient ({name})"
        for name, checksum in checksums(given).items()
        if checksum != before[name]
    ]
    changes += [
        f"the backward wrote the .grad of {name}: gradients would be added up twice"
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    ]
    changes += changed(set_to, "backward")


def _beside_grads(
    leaves: Mapping[str, torch.Tensor],
    outputs: Sequence[torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    place: int,
    changes: list[str],
) -> dict[str, torch.Tensor]:
    """Take gradients where each leaf has a `.grad`, which only who is asked for may change.

    By all leaves and by the first one, as results; then added up in the `.grad` of the first one
    and of another. A backward that adds to `.grad` itself is right in the usual step alone.
    """
    import torch

    pairs = [(y, tensors[f"grad.{k}"]) for k, y in enumerate(outputs) if y.requires_grad]
    ends, given = [y for y, _ in pairs], [g.to(y.dtype) for y, g in pairs]
    names = [*leaves]
    first, other = names[:1], names[1:][place % len(names[1:]) :][:1] if names[1:] else []
    found: dict[str, torch.Tensor] = {}

    def sums() -> dict[str, int]:
        held = checksums({n: x.grad for n, x in leaves.items() if x.grad is not None})
        return {n: held.get(n, 0) for n in leaves}

    for leaf in leaves.values():
        leaf.grad = torch.full_like(leaf, HELD, memory_format=torch.contiguous_format)
    for k, (asked, is_added) in enumerate(
        ((names, False), (first, False), (first, True), (other, True))
    ):
        if not asked:
            continue
        before, wanted = sums(), [leaves[n] for n in asked]
        if is_added:
            torch.autograd.backward(ends, given, retain_graph=True, inputs=wanted)
            grads: Sequence[torch.Tensor | None] = [x.grad for x in wanted]
        else:
            grads = torch.autograd.grad(ends, wanted, given, retain_graph=True, allow_unused=True)
        found |= {
            f"grad{k}.{n}": snapshot(g) for n, g in zip(asked, grads, strict=True) if g is not None
        }
        changes += [
            f"the backward changed the .grad of {n}, for which no gradient was asked"
            for n, total in sums().items()
            if total != before[n] and not (is_added and n in asked)
        ]
    for leaf in leaves.values():
        leaf.grad = None
    return found
