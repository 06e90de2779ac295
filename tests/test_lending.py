"""Tensors of a GPU that another process copies; on the CPU all goes as bytes."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_problem import FLAGSHIP

from tuner.check.calls import crossing, lending
from tuner.check.calls.exercise import checksum_of
from tuner.check.probes.batches import Extent
from tuner.check.probes.probe import Modes
from tuner.check.probes.probes import thorough_probes
from tuner.check.probes.traits import Traits
from tuner.evaluate import judging
from tuner.evaluate.again import Query
from tuner.evaluate.asking import Fewer
from tuner.evaluate.judging import Judge
from tuner.evaluate.needs import Needs
from tuner.evaluate.oracle import Oracle
from tuner.evaluate.pair import Pair
from tuner.evaluate.producing import Producer
from tuner.evaluate.worker import Reply
from tuner.machine.turns import turns_of
from tuner.trial import from_json

ROOT = Path(__file__).resolve().parents[1]
# Lends a tensor, edits it once it was copied, and lends it again.
LENDER = """
import json, sys, torch
from tuner.check.calls import crossing, lending
from tuner.check.calls.exercise import checksum_of
staging = lending.Staging("cuda", float(sys.argv[1]))
held = torch.zeros(2**19 + 64, dtype=torch.int32, device="cuda")
part = held[64:]
part.copy_(lending.sample("cuda"))
for _ in range(2):
    staging.clear()
    text, blobs = crossing.pack(crossing.Report(), {"part": part, "few": held[:3]}, lends=staging)
    torch.cuda.synchronize()
    said = {"lengths": [len(b) for b in blobs], "few": bytes(blobs[1]).hex()}
    print(json.dumps({"text": text, "staging": staging.loan} | said), flush=True)
    sys.stdin.readline()
    part.add_(1)
    torch.cuda.synchronize()
"""


@contextlib.contextmanager
def other_process(text: str, *arguments: str) -> Iterator[Any]:
    command = [sys.executable, "-c", text, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process


def test_on_the_cpu_nothing_is_lent():
    tensors = {"large": torch.arange(2**19), "small": torch.ones(3)}
    text, blobs = crossing.pack(crossing.Report(), tensors, lends=lending.Staging("cpu"))
    assert "loan" not in text
    _, found = crossing.unpack(crossing.Report, text, blobs)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_loan_that_is_none_is_no_packed_record():
    text, _ = crossing.pack(crossing.Report(), {"x": torch.ones(2)})
    content = json.loads(text)
    content["tensors"][0]["loan"] = {"handle": "nothing"}
    with pytest.raises(ValueError, match="not a packed record"):
        crossing.unpack(crossing.Report, json.dumps(content), [b""])


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.001, 1e-5], ids=["apart", "staged", "too large"])
def test_another_process_copies_what_is_lent(share):
    with other_process(LENDER, str(share)) as lender:
        first = json.loads(lender.stdout.readline())
        assert first["lengths"] == [0, 12]
        assert ("staged" in first["text"]) == (share == 0.001)
        loan = first["staging"]
        how = {"borrowed": lending.Borrowed(loan, "cuda") if loan else None}
        blobs = [b"", bytes.fromhex(first["few"])]
        _, found = crossing.unpack(crossing.Report, first["text"], blobs, "cuda", **how)
        lender.stdin.write("\n")
        lender.stdin.flush()
        second = json.loads(lender.stdout.readline())
        assert lending.is_sample(found["part"])  # a copy: the edit came after it
        _, again = crossing.unpack(crossing.Report, second["text"], blobs, "cuda", **how)
        assert torch.equal(again["part"], lending.sample("cuda") + 1)
        # More than is lent: nothing beyond it is read.
        content = json.loads(second["text"])
        content["tensors"][0]["shape"] = [2**30]
        with pytest.raises(ValueError, match="that are lent"):
            crossing.unpack(crossing.Report, json.dumps(content), blobs, "cuda", **how)
        lender.stdin.write("\n")
        lender.stdin.flush()


# Makes rooms for what is announced, and says what it finds in them once they are filled.
RECEIVER = """
import json, sys, torch
from tuner.check.calls import crossing, lending
from tuner.check.calls.exercise import checksum_of
text, few = json.loads(sys.stdin.readline())
staging = lending.Staging("cuda", float(sys.argv[1]))
found = crossing.rooms_of(text, staging)
torch.cuda.synchronize()
loans = {key: loan for key, (_, loan) in found.items()}
print(json.dumps([loans, staging.loan]), flush=True)
sys.stdin.readline()
rooms = {key: staging.moved_out(room) for key, (room, _) in found.items()}
_, found = crossing.unpack(crossing.Script, text, [b"", bytes.fromhex(few)], "cuda", rooms)
print(json.dumps([lending.is_sample(found["large"]), found["few"].tolist()]), flush=True)
sys.stdin.readline()
"""


def test_on_the_cpu_nothing_waits_for_a_room():
    text, blobs = crossing.pack(
        crossing.Script(), {"x": torch.arange(2**19)}, rooms=lending.Rooms()
    )
    assert not crossing.rooms_in(text) and len(blobs[0]) == 2**22


def test_a_room_stays_where_it_is():
    text, blobs = crossing.pack(crossing.Script(), {"large": torch.ones(4), "few": torch.ones(2)})
    content = json.loads(text)
    content["tensors"][0]["room"] = "its key"
    room = torch.empty(4, device="meta")  # of which no copy elsewhere can be made
    given = json.dumps(content), [b"", blobs[1]], "cpu", {"its key": room}
    _, found = crossing.unpack(crossing.Script, *given)
    assert found["large"] is room and found["few"].tolist() == [1.0, 1.0]


def test_what_lies_in_staging_memory_is_apart_and_aligned(monkeypatch):
    monkeypatch.setattr(lending.gpu_memory, "total_bytes", lambda _: 8192)
    monkeypatch.setattr(lending, "lent", lambda tensor: {"num_bytes": tensor.nbytes})
    staging = lending.Staging("cpu", 0.25)
    assert staging.loan == {"num_bytes": 2048}
    first, loan = staging.room([3, 5], torch.float32)
    assert loan == {"staged": 0} and first.shape == (3, 5)
    given = torch.arange(100.0)
    assert staging.lend(given) == {"staged": 512} and staging.lend(given[:1]) == {"staged": 1024}
    assert staging.lend(torch.zeros(513, dtype=torch.uint8)) == {"num_bytes": 513}  # no room
    assert torch.equal(staging._memory[512:912].view(torch.float32), given)
    first.fill_(7.0)
    moved = staging.moved_out(first)
    staging.clear()
    assert staging.lend(given) == {"staged": 0}
    assert torch.equal(moved, torch.full((3, 5), 7.0)) and staging.moved_out(moved) is moved


def test_nothing_is_copied_of_staging_memory_that_was_never_lent():
    text, _ = crossing.pack(crossing.Report(), {"x": torch.ones(2)})
    content = json.loads(text)
    content["tensors"][0]["loan"] = {"staged": 0}
    with pytest.raises(ValueError, match="never lent"):
        crossing.unpack(crossing.Report, json.dumps(content), [b""])


def test_what_was_announced_for_a_question_that_is_withdrawn_is_not_kept(monkeypatch):
    monkeypatch.setattr(lending, "is_worth_it", lambda _: True)  # of a GPU's tensors large ones
    rooms, large = lending.Rooms(), torch.ones(4)
    gone = weakref.ref(large.untyped_storage())
    text, _ = crossing.pack(crossing.Script(), {"large": large}, rooms=rooms)
    del large
    assert gone() is not None and len(crossing.rooms_in(text)) == 1
    other, _ = crossing.pack(crossing.Script(), {"other": torch.ones(4)}, rooms=rooms)
    rooms.forget(crossing.rooms_in(text))
    assert gone() is None
    for question, lacking in ((text, crossing.rooms_in(text)[0]), (other, "device")):
        with pytest.raises(KeyError, match=lacking):  # the other waits still, for a loan
            rooms.fill({key: {} for key in crossing.rooms_in(question)})


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.001], ids=["apart", "staged"])
def test_what_is_given_is_written_into_the_receivers_memory(share):
    rooms = lending.Rooms()
    tensors = {"large": lending.sample("cuda"), "few": torch.ones(2, device="cuda")}
    text, blobs = crossing.pack(crossing.Script(), tensors, rooms=rooms)
    assert crossing.rooms_in(text) and [len(blob) for blob in blobs] == [0, 8]
    with other_process(RECEIVER, str(share)) as receiver:
        print(json.dumps([text, bytes(blobs[1]).hex()]), file=receiver.stdin, flush=True)
        loans, staging = json.loads(receiver.stdout.readline())
        assert bool(staging) == any("staged" in loan for loan in loans.values()) == bool(share)
        borrowed = lending.Borrowed(staging, "cuda") if staging else None
        rooms.fill(loans, borrowed)
        print(file=receiver.stdin, flush=True)
        assert json.loads(receiver.stdout.readline()) == [True, [1.0, 1.0]]
        with pytest.raises(KeyError):  # it was filled
            rooms.fill(loans, borrowed)
        print(file=receiver.stdin, flush=True)


# ---- weights that many questions have ---------------------------------------------------------


class Here:
    """A role of a worker in this process: only the transport is left out."""

    is_alive, generation = True, 0

    def __init__(self, role: Judge | Producer) -> None:
        self.role = role

    def call(self, job: str, payload: dict[str, Any], blobs=(), timeout_s: float = 0.0) -> Reply:
        given = {"blobs": [memoryview(bytearray(b)) for b in blobs]} if blobs else {}
        if job in ("answer", "judge", "receive", "can_borrow"):
            given.setdefault("blobs", [])
        data, found = getattr(self.role, job)(**payload, **given)
        return Reply(json.loads(json.dumps(data)), [bytearray(blob) for blob in found])


def pair_of(folder: Path) -> tuple[Pair, Judge, Producer, list[Query]]:
    """A judge and the reference itself as contender, in this process; questions with weights."""
    reference, same = folder / "reference.py", folder / "same.py"
    reference.write_text(FLAGSHIP)
    same.write_text(FLAGSHIP + "\n\nclass ModelNew(Model):\n    ...\n")
    judge = Judge(Oracle(str(reference), {}, "cpu", "float32"))
    about = judge.about()
    producer = Producer("cpu", "float32", about["init_inputs"], file=str(same))
    pair = Pair(
        Here(judge), Here(producer), turns_of("cpu"), Fewer(about["num_rows"]),
        Needs(Extent(about["num_rows"]), 0.0, 0.0), most_s=60.0, is_gpu=False,
    )  # fmt: skip
    modes, traits = (
        from_json(kind, json.dumps(about[name]))
        for kind, name in ((Modes, "modes"), (Traits, "traits"))
    )
    probes = [
        probe
        for probe in thorough_probes(1, about["num_rows"], modes=modes, traits=traits)
        if probe.batch is not None and (probe.gives_weights or probe.weights != "random")
    ][:40]
    return pair, judge, producer, [Query(probe) for probe in probes]


@pytest.mark.parametrize("most_bytes", [math.inf, 0.0], ids=["held", "forgotten"])
def test_large_weights_are_held_for_open_questions_alone(most_bytes, tmp_path):
    pair, judge, producer, queries = pair_of(tmp_path)
    judge._weights_bytes = most_bytes
    most = 0
    for result in pair.answers(queries, {}, is_alone=True):
        assert result.is_accepted, result.reason
        most = max(most, len(judge._weights_of), len(producer._received))
    one = len(judge._oracle.problem.make_model(0).state_dict())
    assert (most <= 2 * one) == (most_bytes == 0.0), (most, one)


@pytest.mark.parametrize("share", [1.0, 0.0], ids=["few", "large"])
def test_who_waits_for_memory_holds_no_large_weights(share, tmp_path, monkeypatch):
    """In either process, once what is not used is freed; later questions have them anew."""
    monkeypatch.setattr(judging, "IDLE_SHARE", share)
    pair, judge, producer, queries = pair_of(tmp_path)
    for some in (queries[:6], queries[6:12], queries[:6]):
        results = [*pair.answers(some, {}, is_alone=True)]
        assert len(results) == 6 and all(result.is_accepted for result in results)
        assert judge._weights_of and producer._received
        pair.free()
        assert bool(judge._weights_of) == bool(producer._received) == (share > 0)


@pytest.mark.parametrize(
    "number", [torch.tensor(2.5).expand(1), torch.tensor(2.5), torch.full((1, 1), 2.5)]
)
def test_one_number_crosses_wherever_it_lies(number):
    text, blobs = crossing.pack(crossing.Script(), {"x": number})
    _, found = crossing.unpack(crossing.Script, text, blobs)
    assert found["x"].shape == number.shape and found["x"].item() == 2.5
    assert checksum_of(number) == checksum_of(torch.full(number.shape, 2.5))
