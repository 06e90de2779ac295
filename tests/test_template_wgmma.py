"""The Hopper templates: they compile, fit, and are as accurate as each precision allows.

The tests marked `gpu` need no other part of the tuner than rendering and binding, and print a
table of errors (`pytest -m gpu -s tests/test_template_wgmma.py`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tuner.binding import BoundOp, bind
from tuner.device import known_device
from tuner.errors import InputError
from tuner.space import SearchSpace
from tuner.template import load_family
from tuner.trial import Candidate

EPS = 1e-5
# What one product may be off, relative to its size: what the operands round or leave out.
PRODUCT_ERROR = {
    "fp16": 2**-11,
    "bf16": 2**-8,
    "bf16x3": 2**-16,
    "fp16x3": 2**-22,
    "fp16_fp8x2": 2**-14,
}
# Together they use every parameter's every branch.
CONFIGURATIONS = (
    {"precision": "fp16_fp8x2", "order": "sweeps", "promote_k": 0, "block_n": 256, "stages": 4},
    {"precision": "fp16_fp8x2", "order": "sweeps", "centre": True, "promote_k": 128},
    {"precision": "fp16_fp8x2", "order": "sweeps", "block_k": 32, "promote_k": 0, "centre": True},
    {"precision": "fp16x3", "centre": True, "prepare": "behind", "raster_rows": 1},
    {"precision": "fp16x3", "prepare": "behind", "finalise": "fused", "raster_rows": 2},
    {"precision": "bf16x3", "prepare": "behind", "block_n": 64, "ahead": 100},
    {
        "precision": "fp16_fp8x2",
        "order": "sweeps",
        "promote_k": 0,
        "block_n": 256,
        "stages": 4,
        "centre": True,
        "prepare": "behind",
        "ahead": 100,
        "raster_rows": 2,
    },
    {"precision": "fp16", "prepare": "behind", "centre": True, "stats": "atomics"},
    {"precision": "fp16x3", "cluster_m": 1, "promote_k": 128},
    {"precision": "fp16x3", "finalise": "fused"},
    {"precision": "fp16x3", "cluster_m": 1, "cluster_n": 2, "stats": "atomics", "raster_rows": 2},
    {"precision": "fp16x3", "cluster_m": 2, "cluster_n": 2, "block_k": 32, "stages": 6},
    {"precision": "fp16x3", "block_n": 192, "block_k": 32, "stages": 5, "raster_rows": 0},
    {"precision": "fp16x3", "block_m": 64, "consumers": 1, "min_blocks": 2, "block_k": 32},
    {"precision": "bf16x3", "block_m": 192, "consumers": 3, "block_k": 32, "promote_k": 0},
    {"precision": "bf16x3", "block_n": 256, "order": "sweeps", "promote_k": 0, "stages": 4},
    {"precision": "fp16_fp8x2", "promote_k": 64, "cluster_m": 2},
    {"precision": "fp16_fp8x2", "block_k": 32, "promote_k": 32, "prepare_threads": 128},
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
    {"template": "wgmma_convert", "precision": "fp16x3"},
    {"template": "wgmma_convert", "precision": "fp16x3", "load": "after", "cluster_m": 2},
    {"template": "wgmma_convert", "precision": "fp16x3", "cluster_n": 2, "stats": "atomics"},
    {"template": "wgmma_convert", "precision": "fp16x3", "block_n": 96, "finalise": "fused"},
    {"template": "wgmma_convert", "precision": "fp16x3", "block_k": 32, "stages": 6},
    {"template": "wgmma_convert", "precision": "fp16_fp8x2", "cluster_m": 2, "cluster_n": 2},
    {
        "template": "wgmma_convert",
        "precision": "fp16",
        "block_k": 128,
        "stages": 2,
        "load": "after",
    },
)

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on the PATH")


def render(**params) -> Candidate:
    return load_family("gemm_scale_batchnorm").render({"template": "wgmma", **params})


def label(params) -> str:
    return ",".join(f"{name}={value}" for name, value in params.items())


def compile_cuda(candidate: Candidate, folder: Path) -> tuple[Path, str]:
    """Build the shared object; return it and the compiler's report of registers and spills."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "candidate.cu"
    source.write_text(candidate.source)
    library = folder / "candidate.so"
    command = ["nvcc", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xptxas", "-v"]
    command += ["-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC"]
    command += ["-Xlinker", "-z", "-Xlinker", "defs", "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return library, done.stderr


# ---- without a GPU --------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize(
    "params",
    [
        {"precision": "fp16x3", "stats": "atomics"},
        {"precision": "fp16_fp8x2", "order": "sweeps", "block_n": 256, "promote_k": 0, "stages": 4},
        {"precision": "fp16x3", "prepare": "behind", "centre": True},
        {"template": "wgmma_convert", "precision": "fp16x3"},
        {"template": "wgmma_convert", "precision": "fp16_fp8x2", "cluster_n": 2},
    ],
    ids=label,
)
def test_it_compiles_without_warnings_spills_or_serialised_products(params, tmp_path):
    _, report = compile_cuda(render(**params), tmp_path)
    assert "warning" not in report and "C75" not in report  # C7510: products serialised
    spills = re.findall(r"Function properties for (\S+)\s+.*?(\d+) bytes spill stores", report)
    assert any("gemm_kernel" in name for name, _ in spills)
    assert not any(int(size) for _, size in spills), spills


def test_the_text_can_stand_in_a_kernelbench_file():
    for precision in PRODUCT_ERROR:
        source = render(precision=precision).source
        assert not re.search(r"\bpass\b|\btry:|\bexcept\b", source)
        assert '"""' not in source
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
        ({"precision": "fp16_fp8x2", "promote_k": 128}, "float8"),
        ({"prepare": "behind", "block_n": 192, "block_k": 32}, "fit in its registers"),
        ({"precision": "fp16", "order": "sweeps"}, "has no order"),
        ({"precision": "tf32"}, "knows precision"),
    ],
)
def test_what_cannot_run_is_infeasible_for_a_stated_reason(params, why):
    with pytest.raises(InputError, match=why):
        search_space(params)


def test_every_configuration_that_is_tested_on_a_gpu_is_feasible():
    for params in CONFIGURATIONS:
        assert search_space(params).num_feasible == 1, params


def search_space(params) -> SearchSpace:
    family = load_family("gemm_scale_batchnorm")
    template = params.get("template", "wgmma")
    varied = {name: (value,) for name, value in {"stats": "two_pass", **params}.items()}
    varied.pop("template", None)
    facts = {**known_device("NVIDIA H200").facts(), **family.sizes}
    return SearchSpace.build(
        family.parameters([template], varied), family.constraints([template], varied), facts
    )


# ---- on a GPU -------------------------------------------------------------------------------

SHAPES = [(2, 7, 1), (33, 100, 5), (129, 64, 1000), (1000, 1024, 129), (1024, 1001, 260)]
SHAPES += [(130, 4096, 512), (300, 17000, 33), (4100, 65, 257), (3, 4, 2), (257, 1028, 130)]
CASES = ("normal", "offset", "heavy_x", "heavy_w", "big_small", "small_big", "constant")


def make_inputs(shape, case):
    import torch

    batch, length, columns = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    def powers(*size):  # 2^-20 to 2^20
        return 2.0 ** torch.randint(-20, 21, size, generator=generator)

    x, weight = normal(batch, length), normal(columns, length) / length**0.5
    if case == "offset":
        x += 100
    elif case == "heavy_x":
        x *= powers(batch, 1)
    elif case == "heavy_w":
        weight *= powers(columns, 1)
    elif case == "big_small":
        x, weight = x * 1e30, weight * 1e-30
    elif case == "small_big":
        x, weight = x * 1e-30, weight * 1e30
    elif case == "constant":
        x[:] = x[0] + 100
    scale = normal(columns)
    scale[0] = -0.5
    vectors = (normal(columns), scale, normal(columns), normal(columns))
    return tuple(tensor.cuda() for tensor in (x, weight, *vectors))


def oracle(inputs):
    """Return y, mean, var in float64, and h with the size of the sums behind it."""
    x, weight, bias, scale, gamma, beta = (tensor.double() for tensor in inputs)
    h = x @ weight.T
    mean_h, var_h = h.mean(0), h.var(0, correction=0)
    var = scale**2 * var_h
    y = (h - mean_h) * (gamma * scale / (var + EPS).sqrt()) + beta
    size = (x.square() @ weight.square().T).sqrt()  # of a sum of independent products' errors
    return y, scale * (mean_h + bias), var, h, size


def bounds(inputs, answer, params):
    """Bound the errors of y, mean, var if each product is off by at most PRODUCT_ERROR.

    Products' errors are independent: six of their standard deviations. To that comes what
    sums, statistics and outputs cost, relative to the largest h of a column: float32's, or
    that of a truncating accumulator.
    """
    _, _, bias, scale, gamma, beta = (tensor.double() for tensor in inputs)
    y, _, var, h, size = answer
    largest = h.abs().amax(0)
    sums = 2**-20 if params.get("promote_k", 64) > 0 else 2**-15
    off = 6 * PRODUCT_ERROR[params["precision"]] * size + sums * largest
    mean_off = off.mean(0)
    rms_off = off.square().mean(0).sqrt()
    std = (var + EPS).sqrt()
    slope = (gamma * scale / std).abs()
    slope_off = (2 * scale.abs() * rms_off / std).clamp(max=2) + 1e-6
    y_off = slope * (off + mean_off) + (y - beta).abs() * slope_off + 1e-6 * y.abs()
    mean_bound = scale.abs() * mean_off + 2**-22 * (scale * bias).abs()
    var_bound = 2 * var.sqrt() * scale.abs() * rms_off + (scale * rms_off) ** 2 + 1e-5 * var
    return y_off + 1e-12, mean_bound + 1e-30, var_bound + 1e-30


def eager(inputs):
    """Return PyTorch's own y."""
    import torch

    x, weight, bias, scale, gamma, beta = inputs
    z = torch.nn.functional.linear(x, weight, bias) * scale
    return torch.nn.functional.batch_norm(z, None, None, gamma, beta, True, 0.1, EPS)


def takes(params, shape) -> bool:
    """Return whether the configuration takes inputs of that shape, or says why not."""
    return params.get("template") != "wgmma_convert" or shape[1] % 4 == 0


def errors(y, exact) -> tuple[float, float]:
    """Return the rms error relative to the rms of `exact`, and the largest error."""
    off = y.double() - exact
    return (
        float(off.square().mean().sqrt() / exact.square().mean().sqrt()),
        float(off.abs().max()),
    )


@pytest.fixture(scope="module")
def operators(tmp_path_factory) -> dict[str, BoundOp]:
    """Every tested configuration, built for this GPU."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an NVIDIA GPU of compute capability 9.0")
    folder = tmp_path_factory.mktemp("wgmma")

    def build(numbered):
        number, params = numbered
        candidate = render(**params)
        library, _ = compile_cuda(candidate, folder / str(number))
        return label(params), bind(candidate.plan, candidate.language, library)

    with ThreadPoolExecutor() as pool:
        return dict(pool.map(build, enumerate(CONFIGURATIONS)))


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
            if not takes(params, shape):
                with pytest.raises(RuntimeError, match="multiple of 4"):
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
    own = errors(eager(inputs), exact)
    print(f"\n{case} {shape}: rms relative and largest error of y; PyTorch's {own}")
    for params in CONFIGURATIONS:
        if not takes(params, shape):
            continue
        found = errors(operators[label(params)](*inputs, EPS)[0], exact)
        print(f"  {label(params):70s} {found[0]:.2e} {found[1]:.2e}")
        if params["precision"] == "fp16x3":
            rms_floor = floor / float(exact.square().mean().sqrt())
            assert found[0] <= max(2 * own[0], rms_floor), label(params)
            assert found[1] <= max(2 * own[1], floor), label(params)


@needs_nvcc
@pytest.mark.gpu
def test_nan_and_inf_poison_their_column_and_no_other(operators):
    import torch

    for params in CONFIGURATIONS:
        run = operators[label(params)]
        for value in (float("nan"), float("inf"), -float("inf")):
            inputs = make_inputs((200, 100, 133), "normal")
            inputs[1][3, 7] = value  # a row of the weight: one column of y
            y, mean, var = run(*inputs, EPS)
            is_hit = torch.arange(133, device="cuda") == 3
            assert torch.equal(y.isnan().all(0), is_hit), label(params)
            assert torch.equal(y.isnan().any(0), is_hit), label(params)
            assert torch.equal(var.isnan(), is_hit), label(params)
            assert torch.equal(~mean.isfinite(), is_hit), label(params)
            inputs = make_inputs((200, 100, 133), "normal")
            inputs[0][77, 5] = value  # a row of x: every column of y
            y, mean, var = run(*inputs, EPS)
            assert y.isnan().all() and var.isnan().all(), label(params)
            assert not mean.isfinite().any(), label(params)


@needs_nvcc
@pytest.mark.gpu
def test_equal_bits_twice_unless_atomics_are_declared(operators):
    import torch

    inputs = make_inputs((1000, 1024, 129), "normal")
    for params in CONFIGURATIONS:
        run = operators[label(params)]
        first = run(*inputs, EPS)
        second = run(*inputs, EPS)
        if params.get("stats") == "atomics":
            assert not render(**params).is_deterministic
        else:
            pairs = zip(first, second, strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), label(params)


@needs_nvcc
@pytest.mark.gpu
def test_zero_rows_and_zero_scale_give_beta(operators):
    import torch

    for params in CONFIGURATIONS:
        inputs = make_inputs((64, 32, 40), "normal")
        inputs[1][5] = 0  # a row of the weight
        inputs[3][6] = 0  # a scale
        inputs[0][9] = 0  # a row of x
        y, mean, var = operators[label(params)](*inputs, EPS)
        for column in (5, 6):
            assert torch.equal(y[:, column], inputs[5][column].expand(64)), label(params)
            assert var[column] == 0 and torch.isfinite(mean[column])
        assert torch.isfinite(y).all()


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
