"""A file beside eager as it is used: every batch, mode and way has a record, whatever it takes."""

from __future__ import annotations

import json
import sys

from benchmarks import in_use

MODULE = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(x)


def get_inputs():
    return [torch.randn(4, 8)]


def get_init_inputs():
    return []
"""
FILE = MODULE + (
    "\n_FUSED_ROWS = {'call': (2, 9)}\n\n\nclass ModelNew(Model):\n"
    "    def forward(self, x):\n        return super().forward(x)\n"
)


def records(folder, monkeypatch, *options: str) -> dict:
    for name, text in (("ref.py", MODULE), ("file.py", FILE)):
        (folder / name).write_text(text)
    monkeypatch.setattr(in_use, "MOST_S", 0.0)
    monkeypatch.setattr(in_use, "ROUNDS", {"cpu": 2})
    found = folder / "found.json"
    argv = ["in_use", str(folder / "file.py"), "--reference", str(folder / "ref.py")]
    monkeypatch.setattr(sys, "argv", [*argv, "--json", str(found), *options])
    monkeypatch.setitem(sys.modules, "stranger", None)
    assert in_use.main() == 0
    return json.loads(found.read_text())


def test_every_batch_mode_and_way_is_timed_or_says_why_not(tmp_path, monkeypatch, capsys):
    found = records(tmp_path, monkeypatch)
    assert found["rows_taken"] == {"call": [2, 9]} and found["file"] == "file.py"
    names = ("mode", "inputs", "way", "num_rows")
    asked = {tuple(record[name] for name in names) for record in found["records"]}
    assert asked == {
        (mode, inputs, way, rows)
        for mode in ("train", "eval")
        for inputs in ("given", "normal", "ordinary")
        for way in ("call", "step")
        for rows in (1, 2, 4, 8, 16)
    }
    failed = [record for record in found["records"] if "failure" in record]
    # One row has no variance: PyTorch refuses it in training.
    assert {(record["mode"], record["num_rows"]) for record in failed} == {("train", 1)}
    timed = [record for record in found["records"] if "speedup" in record]
    assert {record["host"] for record in timed} == {"exposed", "hidden"}
    assert all(record["low"] <= record["speedup"] <= record["high"] for record in timed)
    shown = capsys.readouterr().out
    assert "train given call 1: " in shown and "\nleast: " in shown


def test_what_is_asked_for_alone_is_timed(tmp_path, monkeypatch):
    options = ("--rows", "3", "--modes", "eval", "--inputs", "given", "--ways", "call")
    found = records(tmp_path, monkeypatch, *options, "--kernels")
    assert [record["num_rows"] for record in found["records"]] == [3, 3]
    assert found["rows_taken"] == {"call": [2, 9]}


def test_a_slower_file_is_marked_unless_it_is_noise():
    assert in_use.is_slower({"speedup": 0.9, "high": 0.95})
    assert not in_use.is_slower({"speedup": 0.9, "high": 1.1})
    assert not in_use.is_slower({"speedup": 0.98, "high": 0.99})
    assert not in_use.is_slower({"speedup": 0.9, "high": 0.95, "is_disturbed": True})
