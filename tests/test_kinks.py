"""Where rounding decides on which side of a kink a number lies, either gradient is right."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from test_check import FLOAT32, ask_all, expect_all, load_reference

from tuner.check.calls.crossing import Report
from tuner.check.judge.compare import Limits
from tuner.check.judge.kinks import errors_at_kinks
from tuner.check.judge.verdict import judge, merge
from tuner.check.probes.probe import Probe
from tuner.evaluate.asking import lacks_memory

ROWS, WIDTH, FEATURES = 2048, 96, 40
# One element of a row is within rounding of the kink: the bias of its column puts it there.
REFERENCE = """
import torch
import torch.nn as nn
import torch.nn.functional as F

def drawn():
    g = torch.Generator().manual_seed(SEED)
    weight = torch.randn(FEATURES, WIDTH, generator=g) / WIDTH**0.5
    bias = 0.1 * torch.randn(FEATURES, generator=g)
    bias[0] = BIAS
    return torch.randn(ROWS, WIDTH, generator=g), weight, bias

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        _, weight, bias = drawn()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def product(self, x):
        return F.linear(x, self.weight, self.bias)

    def forward(self, x):
        z = self.product(x)
        return RESULT

def get_inputs():
    return [drawn()[0]]

def get_init_inputs():
    return []
"""
# What is made of the product, and what is at a kink where it is 0.
KINKS = {
    "leaky relu": ("F.leaky_relu(z, 0.1)", lambda z: z[:, 0]),
    "relu, twice": ("F.relu(z) * F.relu(z)[:, :1]", lambda z: z[:, 0]),
    "hard swish": ("F.hardtanh(z, 0.0, 6.0)", lambda z: z[:, 0]),
    "max pooling": ("F.max_pool1d(z[:, None], 2)[:, 0]", lambda z: z[:, 0] - z[:, 1]),
    "maximum": ("torch.maximum(z[:, :20], z[:, 20:])", lambda z: z[:, 0] - z[:, 20]),
    "mean of rows": ("F.leaky_relu(z, 0.1).mean(0)", lambda z: z[:, 0]),
}
FROZEN = (("freeze all",), ("freeze module",), ("freeze module",), ("thaw",))
GRADIENTS = Probe("gradients", weights="initial", gradients="all", seed_weights=3)


def in_chunks(x, weight, bias):
    """An honest product in float32 whose sums are in another order."""
    parts = [x[:, k : k + 8] @ weight[:, k : k + 8].t() for k in range(0, WIDTH, 8)]
    total = parts[-1]
    for part in parts[-2::-1]:
        total = total + part
    return total + bias


def at_a_kink(folder, name: str):
    """Return a problem in which sums in chunks and PyTorch's are on two sides of one kink."""
    result, gap = KINKS[name]
    text = REFERENCE.replace("RESULT", result).replace("ROWS", str(ROWS))
    text = text.replace("WIDTH", str(WIDTH)).replace("FEATURES", str(FEATURES))
    for seed in range(40):
        drawn: dict = {}
        plain = text.replace("SEED", str(seed))
        exec(plain.replace("BIAS", "0.0"), drawn)  # its own numbers
        x, weight, bias = drawn["drawn"]()
        gaps = gap(F.linear(x.double(), weight.double(), bias.double()))
        for row in gaps.abs().argsort()[:100].tolist():
            bias[0] = -gaps[row]
            exact = gap(F.linear(x.double(), weight.double(), bias.double()))
            own, other = gap(F.linear(x, weight, bias)), gap(in_chunks(x, weight, bias))
            wrong = [bool(((y < 0) != (exact < 0)).any()) for y in (own, other)]
            if wrong == [False, True] and abs(float(exact[row])) < 1e-7:
                reported = plain.replace("BIAS", repr(float(bias[0])))
                return load_reference(folder, reported)
    raise AssertionError("no row is near enough")


@pytest.fixture(scope="module", params=sorted(KINKS))
def any_problem(request, tmp_path_factory):
    return at_a_kink(tmp_path_factory.mktemp("kink"), request.param)


@pytest.fixture(scope="module")
def leaky(tmp_path_factory):
    return at_a_kink(tmp_path_factory.mktemp("leaky"), "leaky relu")


def honest(problem):
    class InChunks(problem.module.Model):
        def product(self, x):
            return in_chunks(x, self.weight, self.bias)

    return InChunks


def judged(problem, new_class, probe=GRADIENTS, has_replay=True):
    (e,) = expect_all(problem, [probe])
    (found,) = ask_all(problem, new_class, [e])
    return judge(e if has_replay else dataclasses.replace(e, replay=None), found, FLOAT32)


def test_another_order_of_sums_may_be_on_the_other_side_of_a_kink(any_problem):
    new_class = honest(any_problem)
    plain = judged(any_problem, new_class, has_replay=False)
    assert "gradient of" in plain.reason and "elements are beyond" in plain.reason
    result = judged(any_problem, new_class)
    assert result.is_accepted, result.reason
    assert result.is_at_kinks
    (note,) = merge([result], FLOAT32, is_thorough=True).notes
    assert note == (
        "in 1 of 1 probes a number lay so near a kink, as that of ReLU at 0, that rounding "
        "decides which of two answers is right; either was accepted"
    )


HUGE = Probe("huge values", batch=16, distribution="huge", weights="initial", seed_inputs=5)
# Of all other columns no element is near: they are one product each.
LAST = "weight[1:, 1:], weight[0, -1] = 0.0, LAST"
WIDE = 2**16 + 64  # features: one element of 16 rows is less than one of a million


@pytest.fixture(scope="module")
def clamped(tmp_path_factory):
    """A clamp of sums of 1e9, of which one element is within float32's rounding of 0."""
    folder = tmp_path_factory.mktemp("clamped")
    text = REFERENCE.replace("RESULT", "z.clamp(-1.0, 1.0)").replace("bias[0] = BIAS", LAST)
    text = text.replace("ROWS", "16").replace("FEATURES", str(WIDE)).replace("WIDTH", str(WIDTH))
    for seed in range(20):
        plain = text.replace("SEED", str(seed))
        (e,) = expect_all(load_reference(folder, plain.replace("LAST", "0.0")), [HUGE])
        (x,) = [t for name, t in e.question.tensors.items() if name.startswith("input.")]
        drawn: dict = {}
        exec(plain.replace("LAST", "0.0"), drawn)
        _, weight, bias = drawn["drawn"]()
        for row in range(16):
            weight[0, -1] = -(x[row, :-1].double() @ weight[0, :-1].double()) / x[row, -1].double()
            exact = F.linear(x.double(), weight[:1].double(), bias[:1].double())
            off = in_chunks(x, weight, bias).double().clamp(-1.0, 1.0)[:, :1] - exact.clamp(-1, 1)
            if off.abs().max() < 1.5:
                continue
            problem = load_reference(folder, plain.replace("LAST", repr(float(weight[0, -1]))))
            (e,) = expect_all(problem, [HUGE])
            if max(error.max_abs for error in e.baseline.values()) < 1e-3:  # PyTorch is lucky
                return problem
    raise AssertionError("no element is near enough")


def test_an_output_may_be_at_the_other_end_of_a_clamp(clamped):
    new_class = honest(clamped)
    plain = judged(clamped, new_class, HUGE, has_replay=False)
    assert "output of call 1" in plain.reason and plain.is_close
    result = judged(clamped, new_class, HUGE)
    assert result.is_accepted and result.is_at_kinks, result.reason


def test_an_output_that_is_wrong_elsewhere_stays_wrong(clamped):
    class Wrong(clamped.module.Model):
        def forward(self, x):
            y = super().forward(x).clone()
            y[3, 7] = -y[3, 7]
            return y

    result = judged(clamped, Wrong, HUGE)
    assert not result.is_accepted and "output of call 1[3, 7]" in result.reason


def test_many_wrong_elements_are_no_chance(clamped):
    class Wrong(clamped.module.Model):
        def forward(self, x):
            y = super().forward(x).clone()
            y[3, 7:17] = -y[3, 7:17]
            return y

    result = judged(clamped, Wrong, HUGE)
    assert not result.is_accepted and not result.is_close and not result.is_at_kinks


@pytest.mark.parametrize(
    "fields",
    [
        {"gradients": "forward"},
        {"gradients": "forward weights"},
        {"calls": 3, "inputs": "repeated", "backward_at_once": True},
        {"calls": 2, "inputs": "repeated", "accumulates": True, "gradients": "plain_inputs"},
        {"gradients": "plain_inputs"},
        {"holds_grads": True},
        # Of a call whose parameters are frozen nothing has a gradient.
        {
            "calls": 4,
            "before": FROZEN,
            "inputs": "repeated",
            "backward_at_once": True,
            "gradients": "plain_inputs",
        },
    ],
    ids=str,
)
def test_so_it_may_in_each_way_to_take_gradients(fields, leaky):
    probe = dataclasses.replace(GRADIENTS, **fields)
    assert not judged(leaky, honest(leaky), probe, has_replay=False).is_accepted
    result = judged(leaky, honest(leaky), probe)
    assert result.is_accepted, result.reason


def test_the_reference_itself_is_asked_once(leaky, monkeypatch):
    monkeypatch.setattr("tuner.check.judge.kinks.Replay.measured", None)  # nothing is replayed
    result = judged(leaky, leaky.module.Model)
    assert result.is_accepted and not result.is_at_kinks


class Slope(torch.autograd.Function):
    """A LeakyReLU of a product whose backward is ours."""

    @staticmethod
    def forward(ctx, x, weight, bias, change):
        z = in_chunks(x, weight, bias)
        ctx.save_for_backward(x, weight, z, bias)
        ctx.change = change
        return F.leaky_relu(z, 0.1)

    @staticmethod
    def backward(ctx, g):
        x, weight, z, bias = ctx.saved_tensors
        dz = g * ctx.change.slope(x, weight, z, bias)
        dx, dw, db = dz @ weight, dz.t() @ x, dz.sum(0)
        return *ctx.change.grads(x, dz, dx, dw, db), None


class Right:
    def slope(self, x, weight, z, bias):
        return torch.where(z > 0, 1.0, 0.1)

    def grads(self, x, dz, dx, dw, db):
        return dx, dw, db


class OtherSlope(Right):
    def slope(self, x, weight, z, bias):
        return torch.where(z > 0, 1.0, 0.11)


class OtherKink(Right):
    def slope(self, x, weight, z, bias):
        return torch.where(z > -1e-3, 1.0, 0.1)


class NearKink(Right):
    def slope(self, x, weight, z, bias):
        return torch.where(z > -5e-5, 1.0, 0.1)


class SlopeOfTF32(Right):
    def slope(self, x, weight, z, bias):
        return torch.where(F.linear(to_tf32(x), to_tf32(weight), bias) > 0, 1.0, 0.1)


class RowOfWeight(Right):
    def grads(self, x, dz, dx, dw, db):
        dw[0] *= 1.001
        return dx, dw, db


class RowOfInput(Right):
    def grads(self, x, dz, dx, dw, db):
        dx[7] *= 1.001
        return dx, dw, db


class SampleDropped(Right):
    def grads(self, x, dz, dx, dw, db):
        return dx, dw - dz[5:6].t() @ x[5:6], db


class SampleOfBiasDropped(Right):
    def grads(self, x, dz, dx, dw, db):
        return dx, dw, db - dz[5]


class OtherBackward(Right):
    def grads(self, x, dz, dx, dw, db):
        return dx, dw.roll(1, 0), db


class BackwardOfTF32(Right):
    def grads(self, x, dz, dx, dw, db):
        return dx, to_tf32(dz).t() @ to_tf32(x), db


def to_tf32(x):
    bits = x.detach().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def with_backward(problem, change):
    class Ours(problem.module.Model):
        def forward(self, x):
            return Slope.apply(x, self.weight, self.bias, change())

    return Ours


@pytest.mark.parametrize(
    "change",
    [OtherSlope, OtherKink, NearKink, SlopeOfTF32, RowOfWeight, RowOfInput, SampleDropped,
     SampleOfBiasDropped, OtherBackward, BackwardOfTF32],
)  # fmt: skip
def test_a_wrong_backward_stays_wrong(change, leaky):
    result = judged(leaky, with_backward(leaky, change))
    assert not result.is_accepted and "gradient of" in result.reason


def test_the_same_backward_without_a_fault_is_right(leaky):
    assert judged(leaky, with_backward(leaky, Right)).is_accepted


def test_a_forward_of_fewer_bits_stays_wrong(leaky):
    class OfTF32(leaky.module.Model):
        def product(self, x):
            exact = F.linear(x, self.weight, self.bias)
            return exact + (F.linear(to_tf32(x), to_tf32(self.weight), self.bias) - exact).detach()

    result = judged(leaky, OfTF32)
    assert not result.is_accepted and "output of call 1" in result.reason


def small_reference(folder, result: str, inputs: str):
    text = REFERENCE.replace("RESULT", result).replace("return [drawn()[0]]", f"return [{inputs}]")
    for name, value in {"ROWS": 64, "WIDTH": 24, "FEATURES": 8, "SEED": 1, "BIAS": 0.0}.items():
        text = text.replace(name, str(value))
    return load_reference(folder, text)


def test_what_is_exactly_at_a_kink_has_one_gradient(tmp_path):
    """Zeros that no rounding has made are on no side by chance."""
    result = "F.leaky_relu(x * self.weight[0], 0.1)"
    problem = small_reference(tmp_path, result, "F.relu(drawn()[0])")

    class OneAtZero(problem.module.Model):
        def forward(self, x):
            y = x * self.weight[0]
            return torch.where(y >= 0, y, 0.1 * y)

    result = judged(problem, OneAtZero)
    assert not result.is_accepted and "gradient of input 0" in result.reason
    assert judged(problem, problem.module.Model).is_accepted


def test_which_of_two_equal_numbers_is_the_largest_is_no_chance(tmp_path):
    result = "F.max_pool1d((x * 0.3 + 0.7)[:, None], 2)[:, 0]"
    problem = small_reference(tmp_path, result, "drawn()[0]")

    class TheLast(problem.module.Model):
        def forward(self, x):
            y = F.max_pool1d((x * 0.3 + 0.7).flip(1)[:, None], 2)[:, 0]
            return y.flip(1)

    assert judged(problem, TheLast).is_accepted  # no two are equal
    result = judged(problem, TheLast, dataclasses.replace(GRADIENTS, distribution="few_values"))
    assert not result.is_accepted and "gradient of input 0" in result.reason


def in_order(order):
    """Return a softmax along axis 1 that adds up in an order."""

    def softmax(x):
        e = torch.exp(x - x.amax(1, keepdim=True))
        total = sum(e[:, k] for k in order)
        return e / total[:, None]

    return softmax


def test_what_is_equal_but_for_the_order_of_sums_may_be_either(tmp_path):
    """Behind a softmax of few values, where two columns hold the same four in another order."""
    four = "torch.softmax(x.clamp(-1.5, 1.5).view(-1, 4, 6), 1)"
    problem = small_reference(tmp_path, f"F.max_pool1d({four}.flatten(1), 2)", "drawn()[0]")
    probe = dataclasses.replace(GRADIENTS, distribution="few_values", seed_inputs=8)

    class Ordered(problem.module.Model):
        softmax = staticmethod(in_order((0, 2, 1, 3)))

        def forward(self, x):
            return F.max_pool1d(self.softmax(x.clamp(-1.5, 1.5).view(-1, 4, 6)).flatten(1), 2)

    plain = judged(problem, Ordered, probe, has_replay=False)
    assert "gradient of input 0" in plain.reason and not plain.is_accepted
    result = judged(problem, Ordered, probe)
    assert result.is_accepted and result.is_at_kinks, result.reason


def test_a_replay_that_is_far_off_says_nothing(leaky, monkeypatch):
    """Else whatever a reference makes of noise were right."""
    monkeypatch.setattr("tuner.check.judge.kinks.REACHES", (3e4,) * 4)
    assert not judged(leaky, honest(leaky)).is_accepted


def test_where_memory_runs_out_that_is_said_so_that_it_is_asked_again(leaky, monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("tuner.check.judge.kinks.Replay.measured", refuse)
    result = judged(leaky, honest(leaky))
    assert not result.is_accepted and "gradient of" in result.reason
    assert "whether kinks do that was not found out: OutOfMemoryError" in result.reason
    assert lacks_memory(result)


class Played:
    """A replay of which the test says what each turn crosses."""

    device = "cpu"
    probe = GRADIENTS

    def __init__(self, turns):
        self.turns = itertools.cycle(turns)

    def measured(self):
        return []

    def moved(self, results, reach, seed):
        return Report(), next(self.turns)


def known_by(crossed, got, numel=2000):
    """Return whether a gradient is right, from what each replay crosses: sums of two jumps."""
    draw = torch.Generator().manual_seed(5)
    want, first, second = torch.randn(3, numel, generator=draw, dtype=torch.float64)
    turns = [{"grad0.w": want + a * first + b * second} for a, b in crossed]
    answer_ = {"grad0.w": (want + got(first, second)).float()}
    limits = {"grad0.w": Limits(1e-5, float("inf"), "")}
    oracle = {"grad0.w": want}
    return bool(errors_at_kinks(Played(turns), answer_, oracle, {}, limits, FLOAT32)[0])


def test_one_kink_is_distinguished_from_replays_that_cross_two():
    crossed = [(0, 0), (1, 1), (0, 1), (1, 1), (0, 0), (0, 1), (1, 1), (0, 0)]
    assert known_by(crossed, lambda a, b: a)
    assert known_by(crossed, lambda a, b: a + b)
    assert not known_by(crossed, lambda a, b: a + 1e-3 * a.roll(1))
    assert not known_by(crossed, lambda a, b: 1e-3 * torch.ones_like(a))
    assert not known_by([(0, 0)] * 8, lambda a, b: a)


def test_what_rounding_makes_is_no_kink_however_often_it_is_taken():
    """A gate learned as one number: each replay's gradient is a multiple of the same pattern."""
    rounded = [(1e-7 * turn, -1e-7 * turn) for turn in range(1, 9)]
    assert not known_by(rounded, lambda a, b: 3.0 * a - 3.0 * b)
    assert not known_by([(1, 0), (0, 1)] * 4, lambda a, b: 40.0 * a)  # nor is a kink, 40 times


GATED = {
    # What a backward hands on in place of the right gradient.
    "another sign": "-3.0 * dy",
    "nothing": "0.0 * dy",
    "as without a gate": "dy",
}


@pytest.mark.parametrize("wrong", sorted(GATED))
def test_a_wrong_multiple_of_a_pattern_stays_wrong(wrong, tmp_path):
    problem = small_reference(tmp_path, "x * torch.sigmoid(self.bias[1:2])", "drawn()[0]")

    class Gated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, gate):
            ctx.save_for_backward(x)
            return x * gate

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            return eval(GATED[wrong]), (dy * x).sum().reshape(1)

    class Wrong(problem.module.Model):
        def forward(self, x):
            return Gated.apply(x, torch.sigmoid(self.bias[1:2]))

    result = judged(problem, Wrong)
    assert not result.is_accepted and "gradient of input 0" in result.reason


def test_the_last_of_equal_numbers_is_wrong_in_a_few_rows_as_well(tmp_path):
    some = "F.max_pool1d(torch.sigmoid(x[:64, :2] * 0.3 + 0.1), 2)"
    rest = "0.5 * x[64:].flatten()"  # most elements have no kink
    result = f"torch.cat([{some}.flatten(), {rest}])"
    problem = small_reference(tmp_path, result, "drawn()[0].repeat(40, 1)")

    class TheLast(problem.module.Model):
        def forward(self, x):
            y = torch.sigmoid(x[:64, :2] * 0.3 + 0.1).flip(1)
            return torch.cat([F.max_pool1d(y, 2).flatten(), 0.5 * x[64:].flatten()])

    probe = dataclasses.replace(GRADIENTS, distribution="few_values")
    result = judged(problem, TheLast, probe)
    assert not result.is_accepted and "gradient of input 0" in result.reason


def test_few_elements_are_not_enough_to_tell_what_replays_add_up_to():
    crossed = [(1, 1), (0, 1), (1, 1), (0, 1), (1, 1), (0, 1), (1, 1), (0, 1)]
    assert known_by(crossed, lambda a, b: a)
    assert not known_by(crossed, lambda a, b: a - b, numel=8)
