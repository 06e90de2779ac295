"""Which nests share the blocks that a search decides: those whose blocks are of one kind."""

from __future__ import annotations

import re

import pytest
from test_steps import derive_with_steps
from test_trained_modules import text_of

from tuner.machine.datasheets import known_device

NORM = "self.n = nn.BatchNorm1d(520); self.s = nn.Parameter(torch.ones(520))"
# Forward and shape of x; over the batch, of rows, and both twice.
MODULES = {
    "columns, rows": ("torch.softmax(self.n(x) * self.s, -1)", "900, 520"),
    "rows, columns, rows": (
        "torch.softmax(self.n(torch.softmax(x, -1)) * self.s, -1).cumsum(1)", "900, 520",
    ),
}  # fmt: skip
OF_COLUMNS = {"block_rows": 512, "block_columns": 4, "num_warps": 2}
OF_ROWS = {"block_rows": 4, "block_columns": 1024, "num_warps": 8}


def functions_of(source: str) -> list[str]:
    """Return the texts of the functions that launch a nest's kernels."""
    parts = re.split(r"^def (?=fused_\w+_rows(?:_\d+)?\()", source, flags=re.MULTILINE)
    return parts[1:]


@pytest.mark.parametrize("name", MODULES)
def test_nests_of_rows_have_no_blocks_of_nests_of_columns(name, tmp_path):
    """A softmax of 8192 columns, 16 at a time of 128 rows, took 1.28 ms for 0.02 where kept."""
    forward, shape = MODULES[name]
    text = text_of(NORM, "x", f"return {forward}", f"torch.randn({shape})")
    _, family = derive_with_steps(tmp_path, "shared", text)
    head = family.templates["nest_triton"]
    first, second = (OF_ROWS, OF_COLUMNS) if name[0] == "r" else (OF_COLUMNS, OF_ROWS)
    params = first | {f"{n}_2": value for n, value in second.items()}
    assert {*params} <= {*head.parameters}
    candidate = family.render({"template": "nest_triton", **params}, known_device("H200").facts())
    functions = {f.partition("(")[0]: f for f in functions_of(candidate.source)}
    for call in (candidate.plan, candidate.plan.extra["kept"]):
        texts = [functions[s.function] for s in call.steps if s.kind == "call"]
        of_columns = [text for text in texts if "block_rows = 512\n" in text]
        of_rows = [text for text in texts if "block_rows = 4\n" in text]
        assert of_columns and of_rows and len(texts) == len(of_columns) + len(of_rows)
        assert all("num_warps=2," in text and "_pass_0[" in text for text in of_columns)
        assert all("num_warps=8," in text and "_pass_0[" not in text for text in of_rows)


def test_what_is_worth_trying_is_the_larger_ones_of_those_that_share_blocks(tmp_path):
    """Of a third nest, a fifth of the second one's size, that has the second's blocks."""
    forward = "return torch.softmax(torch.softmax(self.n(x) * self.s, -1)[:, :104], -1)"
    text = text_of(NORM, "x", forward, "torch.randn(900, 520)")
    _, family = derive_with_steps(tmp_path, "shared", text)
    parameter = family.templates["nest_triton"].parameters["block_columns_2"]
    assert parameter.default == 1024 and parameter.about.startswith("task div:")
