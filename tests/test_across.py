"""Loops in C++ whose vectors lie along rows: tiles of any width, memory asked for ahead."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch
from cpu_machine import FACTS, FEW_PASSES, GPP, compiled
from spaces import feasible

from tuner.capture.capture import capture
from tuner.capture.derive import derived
from tuner.capture.graph.settings import settings_of
from tuner.capture.tasks.step_records import Captured
from tuner.config.run_config import load_config
from tuner.kernel.binding import bind
from tuner.kernel.family import load_family
from tuner.planning.deriving import derive_config
from tuner.planning.planning import plan
from tuner.problem.reference import load_problem
from tuner.trial import Candidate

MODULE = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return {result}


def get_inputs():
    return [torch.randn({shape})]


def get_init_inputs():
    return []
"""
MOMENTS = "x.sum(0), (x - x.mean(0)).square().sum(0), x.amax(0)"
AHEAD = "rows_of::ask_ahead"


def loops_of(folder: Path, result: str, shape: tuple[int, ...], unroll: int = 4) -> Candidate:
    text = MODULE.format(result=result, shape=", ".join(map(str, shape)))
    path = folder / "mine.py"
    path.write_text(text)
    problem = load_problem(path)
    settings = settings_of(problem.make_model(0), False)
    graph = capture(problem)
    made = derived(Captured(graph), text, "mine", settings, False, folder / "derived")
    family = load_family(made.name, [made.folder])
    return family.render({"template": "nest", "unroll": unroll}, FACTS)


@pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
@pytest.mark.parametrize("unroll", [1, 4])
@pytest.mark.parametrize("length", [7, 64, 131, 1000])
def test_sums_across_are_those_of_pytorch_at_any_width(tmp_path, length, unroll):
    """The last tile has whole vectors, a part of one, and none, and columns end within reach."""
    candidate = loops_of(tmp_path, MOMENTS, (5, length), unroll)
    operator = bind(candidate.plan, "cpp", compiled(candidate, level=FEW_PASSES))
    x = torch.randn(5, length)
    exact = x.double()
    total, squares, most = operator(x.reshape(-1))
    torch.testing.assert_close(total.double(), exact.sum(0), rtol=1e-6, atol=1e-6)
    expected = (exact - exact.mean(0)).square().sum(0)
    torch.testing.assert_close(squares.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(most, x.amax(0))


@pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
def test_what_lies_behind_the_last_column_is_not_touched(tmp_path):
    """It is asked for ahead, and lies in a page of which a read would end the process."""
    candidate = loops_of(tmp_path, "x.sum(0)", (3, 2048))
    assert AHEAD in candidate.source
    operator = bind(candidate.plan, "cpp", compiled(candidate, level=FEW_PASSES))
    num_bytes = 3 * 2048 * 4
    held = mmap.mmap(-1, num_bytes + mmap.PAGESIZE)
    x = torch.frombuffer(held, dtype=torch.float32, count=num_bytes // 4).normal_()
    assert num_bytes % mmap.PAGESIZE == 0
    nobody = ctypes.c_int(0)
    behind = ctypes.c_void_p(x.data_ptr() + num_bytes)
    assert ctypes.CDLL(None).mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), nobody) == 0
    (total,) = operator(x)
    torch.testing.assert_close(total, x.view(3, 2048).sum(0))


@pytest.mark.parametrize(
    ("result", "shape", "is_far"),
    [
        ("x.sum(0)", (300, 2048), True),
        ("torch.softmax(x, 1)", (4, 30, 40, 40), True),
        ("x.sum(0)", (300, 64), False),  # columns that lie side by side in memory
        ("x.sum(1)", (300, 2048), False),
    ],
)
def test_memory_is_asked_for_ahead_where_columns_lie_far_apart(tmp_path, result, shape, is_far):
    assert (AHEAD in loops_of(tmp_path, result, shape).source.split('extern "C"', 1)[1]) == is_far


@pytest.mark.parametrize(
    ("result", "fewest"), [("x.mean(1)", 8), ("x.sum(1)", 8), ("x.amax(1)", 1)]
)
def test_sums_of_many_numbers_are_not_left_to_a_few_lanes(tmp_path, result, fewest):
    """Of means in lanes of a thousand numbers one in a million was not exact enough."""
    text = MODULE.format(result=result, shape="8, 4096, 255")
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "config.yaml").write_text("problem: {module: mine.py}\n")
    config = load_config(derive_config(tmp_path / "config.yaml"), {"device": "cuda"})
    rows = feasible(plan(config, may_assume=True).space)
    assert min(row["block_columns"] for row in rows) == fewest
