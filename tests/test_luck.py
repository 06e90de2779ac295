"""Of a few numbers PyTorch's own error on one draw says little: how large it may be is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_check import FLOAT32, ask_all, expect_all, load_reference, reference_of

from tuner.check.judge.timed_call import expected_of_call
from tuner.check.judge.verdict import judge
from tuner.check.probes.probe import Probe
from tuner.evaluate.kept import NUM_ELEMENTS, wrong_element

NUM_DRAWS = 60


@pytest.fixture(scope="module")
def loss(tmp_path_factory):
    """A sum of products that cancel: one number, which PyTorch finds exactly by chance."""
    text = reference_of("(a * b).sum()", "torch.randn(64, 48), torch.randn(64, 48)")
    return load_reference(tmp_path_factory.mktemp("luck"), text)


@pytest.fixture(scope="module")
def expectations(loss):
    probes = [
        Probe(f"draw {n}", distribution="normal", batch=64, seed_inputs=n)
        for n in range(NUM_DRAWS)
    ]
    return expect_all(loss, probes)


def results(loss, expectations, answer):
    class ModelNew(loss.module.Model):
        def forward(self, a, b):
            return answer(a, b)

    answers = ask_all(loss, ModelNew, expectations)
    return [judge(e, a, FLOAT32) for e, a in zip(expectations, answers, strict=True)]


def test_another_order_of_a_sum_is_right_where_pytorch_was_lucky(loss, expectations):
    found = results(loss, expectations, lambda a, b: (a * b).sum(0).flip(0).sum())
    # Twice PyTorch's own error on the same draw, and nothing else, rejects a fourth of these.
    factors = [r.max_abs / max(r.baseline_max_abs, 1e-12) for r in found]
    assert sum(factor > 8.0 for factor in factors) >= 2
    assert all(r.is_accepted or r.is_close for r in found)
    assert sum(not r.is_accepted for r in found) <= 2


def test_fewer_bits_are_wrong_in_nearly_all_draws(loss, expectations):
    found = results(loss, expectations, lambda a, b: (a.half() * b.half()).float().sum())
    assert sum(not r.is_accepted for r in found) >= 0.9 * NUM_DRAWS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_does_not_cancel_is_not_given_more(dtype, tmp_path):
    inputs = f"torch.randn(64, 48).to(torch.{dtype}), torch.randn(64, 48).to(torch.{dtype})"
    reference = load_reference(tmp_path, reference_of("(a - b).square().mean()", inputs))
    probes = [Probe(f"draw {n}", batch=64, seed_inputs=n) for n in range(12)]
    expectations = expect_all(reference, probes)
    off = 1.03 if dtype == "bfloat16" else 1.000003
    found = results(reference, expectations, lambda a, b: (a - b).square().mean() * off)
    assert not any(r.is_accepted for r in found)


class Added(torch.autograd.Function):
    """Adds a bias, whose gradient is summed in parts, or of float16."""

    @staticmethod
    def forward(ctx, a, bias, dtype):
        ctx.dtype = dtype
        return a + bias

    @staticmethod
    def backward(ctx, grad):
        return grad, sum(grad.to(ctx.dtype).float().view(64, 8, 16).sum(1)), None


def test_equal_numbers_are_one_number_with_which_pytorch_may_have_been_lucky(tmp_path):
    """Of a gradient that is one number in a row, the sums of all columns are one and the same."""
    init = "self.bias = nn.Parameter(torch.zeros(16))"
    reference = load_reference(
        tmp_path, reference_of("a + self.bias", "torch.randn(512, 16)", init)
    )

    def cancels(draw):
        rows = torch.randn(512, 16, generator=torch.Generator().manual_seed(draw + 7))[:, 0]
        return abs(float(rows.sum())) < 0.2

    probe = Probe("", distribution="normal", batch=512, gradients="all")
    expectations = expect_all(
        reference,
        [
            replace(probe, name=f"draw {n}", seed_inputs=n, gradient_layout="of_row_sums")
            for n in filter(cancels, range(2_500))
        ],
    )

    def judged(dtype):
        class ModelNew(reference.module.Model):
            def forward(self, a):
                return Added.apply(a, self.bias, dtype)

        answers = ask_all(reference, ModelNew, expectations)
        return [judge(e, a, FLOAT32) for e, a in zip(expectations, answers, strict=True)]

    found = judged(torch.float32)
    assert len(found) >= 10
    assert [r.reason for r in found if not r.is_accepted] == []
    assert not any(r.is_accepted for r in judged(torch.float16))


def test_of_a_timed_call_a_number_may_be_as_far_off_as_luck_makes_it(loss):
    """As a call in another order is; one that left out a row, or is of fewer bits, is not."""
    wrong = {"order": 0, "row": 0, "bits": 0}
    for draw in range(NUM_DRAWS):
        torch.manual_seed(draw)
        a, b = torch.randn(64, 48), torch.randn(64, 48)
        expected = expected_of_call(loss, loss.make_model(0), [a, b], FLOAT32)
        kinds = expected.report.kinds[0]
        answers = {
            "order": (a * b).sum(0).flip(0).sum(),
            "row": (a * b)[1:].sum(),
            "bits": (a.half() * b.half()).float().sum(),
        }
        for name, answer in answers.items():
            kept = {"call0.output0": answer.expand(NUM_ELEMENTS)}
            places = {"call0.output0": torch.zeros(NUM_ELEMENTS, dtype=torch.int64)}
            wrong[name] += bool(wrong_element(expected, kinds, places, kept, FLOAT32))
    assert wrong["order"] == 0 and wrong["row"] == NUM_DRAWS and wrong["bits"] > 0.5 * NUM_DRAWS
