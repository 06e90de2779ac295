"""The flagship's C++ template: real g++, judged against float64 next to PyTorch's own error."""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cpu_machine import FACTS, GPP, NARROW, VECTORS, compiled
from families import built_in
from torch import Tensor

from tuner.kernel.binding import BoundOp, bind
from tuner.kernel.family import Family
from tuner.trial import Params

STATS = ("gram", "per_thread", "two_pass", "atomics")
CONFIGS: list[Params] = [
    *({"stats": stats} for stats in STATS),
    {"stats": "gram", "gemm": "own"},
    {"stats": "gram", "gemm": "own", "width": NARROW, "tile_rows": 6,
     "tile_vectors": 4 if VECTORS.num_registers >= 32 else 2, "depth": 32, "block_rows": 16,
     "gram_slices": 3, "huge_pages": False},
    {"stats": "gram", "width": NARROW, "max_threads": 1, "gram_slices": 1},
    {"stats": "per_thread", "width": NARROW, "stats_columns": 8, "max_threads": 1},
    {"stats": "two_pass", "width": NARROW, "stats_columns": 256, "block_rows": 7},
    {"stats": "gram", "gemm": "own", "tile_rows": 12, "tile_vectors": 1, "depth": 100},
    {"stats": "atomics", "stats_columns": 32, "block_rows": 1024, "huge_pages": False},
]  # fmt: skip
# batch, in_features, out_features: tiny, odd, whole vectors, more rows than a block, many features
SHAPES = [(2, 1, 1), (3, 5, 7), (2, 64, 33), (130, 64, 128), (1000, 33, 129), (257, 300, 70)]
FLOOR = 16 * 2.0**-24  # of the largest output

pytestmark = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")


def _name(params: Params) -> str:
    return "-".join(str(value) for value in params.values())


@pytest.fixture(scope="module")
def family() -> Family:
    return built_in("gemm_scale_batchnorm")


@functools.cache
def _built(items: tuple[tuple[str, object], ...]) -> BoundOp:
    candidate = built_in("gemm_scale_batchnorm").render({"template": "cpu", **dict(items)}, FACTS)
    return bind(candidate.plan, "cpp", compiled(candidate))


def _op(params: Params) -> BoundOp:
    return _built(tuple(params.items()))


def _arguments(batch: int, in_features: int, out_features: int, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(batch, in_features, generator=draw)
    weight = torch.randn(out_features, in_features, generator=draw) * in_features**-0.5
    bias, scale, gamma, beta = (torch.randn(out_features, generator=draw) for _ in range(4))
    scale[0] = 0.0
    scale[-1] = -scale[-1].abs() - 0.1
    return [x, weight, bias, scale, gamma, beta]


def _reference(arguments: list[Tensor], eps: float, dtype: torch.dtype) -> list[Tensor]:
    x, weight, bias, scale, gamma, beta = (tensor.to(dtype) for tensor in arguments)
    z = torch.nn.functional.linear(x, weight, bias) * scale
    y = torch.nn.functional.batch_norm(z, None, None, gamma, beta, True, 0.1, eps)
    return [y, z.mean(0), z.var(0)]


def _assert_float32_class(op: BoundOp, arguments: list[Tensor], eps: float = 1e-5) -> None:
    exact = _reference(arguments, eps, torch.float64)
    baseline = _reference(arguments, eps, torch.float32)
    allowed = 4.0 if arguments[0].shape[0] < 32 else 2.0
    for name, mine, theirs, true in zip(
        ("y", "mean", "var"), op(*arguments, eps), baseline, exact, strict=True
    ):
        assert mine.dtype == torch.float32 and mine.shape == true.shape
        for norm in (torch.amax, lambda e: e.square().mean().sqrt()):
            error, own = (norm((t.double() - true).abs()).item() for t in (mine, theirs))
            floor = FLOOR * true.abs().max().item()
            assert error <= max(allowed * own, floor), (name, error, own, floor)


# ---- accuracy -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("params", CONFIGS, ids=_name)
def test_is_as_accurate_as_pytorch_float32(params: Params, shape: tuple[int, int, int]) -> None:
    arguments = _arguments(*shape)
    _assert_float32_class(_op(params), arguments)
    arguments[0] = arguments[0] + 100.0
    _assert_float32_class(_op(params), arguments)


def _heavy_tailed(x: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    factor = (1.5 * torch.randn(x.shape, generator=draw)).exp()
    return (torch.randn(x.shape, generator=draw) * factor).clamp(-1e4, 1e4)


def _wide_rows(x: Tensor) -> Tensor:
    return (x - 0.5) * torch.exp2(torch.arange(len(x)) % 41 - 20.0)[:, None]


def _wide_columns(x: Tensor) -> Tensor:
    return (x - 0.5) * torch.exp2(torch.arange(x.shape[1]) % 41 - 20.0)


def _almost_one_direction(x: Tensor) -> Tensor:
    # The covariance is nearly singular: most columns of x follow the first one.
    return x[:, :1] * 30.0 + x * 0.01


@pytest.mark.parametrize(
    "change", [_heavy_tailed, _wide_rows, _wide_columns, _almost_one_direction]
)
@pytest.mark.parametrize("params", CONFIGS, ids=_name)
def test_is_as_accurate_as_pytorch_on_difficult_inputs(
    params: Params, change: Callable[[Tensor], Tensor]
) -> None:
    arguments = _arguments(700, 60, 96)
    arguments[0] = change(arguments[0])
    _assert_float32_class(_op(params), arguments)


def test_covariance_survives_weights_that_cancel_the_large_direction() -> None:
    # var(h) is 1e-8 of the terms that W C W^T adds up: float32 statistics would lose it all.
    draw = torch.Generator().manual_seed(2)
    common = torch.randn(2000, 1, generator=draw)
    x = common * 1024.0 + torch.randn(2000, 16, generator=draw)
    weight = torch.randint(-8, 9, (40, 16), generator=draw) / 16.0
    weight[:, 0] -= weight.sum(1)  # every row sums to 0, exactly
    arguments = [x, weight, *_arguments(2, 1, 40)[2:]]
    _assert_float32_class(_op({"stats": "gram"}), arguments)


@pytest.mark.parametrize("params", CONFIGS, ids=_name)
def test_constant_columns_give_beta_exactly(params: Params) -> None:
    arguments = _arguments(1000, 24, 65)
    row = torch.randint(-8, 9, (24,), generator=torch.Generator().manual_seed(1)) / 4.0
    arguments[0] = row.expand(1000, 24).contiguous()
    arguments[1] = (arguments[1] * 64).round() / 64  # sums of products are then exact
    y, mean, var = _op(params)(*arguments, 1e-5)
    assert torch.equal(y, arguments[5].expand(1000, 65))
    assert torch.equal(var, torch.zeros(65))
    expected = _reference(arguments, 1e-5, torch.float64)[1]
    torch.testing.assert_close(mean.double(), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("params", CONFIGS, ids=_name)
def test_nan_and_inf_poison_what_they_poison_in_pytorch(params: Params) -> None:
    for row, value in itertools.product((0, 77), (float("nan"), float("inf"), -float("inf"))):
        arguments = _arguments(150, 20, 70)
        arguments[0][row, 3] = value
        mine = _op(params)(*arguments, 1e-5)
        theirs = _reference(arguments, 1e-5, torch.float32)
        for name, a, b in zip(("y", "mean", "var"), mine, theirs, strict=True):
            assert torch.equal(a.isnan(), b.isnan()), (name, row, value)
            assert torch.equal(a.isinf(), b.isinf()), (name, row, value)


@pytest.mark.parametrize("stats", STATS)
def test_extreme_scales_and_eps_follow_pytorch(stats: str) -> None:
    arguments = _arguments(300, 16, 48)
    arguments[3] = torch.logspace(-12, 12, 48)
    for eps in (1e-5, 1e-12, 1.0):
        mine = _op({"stats": stats})(*arguments, eps)[0]
        exact = _reference(arguments, eps, torch.float64)[0]
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=2e-5)


# ---- eval mode ------------------------------------------------------------------------------


def _stored(shape: tuple[int, int, int], offset: float = 0.0) -> list[Tensor]:
    """Return the call's arguments for eval mode, with statistics near those of the input."""
    arguments = _arguments(*shape)
    arguments[0] = arguments[0] + offset
    x, weight, bias, scale = (tensor.double() for tensor in arguments[:4])
    z = (x @ weight.t() + bias) * scale
    noise = torch.rand(2, shape[2], generator=torch.Generator().manual_seed(4))
    var = z.var(0, correction=0) + 0.1 * noise[1]
    return [*arguments, (z.mean(0) + noise[0]).float(), var.float()]


def _eval_reference(arguments: list[Tensor], eps: float, dtype: torch.dtype) -> Tensor:
    x, weight, bias, scale, gamma, beta, mean, var = (t.to(dtype) for t in arguments)
    z = torch.nn.functional.linear(x, weight, bias) * scale
    return torch.nn.functional.batch_norm(z, mean, var, gamma, beta, False, 0.1, eps)


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 64, 33), *SHAPES, (700, 513, 96)], ids=str)
@pytest.mark.parametrize("params", [CONFIGS[0], CONFIGS[4], CONFIGS[8]], ids=_name)
def test_eval_mode_is_as_accurate_as_pytorch_float32(
    params: Params, shape: tuple[int, int, int], offset: float
) -> None:
    arguments = _stored(shape, offset)
    (y,) = _op(params).extra["eval"](*arguments, 1e-5)
    exact, theirs = (_eval_reference(arguments, 1e-5, t) for t in (torch.float64, torch.float32))
    allowed = 4.0 if shape[0] < 32 else 1.5
    for norm in (torch.amax, lambda e: e.square().mean().sqrt()):
        error, own = (norm((t.double() - exact).abs()).item() for t in (y, theirs))
        assert error <= max(allowed * own, FLOOR * exact.abs().max().item())


@pytest.mark.parametrize("params", [CONFIGS[0], CONFIGS[4], CONFIGS[8]], ids=_name)
def test_eval_mode_poisons_rows_and_columns_as_pytorch_does(params: Params) -> None:
    op = _op(params).extra["eval"]
    for value in (float("nan"), float("inf"), -float("inf")):
        # A row of x, a row of the weight, and one of each vector: a column of y.
        for position in range(8):
            arguments = _stored((150, 20, 70))
            arguments[position].view(-1)[47] = value
            copies = [tensor.clone() for tensor in arguments]
            (y,) = op(*arguments, 1e-5)
            theirs = _eval_reference(arguments, 1e-5, torch.float32)
            assert torch.equal(y.isfinite(), theirs.isfinite()), (position, value)
            if position == 0:
                assert torch.equal(y.isnan(), theirs.isnan()), value
            for mine, before in zip(arguments, copies, strict=True):
                assert torch.equal(mine.nan_to_num(7.0), before.nan_to_num(7.0))


# ---- behaviour ------------------------------------------------------------------------------


@pytest.mark.parametrize("params", CONFIGS, ids=_name)
def test_same_input_gives_the_same_bits_unless_declared(params: Params, family: Family) -> None:
    candidate = family.render({"template": "cpu", **params}, FACTS)
    assert candidate.is_deterministic == (params["stats"] != "atomics")
    if candidate.is_deterministic:
        arguments = _arguments(513, 40, 100)
        first = _op(params)(*arguments, 1e-5)
        for _ in range(3):
            assert all(map(torch.equal, first, _op(params)(*arguments, 1e-5)))


@pytest.mark.parametrize(
    "params", [p for p in CONFIGS if p.get("gemm") == "own" or p["stats"] == "per_thread"]
)
def test_number_of_threads_does_not_change_the_answer(params: Params) -> None:
    op = _op(params)
    arguments = _arguments(500, 40, 200)
    before = torch.get_num_threads()
    try:
        answers = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            answers.append(op(*arguments, 1e-5))
    finally:
        torch.set_num_threads(before)
    for other in answers[1:]:
        assert all(map(torch.equal, answers[0], other))


@pytest.mark.parametrize("params", CONFIGS, ids=_name)
def test_arguments_stay_as_they_were(params: Params) -> None:
    arguments = _arguments(200, 30, 50)
    copies = [tensor.clone() for tensor in arguments]
    _op(params)(*arguments, 1e-5)
    assert all(map(torch.equal, arguments, copies))


def test_more_features_than_a_covariance_holds_are_refused() -> None:
    with pytest.raises(RuntimeError, match="at most 2048 in_features"):
        _op({"stats": "gram"})(*_arguments(4, 2049, 8), 1e-5)


def test_2048_features_are_not_refused() -> None:
    arguments = _arguments(64, 2048, 12)
    _assert_float32_class(_op({"stats": "gram", "gemm": "own"}), arguments)


# ---- the text and its build -------------------------------------------------------------------


def test_random_feasible_configurations_compile_without_warnings(family: Family) -> None:
    rng = random.Random(7)
    head = family.template("cpu").parameters
    choices = {name: item.values for name, item in head.items() if item.values is not None}
    choices |= {"block_rows": (1, 33, 512), "stats_columns": (16, 48, 512), "gram_slices": (1, 64)}
    choices |= {"max_threads": (0, 3), "depth": (1, 512)}
    constraints = family.constraints(["cpu"], choices)
    tried = 0
    while tried < 6:
        params: Params = {name: rng.choice(values) for name, values in choices.items()}
        params["template"] = "cpu"
        if all(c.expression.evaluate({**FACTS, **params}) for c in constraints):
            tried += 1
            compiled(family.render(params, FACTS))


@pytest.mark.parametrize("params", CONFIGS, ids=_name)
def test_text_may_stand_in_an_exported_file(params: Params, family: Family) -> None:
    source = family.render({"template": "cpu", **params}, FACTS).source
    for word in (r"\bpass\b", r"\btry\s*:", r"\bexcept\b", '"""', r"torch", r"ATen"):
        assert not re.search(word, source), word
    assert not source.endswith("\\")


def test_is_infeasible_on_a_gpu(family: Family) -> None:
    rules = family.constraints(["cpu"], {})
    assert any(
        not rule.expression.evaluate({"device.kind": "cuda", "template": "cpu"})
        for rule in rules
        if rule.expression.names <= {"device.kind", "template"}
    )


def test_threads_are_those_of_pytorch() -> None:
    """One OpenMP runtime in the process: two would fight for the cores."""
    _op({"stats": "gram", "gemm": "own"})(*_arguments(64, 8, 32), 1e-5)
    mapped = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if re.search(r"lib[gi]?omp[^/]*\.so", line)
    }
    library = ctypes.CDLL(None)
    assert library.omp_get_max_threads() == torch.get_num_threads()
    assert len(mapped) == 1, mapped
