"""The producer's half of a check: run the candidate on one question, return what it did.

What the candidate raises becomes part of its answer. Nothing here knows the probe, its secret
seeds, the reference or the oracle.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tuner.check.calls.circumstances import (
    Halted,
    busy_side_stream,
    changed_flags,
    flags,
    nan_filled_memory,
    num_copies,
    poison,
    replaced_parameters,
    spoil,
    stage,
)
from tuner.check.calls.crossing import Answer, Question, Report
from tuner.check.calls.exercise import (
    DRAWN,
    STAYS,
    arguments_of,
    called_with,
    checksum_of,
    checksums_of,
    keys_of,
    kinds_of,
    mode_of,
    outputs_of,
    recorded,
    snapshot,
    snapshots,
    stays,
    tensors_under,
)
from tuner.check.calls.gradients import (
    Kept,
    accumulated,
    differentiated,
    edit_before_backward,
    leaves_of,
    watched,
    with_tangents,
)
from tuner.check.calls.history import BEFORE_CALL, History, set_mode
from tuner.check.calls.layouts import laid_out, laid_out_where, overwrite
from tuner.check.calls.mapping import mapped
from tuner.check.calls.registries import successor, tables_of, use
from tuner.check.calls.sharing import aliases_of
from tuner.check.calls.surroundings import changed, is_pytorchs, settings
from tuner.check.calls.threads import called_at_once
from tuner.machine.platforms import is_gpu, platform_of
from tuner.problem.draws import seed_everything

if TYPE_CHECKING:
    import torch

__all__ = ["OWN_WEIGHTS_SEED", "answer"]

OWN_WEIGHTS_SEED = 42  # public: KernelBench seeds both constructors with it

LATE_WAIT_S = 0.05  # how long threads that outlive the call are given to show themselves


def answer(make_candidate: Callable[..., torch.nn.Module], question: Question) -> Answer:
    """Ask a candidate one question; what it raises becomes part of the answer.

    A warning is no error, whatever the filters of the process make of it.

    `make_candidate` returns `ModelNew(*init_inputs, **options)` and is called once; its device is
    moved to that of the inputs. While searching it may return one module again and again, since
    the state is loaded anew, except where `script.own_seed` is set.
    """
    state = _AnswerState(question)
    try:
        # A device reports some faults only at a later operation, which may be one of ours.
        with stage("an operation after the call"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state.build(make_candidate)
            with state.circumstances():
                state.serve_mild()
                if question.script.at_once:
                    state.calls_at_once()
                else:
                    for call in range(question.script.calls):
                        state.call(call)
            state.look_again()
            if question.script.accumulates:
                state.accumulate()
            elif not question.script.at_once:
                for k, call in enumerate(question.script.backward):
                    state.differentiate(k, call)
            state.changes += state.kept.rewritten()
            if question.script.drops:
                state.changes += [STAYS] * stays(state.model, state.arguments[-1])
    except Halted as halt:
        return state.answer(halt.message, halt.stage)
    return state.answer()


class _AnswerState:
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
        self.process = os.getpid()
        self.detached: list[int] = []
        self.history: Any = None
        self.second: Any = None
        self.tables: list[tuple[Any, list[Any]]] = []
        self.kept = Kept()  # gradients, where the script wants it
        self.graphs: list[Any] = []  # of calls that nobody looks at
        self.leaves: list[dict[str, torch.Tensor]] = []
        self.threads_before = set(threading.enumerate())

    @property
    def model(self) -> Any:
        """The candidate, or the copy of it that goes on."""
        return self.history.model

    def build(self, make_candidate: Callable[..., torch.nn.Module]) -> None:
        """Construct the candidate and load the state strictly."""
        import torch

        own = self.script.own_seed
        seed_everything(OWN_WEIGHTS_SEED if own is None else own)
        with stage("build"):
            if any("read elsewhere" in actions for actions in self.script.before):
                self.tables = tables_of(self._made(make_candidate))
            model = self._first(make_candidate)
            if self.script.at_once == "two modules":
                self.second = self._made(make_candidate)
        with stage("load"):
            self.keys = keys_of(model)
            if own is not None:
                drawn = checksums_of(model, [])
                self.checksums.update((f"drawn.{name}", value) for name, value in drawn.items())
                self.checksums[DRAWN] = checksum_of(torch.get_rng_state())
            else:
                model.load_state_dict(tensors_under("state", self.given), strict=True)
            if self.second is not None:
                self.second.load_state_dict(tensors_under("state", self.given), strict=True)
                set_mode(self.second, self.script.mode)
        with stage("a change of settings"):
            set_mode(model, self.script.mode)
        self.history = History(model, self.script, self.given)
        self.history.tables = self.tables
        self.history.make_new = lambda: self._made(make_candidate)
        self.history.make_another = lambda: self._another(make_candidate)
        self.history.make_others = lambda: make_candidate(**self.script.others)
        if not is_pytorchs(type(model).__call__):
            self.changes.append("it has a __call__ of its own: hooks on the module would not run")

    def _made(self, make_candidate: Callable[..., torch.nn.Module]) -> torch.nn.Module:
        return make_candidate(**self.script.options).to(self.device)

    def _first(self, make_candidate: Callable[..., torch.nn.Module]) -> torch.nn.Module:
        """Make the candidate, where the script asks it after another one that was deleted."""
        if not self.script.has_predecessor:
            return self._made(make_candidate)
        inputs = laid_out_where(arguments_of(self.script, self.given, 0), self.script)

        def make_other() -> torch.nn.Module:
            other = make_candidate(**self.script.other_options).to(self.device)
            other.load_state_dict(tensors_under("other", self.given), strict=True)
            use(other, inputs)
            return other

        return successor(lambda: self._made(make_candidate), make_other)

    def _another(self, make_candidate: Callable[..., torch.nn.Module]) -> None:
        """Make another module, with other options, and call it as the first one was called."""
        use(make_candidate(**self.script.other_options).to(self.device), self.arguments[-1])

    @contextlib.contextmanager
    def circumstances(self) -> Iterator[None]:
        """Set what holds during the calls: gradients or not, NaN-filled memory, the stream."""
        import torch

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.script.has_backward))
            if self.script.num_threads:
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(self.script.num_threads)
            if self.script.has_nan_memory:
                stack.enter_context(nan_filled_memory())
            if self.script.has_side_stream and is_gpu(self.device):
                stack.enter_context(busy_side_stream(self.device))
            yield

    def serve_mild(self) -> None:
        """Let the candidate serve usual inputs first, where the script wants it."""
        with stage("call on usual inputs, before the first"):
            self.history.serve_mild(called_with)

    def call(self, call: int) -> None:
        """Run one forward and keep a copy of what it returned, taken at once."""
        with stage(f"{BEFORE_CALL} {call + 1}"):
            called = self.history.prepare(call)
        parameters = dict(self.model.named_parameters())
        arguments = self._lay_out(call)
        if call == 1:
            with stage("one of many calls"):
                for _ in range(self.script.more_calls):
                    result = called(*arguments)
                    self.graphs += [result] * self.script.keeps_graphs
        poison(self.script.output_bytes, self.device)
        before, own = settings(), flags(self.model, arguments)
        # One that raises with lent weights alone refuses those.
        with stage(f"{BEFORE_CALL if self.history.is_lent else 'call'} {call + 1}"):
            with recorded(self.operations, self.script.traces), mode_of(self.script):
                result = self._result_of(called, arguments, call)
            self._end_copies()
            # No synchronisation before the copy: work on another stream must not be waited for.
            copies = snapshots(outputs_of(result))
        self.changes += changed(before)
        self.changes += changed_flags(own, flags(self.model, arguments))
        self.changes += replaced_parameters(parameters, dict(self.model.named_parameters()))
        self._keep(call, result, copies)
        if self.script.spoils_outputs:
            spoil(self.outputs[call], self.model, arguments)
            self.outputs[call] = copies  # what is looked at again in the end
        if self.script.backward_at_once:
            self.differentiate(call, call)

    def _result_of(self, called: Callable[..., Any], arguments: list[Any], call: int) -> Any:
        if self.script.mapped:
            return mapped(self.model, arguments, self.script.mapped, self.given)
        if not self.script.is_forward:
            named = dict(zip(self.script.names, arguments, strict=False))
            return called(**named) if named else called(*arguments)
        of_weights = self.script.gradients == "forward weights"
        asked = (self.model if of_weights else called), arguments
        result, tangents = with_tangents(called_with, *asked, self.given, call, of_weights)
        self.tensors.update(tangents)
        return result

    def calls_at_once(self) -> None:
        """Let each call be made by a thread of its own, again and again at the same time."""
        arguments = [self._lay_out(call) for call in range(self.script.calls)]
        models = [self.model] * (self.script.calls - 1) + [self.second or self.model]
        has_gradients = self.script.has_backward
        self._synchronize()
        with stage("calls of several threads at once"):
            made = called_at_once(
                models, arguments, self.device, self.given, has_gradients=has_gradients
            )
        self._synchronize()
        self.history.model = models[-1]
        for call, each in enumerate(made):
            self._keep(call, each.result, each.copies)
            self.tensors.update((f"grad{call}.{n}", g) for n, g in each.gradients.items())

    def _synchronize(self) -> None:
        if is_gpu(self.device):
            with stage("synchronise"):
                platform_of(self.device).synchronize(self.device)

    def _keep(self, call: int, result: Any, copies: list[torch.Tensor | None]) -> None:
        """Note what a call returned."""
        import torch

        outputs = outputs_of(result)
        for j, output in enumerate(copies):
            if output is not None:
                self.tensors[f"call{call}.output{j}"] = output
        with torch.set_grad_enabled(self.script.has_backward):  # the call may have set another
            self.kinds.append(kinds_of(result))
        arguments = self.arguments[call]
        self.leaves.append(leaves_of(self.model, arguments) if self.script.has_backward else {})
        self.aliases += aliases_of(self.model, arguments, self.outputs, outputs)
        if not self.script.has_backward:  # who frees an output's own object still holds its memory
            outputs = tuple(y.detach() if isinstance(y, torch.Tensor) else y for y in outputs)
        self.outputs.append(list(outputs))

    def _lay_out(self, call: int) -> list[Any]:
        """Return the arguments in memory of their own, with the strides that are asked."""
        import torch

        source = arguments_of(self.script, self.given, call)
        if call and self.script.is_repeated:
            arguments = self.arguments[0]
        elif call and self.script.is_overwritten:
            arguments = self.arguments[0]
            for old, new in zip(arguments, source, strict=True):
                if isinstance(new, torch.Tensor):
                    overwrite(old, new, call)
        else:
            arguments = laid_out_where(source, self.script)
            for i, value in enumerate(arguments):
                is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
                if is_number and self.script.wants(call, i):
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

        self._synchronize()
        self.num_forks_left = num_copies()
        threads = set(threading.enumerate()) - self.threads_before
        self.num_threads_left = len(threads)
        latest = time.monotonic() + LATE_WAIT_S
        for thread in threads:
            thread.join(max(0.0, latest - time.monotonic()))
        late = {
            f"late.call{i}.output{j}": y for i, outputs in enumerate(self.outputs)
            for j, y in enumerate(outputs) if isinstance(y, torch.Tensor)
        }  # fmt: skip
        self.keys = keys_of(self.model)  # once more: a call may have added to it
        self.checksums |= checksums_of(self.model, self.arguments[-1], late)
        for name, value in self.model.named_buffers():
            self.tensors[f"buffer.{name}"] = value.detach().clone()

    def differentiate(self, k: int, call: int) -> None:
        """Take the gradients of a call by its inputs and every parameter, the k-th ones."""
        import torch

        with stage("gradients"):
            outputs = [y for y in self.outputs[call] if isinstance(y, torch.Tensor)]
            if not any(y.requires_grad for y in outputs):
                self.detached.append(k)
                return
            # Copies, and of what comes back: a later backward may write where this one has.
            given = {n: snapshot(t) for n, t in self.given.items() if n.startswith("grad.")}
            edit_before_backward(self.script.edits, self.arguments[call], outputs, self.model)
            if self.script.edits == "input freed":  # and its memory written by another
                self.arguments[call] = [laid_out(x, "contiguous") for x in self.arguments[call]]
                poison(self.script.output_bytes, self.device)
            with (
                watched(given, self.model, self.changes),
                recorded(self.operations, self.script.traces),
                nan_filled_memory() if self.script.has_nan_memory else contextlib.nullcontext(),
            ):
                leaves = self.leaves[call]
                grads = differentiated(self.script, leaves, outputs, given, k, self.changes)
            self.tensors.update((n, snapshot(g)) for n, g in grads.items())
            self.kept.keep(grads if self.script.keeps_gradients else {})

    def accumulate(self) -> None:
        """Let the calls add up their gradients in `.grad`."""
        import torch

        outputs = [[y for y in each if isinstance(y, torch.Tensor)] for each in self.outputs]
        if not any(y.requires_grad for each in outputs for y in each):
            self.detached.append(0)
            return
        first = self.script.first_place
        with stage("gradients"), watched({}, self.model, self.changes):
            grads = accumulated(self.leaves, outputs, self.given, first, self.changes)
            self.tensors.update((f"grad0.{n}", g) for n, g in grads.items())

    def answer(self, error: str = "", part: str = "") -> Answer:
        """Return what was seen up to here."""
        report = Report(
            error, part, tuple(self.keys), tuple(self.kinds), tuple(self.aliases),
            self.checksums, self.num_threads_left, tuple(self.detached), self.num_forks_left,
            tuple(self.operations), (*self.changes, *self._of_history("changes")),
            self._of_history("refusals"), self._of_history("loads"),
        )  # fmt: skip
        return Answer(report, self.tensors)

    def _of_history(self, what: str) -> tuple[str, ...]:
        return tuple(getattr(self.history, what)) if self.history else ()
