"""How the processes of ours that hold a reference give large tensors to a contender's process.

On a GPU they write them into memory that the contender's process lends: through the host, an input
of gigabytes takes seconds, and each probe at full size has one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.calls import crossing, lending
from tuner.errors import TunerError, WorkerError
from tuner.evaluate.channel import Blob
from tuner.evaluate.child import Answer
from tuner.evaluate.oracle import Oracle
from tuner.evaluate.worker import JobFailed, Reply, Worker
from tuner.wording import one_line

if TYPE_CHECKING:
    import torch

__all__ = ["Giver", "hand_over", "lender_of"]

Ask = Callable[..., Reply]
"""Runs a job, by name, payload and blobs, in the process that gives."""


class Giver:
    """The jobs of a judge, or of a race's baseline, that give tensors to contenders."""

    def __init__(self, oracle: Oracle, *, to_many: bool = False) -> None:
        self._oracle = oracle
        self._rooms = lending.Rooms(to_many=to_many)
        self._borrowed: dict[str, lending.Borrowed] = {}  # of contenders, by a name for each

    def _packed(
        self, script: crossing.Script, tensors: Mapping[str, torch.Tensor], lends: bool
    ) -> tuple[dict[str, Any], Sequence[Blob]]:
        """Pack a question; with `lends` large tensors are announced, for `hand_over`."""
        text, blobs = crossing.pack(script, tensors, rooms=self._rooms if lends else None)
        return {"question": text, "rooms": crossing.rooms_in(text)}, blobs

    def can_borrow(
        self, answer: str, blobs: list[memoryview], staging: dict[str, Any] | None = None
    ) -> Answer:
        """Say whether tensors that a producer lends arrive here.

        Its staging memory, where it has some, stays open under the name that is returned.
        """
        borrowed = lending.Borrowed(staging, self._oracle.device) if staging else None
        tensors = self._oracle.unpacked(answer, blobs, borrowed).tensors
        name = secrets.token_hex(8)
        if not lending.is_sample(tensors["sample"]):
            return {"name": ""}, ()
        if borrowed is not None:
            self._borrowed[name] = borrowed
        return {"name": name}, ()

    def give_back(self, name: str) -> Answer:
        """Close what was borrowed under that name."""
        self._borrowed.pop(name, None)
        return {}, ()

    def fill(self, loans: dict[str, dict[str, Any]], lender: str = "") -> Answer:
        """Write what a question announced into the rooms that a producer lends."""
        self._rooms.fill(loans, self._borrowed.get(lender))
        return {}, ()


def lender_of(
    producer: Worker, ask_giver: Ask, timeout_s: float, *, is_staged: bool = False
) -> str:
    """Return a name for a producer, if a GPU's tensors of its process can be had in the giver's.

    With `is_staged` a piece of its memory is open there until it is given back by that name.

    Raises:
        TunerError: as `ask_giver`, where that process ended.
    """
    asks = {"is_staged": is_staged}
    try:
        sample = producer.call("lent_sample", asks, timeout_s=timeout_s)
    except (TunerError, JobFailed):  # not on this system: then through the host
        return ""
    try:
        return str(ask_giver("can_borrow", sample.data, sample.blobs).data["name"])
    except WorkerError:
        raise
    except TunerError:
        return ""


def hand_over(
    question: Reply, producer: Worker, ask_giver: Ask, timeout_s: float, lender: str = ""
) -> str:
    """Let the producer make room for what a question announces, and the giver fill it.

    `lender` is the producer's name, where the giver has some of its memory open.

    Returns:
        Why what the producer lent cannot be used, or nothing.

    Raises:
        WorkerError, JobFailed: a process ended, or there is no memory for the rooms.
    """
    if not question.data["rooms"]:
        return ""
    asks = {"question": question.data["question"]}
    loans = producer.call("make_rooms", asks, timeout_s=timeout_s).data["loans"]
    try:
        ask_giver("fill", {"loans": loans, "lender": lender})
    except WorkerError:
        raise
    except TunerError as failure:
        return f"the memory that it lent for its inputs cannot be used: {one_line(str(failure))}"
    return ""
