"""The judge's role in a worker: it draws questions, holds the oracle and gives the verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.calls import crossing
from tuner.check.judge.chance import modes_of
from tuner.check.judge.expected import Expected
from tuner.check.judge.refusals import extent_of
from tuner.check.probes.probe import Probe
from tuner.check.probes.traits import traits_of
from tuner.evaluate.child import Answer
from tuner.evaluate.giving import Giver
from tuner.evaluate.oracle import Oracle
from tuner.evaluate.process import RESERVE_BYTES, free_bytes
from tuner.machine import gpu_memory
from tuner.problem.accuracy import math_mode
from tuner.trial import from_json, to_json

if TYPE_CHECKING:
    import torch

__all__ = ["Judge"]

# Of the memory that is free, for what a judge expects of its probes; that of a CPU is everybody's.
KEPT_SHARE = {"gpu": 0.15, "cpu": 0.1}
SHORT_BYTES = 4 * RESERVE_BYTES  # with less free memory than this nothing is kept,
SHORT_SHARE = 1 / 8  # nor with less than this of a GPU's
WEIGHTS = ("state.", "other.")  # how a question's tensors begin that others share
LARGE_SHARE = 0.02  # of a large problem, whose contenders need the memory
WEIGHTS_SHARE = 0.1  # of all memory, for weights that several questions have
IDLE_SHARE = 1 / 64  # the same while nobody is asked


class Judge(Giver):
    """The judge of contenders; it never imports one."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle)
        self._is_strict = False  # in the question that was asked last
        self._room_bytes = 0  # for what is kept
        self._short_bytes = float(SHORT_BYTES)
        self._weights_bytes = math.inf  # that are held at most before some are forgotten
        self._asked: dict[int, Expected] = {}  # by ticket: several contenders may be in turn
        self._num_asked = 0
        self._last: tuple[Probe, Expected] | None = None  # that is asked once more
        self._held_bytes = 0  # of a GPU's memory, at most, until now
        self._kept: dict[Probe, Expected] = {}  # for the next contender
        self._tokens: dict[Any, str] = {}  # of weights that questions refer to, by their place
        self._weights_of: dict[str, torch.Tensor] = {}  # by token
        self._num_tokens = 0

    def about(self) -> dict[str, Any]:
        """Return what others must know of the problem, and in which modes it can be asked.

        Raises:
            ProblemError: the reference draws random numbers in the problem's own mode.
        """
        problem, device = self._oracle.problem, self._oracle.device
        modes = modes_of(problem, device)
        model = problem.make_model(0, device, is_quick=True)
        extent = extent_of(problem, model, device)
        traits = traits_of(problem, model, device)
        if total_bytes := gpu_memory.total_bytes(device):  # others have it until a question comes
            gpu_memory.free_all_unused(device)
        is_large = extent.device == "gpu" and extent.is_large
        share = LARGE_SHARE if is_large else KEPT_SHARE[extent.device]
        self._room_bytes = int(share * free_bytes(device))
        self._weights_bytes = WEIGHTS_SHARE * (total_bytes or free_bytes(device))
        self._short_bytes = max(SHORT_BYTES, SHORT_SHARE * total_bytes)
        return {
            **self._oracle.about(), "modes": json.loads(to_json(modes)),
            "row_elements": extent.row_elements, "is_fixed": extent.is_fixed,
            "total_bytes": total_bytes,
            "free_bytes": free_bytes(device), "fixed_elements": extent.fixed_elements,
            "state_elements": sum(tensor.numel() for tensor in model.state_dict().values()),
            "traits": json.loads(to_json(traits)),
        }  # fmt: skip

    def ask(
        self, probe: str, lends: bool = False, is_strict: bool = False, is_kept: bool = False
    ) -> Answer:
        """Draw a probe's inputs and weights; return the question for the producer.

        The answer is judged by the question's `ticket`. Weights are the bulk of a question, and
        many questions share theirs: `known` refers to them by tokens. With `lends` the producer
        makes rooms for large tensors. With `is_strict` no memory may have run out. With `is_kept`
        the next question is the same one.
        """
        asked = from_json(Probe, probe)
        self._forget_weights(self._weights_bytes)
        last, self._last = self._last, None
        found = last[1] if last and last[0] == asked else None
        del last  # before another one is computed
        found = found or self._expected_once(asked)
        self._last = (asked, found) if is_kept else None
        self._is_strict = is_strict
        self._require_memory()
        self._num_asked += 1
        self._asked[self._num_asked] = found
        tensors, known = dict(found.question.tensors), {}
        for name in [n for n in tensors if n.startswith(WEIGHTS)]:
            tensor = tensors.pop(name)
            place = (tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape)
            if place not in self._tokens:
                self._num_tokens += 1
                self._tokens[place] = f"{name}#{self._num_tokens}"
            known[name] = self._tokens[place]
            self._weights_of[known[name]] = tensor  # kept, so that its memory stays its own
        packed, blobs = self._packed(found.question.script, tensors, lends)
        return {**packed, "known": known, "ticket": self._num_asked}, blobs

    def _expected_once(self, probe: Probe) -> Expected:
        """Compute what a probe expects, or find it where an earlier contender was asked the same.

        At full size a float64 oracle is most of a probe's time.
        """
        if probe in self._kept:
            return self._kept[probe]
        gpu_memory.require_room(self._oracle.device)
        found = self._oracle.expected(probe)
        if free_bytes(self._oracle.device) < self._short_bytes:  # others have taken it
            self.free()
            return found
        size = found.num_bytes(without=WEIGHTS)  # those are kept anyway
        if size <= self._room_bytes:
            self._room_bytes -= size
            self._kept[probe] = found
        return found

    def _forget_weights(self, most_bytes: float) -> None:
        """Give up weights that no open question refers to, where all take more memory than this.

        Those of a gigabyte would fill a GPU, here and in the contender's process: the probes have
        some fifty kinds of them.
        """
        if sum(tensor.nbytes for tensor in self._weights_of.values()) <= most_bytes:
            return
        asked = (found.question.tensors.values() for found in self._asked.values())
        used = {tensor.data_ptr() for tensors in asked for tensor in tensors}
        self._weights_of = {n: t for n, t in self._weights_of.items() if t.data_ptr() in used}
        self._tokens = {p: token for p, token in self._tokens.items() if token in self._weights_of}
        self._kept.clear()  # their questions have such weights
        self._oracle.forget_weights()

    def weights(self, tokens: list[str], lends: bool = False) -> Answer:
        """Return the weights that questions refer to by these tokens, and which others are held.

        A contender needs no more of them: what is `held` no longer will not be asked about.
        """
        tensors = {token: self._weights_of[token] for token in tokens}
        packed, blobs = self._packed(crossing.Script(), tensors, lends)
        return {**packed, "held": sorted(self._weights_of)}, blobs

    def judge(self, ticket: int, answer: str, blobs: list[memoryview], lender: str = "") -> Answer:
        """Give the verdict on the answer to the question of that ticket, by that lender."""
        expected = self._asked.pop(ticket)
        given = self._oracle.unpacked(answer, blobs, self._borrowed.get(lender))
        with math_mode(self._oracle.accuracy):
            result = self._oracle.verdict(expected, given)
        del given, expected
        gpu_memory.free_unused(self._oracle.device)
        if not result.is_accepted:  # perhaps by what was computed again without memory
            self._require_memory()
        return {"result": json.loads(to_json(result)), "used_bytes": self._most_used_bytes()}, ()

    def _most_used_bytes(self) -> int:
        """Return what tensors took at most since this was asked; note what was held for them."""
        used_bytes, held_bytes = gpu_memory.most_bytes(self._oracle.device)
        self._held_bytes = max(self._held_bytes, held_bytes)
        return used_bytes

    def _require_memory(self) -> None:
        if self._is_strict:
            gpu_memory.require_no_shortage(self._oracle.device)

    def withdraw(self, ticket: int, rooms: Sequence[str] = ()) -> Answer:
        """Give up a question that nobody will answer, and what it announced for `rooms`."""
        self._asked.pop(ticket, None)
        self._rooms.forget(rooms)
        return {}, ()

    def free(self) -> Answer:
        """Give up what is kept for later contenders, and for later questions where it is much.

        Returns:
            Bytes: of all memory, which of it is held, and was most since the last time, is free;
            and of which weights questions may still refer to.
        """
        device = self._oracle.device
        self._most_used_bytes()
        most_bytes, self._held_bytes = self._held_bytes, 0
        self._kept.clear()
        self._last = None
        total_bytes = gpu_memory.total_bytes(device)
        self._forget_weights(IDLE_SHARE * (total_bytes or free_bytes(device)))
        held_bytes = gpu_memory.free_all_unused(device)
        return {
            "held": sorted(self._weights_of), "held_bytes": held_bytes, "most_bytes": most_bytes,
            "free_bytes": free_bytes(device), "total_bytes": total_bytes,
        }, ()  # fmt: skip
