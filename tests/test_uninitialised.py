"""A module whose constructor leaves memory as it is, is refused before a search."""

from __future__ import annotations

import pytest
import torch
from unusual_modules import reference

from tuner.errors import ProblemError
from tuner.problem.reference import Problem, load_problem
from tuner.problem.uninitialised import require_initialised


def problem_of(tmp_path, init: str) -> Problem:
    path = tmp_path / "reference.py"
    more = f"    def __init__(self):\n        super().__init__()\n        {init}\n\n"
    path.write_text(reference("x: x * self.w", "torch.rand(4, 6)", more=more))
    return load_problem(path)


@pytest.mark.parametrize(
    ("init", "name"),
    [
        ("self.w = nn.Parameter(torch.empty(6))", "w"),
        ("self.register_buffer('w', torch.empty(6))", "w"),
        ("self.w, self.v = 1.0, nn.Parameter(torch.Tensor(3))", "v"),
        ("self.w = 1.0; self.register_buffer('v', torch.ones(3).new_empty(9))", "v"),
        ("self.w = 1.0; self.register_buffer('v', torch.empty_like(torch.ones(9)))", "v"),
    ],
)
def test_what_has_no_values_is_named(init, name, tmp_path):
    problem = problem_of(tmp_path, init)
    with pytest.raises(ProblemError) as error:
        require_initialised(problem)
    assert str(error.value).startswith(f"{problem.path}: Model gives no values to {name}: ")
    assert "next: give values in __init__" in str(error.value)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    "init",
    [
        "self.w = nn.Parameter(torch.ones(6))",
        "self.w = nn.Parameter(torch.empty(6)); nn.init.normal_(self.w)",
        "self.w = nn.Parameter(torch.full((6,), float('nan')))",  # as somebody wants it
        "self.w = 2.0; self.l, self.n, self.e = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.LSTM(6, 6)",
    ],
)
def test_what_has_values_is_not(init, tmp_path):
    require_initialised(problem_of(tmp_path, init))


@pytest.mark.parametrize("size", [6, 200, 5000])
def test_what_lies_in_memory_says_nothing(size, tmp_path):
    """Memory that holds NaN is given to the next module, or some that holds random bytes."""
    problem = problem_of(tmp_path, f"self.w = nn.Parameter(torch.empty({size}))")
    for _ in range(20):
        before = [torch.full((size,), torch.nan) for _ in range(9)]
        before.append(torch.get_rng_state())
        del before
        with pytest.raises(ProblemError, match="no values to w"):
            require_initialised(problem)
