"""Between which numbers of rows a forward does the same: kernels are for no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cpu_machine import GPP
from impatience import EVERY_NUMBER_OF_ROWS
from test_matching import TEXT
from test_steps import Taken, gradients

from tuner.capture import rows_tried as room
from tuner.capture.any_batch import another_batch
from tuner.capture.capture import capture
from tuner.capture.rows_tried import rows_tried
from tuner.problem.reference import load_problem

X, IMAGES = "torch.randn(48, 40)", "torch.randn(48, 3, 5, 7)"
FORMS = {
    "nothing": ("pass", "torch.relu(x) * 2", X, (1, None)),
    "all rows": ("pass", "x - x.mean(0) / len(x)", X, (1, None)),
    "a branch": ("pass", "torch.relu(x) if len(x) > 100 else torch.relu(x) * 3", X, (1, 100)),
    "a branch above few": ("pass", "torch.relu(x) if len(x) > 4 else x * 3", X, (5, None)),
    "a branch between": ("pass", "torch.relu(x) if 64 < len(x) < 512 else x * 3", X, (1, 64)),
    "at most": ("pass", "torch.relu(x) / min(x.shape[0], 64)", X, (1, 64)),
    "at least": ("pass", "torch.relu(x) / max(x.shape[0] - 1, 1)", X, (2, None)),
    "one row is none": ("pass", "torch.relu(x).squeeze(0)", X, (2, None)),
    "refused": ("pass", "torch.relu(x) if len(x) < 300 else 1 / 0", X, (1, 257)),
    "every eighth": ("pass", "torch.relu(x) if len(x) % 8 else x * 5", X, None),
    "every fourth": ("pass", "x * 2 if len(x) % 4 else x.exp()", "torch.randn(18, 40)", (17, 19)),
    "a loop": ("pass", "torch.stack([row * 2 for row in x])", X, None),
    "half": ("pass", "torch.relu(x) * (len(x) // 2)", X, (48, 53)),
    "variances": ("self.n = nn.BatchNorm1d(40)", "self.n(x)", X, (2, None)),
    "of images": ("self.n = nn.BatchNorm2d(3)", "self.n(x)", IMAGES, (1, None)),
    "recurrent": ("self.r = nn.GRU(40, 9)", "self.r(x)[0]", "torch.randn(48, 2, 40)", (1, None)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a forward as often as a user's capture does."""
    monkeypatch.setattr(room, "_TRIED", EVERY_NUMBER_OF_ROWS)


def text_of(name: str) -> str:
    init, forward, inputs, _ = FORMS[name]
    return TEXT.format(init=init, names="x", forward=f"return {forward}", inputs=inputs)


@pytest.mark.parametrize("name", FORMS)
def test_forward_is_called_at_few_rows_and_at_many(name, tmp_path):
    path = Path(tmp_path) / "module.py"
    path.write_text(text_of(name))
    problem = load_problem(path)
    batch = capture(problem).batch
    assert batch is not None
    other = another_batch(batch)
    assert rows_tried(problem, "train", (batch, other)) == FORMS[name][-1]
    assert rows_tried(problem, "train", (other, batch)) == FORMS[name][-1]


def test_what_forward_prints_is_not_printed_again(tmp_path, capfd):
    path = tmp_path / "module.py"
    path.write_text(text_of("nothing").replace("return", "print('said'); return", 1))
    assert rows_tried(load_problem(path), "train", (48, 53)) == (1, None)
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
@pytest.mark.parametrize(
    "name", ["a branch", "a branch above few", "a branch between", "at most", "every eighth"]
)
def test_elsewhere_the_references_own_forward_runs(name, tmp_path):
    taken = Taken(tmp_path, "module", text_of(name))
    fewest, most = FORMS[name][-1] or (48, 48)
    for rows in (1, 4, 5, 8, 16, 48, 53, 64, 97, 100, 101, 200):
        before = taken.num_calls
        inputs = taken.inputs(3, rows)
        mine, own = gradients(taken.mine, inputs), gradients(taken.own, inputs)
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(mine, own, strict=True))
        with torch.no_grad():
            torch.testing.assert_close(taken.mine(*inputs), taken.own(*inputs))
        is_taken = fewest <= rows <= (most or rows)
        assert taken.num_calls == before + is_taken, f"{rows} rows"
