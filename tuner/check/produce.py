"""The producer's half of a check: run the candidate on one question, return what it did.

What the candidate raises becomes part of its answer. Nothing here knows the probe, its secret
seeds, the reference or the oracle. The judge runs the reference with the functions that lay out,
edit, copy and add up in the same way.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from tuner.check.probes import OWN_WEIGHTS_SEED, Answer, Layout, Mode, Question, Report, Script

if TYPE_CHECKING:
    import torch

__all__ = [
    "CHUNK_ELEMENTS",
    "answer",
    "answer_of_call",
    "arguments_of",
    "checksum_of",
    "checksums_of",
    "edit_weights",
    "gradients_of",
    "keys_of",
    "kind_of",
    "laid_out",
    "recorded",
    "set_mode",
    "snapshot",
]

CHUNK_ELEMENTS = 2**24  # 128 MB a float64 temporary; a comparison holds about six
LATE_WAIT_S = 0.05  # how long a thread that outlives the call is given to show itself


# ---- run the candidate ----------------------------------------------------------------------


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
        self.num_forks_left = 0
        self.operations: list[str] = []
        self.process = os.getpid()
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
            self.keys = keys_of(self.model)
            if own is not None:
                drawn = checksums_of(self.model, [])
                self.checksums.update((f"drawn.{name}", value) for name, value in drawn.items())
            else:
                self.model.load_state_dict(_part(self.given, "state"), strict=True)
            set_mode(self.model, self.script.mode)

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
                edit_weights(self.model, self.given)
        arguments = self._lay_out(call)
        _poison(self.script.output_bytes, self.device)
        with _stage(f"call {call + 1}"):
            with recorded(self.operations, self.script.traces):
                result = self.model(*arguments)
            self._end_copies()
            # No synchronisation before the copy: work on another stream must not be waited for.
            outputs = _as_tuple(result)
            for j, output in enumerate(outputs):
                if isinstance(output, torch.Tensor):
                    self.tensors[f"call{call}.output{j}"] = snapshot(output)
        self.kinds.append(tuple(kind_of(output) for output in outputs))
        self.aliases += self._find_aliases(call, outputs)
        self.outputs.append(list(outputs))

    def _lay_out(self, call: int) -> list[Any]:
        """Return the arguments in memory of their own, with the strides that are asked."""
        import torch

        script = self.script
        source = arguments_of(script, self.given, call)
        if call and script.is_repeated:
            arguments = self.arguments[0]
        elif call and script.is_overwritten:
            arguments = self.arguments[0]
            for old, new in zip(arguments, source, strict=True):
                if isinstance(new, torch.Tensor):
                    old.data.copy_(new)  # .data: the version counter stays as it was
        else:
            arguments = [laid_out(value, script.layout) for value in source]
            if script.gradients:
                for value in arguments:
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        value.requires_grad_()
        self.arguments.append(arguments)
        return arguments

    def _end_copies(self) -> None:
        """End this process if the call has forked it: only one of them may answer."""
        if os.getpid() != self.process:
            os._exit(1)

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
        self.num_forks_left = _num_copies()
        late = set(threading.enumerate()) - self.threads_before
        self.num_threads_left = len(late)
        for thread in late:
            thread.join(LATE_WAIT_S)
        for call, outputs in enumerate(self.outputs):
            for j, output in enumerate(outputs):
                if isinstance(output, torch.Tensor):
                    self.checksums[f"late.call{call}.output{j}"] = checksum_of(output)
        self.checksums.update(checksums_of(self.model, self.arguments[-1]))
        for name, value in self.model.named_buffers():
            self.tensors[f"buffer.{name}"] = value.detach().clone()

    def differentiate(self) -> None:
        """Take the gradients of the last call by its inputs and every parameter."""
        import torch

        with _stage("gradients"):
            outputs = [y for y in self.outputs[-1] if isinstance(y, torch.Tensor)]
            self.is_detached = not any(y.requires_grad for y in outputs)
            if not self.is_detached:
                grads = gradients_of(self.model, self.arguments[-1], outputs, self.given)
                self.tensors.update(grads)

    def answer(self, error: str = "", stage: str = "") -> Answer:
        """Return what was seen up to here."""
        report = Report(
            error, stage, tuple(self.keys), tuple(self.kinds), tuple(self.aliases),
            self.checksums, self.num_threads_left, self.is_detached, self.num_forks_left,
            tuple(self.operations),
        )  # fmt: skip
        return Answer(report, self.tensors)


def answer_of_call(model: torch.nn.Module, result: Any) -> Answer:
    """Return as an answer what one call returned that no question asked for, e.g. a timed one."""
    import torch

    outputs = _as_tuple(result)
    tensors = {
        f"call0.output{j}": snapshot(y)
        for j, y in enumerate(outputs)
        if isinstance(y, torch.Tensor)
    }
    late = {f"late.{name}": checksum_of(tensor) for name, tensor in tensors.items()}
    kinds = (tuple(kind_of(output) for output in outputs),)
    return Answer(Report(keys=tuple(keys_of(model)), kinds=kinds, checksums=late), tensors)


# ---- what the reference does alike ----------------------------------------------------------


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
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


def set_mode(model: torch.nn.Module, mode: Mode) -> None:
    """Put a model into the mode that a probe asks for."""
    model.train(mode != "eval")
    if mode == "frozen":
        for child in model.children():
            child.eval()
    if mode == "cumulative":
        for module in model.modules():
            if hasattr(module, "momentum"):
                module.momentum = None


def edit_weights(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace parameters in place by the question's `edit.*`."""
    state = model.state_dict()
    for name, value in _part(tensors, "edit").items():
        state[name].data.copy_(value)  # .data: no version counter tells of it


def _num_copies() -> int:
    """Return how many children are copies of this process: forked, and running nothing else.

    What a module starts by running a program, such as a pool of compilers, is not among them.
    """
    own, num_copies = psutil.Process(), 0
    with contextlib.suppress(psutil.Error):
        command = own.cmdline()
        for child in own.children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                num_copies += child.cmdline() == command
    return num_copies


@contextlib.contextmanager
def recorded(operations: list[str], is_wanted: bool = True) -> Iterator[None]:
    """Add to `operations` what PyTorch's dispatcher runs inside, e.g. `aten.addmm`."""
    if not is_wanted:
        yield
        return
    from torch.utils._python_dispatch import TorchDispatchMode

    def record(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operations.append(str(func).rpartition(".")[0])
        return func(*args, **(kwargs or {}))

    recorder: Any = type("Recorder", (TorchDispatchMode,), {"__torch_dispatch__": record})
    with recorder():
        yield


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def kind_of(value: Any) -> str:
    """Describe an output: exact type, dtype, shape and device in one line."""
    import torch

    cls = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor:
        cls = f"subclass {cls}"
    if not isinstance(value, torch.Tensor):
        return cls
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{cls} {dtype}{list(value.shape)} on {value.device.type}"


def snapshot(output: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of an output, taken now."""
    import torch

    with torch.no_grad():
        return output.detach().clone(memory_format=torch.contiguous_format)


def gradients_of(
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


def laid_out(value: Any, layout: Layout) -> Any:
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


def checksums_of(model: torch.nn.Module, arguments: Sequence[Any]) -> dict[str, int]:
    """Return checksums of what a call must leave as it was: inputs and parameters."""
    import torch

    inputs = {
        f"input.{i}": value for i, value in enumerate(arguments) if isinstance(value, torch.Tensor)
    }
    weights = {f"weight.{name}": value for name, value in model.named_parameters()}
    return {name: checksum_of(value) for name, value in (inputs | weights).items()}


def checksum_of(tensor: torch.Tensor) -> int:
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
