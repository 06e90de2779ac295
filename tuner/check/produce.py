"""The producer's half of a check: run the candidate on one question, return what it did.

What the candidate raises becomes part of its answer. Nothing here knows the probe, its secret
seeds, the reference or the oracle.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from tuner.check.crossing import Answer, Question, Report
from tuner.check.exercise import (
    aliases_of,
    arguments_of,
    checksum_of,
    checksums_of,
    edit_weights,
    gradients_of,
    keys_of,
    kinds_of,
    laid_out,
    outputs_of,
    recorded,
    set_mode,
    snapshot,
    tensors_under,
)
from tuner.check.surroundings import changed, is_pytorchs, settings

if TYPE_CHECKING:
    import torch

__all__ = ["OWN_WEIGHTS_SEED", "answer", "answer_of_call"]

OWN_WEIGHTS_SEED = 42  # public: KernelBench seeds both constructors with it

LATE_WAIT_S = 0.05  # how long a thread that outlives the call is given to show itself


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

    A warning is no error, whatever the filters of the process make of it.

    `make_candidate` returns `ModelNew(*init_inputs)` and is called once; its device is moved to
    that of the inputs. While searching it may return one module again and again, since the
    state is loaded anew, except where `script.own_seed` is set.
    """
    session = _Session(question)
    try:
        # A device reports some faults only at a later operation, which may be one of ours.
        with _stage("an operation after the call"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
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
        self.changes: list[str] = []
        self.parameters: dict[str, torch.nn.Parameter] = {}
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
                self.model.load_state_dict(tensors_under("state", self.given), strict=True)
        with _stage("a change of settings"):
            set_mode(self.model, self.script.mode)
        if self.script.is_double:
            with _stage("conversion"):
                self.model = self.model.double()
        self.parameters = dict(self.model.named_parameters())
        if not is_pytorchs(type(self.model).__call__):
            self.changes.append("it has a __call__ of its own: hooks on the module would not run")

    @contextlib.contextmanager
    def circumstances(self) -> Iterator[None]:
        """Set what holds during the calls: gradients or not, NaN-filled memory, the stream."""
        import torch

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(bool(self.script.gradients)))
            if self.script.has_nan_memory:
                stack.enter_context(_nan_filled_memory())
            if self.script.has_side_stream and self.device.type == "cuda":
                stack.enter_context(_busy_side_stream(self.device))
            yield

    def call(self, call: int) -> None:
        """Run one forward and keep a copy of what it returned, taken at once."""
        import torch

        if call == 1 and self.script.copies:
            self._copy_model()
        if call == 1 and self.script.edits_weights:
            with _stage("load"):
                edit_weights(self.model, self.given)
        set_mode(self.model, self.script.mode, call)
        arguments = self._lay_out(call)
        if call == 1:
            with _stage("one of many calls"):
                for _ in range(self.script.more_calls):
                    self.model(*arguments)
        _poison(self.script.output_bytes, self.device)
        before, own = settings(), _flags(self.model, arguments)
        with _stage(f"call {call + 1}"):
            with recorded(self.operations, self.script.traces):
                result = self.model(*arguments)
            self._end_copies()
            # No synchronisation before the copy: work on another stream must not be waited for.
            outputs = outputs_of(result)
            for j, output in enumerate(outputs):
                if isinstance(output, torch.Tensor):
                    self.tensors[f"call{call}.output{j}"] = snapshot(output)
        self.changes += changed(before)
        now = _flags(self.model, arguments)
        self.changes += [
            f"the call left {name} {now[name]}, which was {flag}"
            for name, flag in own.items()
            if now.get(name, flag) != flag
        ]
        with torch.set_grad_enabled(bool(self.script.gradients)):  # the call may have set another
            self.kinds.append(kinds_of(result))
        self.aliases += aliases_of(self.model, arguments, self.outputs, outputs)
        self.outputs.append(list(outputs))

    def _copy_model(self) -> None:
        """Go on with a deep copy, whose weights are then moved as `to` moves them."""
        import torch

        original = self.model.state_dict()
        try:
            self.model = copy.deepcopy(self.model)
        except Exception:
            original = {}  # refused aloud, as a module with a lock or a library may
        self.parameters = dict(self.model.named_parameters())
        for name, tensor in self.model.state_dict().items():
            if name in original and original[name].data_ptr() == tensor.data_ptr() != 0:
                self.changes.append(f"a deep copy shares the memory of {name} with the original")
        torch.nn.Module._apply(self.model, torch.clone)

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
            if script.gradients and script.gradients != "plain_inputs":
                for value in arguments:
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        value.requires_grad_()
        self.arguments.append(arguments)
        return arguments

    def _end_copies(self) -> None:
        """End this process if the call has forked it: only one of them may answer."""
        if os.getpid() != self.process:
            os._exit(1)

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
        self.keys = keys_of(self.model)  # once more: a call may have added to it
        now = dict(self.model.named_parameters())
        self.changes += [
            f"the call replaced the parameter {name} by another object: an optimiser that was "
            "given the old one would train nothing"
            for name, parameter in self.parameters.items()
            if now.get(name) is not parameter
        ]
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
                grads = gradients_of(
                    self.model, self.arguments[-1], outputs, self.given,
                    is_of_sum=self.script.gradients == "of_sum",
                )  # fmt: skip
                self.tensors.update(grads)
                self.changes += [
                    f"the backward wrote the .grad of {name}: gradients would be added up twice"
                    for name, parameter in self.model.named_parameters()
                    if parameter.grad is not None
                ]

    def answer(self, error: str = "", stage: str = "") -> Answer:
        """Return what was seen up to here."""
        report = Report(
            error, stage, tuple(self.keys), tuple(self.kinds), tuple(self.aliases),
            self.checksums, self.num_threads_left, self.is_detached, self.num_forks_left,
            tuple(self.operations), tuple(self.changes),
        )  # fmt: skip
        return Answer(report, self.tensors)


def answer_of_call(model: torch.nn.Module, result: Any) -> Answer:
    """Return as an answer what one call returned that no question asked for, e.g. a timed one."""
    import torch

    outputs = outputs_of(result)
    tensors = {
        f"call0.output{j}": snapshot(y)
        for j, y in enumerate(outputs)
        if isinstance(y, torch.Tensor)
    }
    late = {f"late.{name}": checksum_of(tensor) for name, tensor in tensors.items()}
    kinds = (kinds_of(result),)
    return Answer(Report(keys=tuple(keys_of(model)), kinds=kinds, checksums=late), tensors)


# ---- what surrounds a call ------------------------------------------------------------------


def _flags(model: torch.nn.Module, arguments: Sequence[Any]) -> dict[str, str]:
    """Return which modules train, and what requires gradients, in words, by name."""
    import torch

    modes = {name or "the module": m.training for name, m in model.named_modules()}
    tensors = {f"input {i}": x for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)}
    tensors |= dict(model.named_parameters())
    wants = {name: x.requires_grad for name, x in tensors.items()}
    return {
        **{n: "in training mode" if is_on else "in eval mode" for n, is_on in modes.items()},
        **{n: f"{'with' if is_on else 'without'} requires_grad" for n, is_on in wants.items()},
    }


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

    # Not use_deterministic_algorithms, which imports the whole of inductor: 1.6 s in each process.
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


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
