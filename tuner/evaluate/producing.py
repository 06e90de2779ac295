"""The producer's role in a worker: it holds one stranger, and only produces tensors and times."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.capture.modules.rows_text import ROWS_NAME
from tuner.check import produce
from tuner.check.calls import crossing, lending, unasked
from tuner.check.calls.circumstances import poison
from tuner.check.calls.history import set_mode
from tuner.check.calls.surroundings import functions, replaced
from tuner.errors import ProblemError
from tuner.evaluate.child import Answer
from tuner.evaluate.modules import (
    constructed,
    differentiable,
    free_build_lock,
    fused,
    imported,
    module_of,
    notes_on,
    unpacked,
)
from tuner.evaluate.timed import WEIGHT_SEED, Timed, spoilt_by_cuda_errors
from tuner.export.several import KERNELS_NAME, take_kernel
from tuner.kernel.binding import bind
from tuner.machine import gpu_memory
from tuner.problem.accuracy import Accuracy, math_mode
from tuner.problem.reference import Problem, load_problem
from tuner.trial import Candidate, from_json

if TYPE_CHECKING:
    import torch

__all__ = ["Producer"]

MOST_RANGES = 64  # of rows, that a file is believed to have


class Producer:
    """A stranger's file, imported here, or a built candidate, bound into its family's module.

    With `compile_mode` it is the reference itself, compiled by PyTorch.

    `notes` name what a stranger's text tells, which is read before it runs.
    """

    def __init__(
        self,
        device: str,
        accuracy: str,
        init_inputs: str,
        file: str | None = None,
        candidate: str | None = None,
        artefact: str = "",
        model_new: str = "",
        reference: str = "",
        compile_mode: str = "",
        sizes: dict[str, int] | None = None,
    ) -> None:
        self._device, self._accuracy = device, Accuracy.parse(accuracy)
        self._timed = Timed(device, self._accuracy)  # before the import
        self.time_model, self.repeat = self._timed.time_model, self._timed.repeat
        self.time_steps = self._timed.time_steps
        self.operations, self.profile = self._timed.operations, self._timed.profile
        self.counted = self._timed.counted
        self._received: dict[str, torch.Tensor] = {}
        self._lent: dict[str, torch.Tensor] = {}  # kept until the next question
        self._rooms: dict[str, torch.Tensor] = {}  # of the question that comes next
        self._staging = lending.Staging(device)
        self._is_own_seed = True
        self._functions: dict[str, dict[str, Any]] = {}  # PyTorch's, as they were
        self._make_model: Callable[..., torch.nn.Module]
        self.notes: list[str] = []
        self._file: dict[str, Any] = {}  # the names of an imported file
        self._answer_bytes: list[int] = []  # of the last answer's tensors
        self._own_rows: dict[str, Any] = {}  # of these, where it takes which kernels
        if compile_mode:
            problem = load_problem(Path(reference), sizes or {})
            # One for all weights and inputs: another would be compiled once more.
            self._make_model = functools.cache(lambda: _compiled(problem, device, compile_mode))
            return
        if file is not None:
            self._functions = functions()
            self.notes = notes_on(Path(file).read_text(errors="replace"), sizes or {})
            free_build_lock(Path(file))
            module = self._file = vars(imported(Path(file)))
        else:
            assert candidate is not None
            subject = from_json(Candidate, candidate)
            module = module_of(model_new)
            operator = bind(subject.plan, subject.language, Path(artefact))
            self._timed.timer.is_bound_here = True
            module |= {**fused(operator), "fused_op": differentiable(operator, module)}
        if not callable(module.get("ModelNew")):
            found = [n for n, value in module.items() if isinstance(value, type)]
            raise ProblemError(
                f"{file}: no class ModelNew\n  got: {', '.join(found) or 'no class'}\n"
                "  next: call the class that replaces the reference's `Model` `ModelNew`"
            )
        of = file or "model_new.py"
        unpacked(init_inputs, module, of)  # or it says now why not
        # Arguments of its own for each, which may edit them. Weights that are replaced at once
        # need not be drawn on the CPU: seconds for large ones.
        self._make_model = lambda **options: constructed(
            module["ModelNew"], unpacked(init_inputs, module, of), device, options,
            is_quick=not self._is_own_seed,
        )  # fmt: skip

    def rows_taken(self) -> Answer:
        """Return at which numbers of rows a file says that it takes which of its kernels.

        `rows` are [fewest, most, [low, high] that are left out ...] by way, `kernels` [most rows,
        kernel] of each range.
        """
        said = [self._file.get(name) for name in (ROWS_NAME, KERNELS_NAME)]
        rows, kernels = (each if isinstance(each, dict) else {} for each in said)
        return {
            "rows": {way: each for way, each in rows.items() if _is_range(each)},
            "kernels": {way: each for way, each in kernels.items() if _are_pairs(each)},
        }, ()

    def take_all_rows(self, kernel: int | None = None) -> Answer:
        """Let the file take its kernels at any number of rows from now on; of several one.

        The memory of the last answer is filled with NaN: who forgets to write a part of the next
        one, to the same question, would find it there.
        """
        import torch

        self.take_own_rows()
        self._lent = {}
        poison(self._answer_bytes, torch.device(self._device))
        own = (ROWS_NAME, KERNELS_NAME)
        self._own_rows = {name: self._file[name] for name in own if name in self._file}
        self._file[ROWS_NAME] = None
        if kernel is not None:
            take_kernel(self._file, kernel)
        return {}, ()

    def take_own_rows(self) -> Answer:
        """Let the file take its kernels where it does by itself, again."""
        self._file |= self._own_rows
        return {}, ()

    def make_rooms(self, question: str) -> Answer:
        """Lend memory for what a question announces, to be filled before it is asked."""
        self._lent = {}
        self._staging.clear()
        with spoilt_by_cuda_errors(self._device):  # waits: what was there before is over
            found = crossing.rooms_of(question, self._staging)
        self._rooms = {key: room for key, (room, _) in found.items()}
        return {"loans": {key: loan for key, (_, loan) in found.items()}}, ()

    def _unpacked(
        self, question: str, blobs: list[memoryview]
    ) -> tuple[crossing.Script, dict[str, torch.Tensor]]:
        rooms = {key: self._staging.moved_out(room) for key, room in self._rooms.items()}
        self._rooms = {}
        self._staging.clear()
        return crossing.unpack(crossing.Script, question, blobs, self._device, rooms)

    def receive(self, question: str, forget: list[str], blobs: list[memoryview]) -> Answer:
        """Keep weights that later questions refer to, where they are needed, but not others."""
        for token in forget:
            self._received.pop(token, None)
        self._received |= self._unpacked(question, blobs)[1]
        return {}, ()

    def free(self, forget: Sequence[str] = ()) -> Answer:
        """Give up memory that nothing uses, answers that were judged, and some weights."""
        self._lent = {}
        for token in forget:
            self._received.pop(token, None)
        gpu_memory.free_all_unused(self._device)
        return {}, ()

    def lent_sample(self, is_staged: bool = False) -> Answer:
        """Lend a tensor that the judge knows; with `is_staged` in memory for a whole check."""
        self._staging = lending.Staging(self._device, lending.STAGING_SHARE if is_staged else 0.0)
        self._lent = {"sample": lending.sample(self._device)}
        with spoilt_by_cuda_errors(self._device):
            text, blobs = crossing.pack(crossing.Report(), self._lent, lends=self._staging)
        return {"answer": text, "staging": self._staging.loan}, blobs

    def answer(
        self,
        question: str,
        known: dict[str, str],
        blobs: list[memoryview],
        lends: bool = False,
        is_strict: bool = False,
    ) -> Answer:
        """Answer one question of the judge; `known` refers to weights that were received.

        With `lends` large tensors of the answer stay on the GPU. With `is_strict` no memory may
        have run out.
        """
        self._lent = {}
        script, given = self._unpacked(question, blobs)
        # A copy: what the candidate does to its weights must not reach the next question.
        weights = {name: self._received[token].clone() for name, token in known.items()}
        self._is_own_seed = script.own_seed is not None
        gpu_memory.require_room(self._device)
        with math_mode(self._accuracy), spoilt_by_cuda_errors(self._device):
            found = produce.answer(self._make_model, crossing.Question(script, given | weights))
            if is_strict:
                gpu_memory.require_no_shortage(self._device)
            report = self._with_changes(found.report)
            staging = self._staging if lends else None
            text, answers = crossing.pack(report, found.tensors, lends=staging)
            self._lent = found.tensors if lends else {}
            self._answer_bytes = [tensor.nbytes for tensor in found.tensors.values()]
            del given, weights, found
            gpu_memory.free_unused(self._device)
        return {"answer": text, "used_bytes": gpu_memory.most_bytes(self._device)[0]}, answers

    def _with_changes(self, report: crossing.Report, more: Sequence[str] = ()) -> crossing.Report:
        changes = (*report.changes, *more, *replaced(self._functions))
        return dataclasses.replace(report, changes=changes)

    def take_timing_set(self, question: str, blobs: list[memoryview]) -> Answer:
        """Get ready to be timed on the judge's weights and inputs, in its mode."""
        script, tensors = self._unpacked(question, blobs)
        state = {n[6:]: t for n, t in tensors.items() if n.startswith("state.")}
        inputs = {int(n[6:]): t for n, t in tensors.items() if n.startswith("input.")}
        inputs |= {int(n[2:]): x for n, x in script.numbers.items()}  # "0.1": of the first call
        self._is_own_seed = False
        model = self._make_model()
        set_mode(model, script.mode)
        model.load_state_dict(state)
        self._timed.take(model, [x for _, x in sorted(inputs.items())])
        return {}, ()

    def give_up_timing_set(self) -> Answer:
        """Let go of the inputs that it is timed on, until there are others."""
        self._timed.take(self._timed.model, [])
        gpu_memory.free_unused(self._device)
        return {}, ()

    def timed_output(self, lends: bool = False) -> Answer:
        """Return the output of the last call of `repeat`, with that call's number."""
        assert self._timed.last is not None
        call, outputs, kinds, changes = self._timed.last
        found = unasked.answer_of_call(self._timed.model, outputs, kinds)
        report = self._with_changes(found.report, changes)
        text, blobs = crossing.pack(report, found.tensors, lends=self._staging if lends else None)
        self._lent = found.tensors if lends else {}
        return {"call": call, "answer": text}, blobs

    def give_up_output(self) -> Answer:
        """Let go of the output of the last call of `repeat`, which was judged."""
        self._lent, self._timed.last = {}, None
        gpu_memory.free_cached(self._device)
        return {}, ()

    def kept_outputs(self) -> Answer:
        """Return a few elements of every timed call's outputs, as `Keeper.kept`."""
        return self._timed.keeper.kept()


def _is_range(rows: Any) -> bool:
    is_tuple = isinstance(rows, tuple) and len(rows) >= 2
    is_range = is_tuple and all(type(number) is int for number in rows[:2])
    return is_range and (len(rows) == 2 or _are_pairs(rows[2:]))


def _are_pairs(ranges: Any) -> bool:
    """Whether something is a tuple of some pairs of whole numbers."""
    return isinstance(ranges, tuple) and 0 < len(ranges) <= MOST_RANGES and all(
        isinstance(each, tuple) and len(each) == 2 and all(type(n) is int for n in each)
        for each in ranges
    )  # fmt: skip


def _compiled(problem: Problem, device: str, mode: str) -> torch.nn.Module:
    """Return the reference, compiled at its first call, with the keys of its own state."""
    model = problem.make_model(WEIGHT_SEED, device, is_quick=True)
    model.compile(mode=mode, dynamic=False)
    return model
