"""Texts of an operator for two batches, as one for any: what grows, and what refuses."""

from __future__ import annotations

import pytest

from tuner.capture.any_batch import another_batch, any_batch, moved_rows
from tuner.capture.capture import capture, with_another_batch
from tuner.problem.reference import load_problem

WRITTEN = {
    "  between: {shape: [8, 12]}": "  between: {shape: [batch, 12]}",
    '  partial: {shape: ["2 * 32"], dtype: float64}': None,  # below: 32 is 4 times 8
    "  - {call: rows_1, args: [x, y, 8, 972, num_threads]}": (
        "  - {call: rows_1, args: [x, y, batch, 972, num_threads]}"
    ),
    '  - {aten: view, args: ["x", "[32, 5]"], gives: y}': (
        '  - {aten: view, args: ["x", "[-1, 5]"], gives: y}'
    ),
    'flops: "140"': 'flops: "15 * batch + 20"',
    "        return made[0].view((8, 40,)), made[1].view((16,))": (
        "        return made[0].view((batch, 40,)), made[1].view((2 * batch,))"
    ),
    'sizes: {"batch": 8}': 'sizes: {"batch": 8}',
    "constexpr int kRows = 7;": "constexpr int kRows = 7;",
}
GROWN = {8: 11, 16: 22, 32: 44, 140: 185}


def at_eleven(line: str) -> str:
    """What the line is for a batch of 11 in place of 8."""
    for one, other in GROWN.items():
        for mark in (" ", "(", "[", '"'):
            line = line.replace(f"{mark}{one}", f"{mark}{other}", 1)
    return line


@pytest.mark.parametrize("line", WRITTEN)
def test_what_grows_with_the_batch_is_a_multiple_of_it(line):
    expected = WRITTEN[line] or line.replace("32", "4 * batch")
    assert any_batch(line, at_eleven(line), (8, 11), name="batch") == expected


REFUSED = {
    "a square": ("  y: {shape: [64]}", "  y: {shape: [121]}"),
    "a part that does not grow": ("  y: {shape: [9]}", "  y: {shape: [12]}"),
    "the loops' own text": ("constexpr int kRows = 8;", "constexpr int kRows = 11;"),
    "a share of the batch": ("  - {call: f, args: [0.125]}", "  - {call: f, args: [0.0909]}"),
    "a number that PyTorch takes": (
        '  - {aten: slice, args: ["x", "0", "0", "8"], gives: y}',
        '  - {aten: slice, args: ["x", "0", "0", "11"], gives: y}',
    ),
    "another step": ("  - {call: f, args: [8]}", "  - {call: g, args: [11]}"),
    "more steps": ("  - {call: f, args: [8]}", "  - {call: f, args: [11]}\n  - {call: g}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_differs_in_another_way_has_no_such_text(case):
    assert any_batch(*REFUSED[case], (8, 11), name="batch") is None


def test_another_batch_shares_no_factor():
    assert [another_batch(batch) for batch in (1, 2, 8, 128, 16384)] == [3, 3, 11, 131, 16411]
    assert another_batch(4, {4, 5, 7, 49}) == 11


def test_another_batch_is_one_whose_loops_are_cut_alike():
    """Of 8 x 784 numbers a thread sums a channel alone, of 11 x 784 several do."""
    assert another_batch(8, {28, 128, 784}, {784}) == 5  # 7 divides 28
    assert another_batch(8, {28, 128, 784}, {784, 4}) == 5
    assert another_batch(12, {28}, {784}) == 13
    assert another_batch(2, {56}, {3136}) == 3  # none is below
    assert another_batch(8192, {16}, {1}) == 8209


MIXED = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x):
        y = torch.tanh(x)
        return {result}


def get_inputs():
    return [torch.randn(32, 16)]


def get_init_inputs():
    return []
"""


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (
            'torch.einsum("nd,edh->enh", y, self.w)',
            " (rows are not the first dimension of all that line 12 has)",
        ),
        ("y @ self.w[0]", ""),
    ],
)
def test_who_is_to_have_other_batches_reads_where_rows_are_elsewhere(result, words, tmp_path):
    path = tmp_path / "mixed.py"
    path.write_text(MIXED.format(result=result))
    problem = load_problem(path)
    graph = capture(problem)
    other = with_another_batch(problem, graph)
    assert other is not None and moved_rows(graph, other) == words
