"""What crosses between producer and judge: a question and its answer.

The question holds tensors and a script of what to do with them: no seed, no name of the probe, no
oracle. The answer holds raw tensors and a report. Both travel as JSON and raw bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tuner.check.calls import lending
from tuner.check.calls.transfers import contents_of, moved
from tuner.trial import from_json, to_json

if TYPE_CHECKING:
    import torch

__all__ = [
    "Action",
    "Answer",
    "Asked",
    "Dtype",
    "Edits",
    "GradientLayout",
    "Gradients",
    "Layout",
    "Mapped",
    "Mode",
    "Question",
    "Report",
    "Script",
    "pack",
    "unpack",
]

Layout = Literal[
    "contiguous", "transposed", "strided", "padded", "cut", "misaligned", "expanded", "float64",
    "too_wide", "twice_wide", "mixed", "sliced", "rows expanded", "overlapping", "negated",
    "shared", "transposed padded", "transposed cut", "same", "channels_last", "reversed",
    "rows inside", "chunked", "fewer rows", "more rows", "one row", "int32", "bools as masks",
    "bools as float32", "bools as int64", "bools as uint8",
]  # fmt: skip
Mode = Literal["train", "eval", "frozen", "thawed", "cumulative"]
Gradients = Literal["", "all", "plain_inputs", "forward", "forward weights"]
Edits = Literal[
    "", "output", "output negated", "input", "integers", "input freed", "weights", "mode", "rows"
]
GradientLayout = Literal[
    "contiguous", "transposed", "misaligned", "of_sum", "of_row_sums", "of_first", "of_last",
    "of_inner",
    "shared", "in_thread", "in_graph", "transposed cut", "channels_last", "chunked",
]  # fmt: skip
AtOnce = Literal["", "one module", "two modules"]
Dtype = Literal["", "float64", "float16", "bfloat16"]
Mapped = Literal["", "inputs", "weights"]
# What is done to a module between two calls. A question has two sets of weights, and the module
# holds one of them; the first thirteen give it the other one, or a parameter of it.
Action = Literal[
    "edit",  # each parameter in place, so that no version counter tells of it
    "edit all",  # buffers as well
    "edit one",  # the next parameter or buffer alone
    "load",  # load_state_dict
    "load inside",  # that of a module which holds it
    "load part",  # all but the last submodule's, with strict=False
    "edit state",  # what state_dict() returns, in place
    "rebind",  # each parameter's .data becomes another tensor
    "assign",  # load_state_dict(assign=True): other tensors
    "replace",  # each parameter by another nn.Parameter
    "borrow",  # for the next call alone: torch.func.functional_call
    "replace one",  # a single parameter, by another nn.Parameter
    "borrow one",
    "train",
    "eval",
    "copy",  # go on with a deep copy, whose memory is then moved
    "pickle",  # go on with what was pickled and read back
    "freeze",  # of all parameters the next one alone requires no gradients
    "freeze module",  # those of the next submodule that has any
    "freeze all",
    "thaw",
    "replace module",  # the next submodule by a copy of it, with the other weights
    "another",  # make another module with other options, and call it
    "empty",  # to_empty(), as after the meta device, then load_state_dict of what it held
    "convert",  # to the script's dtype, as the inputs are from then on
    "restore",  # to float32 again, as the inputs are, and load the weights that it held
    "convert inside",  # as a part of a module that is converted
    "refused call",  # with one feature too many
    "infer",  # a call in inference mode
    "wrap module",  # the next submodule's forward becomes another, in a class derived from its own
    "parametrize",  # a weight of the next submodule by torch.nn.utils.parametrize
    "hook",  # put hooks on the module, and an attribute of one's own
    "load wrong",  # load_state_dict with a key too few, one too many, and a wrong shape
    "read elsewhere",  # save, and go on with what another process would read
    "twin",  # make a deep copy, and go on with the original
    "swap",  # go on with the other one of the two
    "made anew",  # forget the module, and go on with a new one that has its weights
    "tie",  # a parameter becomes another one of its shape
    "mask",  # -Inf in a block of the next vector alone
    "convert part",  # to the script's dtype, but for its normalisations
    "zero",  # the next parameter alone becomes zeros
    "zero part",  # every second column of the next one, and the first row of a matrix
    "ones",  # the next parameter alone becomes ones
    "minus ones",
    "scalar",  # the next parameter that is one number becomes 3, -3 or 0.3
    "small",  # the next one becomes some 2^-8, and vectors beside it are 8 times as large
    "tiny",  # the same with some 2^-15
    "edit row",  # a row of the next matrix, or an element, past the version counter
    "scale row",  # a row or a column of the next matrix alone is some 2^11 times as large
    "shift",  # the next tensor of the shape of a row of an input becomes 4096
    "derive",  # its class becomes a user's, derived from its own
    "read state",  # state_dict(keep_vars=True), which gives the parameters themselves
    "set eval",  # `training = False` as an attribute of each part, past eval()
    "set eval own",  # of the module alone
    "set eval part",  # of the next part alone
    "set train",
    "freeze whole",  # by the module's own requires_grad_(False)
    "freeze inside",  # by that of the next submodule that has parameters
    "copy inside",  # go on with a deep copy, made in a container with what shares its parameters
    "resize",  # the next of the script's `paths` by a Linear with more outputs
    "others made",  # make another module, with the script's `others`, and leave it
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is done to a module, as a probe asks it and as the producer does it.

    `before` is what is done before each call, `backward` which calls are differentiated after the
    last one, in that order; with `backward_at_once` each is as soon as it was made. Before the
    second call `more_calls` are made that nobody looks at. `at_once`: each call is made by a
    thread of its own, on a GPU on a stream of its own, again and again. `mode` "frozen" is
    training with every submodule in eval mode, "thawed" the reverse, "cumulative" is training with
    momentum None. Of `gradients`, "plain_inputs" asks for the parameters' alone. `first_place` is
    that of the parameter which the first "freeze" or "replace one" takes. With `accumulates`
    gradients are added up in `.grad`, one of which is scaled between two backwards. `edits` is
    what is edited in place between a call and its backward. `default_dtype` is PyTorch's during
    the calls; `dtype` is what "convert" converts to. `layout_at` is the one input that has the
    layout, None for all. `num_threads` are PyTorch's, 0 for as many as usual. With
    `has_predecessor` another module was there before, called and deleted. `mild` are the modes in
    which the module serves usual inputs before. With `holds_grads` every `.grad` is there before
    gradients are taken, of all and of some. `mapped` is what `torch.func.vmap` maps over. `wanted`
    are bits for each call: which inputs want gradients, all where it is empty. With `drops` one
    call more is made, whose result nobody keeps, and which must go. With `keeps_graphs` the graphs
    of `more_calls` live on as long as the others. With `keeps_gradients` all gradients are looked
    at again at the end, and what comes in is larger for each. With `spoils_outputs` each output is
    edited in place, once it was copied. `methods` are called in turn in place of the module;
    `attributes` are read after each call, as further outputs; `paths` are what "resize" is of.
    `traces` lists PyTorch's operations that ran.
    """

    calls: int = 1
    before: tuple[tuple[Action, ...], ...] = ()
    more_calls: int = 0
    at_once: AtOnce = ""
    mode: Mode = "train"
    gradients: Gradients = ""
    gradient_layout: GradientLayout = "contiguous"
    backward: tuple[int, ...] = ()
    backward_at_once: bool = False
    first_place: int = 0
    accumulates: bool = False
    edits: Edits = ""
    is_inference: bool = False
    num_threads: int = 0
    default_dtype: Dtype = ""
    layout_at: int | None = None
    dtype: Dtype = ""
    layout: Layout = "contiguous"
    has_predecessor: bool = False
    mild: tuple[Mode, ...] = ()
    holds_grads: bool = False
    mapped: Mapped = ""
    wanted: tuple[int, ...] = ()
    drops: bool = False
    keeps_graphs: bool = False
    keeps_gradients: bool = False
    spoils_outputs: bool = False
    methods: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    has_nan_memory: bool = False
    has_side_stream: bool = False
    traces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Script(Asked):
    """What the producer does with the question's tensors; it names no probe and no seed.

    `own_seed` seeds the candidate's constructor when it keeps its own weights, else None and the
    question's `state.*` is loaded; `options` are further arguments of its constructor, and
    `other_options` those of "another" and of a predecessor, which has the weights `other.*`.
    `names` are those of the arguments where they are passed by keyword. `mild.*` are the usual
    inputs. `numbers` are the inputs that are no tensors, by "call.argument". `output_bytes` are
    the sizes of memory to poison before each call.
    """

    num_inputs: int = 1
    is_overwritten: bool = False
    is_repeated: bool = False
    names: tuple[str, ...] = ()
    other_options: dict[str, float] = field(default_factory=dict)
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    others: dict[str, bool | int | float] = field(default_factory=dict)
    own_seed: int | None = None
    numbers: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    output_bytes: tuple[int, ...] = ()

    @property
    def has_backward(self) -> bool:
        """Whether calls are recorded for a backward."""
        return self.gradients in ("all", "plain_inputs")

    @property
    def is_forward(self) -> bool:
        """Whether calls are made in forward mode."""
        return self.gradients.startswith("forward")

    def wants(self, call: int, argument: int) -> bool:
        """Whether that argument of that call shall require gradients, where it can."""
        bits = self.wanted[call] if self.wanted else -1
        return self.gradients == "all" and bool(bits >> argument & 1)


@dataclass(frozen=True, slots=True)
class Question:
    """Tensors: `input.<call>.<argument>`, `state.<name>`, `other.<name>`, `grad.<output>`.

    `mild.<argument>` are usual inputs that come before. In forward mode, the inputs' tangents are
    `tangent.<call>.<argument>`, or the parameters' `tangent.<name>`.
    """

    script: Script
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Report:
    """What the producer saw, beside the tensors.

    `error` with its `stage` ("build", "load", "call 1", "gradients") when it raised. `keys` is
    the candidate's state_dict as [name, dtype, shape]. `kinds` describes each call's outputs.
    Checksums are of `input.*`, `weight.*` and `late.*` (an output as it is at the very end).
    `detached` are the backwards whose call had no graph. `num_forks_left` are copies of the
    process that outlive the call; `operations` are PyTorch's, in the order in which they ran,
    where the script wants them; `changes` are what the candidate has done to what is not its own;
    `refusals` are what it refused aloud that was not a call; `loads` what loading a wrong
    state_dict led to.
    """

    error: str = ""
    stage: str = ""
    keys: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    kinds: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[str, ...] = ()
    checksums: dict[str, int] = field(default_factory=dict)
    num_threads_left: int = 0
    detached: tuple[int, ...] = ()
    num_forks_left: int = 0
    operations: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    loads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Tensors: `call<i>.output<j>`, `tangent<i>.output<j>`, `buffer.<name>`, `grad<k>.<leaf>`.

    A leaf is an input or a parameter; `grad<k>` is of the k-th call that `Script.backward` names.
    """

    report: Report
    tensors: dict[str, torch.Tensor]


R = TypeVar("R")


def pack(
    record: Script | Report,
    tensors: Mapping[str, torch.Tensor],
    *,
    lends: lending.Staging | None = None,
    rooms: lending.Rooms | None = None,
) -> tuple[str, list[bytes | memoryview]]:
    """Return a record and its tensors as JSON and raw bytes, one blob a tensor.

    With `lends` large tensors of a GPU stay there, to be copied by whoever unpacks; they must be
    kept as they are until then, and so must what lies in that memory. With `rooms` they are
    written into the receiver's memory: before it unpacks, it makes `rooms_of` the text, and they
    are filled.
    """
    heads: list[dict[str, Any]] = []
    go: dict[str, torch.Tensor] = {}  # through the host
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        heads.append({"name": name, "dtype": dtype, "shape": list(tensor.shape)})
        is_large = lending.is_worth_it(tensor)
        if lends is not None and is_large and (loan := lends.lend(tensor.detach())):
            heads[-1]["loan"] = loan
        elif rooms is not None and is_large:
            heads[-1]["room"] = rooms.announce(tensor)
        else:
            go[name] = tensor
    contents = contents_of(go)
    blobs = [contents.get(name, b"") for name in tensors]
    return json.dumps({"record": json.loads(to_json(record)), "tensors": heads}), blobs


def unpack(
    kind: type[R],
    text: str,
    blobs: Sequence[bytes | bytearray | memoryview],
    device: str | torch.device = "cpu",
    rooms: Mapping[str, torch.Tensor] | None = None,
    borrowed: lending.Borrowed | None = None,
) -> tuple[R, dict[str, torch.Tensor]]:
    """Read what `pack` wrote and return the record and its tensors.

    `rooms` are those of the text by key, filled; `borrowed` is the staging memory of who packed.

    Raises:
        ValueError: the text and the blobs are not what `pack` writes (a stranger wrote them).
    """
    import torch

    try:
        content = json.loads(text)
        record = from_json(kind, json.dumps(content["record"]))
        heads = list(content["tensors"])
        if len(heads) != len(blobs):
            raise ValueError(f"{len(heads)} tensors announced, {len(blobs)} received")
        come = [(h, blob) for h, blob in zip(heads, blobs, strict=True) if "room" not in h]
        there = iter(moved([_tensor(head, blob, device, borrowed) for head, blob in come], device))
        tensors = {
            str(head["name"]): (rooms or {})[head["room"]] if "room" in head else next(there)
            for head in heads
        }
        if borrowed is not None and any("loan" in head for head in heads):
            torch.cuda.synchronize(device)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"not a packed record: {error}") from None
    return record, tensors


def rooms_in(text: str) -> list[str]:
    """Return the keys of the tensors that `pack` wants to write into the receiver's memory."""
    return [head["room"] for head in json.loads(text)["tensors"] if "room" in head]


def rooms_of(
    text: str, staging: lending.Staging
) -> dict[str, tuple[torch.Tensor, dict[str, Any]]]:
    """Return empty tensors, by key, for what `pack` wants to write into the receiver's memory.

    Each with where another process finds it.
    """
    import torch

    heads = [head for head in json.loads(text)["tensors"] if "room" in head]
    return {
        head["room"]: staging.room(head["shape"], getattr(torch, head["dtype"])) for head in heads
    }


_DTYPES = {
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
}


def _tensor(
    head: Mapping[str, Any],
    blob: bytes | bytearray | memoryview,
    device: str | torch.device,
    borrowed: lending.Borrowed | None,
) -> torch.Tensor:
    import torch

    if head["dtype"] not in _DTYPES:
        raise ValueError(f"unknown dtype {head['dtype']!r}")
    dtype: torch.dtype = getattr(torch, head["dtype"])
    shape = [int(size) for size in head["shape"]]
    num_bytes = math.prod(shape) * dtype.itemsize
    if "loan" in head and min(shape, default=0) >= 0:
        copy = lending.copied(head["loan"], num_bytes, device, borrowed)
        return copy.view(dtype).reshape(shape)
    if min(shape, default=0) < 0 or num_bytes != len(blob):
        raise ValueError(f"{head['name']}: {len(blob)} bytes for {head['dtype']}{shape}")
    if not blob:
        return torch.empty(shape, dtype=dtype)
    memory = bytearray(blob) if memoryview(blob).readonly else blob  # else shared, not copied
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)
