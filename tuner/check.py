"""What is asked of a candidate, and the verdict on its answers.

    judge's process                          producer's process (imports the candidate)
    expected(problem, probe) -> Expected
        .question ---- pack / unpack ---->  answer(make_candidate, question) -> Answer
    judge(expected, answer)  <--------------------- pack / unpack ----
        -> ProbeResult ... merge -> Check

The question holds tensors and a script of what to do with them: no seed, no name of the probe, no
oracle. The answer holds raw tensors and a report. For screening both halves may share a process;
then nothing is packed, and what is expected is computed once for all candidates.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import math
import random
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tuner.errors import ProblemError
from tuner.problem import Accuracy, Distribution, Problem, math_mode, widened
from tuner.trial import Check, ProbeResult, from_json, to_json

if TYPE_CHECKING:
    import torch

__all__ = [
    "Answer",
    "Expected",
    "Probe",
    "Question",
    "Report",
    "Script",
    "answer",
    "expected",
    "judge",
    "merge",
    "pack",
    "screening_probes",
    "thorough_probes",
    "unpack",
]

ULP = 2.0**-24  # half the distance between 1 and the next float32
FLOOR_ULPS = 16  # an error below this many ULP of the largest value is always accepted
SMALL_BATCH = 32  # below it the float32 class allows 4x instead of 2x the baseline's error
GRADIENT_FACTOR = 4.0  # gradients: times the baseline's own largest error, in every class
GRADIENT_FLOOR_ULPS = 64  # and this many ULP of the largest gradient of all tensors
CHUNK_ELEMENTS = 2**24  # 128 MB a float64 temporary; a comparison holds about six
OWN_WEIGHTS_SEED = 42  # public: KernelBench seeds both constructors with it
LATE_WAIT_S = 0.05  # how long a thread that outlives the call is given to show itself
UNSTABLE_RMS = 0.1  # a reference with this error against itself in float64 cannot be judged

Layout = Literal[
    "contiguous", "transposed", "strided", "misaligned", "expanded", "float64", "too_wide"
]
Mode = Literal["train", "eval", "frozen", "cumulative"]


# ---- the probes -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that is asked of a candidate.

    `batch` None is as given. `weights`: "own" are those that the candidate's constructor draws,
    "initial" those of the reference, "random" and "dyadic" fresh ones. With several `calls`,
    `inputs` says how the input of each relates to the one before: "fresh" (new content, new
    memory), "repeated", "overwritten" (new content in the same memory, same version counter),
    "nudged" (one element changed). `edits_weights` replaces every parameter in place before the
    second call. `mode` "frozen" is training with every submodule in eval mode, "cumulative" is
    training with momentum None. `tells` is what a failure here usually means.
    """

    name: str
    distribution: Distribution = "as_given"
    batch: int | None = None
    seed_inputs: int = 0
    seed_weights: int = 0
    weights: Literal["own", "initial", "random", "dyadic"] = "random"
    calls: int = 1
    inputs: Literal["fresh", "repeated", "overwritten", "nudged"] = "fresh"
    edits_weights: bool = False
    mode: Mode = "train"
    gradients: bool = False
    layout: Layout = "contiguous"
    has_nan_memory: bool = False
    has_side_stream: bool = False
    wants_same_bits: bool = False
    may_refuse: bool = False
    tells: str = ""


def screening_probes(seed: int, num_rows: int | None) -> list[Probe]:
    """Return the short list that screens candidates while searching.

    `num_rows` is the problem's own batch (`Problem.num_rows`), None where it has none.
    """
    secret = random.Random(seed)
    seed_inputs, seed_weights = secret.getrandbits(31), secret.getrandbits(31)
    batch = None if num_rows is None else _odd_batch(num_rows)
    probe = _seeded(seed_inputs, seed_weights)
    return [
        probe("as given", weights="initial"),
        probe(
            "offset, odd batch", distribution="offset", batch=batch, calls=2,
            inputs="overwritten", tells=TELLS["offset"],
        ),
        probe(
            "heavy-tailed, misaligned", distribution="heavy_tailed", batch=batch,
            layout="misaligned", tells=TELLS["misaligned"],
        ),
    ]  # fmt: skip


TELLS = {
    "weights": "is a weight ignored, or eps?",
    "offset": "a variance from sums of squares, or right only for the tested distribution?",
    "heavy": "is it right only for the tested distribution?",
    "range": "are operands split or rounded to a format of less range?",
    "tiny": "is eps dropped or changed?",
    "constant": "a variance of 0 must not turn negative or NaN",
    "poison": "a NaN or Inf of the input must reach what the reference lets it reach",
    "batch": "is it right only for the tested shape?",
    "eval": "eval mode must use the stored statistics, and change nothing",
    "frozen": "submodules in eval mode inside a training parent",
    "cumulative": "momentum=None averages over all calls",
    "calls": "is it right only on the first call, or replays it?",
    "repeated": "an input seen before",
    "pointer": "memoised by pointer or version counter, or kept from the first call?",
    "content": "memoised by a part of the content?",
    "edited": "are the weights folded once and kept?",
    "gradients": "is the backward wrong, or the output detached?",
    "layout": "are strides ignored?",
    "misaligned": "do vector loads assume 16-byte alignment?",
    "refused": "what the reference refuses must be refused, not computed",
    "memory": "is memory read that was never written?",
    "stream": "does it run on another stream than the current one?",
}


def thorough_probes(
    seed: int,
    num_rows: int | None,
    *,
    is_deterministic: bool = True,
    has_cuda: bool = False,
    may_refuse_batches: bool = False,
) -> list[Probe]:
    """Return everything that is asked of finalists, exports and strangers' files.

    Few probes run at full size, since one tensor of the flagship is 256 MB.
    `is_deterministic` asks for the same bits from the same input. `may_refuse_batches` accepts
    an exception (never a wrong answer) at batches other than `num_rows`.
    """
    secret = random.Random(seed)
    seed_full, seed_reduced = secret.getrandbits(31), secret.getrandbits(31)
    seed_weights = secret.getrandbits(31)
    full = _seeded(seed_full, seed_weights)
    reduced = _seeded(
        seed_reduced, seed_weights, batch=_reduced_batch(num_rows, may_refuse_batches)
    )
    probes = [
        full("as given", weights="own"),
        reduced("fresh weights", tells=TELLS["weights"]),
        full("offset", distribution="offset", tells=TELLS["offset"]),
        full("heavy-tailed", distribution="heavy_tailed", tells=TELLS["heavy"]),
        *_value_probes(reduced, num_rows, may_refuse_batches),
        *_call_probes(reduced, is_deterministic),
        *_layout_probes(reduced, has_cuda),
    ]
    if num_rows is not None:
        probes += _batch_probes(reduced, num_rows, may_refuse_batches)
    return probes


def _seeded(seed_inputs: int, seed_weights: int, batch: int | None = None) -> Callable[..., Probe]:
    def probe(name: str, **fields: Any) -> Probe:
        settings = {"batch": batch, "seed_inputs": seed_inputs, "seed_weights": seed_weights}
        return Probe(name, **{**settings, **fields})

    return probe


def _value_probes(
    probe: Callable[..., Probe], num_rows: int | None, is_fixed: bool
) -> list[Probe]:
    # A power of two keeps the mean of equal values exact.
    power = (
        None if num_rows is None or is_fixed else 2 ** int(math.log2(min(max(num_rows, 2), 64)))
    )
    wide = TELLS["range"]
    return [
        probe("wide range", distribution="wide_range", tells=wide),
        probe("wide columns", distribution="wide_columns", tells=wide),
        probe("tiny values", distribution="tiny", tells=TELLS["tiny"]),
        probe(
            "constant columns", distribution="constant_columns", weights="dyadic", batch=power,
            tells=TELLS["constant"],
        ),
        probe("NaN row", distribution="nan_row", tells=TELLS["poison"]),
        probe("NaN row, eval", distribution="nan_row", mode="eval", tells=TELLS["poison"]),
        probe("Inf element", distribution="inf_element", tells=TELLS["poison"]),
    ]  # fmt: skip


def _call_probes(probe: Callable[..., Probe], is_deterministic: bool) -> list[Probe]:
    return [
        probe("input overwritten", calls=2, inputs="overwritten", tells=TELLS["pointer"]),
        probe("three calls", calls=3, tells=TELLS["calls"]),
        probe("one element changed", calls=2, inputs="nudged", tells=TELLS["content"]),
        probe(
            "weights edited in place", calls=2, inputs="repeated", edits_weights=True,
            tells=TELLS["edited"],
        ),
        probe(
            "called twice", calls=2, inputs="repeated", wants_same_bits=is_deterministic,
            tells=TELLS["repeated"],
        ),
        probe("cumulative average", mode="cumulative", calls=2, tells=TELLS["cumulative"]),
        probe("eval mode", mode="eval", tells=TELLS["eval"]),
        probe("frozen submodules", mode="frozen", tells=TELLS["frozen"]),
        probe("gradients", distribution="normal", gradients=True, tells=TELLS["gradients"]),
        probe(
            "gradients, eval", distribution="normal", gradients=True, mode="eval",
            tells=TELLS["gradients"],
        ),
    ]  # fmt: skip


def _layout_probes(probe: Callable[..., Probe], has_cuda: bool) -> list[Probe]:
    exact = functools.partial(probe, distribution="dyadic", weights="dyadic")
    probes = [
        probe("transposed input", layout="transposed", tells=TELLS["layout"]),
        probe("strided input", layout="strided", tells=TELLS["layout"]),
        exact("expanded input", layout="expanded", tells=TELLS["layout"]),
        probe("misaligned input", layout="misaligned", tells=TELLS["misaligned"]),
        probe("float64 input", layout="float64", tells=TELLS["refused"]),
        probe("one feature too many", layout="too_wide", tells=TELLS["refused"]),
        probe("NaN-filled memory", has_nan_memory=True, calls=2, tells=TELLS["memory"]),
    ]
    if has_cuda:
        probes.append(probe("side stream", has_side_stream=True, tells=TELLS["stream"]))
    return probes


def _batch_probes(probe: Callable[..., Probe], num_rows: int, may_refuse: bool) -> list[Probe]:
    odd = _odd_batch(num_rows)
    fields = {"may_refuse": may_refuse, "tells": TELLS["batch"]}
    # Two rows that happen to be close have a difference with few right bits in any float32
    # arithmetic, so there the products and sums are made exact.
    exact = {"distribution": "dyadic", "weights": "dyadic", **fields}
    fields["distribution"] = "normal"
    settings = {odd: fields, 33 if odd != 33 else 40: fields, 2: exact, 1: fields, 0: fields}
    return [
        probe(f"batch {batch}", batch=batch, **others)
        for batch, others in settings.items()
        if batch != num_rows
    ]


def _odd_batch(num_rows: int) -> int:
    """Return an odd batch other than the problem's own, at most 257 rows."""
    if num_rows > 257:
        return 257
    return num_rows - 1 if num_rows % 2 == 0 and num_rows > 2 else num_rows + 2


def _reduced_batch(num_rows: int | None, is_fixed: bool) -> int | None:
    """Return the batch of the probes that need not run at full size."""
    return 256 if num_rows is not None and num_rows > 256 and not is_fixed else None


# ---- what crosses between the two halves ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Script:
    """What the producer does with the question's tensors; it names no probe and no seed.

    `own_seed` seeds the candidate's constructor when it keeps its own weights, else None and the
    question's `state.*` is loaded. `numbers` are the inputs that are no tensors, by
    "call.argument". `output_bytes` are the sizes of memory to poison before each call.
    """

    calls: int = 1
    num_inputs: int = 1
    is_overwritten: bool = False
    is_repeated: bool = False
    edits_weights: bool = False
    mode: Mode = "train"
    gradients: bool = False
    layout: Layout = "contiguous"
    has_nan_memory: bool = False
    has_side_stream: bool = False
    own_seed: int | None = None
    numbers: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    output_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """Tensors: `input.<call>.<argument>`, `state.<name>`, `edit.<name>`, `grad.<output>`."""

    script: Script
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Report:
    """What the producer saw, beside the tensors.

    `error` with its `stage` ("build", "load", "call 1", "gradients") when it raised. `keys` is
    the candidate's state_dict as [name, dtype, shape]. `kinds` describes each call's outputs.
    Checksums are of `input.*`, `weight.*` and `late.*` (an output as it is at the very end).
    """

    error: str = ""
    stage: str = ""
    keys: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    kinds: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[str, ...] = ()
    checksums: dict[str, int] = field(default_factory=dict)
    num_threads_left: int = 0
    is_detached: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Tensors: `call<i>.output<j>`, `buffer.<name>`, `grad.<input or parameter>`."""

    report: Report
    tensors: dict[str, torch.Tensor]


R = TypeVar("R")


def pack(record: Script | Report, tensors: Mapping[str, torch.Tensor]) -> tuple[str, list[bytes]]:
    """Return a record and its tensors as JSON and raw bytes, one blob a tensor."""
    import torch

    heads, blobs = [], []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        heads.append({"name": name, "dtype": dtype, "shape": list(tensor.shape)})
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        blobs.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return json.dumps({"record": json.loads(to_json(record)), "tensors": heads}), blobs


def unpack(
    kind: type[R],
    text: str,
    blobs: Sequence[bytes | bytearray | memoryview],
    device: str | torch.device = "cpu",
) -> tuple[R, dict[str, torch.Tensor]]:
    """Read what `pack` wrote and return the record and its tensors.

    Raises:
        ValueError: the text and the blobs are not what `pack` writes (a stranger wrote them).
    """
    try:
        content = json.loads(text)
        record = from_json(kind, json.dumps(content["record"]))
        heads = list(content["tensors"])
        if len(heads) != len(blobs):
            raise ValueError(f"{len(heads)} tensors announced, {len(blobs)} received")
        tensors = {
            str(head["name"]): _tensor(head, blob).to(device)
            for head, blob in zip(heads, blobs, strict=True)
        }
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"not a packed record: {error}") from None
    return record, tensors


_DTYPES = {
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
}


def _tensor(head: Mapping[str, Any], blob: bytes | bytearray | memoryview) -> torch.Tensor:
    import torch

    if head["dtype"] not in _DTYPES:
        raise ValueError(f"unknown dtype {head['dtype']!r}")
    dtype: torch.dtype = getattr(torch, head["dtype"])
    shape = [int(size) for size in head["shape"]]
    num_bytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or num_bytes != len(blob):
        raise ValueError(f"{head['name']}: {len(blob)} bytes for {head['dtype']}{shape}")
    if not blob:
        return torch.empty(shape, dtype=dtype)
    memory = bytearray(blob) if memoryview(blob).readonly else blob  # else shared, not copied
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


# ---- producer: run the candidate ------------------------------------------------------------


class _Halted(Exception):
    """The candidate raised; carries where, and what it said."""

    def __init__(self, stage: str, error: BaseException) -> None:
        self.stage = stage
        frames = traceback.extract_tb(error.__traceback__)
        place = f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""
        self.message = f"{type(error).__name__}: {str(error).strip() or 'no message'}{place}"
        super().__init__(self.message)


@contextlib.contextmanager
def _stage(name: str) -> Iterator[None]:
    try:
        yield
    except _Halted:
        raise
    except (Exception, SystemExit) as error:
        # Whatever a candidate raises is its answer, not our failure.
        raise _Halted(name, error) from None


def answer(make_candidate: Callable[[], torch.nn.Module], question: Question) -> Answer:
    """Ask a candidate one question; what it raises becomes part of the answer.

    `make_candidate` returns `ModelNew(*init_inputs)` and is called once; its device is moved to
    that of the inputs. While searching it may return one module again and again, since the
    state is loaded anew, except where `script.own_seed` is set.
    """
    session = _Session(question)
    try:
        # A device reports some faults only at a later operation, which may be one of ours.
        with _stage("an operation after the call"):
            session.build(make_candidate)
            with session.circumstances():
                for call in range(question.script.calls):
                    session.call(call)
            session.look_again()
            if question.script.gradients:
                session.differentiate()
    except _Halted as halt:
        return session.answer(halt.message, halt.stage)
    return session.answer()


class _Session:
    """The state of one `answer`: the model, its arguments and every output, kept alive."""

    def __init__(self, question: Question) -> None:
        import torch

        self.script = question.script
        self.given = question.tensors
        self.device = next(
            (t.device for n, t in self.given.items() if n.startswith("input.")),
            torch.device("cpu"),
        )
        self.arguments: list[list[Any]] = []
        self.outputs: list[list[Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.kinds: list[tuple[str, ...]] = []
        self.aliases: list[str] = []
        self.keys: list[tuple[str, str, tuple[int, ...]]] = []
        self.checksums: dict[str, int] = {}
        self.num_threads_left = 0
        self.is_detached = False
        self.model: Any = None
        self.threads_before = set(threading.enumerate())

    def build(self, make_candidate: Callable[[], torch.nn.Module]) -> None:
        """Construct the candidate and load the state strictly."""
        import torch

        own = self.script.own_seed
        torch.manual_seed(OWN_WEIGHTS_SEED if own is None else own)
        with _stage("build"):
            self.model = make_candidate().to(self.device)
        with _stage("load"):
            self.keys = _keys(self.model)
            if own is not None:
                drawn = _checksums(self.model, [])
                self.checksums.update((f"drawn.{name}", value) for name, value in drawn.items())
            else:
                self.model.load_state_dict(_part(self.given, "state"), strict=True)
            _set_mode(self.model, self.script.mode)

    @contextlib.contextmanager
    def circumstances(self) -> Iterator[None]:
        """Set what holds during the calls: gradients or not, NaN-filled memory, the stream."""
        import torch

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.script.gradients))
            if self.script.has_nan_memory:
                stack.enter_context(_nan_filled_memory())
            if self.script.has_side_stream and self.device.type == "cuda":
                stack.enter_context(_busy_side_stream(self.device))
            yield

    def call(self, call: int) -> None:
        """Run one forward and keep a copy of what it returned, taken at once."""
        import torch

        if call == 1 and self.script.edits_weights:
            with _stage("load"):
                _edit_weights(self.model, self.given)
        arguments = self._lay_out(call)
        _poison(self.script.output_bytes, self.device)
        with _stage(f"call {call + 1}"):
            result = self.model(*arguments)
            # No synchronisation before the copy: work on another stream must not be waited for.
            outputs = _as_tuple(result)
            for j, output in enumerate(outputs):
                if isinstance(output, torch.Tensor):
                    self.tensors[f"call{call}.output{j}"] = _snapshot(output)
        self.kinds.append(tuple(_kind(output) for output in outputs))
        self.aliases += self._find_aliases(call, outputs)
        self.outputs.append(list(outputs))

    def _lay_out(self, call: int) -> list[Any]:
        """Return the arguments in memory of their own, with the strides that are asked."""
        import torch

        script = self.script
        source = _arguments(script, self.given, call)
        if call and script.is_repeated:
            arguments = self.arguments[0]
        elif call and script.is_overwritten:
            arguments = self.arguments[0]
            for old, new in zip(arguments, source, strict=True):
                if isinstance(new, torch.Tensor):
                    old.data.copy_(new)  # .data: the version counter stays as it was
        else:
            arguments = [_laid_out(value, script.layout) for value in source]
            if script.gradients:
                for value in arguments:
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        value.requires_grad_()
        self.arguments.append(arguments)
        return arguments

    def _find_aliases(self, call: int, outputs: Sequence[Any]) -> list[str]:
        import torch

        memory: dict[int, str] = {}

        def note(value: Any, name: str) -> None:
            if isinstance(value, torch.Tensor) and value.numel():
                memory.setdefault(value.untyped_storage().data_ptr(), name)

        for name, value in self.model.state_dict().items():
            note(value, f"{name} of the state_dict")
        for i, value in enumerate(self.arguments[-1]):
            note(value, f"input {i}")
        for earlier, values in enumerate(self.outputs):
            for value in values:
                note(value, f"the output of call {earlier + 1}")
        found = []
        for output in outputs:
            if isinstance(output, torch.Tensor) and output.numel():
                owner = memory.get(output.untyped_storage().data_ptr())
                if owner is not None:
                    found.append(f"the output of call {call + 1} shares memory with {owner}")
        return found

    def look_again(self) -> None:
        """Give late work a moment, then take checksums of outputs, inputs and weights."""
        import torch

        if self.device.type == "cuda":
            with _stage("synchronise"):
                torch.cuda.synchronize(self.device)
        late = set(threading.enumerate()) - self.threads_before
        self.num_threads_left = len(late)
        for thread in late:
            thread.join(LATE_WAIT_S)
        for call, outputs in enumerate(self.outputs):
            for j, output in enumerate(outputs):
                if isinstance(output, torch.Tensor):
                    self.checksums[f"late.call{call}.output{j}"] = _checksum(output)
        self.checksums.update(_checksums(self.model, self.arguments[-1]))
        for name, value in self.model.named_buffers():
            self.tensors[f"buffer.{name}"] = value.detach().clone()

    def differentiate(self) -> None:
        """Take the gradients of the last call by its inputs and every parameter."""
        import torch

        with _stage("gradients"):
            outputs = [y for y in self.outputs[-1] if isinstance(y, torch.Tensor)]
            self.is_detached = not any(y.requires_grad for y in outputs)
            if not self.is_detached:
                grads = _gradients(self.model, self.arguments[-1], outputs, self.given)
                self.tensors.update(grads)

    def answer(self, error: str = "", stage: str = "") -> Answer:
        """Return what was seen up to here."""
        report = Report(
            error, stage, tuple(self.keys), tuple(self.kinds), tuple(self.aliases),
            self.checksums, self.num_threads_left, self.is_detached,
        )  # fmt: skip
        return Answer(report, self.tensors)


# ---- what producer and judge do alike -------------------------------------------------------


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    start = len(prefix) + 1
    return {n[start:]: t for n, t in tensors.items() if n.startswith(prefix + ".")}


def _keys(model: torch.nn.Module) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(n, str(t.dtype), tuple(t.shape)) for n, t in model.state_dict().items()]


def _arguments(script: Script, tensors: Mapping[str, torch.Tensor], call: int) -> list[Any]:
    source = 0 if script.is_repeated else call
    names = [f"{source}.{i}" for i in range(script.num_inputs)]
    return [
        script.numbers[name] if name in script.numbers else tensors[f"input.{name}"]
        for name in names
    ]


def _set_mode(model: torch.nn.Module, mode: Mode) -> None:
    model.train(mode != "eval")
    if mode == "frozen":
        for child in model.children():
            child.eval()
    if mode == "cumulative":
        for module in model.modules():
            if hasattr(module, "momentum"):
                module.momentum = None


def _edit_weights(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    state = model.state_dict()
    for name, value in _part(tensors, "edit").items():
        state[name].data.copy_(value)  # .data: no version counter tells of it


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _kind(value: Any) -> str:
    """Describe an output: exact type, dtype, shape and device in one line."""
    import torch

    cls = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor:
        cls = f"subclass {cls}"
    if not isinstance(value, torch.Tensor):
        return cls
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{cls} {dtype}{list(value.shape)} on {value.device.type}"


def _snapshot(output: torch.Tensor) -> torch.Tensor:
    import torch

    with torch.no_grad():
        return output.detach().clone(memory_format=torch.contiguous_format)


def _gradients(
    model: torch.nn.Module,
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return `grad.input <i>` and `grad.<parameter>`, without those that are not connected."""
    import torch

    leaves = {
        f"grad.input {i}": value
        for i, value in enumerate(arguments)
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    leaves.update((f"grad.{name}", p) for name, p in model.named_parameters())
    pairs = [(y, tensors[f"grad.{k}"]) for k, y in enumerate(outputs) if y.requires_grad]
    grads = torch.autograd.grad(
        [y for y, _ in pairs], list(leaves.values()), [g.to(y.dtype) for y, g in pairs],
        allow_unused=True,
    )  # fmt: skip
    return {n: g for n, g in zip(leaves, grads, strict=True) if g is not None}


def _laid_out(value: Any, layout: Layout) -> Any:
    """Return a copy of a tensor in fresh memory, with the strides or alignment of `layout`."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_floating_point() or value.ndim == 0 or not value.numel():
        return value.clone()
    if layout == "transposed" and value.ndim >= 2:
        return value.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided":
        wide = value.new_full((*value.shape[:-1], 2 * value.shape[-1]), float("nan"))
        wide[..., ::2] = value
        return wide[..., ::2]
    if layout == "misaligned":
        buffer = value.new_full((value.numel() + 1,), float("nan"))
        return buffer[1:].view(value.shape).copy_(value)
    if layout == "expanded":
        return value[..., :1].clone().expand(value.shape)
    return value.clone(memory_format=torch.contiguous_format)


def _poison(output_bytes: Sequence[int], device: torch.device) -> None:
    """Leave NaN in the memory that the allocator will hand out next for such sizes."""
    import torch

    blocks = [
        torch.full((max(1, size // 4),), float("nan"), device=device)
        for size in output_bytes
        for _ in range(2)
    ]
    del blocks


@contextlib.contextmanager
def _nan_filled_memory() -> Iterator[None]:
    """Fill all memory that PyTorch allocates uninitialised with NaN."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    before_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=before_warn)


@contextlib.contextmanager
def _busy_side_stream(device: torch.device) -> Iterator[None]:
    """Make a stream current that is still busy when the candidate is called.

    What the arguments are copied from is complete; their copies wait behind about 20 ms of
    other work, so that a kernel launched on another stream reads memory not yet written.
    """
    import torch

    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(40_000_000)
        yield
    stream.synchronize()


def _checksums(model: torch.nn.Module, arguments: Sequence[Any]) -> dict[str, int]:
    """Return checksums of what a call must leave as it was: inputs and parameters."""
    import torch

    inputs = {
        f"input.{i}": value for i, value in enumerate(arguments) if isinstance(value, torch.Tensor)
    }
    weights = {f"weight.{name}": value for name, value in model.named_parameters()}
    return {name: _checksum(value) for name, value in (inputs | weights).items()}


def _checksum(tensor: torch.Tensor) -> int:
    """Return a sum over the bits that depends on their places, modulo 2^64."""
    import torch

    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
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


# ---- judge: what is expected ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Error:
    """How one tensor differs from float64; absolute, over the elements finite in both."""

    max_abs: float = 0.0
    rms_abs: float = 0.0
    largest: float = 0.0  # of the float64 value
    rms_value: float = 0.0
    num_misplaced: int = 0  # NaN or Inf at other places than in the reference
    num_beyond: int = 0  # elements beyond atol + rtol * |value|, tolerance class only

    @property
    def rms_rel(self) -> float:
        return self.rms_abs / self.rms_value if self.rms_value else self.rms_abs


@dataclass(frozen=True, slots=True)
class Expected:
    """The reference's side of one probe, to judge any number of candidates with.

    `oracle` is float64 (integers as they are); `baseline` the error of PyTorch's own answer.
    `error` is set when the reference itself raises; then so must the candidate.
    """

    probe: Probe
    question: Question
    num_rows: int
    oracle: dict[str, torch.Tensor]
    baseline: dict[str, _Error]
    report: Report
    unjudged: dict[str, torch.Tensor] = field(default_factory=dict)
    momenta: dict[str, float] = field(default_factory=dict)
    start: dict[str, torch.Tensor] = field(default_factory=dict)  # buffers before the calls
    error: str = ""


def expected(
    problem: Problem,
    probe: Probe,
    accuracy: Accuracy,
    device: str | torch.device = "cpu",
    *,
    models: dict[Any, torch.nn.Module] | None = None,
) -> Expected:
    """Compute one probe's question, its float64 oracle and the baseline's own error.

    `models` may be one dict for all probes of a check: constructing a model takes long.

    Raises:
        ProblemError: the reference fails in itself, or its answer cannot be judged.
    """
    import torch

    accuracy.require_on(device)
    known = {} if models is None else models
    model, tensors = _weighted_model(problem, probe, device, known)
    arguments = _inputs_of_calls(problem, probe, device)
    script = _script_of(problem, probe, arguments, tensors)
    wide = copy.deepcopy(model).double()
    start = {name: buffer.detach().clone() for name, buffer in wide.named_buffers()}
    with math_mode(accuracy):
        report, baseline = _reference_answer(problem, model, script, tensors, probe)
    num_rows = _rows_of(arguments[0])
    if report.error:
        return Expected(
            probe, Question(script, tensors), num_rows, {}, {}, report, error=report.error
        )
    sizes = tuple(t.numel() * t.element_size() for n, t in baseline.items() if n[:5] == "call0")
    script = dataclasses.replace(script, output_bytes=sizes)
    wide_tensors = {name: widened(value) for name, value in tensors.items()}
    wide_report, oracle = _reference_answer(problem, wide, script, wide_tensors, probe)
    if wide_report.error:
        raise problem.error(f"the float64 run of the reference fails: {wide_report.error}")
    unjudged = {
        n: mask for n, t in baseline.items() if (mask := _disputed(t, oracle[n])) is not None
    }
    errors = {n: _compare(t, oracle[n], unjudged.get(n), accuracy) for n, t in baseline.items()}
    _require_stable(problem, probe, errors)
    momenta = {f"{n}." if n else "": m for n, m in _momenta(model).items()}
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # of the float64 temporaries, 3 GB for the flagship
    return Expected(
        probe, Question(script, tensors), num_rows, oracle, errors, report, unjudged, momenta,
        start,
    )  # fmt: skip


def _weighted_model(
    problem: Problem, probe: Probe, device: Any, models: dict[Any, torch.nn.Module]
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a copy of the reference with the probe's weights, and them for the question.

    The question's tensors are those of `models`, which nobody edits: at 8192 x 8192 a copy for
    each probe would be 268 MB.
    """
    if "initial" not in models:
        models["initial"] = problem.make_model(OWN_WEIGHTS_SEED, device)
    key: Any = "initial"
    if probe.weights in ("random", "dyadic"):
        key = (probe.weights, probe.seed_weights)
        if key not in models:
            kind: Any = probe.weights
            fresh = copy.deepcopy(models["initial"])
            models[key] = problem.randomise(fresh, probe.seed_weights, kind)
    tensors = {}
    if probe.weights != "own":
        tensors = {f"state.{n}": t.detach() for n, t in models[key].state_dict().items()}
    if probe.edits_weights:
        edit = ("edit", probe.seed_weights)
        if edit not in models:
            fresh = copy.deepcopy(models["initial"])
            models[edit] = problem.randomise(fresh, probe.seed_weights + 1)
        edits = models[edit].named_parameters()
        tensors.update((f"edit.{n}", p.detach()) for n, p in edits)
    model = copy.deepcopy(models[key])
    _set_mode(model, probe.mode)
    return model, tensors


def _inputs_of_calls(problem: Problem, probe: Probe, device: Any) -> list[list[Any]]:
    """Return each call's arguments; those of "repeated" calls are given once."""
    import torch

    first = problem.make_inputs(
        probe.seed_inputs, distribution=probe.distribution, batch=probe.batch, device=device
    )

    def shaped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.ndim:
            return value
        if probe.layout == "expanded":
            return value[..., :1].expand(value.shape).contiguous()
        if probe.layout == "float64":
            return value.double()
        if probe.layout == "too_wide":
            return torch.cat([value, value[..., :1]], dim=-1)
        return value

    first = [shaped(value) for value in first]
    calls = 1 if probe.inputs == "repeated" else probe.calls
    change = _nudged if probe.inputs == "nudged" else _varied
    return [[change(value, call) if call else value for value in first] for call in range(calls)]


def _varied(value: Any, call: int) -> Any:
    """Return other content with other statistics, far from any earlier call's."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.ndim:
        return value
    return value.flip(0) * (1.0 + 0.5 * call) + 0.25 * call


def _nudged(value: Any, call: int) -> Any:
    """Return the same content but for one element, past the middle."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return value
    changed = value.clone()
    at = (2 * value.numel() // 3 + 5 * call) % value.numel()
    changed.view(-1)[at] = -3.0 * changed.view(-1)[at] - 1.0
    return changed


def _script_of(
    problem: Problem,
    probe: Probe,
    arguments: Sequence[Sequence[Any]],
    tensors: dict[str, torch.Tensor],
) -> Script:
    """Return the script; puts `input.*` into `tensors`."""
    import torch

    numbers: dict[str, Any] = {}
    for call, values in enumerate(arguments):
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                tensors[f"input.{call}.{i}"] = value
            elif value is None or isinstance(value, (bool, int, float, str)):
                numbers[f"{call}.{i}"] = value
            else:
                raise problem.error(
                    f"get_inputs() gives a {type(value).__name__} as input {i}; "
                    "expected tensors and numbers"
                )
    return Script(
        calls=probe.calls,
        num_inputs=len(arguments[0]),
        is_overwritten=probe.inputs == "overwritten",
        is_repeated=probe.inputs == "repeated",
        edits_weights=probe.edits_weights,
        mode=probe.mode,
        gradients=probe.gradients,
        layout=probe.layout,
        has_nan_memory=probe.has_nan_memory,
        has_side_stream=probe.has_side_stream,
        own_seed=OWN_WEIGHTS_SEED if probe.weights == "own" else None,
        numbers=numbers,
    )


def _reference_answer(
    problem: Problem,
    model: torch.nn.Module,
    script: Script,
    tensors: dict[str, torch.Tensor],
    probe: Probe,
) -> tuple[Report, dict[str, torch.Tensor]]:
    """Play the script with the reference; draws `grad.*` into `tensors` when they are missing."""
    import torch

    answers: dict[str, torch.Tensor] = {}
    kinds: list[tuple[str, ...]] = []
    keys = tuple(_keys(model))
    values: list[Any] = []
    outputs: tuple[torch.Tensor, ...] = ()
    for call in range(script.calls):
        if call == 1 and script.edits_weights:
            _edit_weights(model, tensors)
        values = [_laid_out(v, "contiguous") for v in _arguments(script, tensors, call)]
        if script.gradients:
            values = [_as_leaf(value) for value in values]
        with torch.set_grad_enabled(script.gradients):
            try:
                outputs = problem.call(model, values)
            except ProblemError as error:
                is_odd = probe.layout in ("float64", "too_wide") or probe.batch is not None
                if call or not is_odd:
                    raise
                return Report(error=str(error), stage="call 1", keys=keys), {}
        kinds.append(tuple(_kind(output) for output in outputs))
        answers.update((f"call{call}.output{j}", _snapshot(y)) for j, y in enumerate(outputs))
    answers.update((f"buffer.{n}", b.detach().clone()) for n, b in model.named_buffers())
    if script.gradients:
        _draw_output_gradients(outputs, tensors, probe)
        if any(y.requires_grad for y in outputs):
            answers.update(_gradients(model, values, outputs, tensors))
    return Report(keys=keys, kinds=tuple(kinds), checksums=_checksums(model, values)), answers


def _as_leaf(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _draw_output_gradients(
    outputs: Sequence[torch.Tensor], tensors: dict[str, torch.Tensor], probe: Probe
) -> None:
    import torch

    for k, y in enumerate(outputs):
        if y.is_floating_point() and f"grad.{k}" not in tensors:
            generator = torch.Generator(y.device).manual_seed(probe.seed_inputs + 7)
            tensors[f"grad.{k}"] = torch.randn(
                y.shape, generator=generator, device=y.device, dtype=y.dtype
            )


def _rows_of(arguments: Sequence[Any]) -> int:
    """Return dim 0 of the first tensor; without one, a number that is no small batch."""
    import torch

    return next(
        (int(x.shape[0]) for x in arguments if isinstance(x, torch.Tensor) and x.ndim), SMALL_BATCH
    )


def _momenta(model: torch.nn.Module) -> dict[str, float]:
    found = ((name, getattr(m, "momentum", None)) for name, m in model.named_modules())
    return {name: float(m) for name, m in found if isinstance(m, float)}


def _disputed(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    """Return where the baseline is NaN or infinite and float64 is not, or the other way."""
    import torch

    if not got.is_floating_point():
        return None
    mask = (torch.isnan(got) != torch.isnan(want)) | (torch.isinf(got) != torch.isinf(want))
    return mask if bool(mask.any()) else None


def _require_stable(problem: Problem, probe: Probe, errors: Mapping[str, _Error]) -> None:
    for name, error in errors.items():
        is_usual = probe.distribution == "as_given" and name.startswith("call")
        if is_usual and probe.batch is None and error.rms_rel > UNSTABLE_RMS:
            raise problem.error(
                "the reference's own answer differs from its float64 answer by "
                f"{error.rms_rel:.2g} (rms, relative), so nothing can be judged by it; "
                "does it draw random numbers?"
            )


# ---- judge: compare -------------------------------------------------------------------------


def _compare(
    got: torch.Tensor,
    want: torch.Tensor,
    unjudged: torch.Tensor | None = None,
    accuracy: Accuracy | None = None,
    *,
    tells_nan_from_inf: bool = True,
) -> _Error:
    """Compare on the device in chunks; one synchronisation a tensor."""
    import torch

    if not want.is_floating_point():
        return _Error(num_misplaced=int((got != want).sum()))
    sums = torch.zeros(7, dtype=torch.float64, device=want.device)
    for g, w, skip in _chunks(got, want, unjudged):
        error, is_misplaced = _differences(g, w, skip)
        if not tells_nan_from_inf:
            is_misplaced &= torch.isfinite(g) | torch.isfinite(w)
        value = torch.where(torch.isfinite(w), w.abs(), 0.0)
        beyond = torch.zeros((), dtype=torch.float64, device=want.device)
        if accuracy is not None and accuracy.kind == "tolerance":
            beyond = (error > accuracy.atol + accuracy.rtol * value).sum().double()
        sums[0] = torch.maximum(sums[0], error.max())
        sums[1] += error.square().sum()
        sums[2] = torch.maximum(sums[2], value.max())
        sums[3] += value.square().sum()
        sums[4] += is_misplaced.sum()
        sums[5] += beyond
        sums[6] += error.numel()
    max_abs, square, largest, square_value, misplaced, beyond_count, count = sums.tolist()
    count = max(1.0, count)
    return _Error(
        max_abs, math.sqrt(square / count), largest, math.sqrt(square_value / count),
        int(misplaced), int(beyond_count),
    )  # fmt: skip


def _chunks(
    got: torch.Tensor, want: torch.Tensor, unjudged: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield flat float64 pieces of both, small enough for several temporaries."""
    g, w = got.reshape(-1), want.reshape(-1)
    skip = None if unjudged is None else unjudged.reshape(-1)
    for start in range(0, w.numel(), CHUNK_ELEMENTS):
        piece = slice(start, start + CHUNK_ELEMENTS)
        yield g[piece].double(), w[piece].double(), None if skip is None else skip[piece]


def _differences(
    got: torch.Tensor, want: torch.Tensor, skip: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the absolute error (0 where either is not finite) and where NaN or Inf is amiss."""
    import torch

    is_both_finite = torch.isfinite(got) & torch.isfinite(want)
    error = torch.where(is_both_finite, (got - want).abs(), 0.0)
    is_same = is_both_finite | (got == want) | (torch.isnan(got) & torch.isnan(want))
    if skip is not None:
        error = torch.where(skip, 0.0, error)
        is_same = is_same | skip
    return error, ~is_same


@dataclass(frozen=True, slots=True)
class _Limits:
    """How large the error of one tensor may be, and why (for the message)."""

    max_abs: float
    rms_abs: float
    why: str
    is_elementwise: bool = False  # no element beyond atol + rtol * |value| is enough as well

    def accepts(self, error: _Error) -> bool:
        if error.num_misplaced:
            return False
        if self.is_elementwise and not error.num_beyond:
            return True
        return error.max_abs <= self.max_abs and error.rms_abs <= self.rms_abs


def _limits(name: str, baseline: _Error, num_rows: int, accuracy: Accuracy) -> _Limits:
    """Return the limits of an output or a buffer by the class of accuracy.

    - float32: twice PyTorch float32's own rms and max error on this probe (4 times for batches
      under 32), or 16 * 2^-24 of the largest value, whichever is larger;
    - tf32: once PyTorch TF32's own, with the same floor. Two equally good kernels that sum in
      another order differ by chance: the rms by 1 %, the largest error of millions by 10 % (seen
      on an H200 between PyTorch's own algorithms), so 1.02 and 1.25 times are taken as once;
      twice for buffers, whose few elements leave the ratio of two maxima more to chance;
    - tolerance: every element within atol + rtol * |value|, or all within twice the baseline's
      own largest error (which is more where the baseline leaves the tolerance, as on x + 100);
      for buffers, |value| is that of the largest element.
    """
    infinite = float("inf")
    is_buffer = name.startswith("buffer.")
    if accuracy.kind == "tolerance":
        limit = 2.0 * baseline.max_abs
        if not is_buffer:
            return _Limits(limit, infinite, accuracy.label, is_elementwise=True)
        limit = max(limit, accuracy.atol + accuracy.rtol * baseline.largest)
        return _Limits(limit, infinite, f"{accuracy.label} of the largest value")
    factor = rms_factor = 4.0 if num_rows < SMALL_BATCH else 2.0
    if accuracy.kind == "tf32":
        factor, rms_factor = (2.0, 2.0) if is_buffer else (1.25, 1.02)
    floor = FLOOR_ULPS * ULP * baseline.largest
    own = f"{factor:g} x PyTorch {accuracy.kind}'s own {baseline.max_abs:.3g}"
    why = own if factor * baseline.max_abs >= floor else f"16 x 2^-24 of {baseline.largest:.3g}"
    return _Limits(
        max(factor * baseline.max_abs, floor), max(rms_factor * baseline.rms_abs, floor), why
    )


def _gradient_limits(baseline: _Error, largest_of_all: float, accuracy: Accuracy) -> _Limits:
    """Return the limits of a gradient.

    4 times the baseline's own largest error, or 64 * 2^-24 of the tensor's largest element; in
    the tolerance class at least atol + 10 * rtol of it. A gradient that is mathematically 0 (of
    a bias in front of a batch normalisation) has no size of its own, and is compared
    absolutely: with the largest element of all gradients.
    """
    is_zero = baseline.largest < 1e-10 * largest_of_all
    largest = largest_of_all if is_zero else baseline.largest
    limit = max(GRADIENT_FACTOR * baseline.max_abs, GRADIENT_FLOOR_ULPS * ULP * largest)
    if accuracy.kind == "tolerance":
        limit = max(limit, accuracy.atol + 10.0 * accuracy.rtol * largest)
    return _Limits(limit, float("inf"), f"PyTorch's own {baseline.max_abs:.3g}")


# ---- judge: the verdict ---------------------------------------------------------------------


def judge(expected: Expected, answer: Answer, accuracy: Accuracy) -> ProbeResult:
    """Judge one answer: how it behaved, what it returned, how near to float64 it is."""
    probe = expected.probe
    reason = _judge_refusal(expected, answer)
    if reason is not None:
        return ProbeResult(probe.name, 0.0, 0.0, 0.0, 0.0, reason == "", _told(probe, reason))
    reason = _judge_form(expected, answer)
    if reason:
        return ProbeResult(
            probe.name, math.inf, math.inf, *_baseline_of(expected), False, _told(probe, reason)
        )
    errors = {
        # A poisoned buffer may be NaN or infinite: that depends on how sums are merged.
        name: _compare(
            _received(answer, want, name),
            want,
            expected.unjudged.get(name),
            accuracy,
            tells_nan_from_inf=not name.startswith("buffer."),
        )
        for name, want in expected.oracle.items()
        if name in answer.tensors
    }
    reason = (
        _judge_behaviour(expected, answer)
        or _judge_values(expected, answer, errors, accuracy)
        or _judge_gradients(expected, answer, errors, accuracy)
        or _judge_bits(expected, answer)
    )
    outputs = [error for name, error in errors.items() if name.startswith("call")]
    worst = max(outputs, key=lambda error: error.max_abs, default=_Error())
    rms_rel = max((error.rms_rel for error in outputs), default=0.0)
    return ProbeResult(
        probe.name, rms_rel, worst.max_abs, *_baseline_of(expected), not reason,
        _told(probe, reason),
    )  # fmt: skip


def _told(probe: Probe, reason: str) -> str:
    if not reason:
        return ""
    return f"{probe.name}: {reason}" + (f" ({probe.tells})" if probe.tells else "")


def _baseline_of(expected: Expected) -> tuple[float, float]:
    outputs = [error for name, error in expected.baseline.items() if name.startswith("call")]
    return (
        max((error.rms_rel for error in outputs), default=0.0),
        max((error.max_abs for error in outputs), default=0.0),
    )


def _received(answer: Answer, want: torch.Tensor, name: str) -> torch.Tensor:
    return answer.tensors[name].to(want.device)


def _judge_refusal(expected: Expected, answer: Answer) -> str | None:
    """Return None to judge on, "" to accept as it is, or why it is rejected."""
    report, probe = answer.report, expected.probe
    if expected.error and not report.error:
        # The reference's answer at such a batch is unknown, so any answer may be right.
        is_beyond_reference = probe.layout == "contiguous" and (probe.batch or 0) >= 2
        if is_beyond_reference:
            return ""
        return f"it returned an answer where the reference raises: {expected.error}"
    if not report.error:
        return None
    is_call = report.stage.startswith("call")
    if is_call and (expected.error or probe.may_refuse):
        return ""
    if report.stage == "load":
        return f"it does not load the reference's state_dict: {_shortened(report.error)}"
    if report.stage == "build":
        return f"ModelNew(*get_init_inputs()) raised {_shortened(report.error)}"
    return f"it raised in {report.stage}: {_shortened(report.error)}"


def _shortened(text: str, limit: int = 600) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]} ... ({len(text) - limit} characters more)"


def _judge_form(expected: Expected, answer: Answer) -> str:
    """Judge the state_dict's keys and the outputs' number, type, dtype, shape and device."""
    report, reference = answer.report, expected.report
    mine, theirs = dict(_by_name(report.keys)), dict(_by_name(reference.keys))
    for name in theirs:
        if mine.get(name) != theirs[name]:
            found = mine.get(name, "missing")
            return f"state_dict: {name!r} is {found}; the reference's is {theirs[name]}"
    extra = [name for name in mine if name not in theirs]
    if extra:
        return f"state_dict: {extra[0]!r} is not in the reference's"
    for call, kinds in enumerate(reference.kinds):
        got = report.kinds[call] if call < len(report.kinds) else ()
        if got != kinds:
            is_disguised = any(not kind.startswith("torch.Tensor ") for kind in got)
            hint = ": a lazy or disguised tensor?" if is_disguised else ""
            return (
                f"call {call + 1} returned {', '.join(got) or 'nothing'}; "
                f"expected {', '.join(kinds)}{hint}"
            )
    for name, want in expected.oracle.items():
        got_tensor = answer.tensors.get(name)
        if got_tensor is None and not name.startswith("grad."):
            return f"{_label(name)} is missing from the answer"
        if got_tensor is not None and got_tensor.shape != want.shape:
            return f"{_label(name)} has shape {list(got_tensor.shape)}, not {list(want.shape)}"
        # Announced kinds were compared above; the received bytes must be of that kind as well.
        if got_tensor is not None and got_tensor.is_complex():
            return f"{_label(name)} is {got_tensor.dtype}"
    return ""


def _by_name(
    keys: Sequence[tuple[str, str, tuple[int, ...]]],
) -> Iterator[tuple[str, str]]:
    for name, dtype, shape in keys:
        yield name, f"{dtype.removeprefix('torch.')}{list(shape)}"


def _judge_behaviour(expected: Expected, answer: Answer) -> str:
    """Judge what must hold whatever the values: memory, edits, late work."""
    report = answer.report
    if report.aliases:
        return report.aliases[0]
    for name, checksum in expected.report.checksums.items():
        if report.checksums.get(name) == checksum:
            continue
        kind, _, rest = name.partition(".")
        if kind == "input":
            return f"input {rest} was edited by the call"
        is_own = expected.question.script.own_seed is not None
        if is_own and report.checksums.get(f"drawn.{name}") != checksum:
            return (
                f"{rest} differs from the reference's initial value: with the same seed, the "
                "constructor must draw the same random numbers in the same order"
            )
        return f"the weight {rest} was edited by the call"
    for name, tensor in answer.tensors.items():
        if name.startswith("call") and report.checksums.get(f"late.{name}") != _checksum(tensor):
            return (
                f"{_label(name)} changed after the call had returned: a later call or another "
                "thread or stream writes to it"
            )
    return ""


def _judge_values(
    expected: Expected, answer: Answer, errors: Mapping[str, _Error], accuracy: Accuracy
) -> str:
    """Judge outputs and buffers by the class of accuracy."""
    for name, error in errors.items():
        if name.startswith("grad."):
            continue
        baseline = expected.baseline[name]
        limits = _limits(name, baseline, expected.num_rows, accuracy)
        if not limits.accepts(error):
            where = _offence(expected, answer, name, error, limits, accuracy)
            diagnosis = _diagnosis(expected, answer, name, error)
            return where + (f"; {diagnosis}" if diagnosis else "")
    return ""


def _judge_gradients(
    expected: Expected, answer: Answer, errors: Mapping[str, _Error], accuracy: Accuracy
) -> str:
    names = [name for name in expected.oracle if name.startswith("grad.")]
    if names and answer.report.is_detached:
        return "the output is detached: it has no gradient, and nothing was raised"
    largest = max((expected.baseline[name].largest for name in names), default=0.0)
    for name in names:
        if name not in errors:
            return f"{_label(name)} is missing: the output does not depend on it"
        limits = _gradient_limits(expected.baseline[name], largest, accuracy)
        error = errors[name]
        if not limits.accepts(error):
            return _offence(expected, answer, name, error, limits, accuracy)
    return ""


def _judge_bits(expected: Expected, answer: Answer) -> str:
    if not expected.probe.wants_same_bits:
        return ""
    for name, tensor in answer.tensors.items():
        if name.startswith("call1."):
            first = answer.tensors[name.replace("call1.", "call0.", 1)]
            if _checksum(first) != _checksum(tensor):
                return (
                    "the same input twice gave different bits, but the candidate is declared "
                    "deterministic"
                )
    return ""


def _label(name: str) -> str:
    """Return what a tensor of the answer is called in a message."""
    kind, _, rest = name.partition(".")
    if kind.startswith("call"):
        which = "" if rest == "output0" else f" {int(rest.removeprefix('output')) + 1}"
        return f"output{which} of call {int(kind[4:]) + 1}"
    return f"gradient of {rest}" if kind == "grad" else f"buffer {rest}"


def _offence(
    expected: Expected,
    answer: Answer,
    name: str,
    error: _Error,
    limits: _Limits,
    accuracy: Accuracy,
) -> str:
    """Say which element is the first beyond its limit, by how much, and what the limit was."""
    want = expected.oracle[name]
    got = _received(answer, want, name)
    label = _label(name)
    if not want.is_floating_point():
        at = int((got != want).reshape(-1).nonzero()[0])
        return (
            f"{label}{_index(at, want)}: got {got.reshape(-1)[at].item()}, "
            f"expected {want.reshape(-1)[at].item()}"
        )
    at, share = _first_beyond(expected, got, name, error, limits, accuracy)
    g, w = float(got.reshape(-1)[at]), float(want.reshape(-1)[at])
    text = f"{label}{_index(at, want)}: got {g:.9g}, expected {w:.9g}"
    if error.num_misplaced:
        return f"{text}; {error.num_misplaced} elements have NaN or Inf at other places"
    if limits.is_elementwise:
        return (
            f"{text}, error {abs(g - w):.3g}; {share:.3g} % of elements are beyond {limits.why}, "
            f"and the largest error {error.max_abs:.3g} is beyond 2 x PyTorch's own "
            f"{limits.max_abs / 2:.3g}"
        )
    if error.max_abs > limits.max_abs:
        return (
            f"{text}, error {abs(g - w):.3g} with limit {limits.max_abs:.3g} ({limits.why}); "
            f"largest {error.max_abs:.3g}, {share:.3g} % of elements are beyond"
        )
    return (
        f"{label}: rms error {error.rms_abs:.3g} with limit {limits.rms_abs:.3g}; the largest "
        f"error is {error.max_abs:.3g}, at {_index(at, want)}: got {g:.9g}, expected {w:.9g}"
    )


def _first_beyond(
    expected: Expected,
    got: torch.Tensor,
    name: str,
    error: _Error,
    limits: _Limits,
    accuracy: Accuracy,
) -> tuple[int, float]:
    """Return the flat index of the first offending element, and the percentage of them."""
    want = expected.oracle[name]
    start, first, worst, total = 0, None, (-1.0, 0), 0
    for g, w, skip in _chunks(got, want, expected.unjudged.get(name)):
        difference, is_misplaced = _differences(g, w, skip)
        is_bad = is_misplaced
        if not error.num_misplaced:
            limit: Any = limits.max_abs
            if limits.is_elementwise:
                limit = accuracy.atol + accuracy.rtol * w.abs()
            is_bad = difference > limit
        count = int(is_bad.sum())
        if count and first is None:
            first = start + int(is_bad.int().argmax())
        total += count
        worst = max(worst, (float(difference.max()), start + int(difference.argmax())))
        start += g.numel()
    return (worst[1] if first is None else first), 100.0 * total / max(1, start)


def _index(flat: int, tensor: torch.Tensor) -> str:
    places = []
    for size in reversed(tensor.shape):
        places.append(flat % size)
        flat //= size
    return f"[{', '.join(str(place) for place in reversed(places))}]"


# ---- judge: name the mistake where it can be told -------------------------------------------


def _diagnosis(expected: Expected, answer: Answer, name: str, error: _Error) -> str:
    want = expected.oracle[name]
    got = _received(answer, want, name)
    if name.startswith("buffer."):
        return _buffer_diagnosis(expected, name, got)
    return _output_diagnosis(expected, answer, name, got, error)


def _output_diagnosis(
    expected: Expected, answer: Answer, name: str, got: torch.Tensor, error: _Error
) -> str:
    import torch

    want = expected.oracle[name]
    if answer.report.num_threads_left:
        return f"{answer.report.num_threads_left} threads outlived the call: a late write?"
    call, _, which = name.partition(".")
    number = int(call[4:])
    for earlier in range(number):
        if torch.equal(got, _received(answer, want, f"call{earlier}.{which}")):
            changed = "weights" if expected.probe.edits_weights else "input"
            return (
                f"the output of call {number + 1} equals that of call {earlier + 1} although the "
                f"{changed} changed: memoised, or replayed"
            )
    is_poisoned = expected.probe.distribution in ("nan_row", "inf_element")
    if not is_poisoned and bool((torch.isnan(got) & torch.isfinite(want)).any()):
        return (
            "NaN where a number is expected: part of the output was never written, or memory "
            "was read that was never written"
        )
    if error.num_misplaced:
        return "NaN and Inf must come through as they do in the reference" if is_poisoned else ""
    if got.numel() > 1 and bool((got == got.reshape(-1)[0]).all()):
        return "every element is the same: a constant output"
    return _place_diagnosis(expected, name, got) or _precision_diagnosis(expected, name, error)


def _place_diagnosis(expected: Expected, name: str, got: torch.Tensor) -> str:
    """Tell whether only some rows (dim 0) or columns (last dim) are wrong, as of a tail."""
    want = expected.oracle[name]
    if want.ndim < 2 or not want.numel():
        return ""
    floor = FLOOR_ULPS * ULP * expected.baseline[name].largest
    is_bad = (got - want).abs() > max(4.0 * expected.baseline[name].max_abs, floor)
    flat = is_bad.reshape(-1, want.shape[-1])
    for what, lines in (
        ("row", is_bad.flatten(1).any(1)),
        ("column", flat.any(0)),
    ):
        at = lines.nonzero().reshape(-1).tolist() if int(lines.sum()) * 2 < len(lines) else []
        if at and at[-1] - at[0] == len(at) - 1:
            which = f"{what} {at[0]} is" if len(at) == 1 else f"{what}s {at[0]} to {at[-1]} are"
            return f"only {which} wrong: a part that was never written?"
    return ""


def _precision_diagnosis(expected: Expected, name: str, error: _Error) -> str:
    """Tell operands of fewer bits from plainly wrong values, on well-behaved inputs."""
    if expected.probe.distribution not in ("as_given", "normal", "heavy_tailed"):
        return ""
    if error.rms_rel < 4.0 * expected.baseline[name].rms_rel or not error.rms_rel:
        return ""
    if error.max_abs > 8.0 * error.rms_abs:  # rounding is spread evenly; a mistake is not
        return ""
    bits = -math.log2(error.rms_rel)
    for low, high, what in ((7.0, 10.5, "bfloat16"), (10.5, 14.0, "float16 or TF32")):
        if low <= bits < high:
            return (
                f"an rms error of 2^-{bits:.1f} is that of {what} operands: a lower precision "
                "than declared"
            )
    return ""


def _buffer_diagnosis(expected: Expected, name: str, got: torch.Tensor) -> str:
    import torch

    want = expected.oracle[name]
    start = expected.start[name.removeprefix("buffer.")]
    if not want.is_floating_point():
        return "the calls were not counted" if torch.equal(got, start) else ""
    if torch.equal(got.double(), start.to(torch.float32).double()):
        return "the running statistics were not updated"
    if expected.probe.mode == "eval":
        return "eval mode must not change the stored statistics"
    momentum = next(
        (m for prefix, m in expected.momenta.items() if name.startswith(f"buffer.{prefix}")), None
    )
    rows = expected.num_rows
    if momentum is not None and expected.probe.calls == 1 and rows > 1:
        # unbiased = biased * B / (B - 1), so a biased update lacks momentum * unbiased / B.
        unbiased = (want - (1.0 - momentum) * start) / momentum
        biased = want - momentum * unbiased / rows
        if bool(((got - biased).abs() <= 0.05 * (want - biased).abs() + 1e-6 * want.abs()).all()):
            return "it looks biased: the variance is off by the factor B/(B-1)"
    return ""


def merge(results: Sequence[ProbeResult], accuracy: Accuracy, is_thorough: bool) -> Check:
    """Return the verdict over all probes: the first reason, and which other probes failed."""
    rejected = [result for result in results if not result.is_accepted]
    if not results:
        return Check(False, accuracy.label, "nothing was asked", (), is_thorough)
    reason = ""
    if rejected:
        reason = rejected[0].reason
        others = [result.probe for result in rejected[1:]]
        if others:
            shown = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
            reason += f"; also rejected on {len(others)} of {len(results) - 1} others: {shown}"
    return Check(not rejected, accuracy.label, reason, tuple(results), is_thorough)
