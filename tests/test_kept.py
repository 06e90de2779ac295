"""What is kept of timed calls: the elements that were there, of any output, and none missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from test_problem import FLAGSHIP

from tuner.check.calls.crossing import Script, unpack
from tuner.check.judge.timed_call import expected_of_call
from tuner.evaluate.inputs import REPEATED_FROM
from tuner.evaluate.kept import NUM_ELEMENTS, Keeper, missing_calls, wrong_element
from tuner.problem.accuracy import Accuracy
from tuner.problem.reference import load_problem

X = torch.arange(6 * 8 * 10, dtype=torch.float32).reshape(6, 8, 10)
OUTPUTS = {
    "contiguous": X,
    "transposed": X.transpose(0, 2),
    "strided": X[1::2, :, ::3],
    "expanded": X[:, :1].expand(6, 8, 10),
    "of integers": X.to(torch.int64).t() if X.ndim == 2 else X.to(torch.int64).permute(2, 0, 1),
    "of truths": X > 7,
    "in bfloat16": X.bfloat16(),
    "a number": X.sum(),
    "a part of larger memory": X[3:],
    "empty": X[:0],
    "with a negative bit": torch.complex(X, X).conj().imag,
}


def kept_of(keeper: Keeper) -> tuple[dict, dict[str, torch.Tensor]]:
    data, blobs = keeper.kept()
    return data, unpack(Script, data["kept"], [bytearray(blob) for blob in blobs])[1]


@pytest.mark.parametrize("what", OUTPUTS)
def test_what_is_kept_of_an_output_is_what_stands_there(what):
    output = OUTPUTS[what]
    keeper = Keeper("cpu")
    with torch.no_grad():
        for call in range(50):
            keeper.keep(call, (output, X))
    data, tensors = kept_of(keeper)
    positions, values = tensors["positions.0"], tensors["values.0"]
    assert data["numbers"] == list(range(50)) and data["odd"] == ""
    assert values.dtype == output.dtype
    if not output.numel():
        assert values.shape == (50, 0)
        return
    assert values.shape == (50, NUM_ELEMENTS)
    assert torch.equal(values, output.reshape(-1)[positions])
    # 800 draws of at most 480 places: other places for each call, and no corner left out
    assert len(positions.unique()) > 0.7 * min(output.numel(), 480)


def test_it_is_what_stood_there_when_the_call_returned():
    keeper = Keeper("cpu")
    output = X.clone()
    keeper.keep(0, output)
    output.zero_()
    _, tensors = kept_of(keeper)
    assert torch.equal(tensors["values.0"], X.reshape(-1)[tensors["positions.0"]])


def test_a_call_that_returns_another_kind_is_named():
    keeper = Keeper("cpu")
    for result in (X, X, X[:3], X):
        keeper.keep(0, result)
    data, tensors = kept_of(keeper)
    assert data["odd"] == "torch.Tensor float32[3, 8, 10] on cpu" and not tensors


def test_what_is_no_plain_tensor_is_named_and_not_looked_into():
    keeper = Keeper("cpu")
    for result in (torch.nn.Parameter(X), {"a": X}, X.to_sparse()):
        keeper.clear()
        keeper.keep(0, result)
        data, tensors = kept_of(keeper)
        assert data["kinds"] != ["torch.Tensor float32[6, 8, 10] on cpu"] or not tensors


@pytest.mark.parametrize(
    ("numbers", "num_asked", "reason"),
    [
        ([5, 6, 7, REPEATED_FROM + 1, REPEATED_FROM + 2], 5, ""),
        ([5, 6, 7, 8], 3, ""),  # more were made: samples that were dropped
        ([5, 7], 2, "of 1 timed calls no output was kept"),
        ([REPEATED_FROM + 1, REPEATED_FROM + 4], 2, "of 2 timed calls no output was kept"),
        ([5, 6], 4, "of 2 of 4 timed calls no output was kept"),
        ([5, 5], 2, "timed call 5 was reported twice"),
        ([], 1, "of 1 of 1 timed calls no output was kept"),
    ],
)
def test_a_timed_call_of_which_nothing_was_kept_is_refused(numbers, num_asked, reason):
    found = missing_calls(numbers, num_asked)
    assert found.startswith(reason) and bool(found) == bool(reason)


@pytest.fixture(scope="module")
def one_call(tmp_path_factory):
    path = tmp_path_factory.mktemp("kept") / "reference.py"
    path.write_text(FLAGSHIP)
    problem = load_problem(path, {})
    model, inputs = problem.make_model(1), problem.make_inputs(1)
    with torch.no_grad():
        right = model(*inputs)
    return expected_of_call(problem, model, inputs, Accuracy()), right


# What a call leaves in its buffers is in the next one's output, by little at a time.
COUNTS = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, momentum):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean.lerp_(x.mean(0).detach(), self.momentum)
        return x - READ


def get_inputs():
    return [torch.randn(64, 8)]


def get_init_inputs():
    return [1e-4]
"""


@pytest.mark.parametrize("read", ["self.mean", "x.mean(0)"])
def test_of_a_timed_call_nothing_is_asked_that_earlier_calls_change(tmp_path, read):
    path = tmp_path / "reference.py"
    path.write_text(COUNTS.replace("READ", read))
    problem = load_problem(path, {})
    model, inputs = problem.make_model(1), problem.make_inputs(1)
    found = expected_of_call(problem, model, inputs, Accuracy())
    assert bool(found.oracle) == bool(found.baseline) == (read != "self.mean")
    assert not model.mean.any()


CONVERGES = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * READ


def get_inputs():
    return [torch.randn(64, 8)]


def get_init_inputs():
    return []
"""


@pytest.mark.parametrize("read", ["torch.clamp(self.calls / 10, max=1.0)", "0.5"])
def test_of_a_timed_call_nothing_is_asked_that_has_converged_since(tmp_path, read):
    path = tmp_path / "reference.py"
    path.write_text(CONVERGES.replace("READ", read))
    problem = load_problem(path, {})
    model, inputs = problem.make_model(1), problem.make_inputs(1)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in range(20):
        model(*inputs)
    found = expected_of_call(problem, model, inputs, Accuracy(), buffers_before=before)
    assert bool(found.oracle) == bool(found.baseline) == (read == "0.5")
    assert int(model.calls) == 20


SHORT_OF_MEMORY = """
import resource, sys, torch
from tuner.check.judge import sums_of_errors
from tuner.check.calls.exercise import kinds_of, outputs_of
from tuner.check.calls.unasked import answer_of_call
from tuner.evaluate import oracle as evaluate_oracle
from tuner.evaluate.oracle import Oracle

sums_of_errors.CHUNK_ELEMENTS = 2**18
evaluate_oracle.HUGE_SHARE = 0.0
oracle = Oracle(sys.argv[1], {}, "cpu", "float32")
model, inputs = oracle.problem.make_model(1), oracle.problem.make_inputs(1)
right = model(*inputs)
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (250 << 20), resource.RLIM_INFINITY))
expected = oracle.expected_of_call(model, inputs)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
again = oracle.expected_of_call(model, inputs, is_rough=True)
print(*(tensor.dtype for each in (expected, again) for tensor in each.oracle.values()))
for output in (right, right * 1.001, right * 1.01, right.roll(1, 0)):
    answer = answer_of_call(model, outputs_of(output), kinds_of(output))
    print(oracle.verdict(expected, answer).is_accepted)
"""


def test_where_no_memory_is_left_for_float64_a_timed_call_is_judged_by_pytorchs_answer(tmp_path):
    path = tmp_path / "reference.py"
    path.write_text(
        COUNTS.replace("READ", "x.mean(0)").replace("torch.randn(64, 8)", "torch.rand(2**21, 8)")
    )
    command = [sys.executable, "-c", SHORT_OF_MEMORY, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    types, verdicts = ["torch.float32"] * 2, ["True", "True", "False", "False"]
    assert done.stdout.split() == [*types, *verdicts], done.stderr


def judged(expected, output: torch.Tensor) -> str:
    keeper = Keeper("cpu")
    with torch.no_grad():
        keeper.keep(0, output)
    data, tensors = kept_of(keeper)
    rows = {n: {"call0.output0": tensors[f"{n}.0"][0]} for n in ("positions", "values")}
    return wrong_element(expected, data["kinds"], rows["positions"], rows["values"], Accuracy())


def test_a_right_output_is_accepted_wherever_one_looks(one_call):
    expected, right = one_call
    assert [judged(expected, right) for _ in range(300)] == [""] * 300


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros_like, lambda y: y.half().float(), lambda y: y + float("nan")],
)
def test_a_wrong_output_is_refused(one_call, wrong):
    expected, right = one_call
    assert judged(expected, wrong(right)).startswith("element ")


def test_rows_that_were_left_out_are_found(one_call):
    expected, right = one_call
    partly = torch.cat([right[: len(right) // 2], right[: len(right) // 2]])
    # all 16 elements in the right half: 1 of 65,536
    assert all(judged(expected, partly) for _ in range(20))


def test_another_shape_is_refused(one_call):
    expected, right = one_call
    assert judged(expected, right[:3]).startswith("it returned torch.Tensor float32[3, ")
