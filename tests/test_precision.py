"""The emulated precision strategies, on a problem small enough for a test."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from benchmarks import precision, rounding
from benchmarks.precision import FP8X2, FP16X3, MAIN, STRATEGIES, Case, Strategy
from tuner.kernel.family import load_family
from tuner.problem.reference import load_problem

SIZES = {"batch": 256, "in_features": 1024, "out_features": 256}
COLUMNS = 64
BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices are small, and the suite runs on all cores
    yield
    torch.set_num_threads(before)


@functools.cache
def cases() -> dict[str, Case]:
    problem = load_problem(load_family("gemm_scale_batchnorm").reference, SIZES)
    probes = {p.name: p for p in precision.value_probes(SIZES["batch"])}
    models: dict[str, torch.nn.Module] = {}
    wanted = ("as given", "heavy-tailed", "wide range")
    return {name: precision.case_of(problem, probes[name], COLUMNS, models) for name in wanted}


def use(case: Case, strategy: Strategy) -> float:
    y, _ = case.answer(strategy)
    return float(case.use(y, case.y).max())


@pytest.mark.parametrize("probe", ["as given", "heavy-tailed", "wide range"])
def test_three_products_are_within_1e4_and_one_is_not(probe):
    case = cases()[probe]
    assert use(case, BY_NAME["fp16x3"]) < 0.1
    assert use(case, BY_NAME["fp16"]) > 2.0
    assert use(case, BY_NAME["fp16x3"]) < use(case, BY_NAME["fp16_fp8x2"])
    assert use(case, BY_NAME["fp16_fp8x2"]) < 0.2 * use(case, BY_NAME["fp16"])


def test_float8_corrections_are_computed_again_where_they_are_too_coarse_and_only_there():
    guarded, plain = BY_NAME["fp16_fp8x2, or all again"], BY_NAME["fp16_fp8x2"]
    given, wide = cases()["as given"], cases()["wide range"]
    assert use(given, plain) < 1.0 < use(wide, plain)
    assert given.answer(guarded)[1] == 2.0
    assert wide.answer(guarded)[1] == 5.0
    assert use(wide, guarded) == use(wide, BY_NAME["fp16x3"])


# Operands whose roundings are not independent, as the guard's norms take them to be.
def _two(a: float, b: float):
    return lambda rows, k: torch.where(torch.rand(rows, k) < 0.5, a, b)


STRUCTURED_X = {
    "binary": _two(0.0, 1.0),
    "two values": _two(1.0667, -1.0),
    "two values, both rounded": _two(1.0624, -1.0629),
    "bytes": lambda rows, k: torch.randint(0, 256, (rows, k)) / 255,
    "relu": lambda rows, k: torch.randn(rows, k).relu(),
    "sparse": lambda rows, k: (torch.rand(rows, k) < 0.01) * torch.randn(rows, k),
    "one of k": lambda rows, k: 1.0667 * torch.eye(k)[torch.randint(0, k, (rows,))],
    "rank 1": lambda rows, k: (
        torch.randn(rows, 1) * torch.randn(1, k) + 0.1 * torch.randn(rows, k)
    ),
}
STRUCTURED_WEIGHTS = {
    "uniform": lambda n, k: torch.rand(n, k) * 2 - 1,
    "of one sign": lambda n, k: torch.rand(n, k) + 0.5,
    "ternary": lambda n, k: torch.randint(-1, 2, (n, k)) * 1.0667,
    "nearly constant": lambda n, k: 1.0667 + 1e-3 * torch.randn(n, k),
    "lognormal": lambda n, k: torch.randn(n, k) * torch.randn(n, k).exp(),
}


@pytest.mark.parametrize("weights", STRUCTURED_WEIGHTS)
@pytest.mark.parametrize("inputs", STRUCTURED_X)
def test_what_the_guard_lets_through_is_within_1e4_on_structured_operands(inputs, weights):
    torch.manual_seed(0)
    x = STRUCTURED_X[inputs](512, 1024).float()
    weight = STRUCTURED_WEIGHTS[weights](COLUMNS, 1024) / 32
    ones, zeros = torch.ones(COLUMNS), torch.zeros(COLUMNS)
    case = Case(inputs, x - precision.centre_of(x), weight, ones, ones, zeros, 1e-5, ones)
    assert use(case, BY_NAME["fp16_fp8x2, or all again"]) < 1.0


def test_rows_and_columns_that_are_computed_again_are_counted_as_work():
    by_both = BY_NAME["fp16_fp8x2, rows over 1.25 and columns over 1.5 again"]
    given, tailed = cases()["as given"], cases()["heavy-tailed"]
    assert given.answer(by_both)[1] == 2.0
    assert use(tailed, by_both) < use(tailed, BY_NAME["fp16_fp8x2"])
    share_long = float((tailed.lengths > 1.25).double().mean())
    assert 2.0 + 3.0 * share_long < tailed.answer(by_both)[1] < 5.0


def test_the_expected_errors_are_the_size_of_those_that_are_found():
    for case in cases().values():
        found = case.answer(BY_NAME["fp16_fp8x2"])[0] - case.y
        expected = case.expected_errors(BY_NAME["fp16_fp8x2"])
        assert 0.8 < float((found.square().mean() / expected.square().mean()).sqrt()) < 1.25


def test_int8_is_finer_than_float8_unless_few_elements_make_a_row_long():
    int8, float8 = BY_NAME["fp16 + 2 int8"], BY_NAME["fp16_fp8x2"]
    assert use(cases()["as given"], int8) < use(cases()["as given"], float8)
    assert use(cases()["heavy-tailed"], int8) > use(cases()["heavy-tailed"], float8)


# ---- integers, for class float32 ------------------------------------------------------------


def test_the_emulated_guard_of_integers_has_the_kernels_numbers():
    params = {"template": "wgmma", "precision": "fp16_int8x2", "order": "sweeps", "promote_k": 0}
    text = load_family("gemm_scale_batchnorm").render({**params, "centre": True}).source

    def number(name: str) -> float:
        (found,) = re.findall(rf"constexpr \w+ {name} = ([-\d. /ef]+);", text)
        top, _, below = found.replace("f", "").partition("/")
        return float(top) / float(below or 1)

    assert number("kIntegerDistance") == rounding.INTEGER_DISTANCE
    assert number("kIntegerStep") == 1 / rounding.INT8_DOWN
    assert number("kIntegerRestStep") == 1 / rounding.INT8_UP
    assert number("kLargestShare") == precision.FLOAT32_SHARE
    assert number("kFloat32Error") == precision.FLOAT32_ERROR
    assert number("kCutOff") == precision.CUT_OFF


@pytest.mark.parametrize("k", [4096, 8192])
def test_integers_are_as_good_as_float32_on_kernelbenchs_operands_also_where_factors_are_guessed(
    k,
):
    torch.manual_seed(0)
    x, weight = torch.rand(2048, k), (2 * torch.rand(64, k) - 1) / k**0.5
    filled = precision.share_of_float32(x, weight, "filled")
    assert filled < precision.share_of_float32(x, weight, "guessed") < 0.9
    assert precision.share_of_float32(x[:, :512], weight[:, :512], "filled") > 1.0
    row = x - precision.centre_of(x)
    full, guess = (rounding.scale_of(row, by) for by in ("filled", "guessed"))
    again = (guess == full).double().mean()
    assert again < 0.001  # else rows are read twice


FEW = {
    "one in a hundred": lambda rows, k: (torch.rand(rows, k) < 0.01).float(),
    "one in ten": lambda rows, k: (torch.rand(rows, k) < 0.1).float(),
    "integers": lambda rows, k: torch.randint(0, 16, (rows, k)).float(),
    "uniform": torch.rand,
}
# Where x has two values and W one sign, roundings are all alike: errors add up, to as much as 16
# times float32's, which are few there (docs/kernels.md).
ALIKE = {"two values", "two values, both rounded"}, {"of one sign", "nearly constant"}


@pytest.mark.parametrize("scaled_by", ["filled", "guessed"])
@pytest.mark.parametrize("inputs", {**STRUCTURED_X, **FEW})
def test_what_the_guard_of_integers_lets_through_is_as_good_as_float32(inputs, scaled_by):
    k, is_let_through = 4096, []
    for weights, draw in STRUCTURED_WEIGHTS.items():
        torch.manual_seed(0)
        x, weight = {**STRUCTURED_X, **FEW}[inputs](128, k).float(), draw(32, k).float() / 32
        if precision.share_of_float32(x, weight, scaled_by) > 1.0:
            continue
        is_let_through.append(weights)
        if inputs in ALIKE[0] and weights in ALIKE[1]:
            continue
        ones, own = torch.ones(32), torch.zeros(128, 32)
        case = Case(inputs, x - precision.centre_of(x), weight, ones, ones, ones, 1e-5, ones)
        found = case.product(Strategy("", 2.0, precision.INT8X2, scaled_by)) - case.h
        for i in range(k):  # one after the other, as PyTorch's product on a GPU
            own = torch.addcmul(own, x[:, i : i + 1], weight[:, i])
        exact = x.double() @ weight.double().T
        theirs = own.double() - exact
        for error in (found, theirs):
            error -= error.mean(0)  # which changes no y
        floor = 16 * 2.0**-24 * float(exact.std(0).max())
        for size in (lambda error: error.abs().max(), lambda error: error.square().mean().sqrt()):
            assert float(size(found)) <= max(2 * float(size(theirs)), floor), weights
    assert is_let_through or inputs not in ("uniform", "bytes", "integers")
    assert not is_let_through or "one in" not in inputs


def test_a_row_that_grows_after_its_beginning_keeps_all_of_its_integers():
    row = torch.cat([torch.full((1, 600), 0.1), torch.ones(1, 400)], dim=1)
    scale = rounding.scale_of(row, "guessed")
    assert float((row * scale).max()) == 127 / rounding.INT8_DOWN
    assert torch.equal(scale, rounding.scale_of(row, "filled"))


def test_the_table_of_integers_has_every_pair_of_operands():
    text = precision.integers_report(64, 16, 0)
    pairs = len(precision.INTEGER_INPUTS) * len(precision.INTEGER_WEIGHTS)
    assert len(text.splitlines()) == 2 + pairs and "**" in text


def test_a_part_and_its_rest_leave_less_than_the_part_alone():
    v = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)) * 2.0**11
    for whole, rest, bits in [("fp16", "fp16 rest", 21), ("bf16", "bf16 rest", 16)]:
        left = v - rounding.part(whole, v) - rounding.part(rest, v)
        assert float(left.abs().max()) <= float(v.abs().max()) * 2.0**-bits
    for rest in ("e4m3 rest", "e5m2 rest", "int8 rest"):
        exact = v - rounding.part("fp16", v)
        assert float((rounding.part(rest, v) - exact).abs().max()) < 0.2 * float(exact.abs().max())


def test_sums_that_are_promoted_are_nearer_than_those_that_are_cut_off_all_the_way():
    case = cases()["as given"]
    x, weight = case.x[:16, :512], case.weight[:16, :512]
    exact = x.double() @ weight.double().T

    def error(products, order, promotes):
        h = rounding.summed(x, weight, products, order=order, promotes=promotes)
        return float((h - exact).square().mean().sqrt())

    assert error(FP16X3, "fused", True) < 0.3 * error(FP16X3, "sweeps", False)
    assert error(FP8X2, "sweeps", False) < 0.2 * error((MAIN,), "sweeps", True)


def test_sums_are_cut_off_towards_zero():
    above = 1.0 + 2.0**-24
    sums = torch.tensor([1.0 + 2.0**-23, above, -above, 0.0], dtype=torch.float64)
    assert rounding.cut(sums, 24).tolist() == [1.0 + 2.0**-23, 1.0, -1.0, 0.0]


def test_the_report_has_every_probe_and_strategy():
    problem = load_problem(
        load_family("gemm_scale_batchnorm").reference,
        {"batch": 64, "in_features": 64, "out_features": 32},
    )
    probes = precision.value_probes(64)
    assert {p.distribution for p in probes} == set(precision.FINITE)
    chosen = [p for p in probes if p.distribution in ("wide_range", "wide_columns")]
    text = precision.report(problem, chosen, STRATEGIES, 16)
    for name in [*(p.name for p in chosen), *BY_NAME, *precision.ARRANGEMENTS]:
        assert name in text
