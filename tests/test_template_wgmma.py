"""The Hopper templates: they compile, fit, and are as accurate as each precision allows.

The tests marked `gpu` need no other part of the tuner than rendering and binding, and print a
table of errors (`pytest -m gpu -s tests/test_template_wgmma.py`).
"""

from __future__ import annotations

import gemm_cases as gemm
import pytest
from gemm_cases import CASES, EPS, compile_cuda, errors, label, make_inputs, needs_nvcc, oracle

from tuner.errors import InputError
from tuner.kernel.binding import BoundOp
from tuner.trial import Candidate

# What one product may be off, relative to its size: what the operands round or leave out.
PRODUCT_ERROR = {
    "fp16": 2**-11,
    "bf16": 2**-8,
    "tf32": 2**-11,  # rounded to nearest; float16's bits
    "bf16x3": 2**-16,
    "fp16x3": 2**-22,
    "tf32x3": 2**-22,
    "fp16_fp8x2": 2**-14,
    "fp16_int8x2": 2**-16,
}
CARRIED = {"order": "sweeps", "promote_into": "float8"}
INT8 = {**CARRIED, "precision": "fp16_int8x2", "centre": True, "promote_k": 1024}
FLOAT8 = {"precision": "fp16_fp8x2", "order": "sweeps"}
# As the second run of a guarded one.
THREE_PRODUCTS = {
    "precision": "fp16x3",
    "prepare": "behind",
    "centre": True,
    "stats": "shared_memory",
}
# Together they use every parameter's every branch.
CONFIGURATIONS = (
    {**FLOAT8, "promote_k": 0, "block_n": 256, "stages": 4, "guard": False},
    {**FLOAT8, "centre": True, "promote_k": 128},
    {**FLOAT8, "block_k": 32, "promote_k": 0, "centre": True, "guard": False},
    {**FLOAT8, "block_k": 32, "promote_k": 0, "centre": True, "stats": "shared_memory"},
    {**FLOAT8, "promote_k": 0, "centre": True, "prepare": "behind", "stats": "atomics"},
    {"precision": "fp16x3", "centre": True, "prepare": "behind", "group_m": 1},
    {"precision": "fp16x3", "prepare": "behind", "finalise": "fused", "group_m": 2},
    {"precision": "bf16x3", "prepare": "behind", "block_n": 64, "ahead": 100},
    THREE_PRODUCTS,
    {
        **FLOAT8,
        "promote_k": 0,
        "block_n": 256,
        "stages": 4,
        "centre": True,
        "prepare": "behind",
        "ahead": 100,
        "group_m": 2,
    },
    {
        **FLOAT8,
        "promote_k": 0,
        "block_n": 256,
        "stages": 4,
        "centre": True,
        "prepare": "behind",
        "guard": False,
    },
    {**INT8, "block_n": 256, "stages": 4, "prepare": "behind", "ahead": 100, "group_m": 2},
    {**INT8, "promote_k": 256, "prepare": "behind", "stats": "atomics"},
    {**INT8, "block_k": 32, "promote_k": 512, "stats": "shared_memory"},
    {**INT8, "block_n": 256, "stages": 4, "cluster_m": 4, "stats": "cluster"},
    {**FLOAT8, **CARRIED, "promote_k": 256, "centre": True},
    {**CARRIED, "precision": "fp16x3", "promote_k": 256, "block_n": 256, "stages": 4},
    {**CARRIED, "precision": "fp16x3", "promote_k": 512, "prepare": "behind", "centre": True},
    # Up to 1024 rows: a cluster has all of them; guarded, and not.
    {
        **FLOAT8,
        "promote_k": 0,
        "block_m": 256,
        "stages": 4,
        "centre": True,
        "prepare": "behind",
        "cluster_m": 4,
        "stats": "cluster",
    },
    {
        **FLOAT8,
        "promote_k": 0,
        "block_n": 256,
        "stages": 4,
        "centre": True,
        "guard": False,
        "cluster_m": 8,
        "stats": "cluster",
    },
    {"precision": "fp16x3", "prepare": "behind", "cluster_m": 8, "stats": "cluster"},
    # Many clusters have rows.
    {"precision": "fp16x3", "cluster_m": 1, "stats": "cluster"},
    {"precision": "bf16x3", "cluster_n": 2, "stats": "cluster", "finalise": "fused"},
    {**FLOAT8, "promote_k": 0, "centre": True, "cluster_m": 2, "stats": "cluster"},
    # What columns become is known before the GEMM.
    {"precision": "fp16x3", "prepare": "behind", "centre": True, "stats": "gram"},
    {"precision": "fp16x3", "stats": "gram", "cluster_m": 1, "gram_slices": 4},
    {
        "precision": "fp16",
        "block_n": 256,
        "promote_k": 0,
        "stages": 4,
        "stats": "gram",
        "gram_slices": 64,
    },
    {"precision": "fp16", "prepare": "behind", "centre": True, "stats": "atomics"},
    {"precision": "fp16x3", "cluster_m": 1, "promote_k": 128},
    {"precision": "fp16x3", "finalise": "fused"},
    {"precision": "fp16x3", "cluster_m": 1, "cluster_n": 2, "stats": "atomics", "group_m": 2},
    {"precision": "fp16x3", "cluster_m": 2, "cluster_n": 2, "block_k": 32, "stages": 6},
    {"precision": "fp16x3", "block_n": 192, "block_k": 32, "stages": 5, "group_m": 0},
    {"precision": "fp16x3", "block_m": 64, "consumers": 1, "min_blocks": 2, "block_k": 32},
    {"precision": "bf16x3", "block_m": 192, "consumers": 3, "block_k": 32, "promote_k": 0},
    {"precision": "bf16x3", "block_n": 256, "order": "sweeps", "promote_k": 0, "stages": 4},
    {"precision": "fp16_fp8x2", "promote_k": 64, "cluster_m": 2, "guard": False},
    {"precision": "fp16_fp8x2", "block_k": 32, "promote_k": 32, "centre": True},
    {
        "precision": "fp16_fp8x2",
        "block_k": 32,
        "promote_k": 32,
        "prepare_threads": 128,
        "guard": False,
    },
    {
        "precision": "fp16",
        "block_m": 256,
        "promote_k": 0,
        "stages": 4,
        "cluster_n": 2,
        "cluster_m": 1,
    },
    {"precision": "fp16", "block_k": 128, "promote_k": 128},
    {"precision": "bf16", "block_n": 64, "promote_k": 0, "stages": 6, "prepare_threads": 512},
    {"precision": "tf32", "block_n": 256, "block_k": 32, "promote_k": 0, "stages": 4},
    {"precision": "tf32", "prepare": "behind", "centre": True, "stats": "shared_memory"},
    {
        "precision": "tf32",
        "block_m": 256,
        "promote_k": 0,
        "stages": 2,
        "cluster_m": 1,
        "cluster_n": 2,
        "prepare": "behind",
        "ahead": 100,
    },
    {
        "precision": "tf32",
        "block_n": 64,
        "block_k": 128,
        "promote_k": 128,
        "stages": 2,
        "cluster_m": 1,
        "centre": True,
        "prepare_threads": 128,
    },
    {"precision": "tf32x3", "block_k": 32, "prepare": "behind", "centre": True},
    {"precision": "tf32x3", "order": "sweeps", "block_k": 32, "stages": 4},
    {"template": "wgmma_convert", "precision": "fp16x3"},
    {
        "template": "wgmma_convert",
        "precision": "fp16x3",
        "load": "after",
        "stats": "shared_memory",
    },
    {"template": "wgmma_convert", "precision": "fp16x3", "cluster_n": 2, "stats": "atomics"},
    {"template": "wgmma_convert", "precision": "fp16x3", "block_n": 96, "finalise": "fused"},
    {"template": "wgmma_convert", "precision": "fp16x3", "block_k": 32, "stages": 6},
    {"template": "wgmma_convert", "precision": "fp16_fp8x2", "cluster_m": 2, "cluster_n": 2},
    {"template": "wgmma_convert", "precision": "fp16", "rescale": "row", "block_n": 256},
    {"template": "wgmma_convert", "precision": "fp16", "rescale": "row", "block_k": 32},
    {
        "template": "wgmma_convert",
        "precision": "fp16",
        "block_k": 128,
        "stages": 2,
        "load": "after",
    },
)


def render(**params) -> Candidate:
    return gemm.render("wgmma", params)


# ---- without a GPU --------------------------------------------------------------------------


# What of the host's half differs most: these are compiled and linked as a whole.
WHOLE = [
    # Guarded: its second run is the GEMM by three products, prepared behind, of the centre.
    {**INT8, "block_n": 256, "stages": 4},
    {
        "precision": "fp16",
        "promote_k": 0,
        "block_m": 256,
        "stages": 4,
        "cluster_m": 4,
        "stats": "cluster",
    },
    {"precision": "fp16x3", "centre": True, "stats": "gram"},
    {"template": "wgmma_convert", "precision": "fp16_fp8x2", "cluster_n": 2},
]
KERNELS = [
    {"precision": "fp16x3", "stats": "atomics"},
    {**FLOAT8, "block_n": 256, "promote_k": 0, "stages": 4, "centre": True},
    {**FLOAT8, **CARRIED, "promote_k": 256, "centre": True, "prepare": "behind"},
    {"precision": "tf32", "block_n": 256, "block_k": 32, "promote_k": 0, "stages": 4},
    {"template": "wgmma_convert", "precision": "fp16x3"},
    {"template": "wgmma_convert", "precision": "fp16", "rescale": "row", "block_n": 256},
]


@needs_nvcc
@pytest.mark.parametrize("params", [*KERNELS, *WHOLE], ids=label)
def test_it_compiles_without_warnings_spills_or_serialised_products(params, tmp_path):
    """And every kernel waits for the one before it.

    One that did not could end, and let its successor go on, before its predecessor has.
    """
    is_whole = params in WHOLE
    _, report = compile_cuda(render(**params), tmp_path, "90a", is_whole=is_whole)
    assert "warning" not in report and "C75" not in report  # C7510: products serialised
    kernels = gemm.spills(report)
    assert any("gemm_kernel" in name for name in kernels)
    assert not any(kernels.values()), kernels
    made = gemm.kernels_of(tmp_path / "candidate.ptx")
    assert len(made) >= 5 and waiting(made) == set(made)


def waiting(kernels: dict[str, str]) -> set[str]:
    return {name for name, text in kernels.items() if "griddepcontrol.wait" in text}


@needs_nvcc
@pytest.mark.parametrize("template", ["wgmma", "wgmma_convert"])
def test_no_kernel_waits_where_they_do_not_overlap(template, tmp_path):
    params = {"template": template, "precision": "fp16", "overlap": False}
    kernels = gemm.ptx_of_kernels(render(**params), tmp_path, "90a")
    assert len(kernels) >= 5 and waiting(kernels) == set()


def test_the_text_can_stand_in_a_kernelbench_file():
    for precision in PRODUCT_ERROR:
        source = render(precision=precision, centre=True).source
        gemm.assert_stands_in_a_kernelbench_file(source)
        assert "fused_gemm_scale_bn_wgmma_gemm_kernel" in source


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"block_n": 256, "block_k": 32, "promote_k": 32}, "fit in its registers"),
        ({"stages": 4}, "shared memory"),
        ({"promote_k": 96}, "end of a stage"),
        ({"block_m": 192}, "64 rows at once"),
        ({"consumers": 1, "block_m": 64}, "tensor cores idle"),
        ({"cluster_m": 4, "cluster_n": 2}, "larger clusters"),
        ({"precision": "fp16_fp8x2", "promote_k": 128, "centre": True}, "float8"),
        ({**FLOAT8, "promote_k": 0}, "takes the centre"),
        ({**FLOAT8, "promote_k": 0, "centre": True, "finalise": "fused"}, "before y is normal"),
        ({"prepare": "behind", "block_n": 192, "block_k": 32}, "fit in its registers"),
        ({**INT8, "promote_into": "float32"}, "become float32 ones"),
        ({**INT8, "guard": False}, "only what is guarded"),
        ({**CARRIED, "precision": "bf16x3", "promote_k": 256}, "float8 holds nothing"),
        ({"precision": "fp16", "order": "sweeps"}, "has no order"),
        ({"precision": "tf32", "order": "sweeps"}, "has no order"),
        ({"precision": "tf32", "block_n": 256, "promote_k": 0}, "shared memory"),
        ({"precision": "tf32x3"}, "shared memory"),
        ({"precision": "ieee"}, "knows precision"),
        ({"stats": "gram"}, "the covariance of more features"),
    ],
)
def test_what_cannot_run_is_infeasible_for_a_stated_reason(params, why):
    with pytest.raises(InputError, match=why):
        search_space(params)


def test_every_configuration_that_is_tested_on_a_gpu_is_feasible():
    for params in CONFIGURATIONS:
        assert search_space(params, {"in_features": 2048}).num_feasible == 1, params


def search_space(params, sizes=None):
    own = {name: value for name, value in params.items() if name != "template"}
    return gemm.search_space(params.get("template", "wgmma"), own, sizes)


# ---- on a GPU -------------------------------------------------------------------------------

SHAPES = [(2, 7, 1), (33, 100, 5), (129, 64, 1000), (1000, 1024, 129), (1024, 1001, 260)]
SHAPES += [(130, 4096, 512), (300, 17000, 33), (4100, 65, 257), (3, 4, 2), (257, 1028, 130)]


def bounds(inputs, answer, params):
    """Bound the errors as the precision and the accumulator, promoted or truncating, allow."""
    is_long = params.get("promote_into") == "float8"
    sums = 2**-15 if params.get("promote_k", 64) == 0 else 2**-17 if is_long else 2**-20
    return gemm.bounds(inputs, answer, PRODUCT_ERROR[params["precision"]], sums)


def refusal(params, shape) -> str:
    """Return what the configuration says of inputs of a shape that it does not take."""
    if params.get("stats") == "gram":
        return "at most 2048" if shape[1] > 2048 else ""
    is_converting = params.get("template") == "wgmma_convert"
    multiple = 4 if is_converting else 8 if is_guarded(params) else 1
    return f"multiple of {multiple}" if shape[1] % multiple else ""


def is_guarded(params) -> bool:
    is_narrow = params["precision"] in ("fp16_fp8x2", "fp16_int8x2")
    return is_narrow and params.get("template") != "wgmma_convert" and params.get("guard", True)


@pytest.fixture(scope="module")
def operators(tmp_path_factory) -> dict[str, BoundOp]:
    """Every tested configuration, built for this GPU."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an NVIDIA GPU of compute capability 9.0")
    return gemm.build_all(render, CONFIGURATIONS, "90a", tmp_path_factory)


@needs_nvcc
@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_stay_within_what_the_precision_explains(shape, operators):
    import torch

    failures = []
    for case in CASES:
        inputs = make_inputs(shape, case)
        answer = oracle(inputs)
        for params in CONFIGURATIONS:
            if refusal(params, shape):
                with pytest.raises(RuntimeError, match=refusal(params, shape)):
                    operators[label(params)](*inputs, EPS)
                continue
            torch.empty(1 << 24, device="cuda").fill_(float("nan"))  # what fresh memory may hold
            outputs = operators[label(params)](*inputs, EPS)
            limits = bounds(inputs, answer, params)
            for name, got, exact, limit in zip(
                ("y", "mean", "var"), outputs, answer, limits, strict=False
            ):
                ratio = float(((got.double() - exact).abs() / limit).max())
                if not ratio <= 1:  # also NaN
                    failures.append(f"{case} {label(params)} {name}: {ratio:.3g} of its bound")
    assert not failures, "\n".join(failures[:20])


@needs_nvcc
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 8192, 1024), (1024, 4096, 1024), (1000, 1004, 129)])
@pytest.mark.parametrize("case", ["normal", "offset", "heavy_x", "small_big"])
def test_promoted_three_products_are_as_accurate_as_float32(case, shape, operators):
    inputs = make_inputs(shape, case)
    exact = oracle(inputs)[0]
    floor = 16 * 2**-24 * float(exact.abs().max())
    own = errors(gemm.eager(inputs), exact)
    print(f"\n{case} {shape}: rms relative and largest error of y; PyTorch's {own}")
    for params in CONFIGURATIONS:
        if refusal(params, shape):
            continue
        found = errors(operators[label(params)](*inputs, EPS)[0], exact)
        print(f"  {label(params):70s} {found[0]:.2e} {found[1]:.2e}")
        if params["precision"] in ("fp16x3", "fp16_int8x2"):
            rms_floor = floor / float(exact.square().mean().sqrt())
            assert found[0] <= max(2 * own[0], rms_floor), label(params)
            assert found[1] <= max(2 * own[1], floor), label(params)


@needs_nvcc
@pytest.mark.gpu
def test_tiny_inputs_and_huge_weights_overflow_nowhere_on_the_way(operators):
    """Their products are about 1; a factor that undoes one scale before the other does not fit."""
    batch, length, columns = 256, 8192, 512
    inputs = make_inputs((batch, length, columns), "normal")
    inputs[0].mul_(2.0**-126)
    inputs[1].mul_(length**0.5 * 2.0**121)
    exact = oracle(inputs)[0]
    for params in CONFIGURATIONS:
        if not refusal(params, (batch, length, columns)):
            y = operators[label(params)](*inputs, EPS)[0]
            assert bool(y.isfinite().all()), label(params)
            if params["precision"] == "fp16x3":
                assert errors(y, exact)[0] <= 2 * errors(gemm.eager(inputs), exact)[0]


@needs_nvcc
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (1, 64, 130)], ids=str)
def test_eval_mode_applies_stored_statistics(shape, operators):
    import torch

    failures = []
    for case in CASES:
        inputs = make_inputs(shape, case)
        running_mean, running_var = inputs[2] - 1, inputs[4].square()
        running_var[0] = 0
        for params in CONFIGURATIONS:
            run = operators[label(params)].extra["eval"]
            arguments = (*inputs, running_mean, running_var, EPS)
            why = "" if params.get("stats") == "gram" else refusal(params, shape)
            if why:
                with pytest.raises(RuntimeError, match=why):
                    run(*arguments)
                continue
            precision = "fp16x3" if is_guarded(params) else params["precision"]
            is_long = not params.get("promote_k", 64) or "promote_into" in params
            sums = 2**-20 if is_guarded(params) or not is_long else 2**-14
            exact, bound = gemm.eval_oracle(
                inputs, running_mean, running_var, PRODUCT_ERROR[precision], sums
            )
            torch.empty(1 << 24, device="cuda").fill_(float("nan"))  # what fresh memory may hold
            (y,) = run(*arguments)
            ratio = float(((y.double() - exact).abs() / bound).max())
            if not ratio <= 1:  # also NaN
                failures.append(f"{case} {label(params)}: {ratio:.3g} of its bound")
    assert not failures, "\n".join(failures[:20])


@needs_nvcc
@pytest.mark.gpu
def test_nan_and_inf_stay_in_their_row_or_column_in_eval_mode(operators):
    for params in CONFIGURATIONS:
        run = operators[label(params)]
        gemm.assert_bad_values_stay_in_their_row_or_column_in_eval_mode(run, label(params))


@needs_nvcc
@pytest.mark.gpu
def test_nan_and_inf_poison_their_column_and_no_other(operators):
    for params in CONFIGURATIONS:
        run = operators[label(params)]
        gemm.assert_bad_values_poison_their_column_and_no_other(run, label(params))


@needs_nvcc
@pytest.mark.gpu
def test_equal_bits_twice_unless_atomics_are_declared(operators):
    for params in CONFIGURATIONS:
        if params.get("stats") == "atomics":
            assert not render(**params).is_deterministic
        else:
            gemm.assert_equal_bits_twice(operators[label(params)], label(params))


@needs_nvcc
@pytest.mark.gpu
def test_zero_rows_and_zero_scale_give_beta(operators):
    for params in CONFIGURATIONS:
        gemm.assert_zero_rows_and_zero_scale_give_beta(operators[label(params)], label(params))


@needs_nvcc
@pytest.mark.gpu
def test_it_can_be_captured_in_a_graph_and_replayed(operators):
    import torch

    inputs = make_inputs((1000, 1024, 129), "normal")
    for params in (*CONFIGURATIONS[:4], *CONFIGURATIONS[-3:]):
        run = operators[label(params)]
        expected = run(*inputs, EPS)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run(*inputs, EPS)
        for output in outputs:
            output.fill_(float("nan"))
        graph.replay()
        for got, want in zip(outputs, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@needs_nvcc
@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_calls_on_several_streams_at_once_wait_for_themselves_alone(operators):
    """Blocks that wait for rows hold multiprocessors that another call's blocks need."""
    import torch

    inputs = make_inputs((3000, 1024, 2000), "normal")
    streams = [torch.cuda.Stream() for _ in range(3)]
    for params in CONFIGURATIONS:
        if params.get("prepare") != "behind":
            continue
        run = operators[label(params)]
        expected = run(*inputs, EPS)[0]
        torch.cuda.synchronize()
        found = []
        for _ in range(20):
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(run(*inputs, EPS)[0])
        torch.cuda.synchronize()
        for y in found:
            torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


# ---- the guard ------------------------------------------------------------------------------


def assert_computed_again(outputs, again, where: str, mean_atol: float = 1e-5) -> None:
    import torch

    names, atols = ("y", "mean", "var"), (1e-5, mean_atol, 1e-5)
    for name, atol, got, want in zip(names, atols, outputs, again, strict=True):
        torch.testing.assert_close(
            got,
            want,
            rtol=1e-5,
            atol=atol,
            equal_nan=True,
            msg=lambda text, name=name: f"{where}: {name}: {text}",
        )


# What makes float8 corrections too coarse, done to inputs on which they are not.
TOO_COARSE = {
    "a large gamma": lambda x, weight, scale, gamma: gamma[3:4].fill_(-4.0),
    "gamma is NaN": lambda x, weight, scale, gamma: gamma[3:4].fill_(float("nan")),
    "a long row of x": lambda x, weight, scale, gamma: x[77].mul_(8.0),
    "a row of x is NaN": lambda x, weight, scale, gamma: x[77].fill_(float("nan")),
    "one large element of x": lambda x, weight, scale, gamma: x[-1, 5:6].fill_(3000.0),
}
NOT_TOO_COARSE = {
    "as it is": lambda x, weight, scale, gamma: None,
    "a small gamma": lambda x, weight, scale, gamma: gamma[3:4].fill_(0.01),
    "long rows of the weight": lambda x, weight, scale, gamma: weight[5:7].mul_(1e4),
    "a large scale": lambda x, weight, scale, gamma: scale.mul_(1e5),
    "a large x": lambda x, weight, scale, gamma: x.mul_(1e15),
    "a small x": lambda x, weight, scale, gamma: x.mul_(1e-25),
}


@needs_nvcc
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 2048, 512), (1000, 1032, 388), (520, 4096, 130)])
def test_all_is_computed_again_where_float8_corrections_are_too_coarse(shape, operators):
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    rows, length, columns = shape

    def normal(*size):
        return torch.randn(*size, device="cuda", generator=generator)

    x, weight, bias = normal(rows, length), normal(columns, length), normal(columns)
    scale = normal(columns).abs() + 0.5
    ones = torch.ones(columns, device="cuda")
    for params in CONFIGURATIONS:
        if not is_guarded(params) or params["precision"] != "fp16_fp8x2":
            continue
        run, plain = operators[label(params)], operators.get(label({**params, "guard": False}))
        for name, change in {**TOO_COARSE, **NOT_TOO_COARSE}.items():
            inputs = [tensor.clone() for tensor in (x, weight, bias, scale, ones, bias)]
            change(inputs[0], inputs[1], inputs[3], inputs[4])
            outputs = run(*inputs, EPS)
            again = operators[label(THREE_PRODUCTS)](*inputs, EPS)
            where = f"{label(params)}, {name}"
            if name in TOO_COARSE:
                assert_computed_again(outputs, again, where)
                continue
            exact = oracle(inputs)[0].float()
            torch.testing.assert_close(outputs[0], exact, rtol=1e-4, atol=1e-4, msg=where)
            if name != "a small x":  # of which y is beta alone
                assert not torch.equal(outputs[0], again[0]), where
            if plain is not None and params.get("stats") != "atomics":
                assert torch.equal(outputs[0], plain(*inputs, EPS)[0]), where


# The same of integers, which are to be as good as float32: what they leave of rows counts.
TOO_COARSE_FOR_INTEGERS = {
    "one large element of x": lambda x, weight, gamma: x[-1, 5:6].fill_(30.0),
    "one large element of the weight": lambda x, weight, gamma: weight[7, 9:10].fill_(30.0),
    "a row of x is NaN": lambda x, weight, gamma: x[77].fill_(float("nan")),
    "a row of x is infinite": lambda x, weight, gamma: x[77, 3:4].fill_(float("inf")),
    "a weight is NaN": lambda x, weight, gamma: weight[7, 9:10].fill_(float("nan")),
    "a row of x is zero": lambda x, weight, gamma: x[77].zero_(),
    "few of x are not zero": lambda x, weight, gamma: x.copy_(x < 0.01),
    "normal values": lambda x, weight, gamma: x.normal_(),
}
NOT_TOO_COARSE_FOR_INTEGERS = {
    "as given": lambda x, weight, gamma: None,
    "a large gamma": lambda x, weight, gamma: gamma[3:4].fill_(-4.0),
    "a longer row of x": lambda x, weight, gamma: x[77].mul_(1.5),
    "long rows of the weight": lambda x, weight, gamma: weight[5:7].mul_(1e4),
    "zero rows of the weight": lambda x, weight, gamma: weight[5:7].zero_(),
    "x + 100": lambda x, weight, gamma: x.add_(100.0),
    "a large x": lambda x, weight, gamma: x.mul_(1e15),
}


@needs_nvcc
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 4096, 512), (1000, 4104, 388), (520, 8192, 130)])
def test_all_is_computed_again_where_integers_are_coarser_than_float32(shape, operators):
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    rows, length, columns = shape

    def uniform(*size):
        return torch.rand(*size, device="cuda", generator=generator)

    x, weight, bias = uniform(rows, length), 2 * uniform(columns, length) - 1, uniform(columns)
    scale, ones = uniform(columns) + 0.5, torch.ones(columns, device="cuda")
    for params in CONFIGURATIONS:
        if params["precision"] != "fp16_int8x2":
            continue
        run = operators[label(params)]
        for name, change in {**TOO_COARSE_FOR_INTEGERS, **NOT_TOO_COARSE_FOR_INTEGERS}.items():
            inputs = [tensor.clone() for tensor in (x, weight, bias, scale, ones, bias)]
            change(inputs[0], inputs[1], inputs[4])
            outputs = run(*inputs, EPS)
            again = operators[label(THREE_PRODUCTS)](*inputs, EPS)
            where = f"{label(params)}, {name}"
            if name in TOO_COARSE_FOR_INTEGERS:
                # Far from 0, a mean is known to a share of its column's deviation.
                deviation = float(again[2].sqrt().nan_to_num(0.0, 0.0).max())
                assert_computed_again(outputs, again, where, mean_atol=1e-5 * deviation)
                continue
            exact = oracle(inputs)[0]
            floor = 16 * 2**-24 * float(exact.abs().max())
            found, own = errors(outputs[0], exact), errors(gemm.eager(inputs), exact)
            print(f"{where}: {found[0]:.2e} {found[1]:.2e}; PyTorch's {own[0]:.2e} {own[1]:.2e}")
            rms_floor = floor / float(exact.square().mean().sqrt())
            assert found[0] <= max(2 * own[0], rms_floor), where
            assert found[1] <= max(2 * own[1], floor), where
            assert not torch.equal(outputs[0], again[0]), where
