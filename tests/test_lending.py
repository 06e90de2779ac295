"""Tensors of a GPU that another process copies; on the CPU all goes as bytes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tuner.check import crossing, lending

ROOT = Path(__file__).resolve().parents[1]
# Lends a tensor, edits it once it was copied, and lends it again.
LENDER = """
import json, sys, torch
from tuner.check import crossing, lending
held = torch.zeros(2**19 + 64, dtype=torch.int32, device="cuda")
part = held[64:]
part.copy_(lending.sample("cuda"))
for _ in range(2):
    text, blobs = crossing.pack(crossing.Report(), {"part": part, "few": held[:3]}, lends=True)
    few = bytes(blobs[1]).hex()
    print(json.dumps({"text": text, "lengths": [len(b) for b in blobs], "few": few}), flush=True)
    sys.stdin.readline()
    part.add_(1)
    torch.cuda.synchronize()
"""


@contextlib.contextmanager
def other_process(text: str) -> Iterator[Any]:
    command = [sys.executable, "-c", text]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process


def test_on_the_cpu_nothing_is_lent():
    tensors = {"large": torch.arange(2**19), "small": torch.ones(3)}
    text, blobs = crossing.pack(crossing.Report(), tensors, lends=True)
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
def test_another_process_copies_what_is_lent():
    with other_process(LENDER) as lender:
        first = json.loads(lender.stdout.readline())
        assert first["lengths"] == [0, 12]
        blobs = [b"", bytes.fromhex(first["few"])]
        _, found = crossing.unpack(crossing.Report, first["text"], blobs, "cuda")
        lender.stdin.write("\n")
        lender.stdin.flush()
        second = json.loads(lender.stdout.readline())
        assert lending.is_sample(found["part"])  # a copy: the edit came after it
        _, again = crossing.unpack(crossing.Report, second["text"], blobs, "cuda")
        assert torch.equal(again["part"], lending.sample("cuda") + 1)
        # More than is lent: nothing beyond it is read.
        content = json.loads(second["text"])
        content["tensors"][0]["shape"] = [2**30]
        with pytest.raises(ValueError, match="that are lent"):
            crossing.unpack(crossing.Report, json.dumps(content), blobs, "cuda")
        lender.stdin.write("\n")
        lender.stdin.flush()


# Makes rooms for what is announced, and says what it finds in them once they are filled.
RECEIVER = """
import json, sys, torch
from tuner.check import crossing, lending
text, few = json.loads(sys.stdin.readline())
rooms = crossing.rooms_of(text, "cuda")
torch.cuda.synchronize()
print(json.dumps({key: lending.lent(room) for key, room in rooms.items()}), flush=True)
sys.stdin.readline()
_, found = crossing.unpack(crossing.Script, text, [b"", bytes.fromhex(few)], "cuda", rooms)
print(json.dumps([lending.is_sample(found["large"]), found["few"].tolist()]), flush=True)
sys.stdin.readline()
"""


def test_on_the_cpu_nothing_waits_for_a_room():
    text, blobs = crossing.pack(
        crossing.Script(), {"x": torch.arange(2**19)}, rooms=lending.Rooms()
    )
    assert not crossing.has_rooms(text) and len(blobs[0]) == 2**22


@pytest.mark.gpu
def test_what_is_given_is_written_into_the_receivers_memory():
    rooms = lending.Rooms()
    tensors = {"large": lending.sample("cuda"), "few": torch.ones(2, device="cuda")}
    text, blobs = crossing.pack(crossing.Script(), tensors, rooms=rooms)
    assert crossing.has_rooms(text) and [len(blob) for blob in blobs] == [0, 8]
    with other_process(RECEIVER) as receiver:
        print(json.dumps([text, bytes(blobs[1]).hex()]), file=receiver.stdin, flush=True)
        loans = json.loads(receiver.stdout.readline())
        rooms.fill(loans)
        print(file=receiver.stdin, flush=True)
        assert json.loads(receiver.stdout.readline()) == [True, [1.0, 1.0]]
        with pytest.raises(KeyError):  # it was filled
            rooms.fill(loans)
        print(file=receiver.stdin, flush=True)
