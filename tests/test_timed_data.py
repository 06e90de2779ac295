"""The data that a speed-up is for: what each is made of, and files of a user's tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tuner.errors import ProblemError
from tuner.evaluate.timed import Timed
from tuner.problem.accuracy import Accuracy
from tuner.problem.draws import seed_of_inputs
from tuner.problem.reference import Problem, load_problem
from tuner.problem.timed_data import WORKLOADS, made_data

SEED = 7
INPUT_SEED = seed_of_inputs(SEED)
REFERENCE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(128, 8)

    def forward(self, x, scale, places, power=2):
        x = {first}
        return self.linear(x)[places] * scale

def get_inputs():
    return [torch.rand(64, 128), torch.rand(8), torch.arange(32)]

def get_init_inputs():
    return []
"""


OF_PLACES = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, 4)
    def forward(self, places):
        return self.table(places)
def get_inputs():
    return [torch.arange(8)]
def get_init_inputs():
    return []
"""


def problem_of(folder: Path, first: str = "x") -> Problem:
    path = folder / "reference.py"
    path.write_text(REFERENCE.format(first=first))
    return load_problem(path)


@pytest.fixture
def problem(tmp_path: Path) -> Problem:
    return problem_of(tmp_path)


def made(problem: Problem, name: str, path: Path | None = None) -> tuple[list, str, dict]:
    """Return the inputs, what they are in words, and the weights that go with them."""
    model = problem.make_model(SEED)
    inputs, words = made_data(problem, model, name, SEED, "cpu", str(path or ""))
    return inputs, words, model.state_dict()


def test_each_workload_is_what_its_name_says(problem):
    own, given = problem.make_model(SEED).state_dict(), problem.make_inputs(INPUT_SEED)
    found = {name: made(problem, name) for name in WORKLOADS[1:]}
    for name, (inputs, _, weights) in found.items():
        assert [x.shape for x in inputs] == [x.shape for x in given]
        assert torch.equal(inputs[2], given[2])  # integers are as given
        is_own = all(torch.equal(weights[key], own[key]) for key in own)
        assert is_own is (name != "ordinary")
    x = {name: inputs[0] for name, (inputs, _, _) in found.items()}
    assert torch.equal(x["offset"], given[0] + 100)
    is_zero = x["sparse"] == 0
    assert 0.87 < is_zero.float().mean() < 0.93
    assert torch.equal(x["sparse"][~is_zero], given[0][~is_zero])
    assert abs(float(x["ordinary"].mean())) < 0.1 < 0.9 < float(x["ordinary"].std()) < 1.1
    assert x["heavy_tailed"].abs().max() > 10 * x["heavy_tailed"].abs().median() > 0
    assert {name: words for name, (_, words, _) in found.items()} == {
        "ordinary": "weights as after training and normal inputs",
        "offset": "inputs plus 100",
        "heavy_tailed": "heavy-tailed inputs",
        "sparse": "inputs of which 90 % are 0",
    }


def test_no_sample_that_is_timed_is_a_row_of_the_weight(problem):
    """A softmax behind such a product has gradients of a range that no user's have."""
    timed = Timed("cpu", Accuracy.parse("pytorch"))
    timed.take_reference(problem)
    for name in ("given", "offset"):
        if name != "given":
            timed.take_data(problem, name)
        x, weight = timed.inputs[0][0], timed.model.state_dict()["linear.weight"]
        likeness = torch.nn.functional.cosine_similarity((x - x.mean())[:, None], weight, dim=-1)
        assert likeness.abs().max() < 0.5


@pytest.mark.parametrize(
    ("first", "name", "words"),
    [
        ("x.log()", "ordinary", "weights as after training"),
        ("x.log()", "sparse", "the given inputs once more (inputs of which 90 % are 0 give"),
        ("x.log()", "heavy_tailed", "the given inputs once more (heavy-tailed inputs give"),
        (
            "torch.ones(()) if x.max() <= 1 else [][0]",
            "offset",
            "the given inputs once more (inputs plus 100 give",
        ),
    ],
)
def test_where_the_reference_has_no_finite_answer_inputs_are_as_given(
    tmp_path, first, name, words
):
    problem = problem_of(tmp_path, first if "ones" not in first else f"x * ({first})")
    inputs, said, _ = made(problem, name)
    assert said.startswith(words)
    assert torch.equal(inputs[0], problem.make_inputs(INPUT_SEED)[0])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sparse", "the given inputs once more (none is of floating-point numbers)"),
        ("ordinary", "weights as after training"),
    ],
)
def test_data_of_whole_numbers_are_said_to_be_the_given_ones(tmp_path, name, words):
    (tmp_path / "places.py").write_text(OF_PLACES)
    inputs, said, _ = made(load_problem(tmp_path / "places.py"), name)
    assert said == words and torch.equal(inputs[0], torch.arange(8))


def tensors() -> list[torch.Tensor]:
    return [torch.full((64, 128), 3.0), torch.ones(8), torch.arange(32).flip(0)]


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_file_holds_the_inputs_in_order_or_by_name(problem, tmp_path, kind):
    mine = tensors()
    stored = dict(zip(("x", "scale", "places"), mine, strict=True)) if kind is dict else kind(mine)
    torch.save(stored, tmp_path / "mine.pt")
    inputs, words, weights = made(problem, "file:mine.pt", tmp_path / "mine.pt")
    assert words == "the tensors of mine.pt"
    assert all(torch.equal(one, other) for one, other in zip(inputs, mine, strict=True))
    own = problem.make_model(SEED).state_dict()
    assert all(torch.equal(weights[key], own[key]) for key in own)


NAMES = "x float32 [64, 128], scale float32 [8], places int64 [32]"


@pytest.mark.parametrize(
    ("stored", "got"),
    [
        (tensors()[:2], "got 2 tensors in place of 3"),
        ([tensors()[0].half(), *tensors()[1:]], "got float16 [64, 128] as x"),
        ([tensors()[0][:32], *tensors()[1:]], "got float32 [32, 128] as x"),
        ([tensors()[0].to_sparse(), *tensors()[1:]], "got float32 [64, 128] sparse_coo as x"),
        ([*tensors()[:2], 3], "got int as places"),
        ({"x": tensors()[0]}, "got x as names of inputs"),
        ("text", "got str in place of a list, tuple or dictionary of tensors"),
        (tensors()[0], "got 1 tensors in place of 3"),
        ([*tensors()[:2], tensors()[2].to("meta")], "got int64 [32] without numbers as places"),
        (None, "is nothing that torch.save wrote of tensors alone (UnpicklingError)"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_what_would(problem, tmp_path, stored, got):
    path = tmp_path / "mine.pt"
    if stored is None:
        path.write_bytes(b"no archive")
    else:
        torch.save(stored, path)
    with pytest.raises(ProblemError) as error:
        made(problem, "file:mine.pt", path)
    first, *others = str(error.value).splitlines()
    assert first.startswith(f"{path}: {got}")
    assert others[0] == f"  expected: the tensors of the reference's inputs: {NAMES}"
    assert others[1].startswith("  next: write them with torch.save([...], FILE)")


def test_a_file_of_code_is_not_run(problem, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save(Evil(), tmp_path / "mine.pt")
    with pytest.raises(ProblemError, match=r"is nothing that torch.save wrote of tensors alone"):
        made(problem, "file:mine.pt", tmp_path / "mine.pt")
    assert not (tmp_path / "ran").exists()


def test_a_users_tensors_are_not_replaced_by_others(tmp_path):
    """Silently timed on the given inputs, his own would seem to have been timed."""
    problem = problem_of(tmp_path, "x.log()")
    torch.save([-tensors()[0], *tensors()[1:]], tmp_path / "mine.pt")
    with pytest.raises(ProblemError) as error:
        made(problem, "file:mine.pt", tmp_path / "mine.pt")
    assert "on these tensors the reference gives NaN or Inf" in str(error.value)
    torch.save([*tensors()[:2], tensors()[2] + 100], tmp_path / "mine.pt")
    with pytest.raises(ProblemError, match=r"the reference gives an error: .*out of bounds"):
        made(problem, "file:mine.pt", tmp_path / "mine.pt")
