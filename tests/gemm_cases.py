"""What the tests of CUDA templates of gemm_scale_batchnorm share: inputs, oracle, bounds, builds.

`make_inputs` gives the operator's tensors for a named case, `oracle` the answer in float64,
`bounds` how far off a precision may be. The `assert_...` ask one thing of a bound operator.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from families import built_in

from tuner.kernel.binding import BoundOp, bind
from tuner.machine.datasheets import known_device
from tuner.space.search_space import SearchSpace
from tuner.trial import Candidate

EPS = 1e-5
CASES = ("normal", "offset", "heavy_x", "heavy_w", "big_small", "small_big", "constant")

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on the PATH")


# ---- rendering and building -------------------------------------------------------------------


def render(template: str, params: Mapping[str, Any]) -> Candidate:
    return built_in("gemm_scale_batchnorm").render({"template": template, **params})


def label(params: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in params.items())


def compile_cuda(
    candidate: Candidate, folder: Path, arch: str, *, is_whole: bool = True
) -> tuple[Path, str]:
    """Build the shared object; return it and the compiler's report of registers and spills.

    Unless `is_whole`, only the kernels are compiled: the host's half is a third of the work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "candidate.cu"
    source.write_text(candidate.source)
    library = folder / "candidate.so"
    command = ["nvcc", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xptxas", "-v"]
    command += [f"-gencode=arch=compute_{arch},code=sm_{arch}", "-o", str(library), str(source)]
    linked = ["-shared", "-Xcompiler", "-fPIC", "-Xlinker", "-z", "-Xlinker", "defs"]
    command += linked if is_whole else ["-cubin"]
    command += ["--keep", "--keep-dir", str(folder)]  # candidate.ptx
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return library, done.stderr


def build_all(
    render: Callable[..., Candidate],
    configurations: Sequence[Mapping[str, Any]],
    arch: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, BoundOp]:
    """Build every configuration once, however many workers of pytest-xdist ask; bind it here."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all workers

    def built(params: Mapping[str, Any]) -> tuple[str, BoundOp]:
        candidate = render(**params)
        own = folder / "built" / hashlib.sha256(candidate.source.encode()).hexdigest()
        own.mkdir(parents=True, exist_ok=True)
        library = own / "finished.so"
        with (own / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                compile_cuda(candidate, own, arch)[0].rename(library)
        return label(params), bind(candidate.plan, candidate.language, library)

    with ThreadPoolExecutor() as pool:
        return dict(pool.map(built, configurations))


def ptx_of_kernels(candidate: Candidate, folder: Path, arch: str) -> dict[str, str]:
    """Return the PTX of every kernel by its mangled name."""
    source, target = folder / "candidate.cu", folder / "candidate.ptx"
    source.write_text(candidate.source)
    command = ["nvcc", "-std=c++17", "--expt-relaxed-constexpr", f"-arch=compute_{arch}", "-ptx"]
    subprocess.run([*command, "-o", str(target), str(source)], capture_output=True, check=True)
    return kernels_of(target)


def kernels_of(ptx: Path) -> dict[str, str]:
    """Return the text of every kernel by its mangled name."""
    return dict(re.findall(r"\.entry (\w+)\((.*?)\n}\n", ptx.read_text(), re.DOTALL))


def spills(report: str) -> dict[str, int]:
    """Return the bytes that each kernel of a compiler's report spills."""
    found = re.findall(r"Function properties for (\S+)\s+.*?(\d+) bytes spill stores", report)
    return {name: int(size) for name, size in found}


def assert_stands_in_a_kernelbench_file(source: str) -> None:
    assert not re.search(r"\bpass\b|\btry:|\bexcept\b", source)
    assert '"""' not in source


def search_space(
    template: str, params: Mapping[str, Any], sizes: Mapping[str, int] | None = None
) -> SearchSpace:
    """Return the space of one configuration on an H200; InputError where it cannot run."""
    family = built_in("gemm_scale_batchnorm")
    varied = {name: (value,) for name, value in {"stats": "two_pass", **params}.items()}
    facts = {**known_device("NVIDIA H200").facts(), **family.op.sizes, **(sizes or {})}
    return SearchSpace.build(
        family.parameters([template], varied), family.constraints([template], varied), facts
    )


# ---- questions and answers --------------------------------------------------------------------


def make_inputs(shape, case, *, power=30, device="cuda"):
    """Return x, weight, bias, scale, gamma, beta; `power` of ten is where big and small end."""
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
        x, weight = x * 10.0**-power, weight * 10.0**power
    elif case == "constant":
        x[:] = x[0] + 100
    scale = normal(columns)
    scale[0] = -0.5
    vectors = (normal(columns), scale, normal(columns), normal(columns))
    return tuple(tensor.to(device) for tensor in (x, weight, *vectors))


def oracle(inputs):
    """Return y, mean, unbiased var in float64, and h with the size of the sums behind it."""
    x, weight, bias, scale, gamma, beta = (tensor.double() for tensor in inputs)
    h = x @ weight.T
    mean_h, var_h = h.mean(0), h.var(0, correction=0)
    var = scale**2 * var_h
    y = (h - mean_h) * (gamma * scale / (var + EPS).sqrt()) + beta
    size = (x.square() @ weight.square().T).sqrt()  # of a sum of independent products' errors
    return y, scale * (mean_h + bias), scale**2 * h.var(0), h, size


def bounds(inputs, answer, product_error, sums):
    """Bound the errors of y, mean, var if each product is off by at most `product_error`.

    Products' errors are independent: six of their standard deviations. To that comes what
    sums, statistics and outputs cost, `sums` of the largest h of a column.
    """
    _, _, bias, scale, gamma, beta = (tensor.double() for tensor in inputs)
    y, _, unbiased, h, size = answer
    unbias = h.shape[0] / (h.shape[0] - 1)
    var = unbiased / unbias
    off = 6 * product_error * size + sums * h.abs().amax(0)
    mean_off = off.mean(0)
    rms_off = off.square().mean(0).sqrt()
    std = (var + EPS).sqrt()
    slope = (gamma * scale / std).abs()
    slope_off = (2 * scale.abs() * rms_off / std).clamp(max=2) + 1e-6
    y_off = slope * (off + mean_off) + (y - beta).abs() * slope_off + 1e-6 * y.abs()
    mean_bound = scale.abs() * mean_off + 2**-22 * (scale * bias).abs()
    var_bound = 2 * var.sqrt() * scale.abs() * rms_off + (scale * rms_off) ** 2 + 1e-5 * var
    return y_off + 1e-12, mean_bound + 1e-30, unbias * var_bound + 1e-30


def eval_oracle(inputs, running_mean, running_var, product_error, sums):
    """Return y of eval mode in float64, and how far off it may be; see `bounds`."""
    x, weight, bias, scale, gamma, beta = (tensor.double() for tensor in inputs)
    h = x @ weight.T
    inv_std = gamma / (running_var.double() + EPS).sqrt()
    terms = inv_std * scale * h, inv_std * (scale * bias - running_mean.double()) + beta
    size = (x.square() @ weight.square().T).sqrt()
    off = 6 * product_error * size + sums * h.abs().amax(0)
    bound = (inv_std * scale).abs() * off + 1e-6 * (terms[0].abs() + terms[1].abs())
    return terms[0] + terms[1], bound + 1e-12


def eager(inputs, *, tf32=False):
    """Return PyTorch's own y."""
    import torch

    x, weight, bias, scale, gamma, beta = inputs
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        z = torch.nn.functional.linear(x, weight, bias) * scale
        return torch.nn.functional.batch_norm(z, None, None, gamma, beta, True, 0.1, EPS)
    finally:
        torch.set_float32_matmul_precision(before)


def errors(y, exact) -> tuple[float, float]:
    """Return the rms error relative to the rms of `exact`, and the largest error."""
    off = y.double() - exact
    return (
        float(off.square().mean().sqrt() / exact.square().mean().sqrt()),
        float(off.abs().max()),
    )


# ---- one thing asked of an operator -----------------------------------------------------------


def assert_bad_values_poison_their_column_and_no_other(run: BoundOp, name: str) -> None:
    import torch

    for value in (float("nan"), float("inf"), -float("inf")):
        inputs = make_inputs((200, 104, 133), "normal")
        inputs[1][3, 7] = value  # a row of the weight: one column of y
        y, mean, var = run(*inputs, EPS)
        is_hit = torch.arange(133, device="cuda") == 3
        assert torch.equal(y.isnan().all(0), is_hit), name
        assert torch.equal(y.isnan().any(0), is_hit), name
        assert torch.equal(var.isnan(), is_hit), name
        assert torch.equal(~mean.isfinite(), is_hit), name
        inputs = make_inputs((200, 104, 133), "normal")
        inputs[0][77, 5] = value  # a row of x: every column of y
        y, mean, var = run(*inputs, EPS)
        assert y.isnan().all() and var.isnan().all(), name
        assert not mean.isfinite().any(), name


def assert_equal_bits_twice(run: BoundOp, name: str) -> None:
    import torch

    inputs = make_inputs((1000, 1024, 129), "normal")
    first = run(*inputs, EPS)
    torch.empty(1 << 22, device="cuda").fill_(float("nan"))  # what fresh memory may hold
    second = run(*inputs, EPS)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), name


def assert_zero_rows_and_zero_scale_give_beta(run: BoundOp, name: str) -> None:
    import torch

    inputs = make_inputs((64, 32, 40), "normal")
    inputs[1][5] = 0  # a row of the weight
    inputs[3][6] = 0  # a scale
    inputs[0][9] = 0  # a row of x
    y, mean, var = run(*inputs, EPS)
    for column in (5, 6):
        assert torch.equal(y[:, column], inputs[5][column].expand(64)), name
        assert var[column] == 0 and torch.isfinite(mean[column]), name
    assert torch.isfinite(y).all(), name


def assert_bad_values_stay_in_their_row_or_column_in_eval_mode(run: BoundOp, name: str) -> None:
    import torch

    for value in (float("nan"), float("inf"), -float("inf")):
        for hit in ({0: (77, 5)}, {1: (3, 7)}, {0: (77, 5), 1: (3, 7)}, {0: (0, 5), 1: (0, 5)}):
            inputs = make_inputs((200, 104, 133), "normal")
            for which, place in hit.items():
                inputs[which][place] = value
            x, weight, bias, scale, gamma, beta = inputs
            (y,) = run.extra["eval"](*inputs, bias, scale.abs(), EPS)
            is_hit = torch.zeros_like(y, dtype=torch.bool)
            for which, (line, _) in hit.items():
                is_hit[(line,) if which == 0 else (slice(None), line)] = True
            assert torch.equal(~y.isfinite(), is_hit), (name, value, hit)
            own = (torch.nn.functional.linear(x, weight, bias) * scale - bias) / scale.abs().sqrt()
            own = own * gamma + beta
            assert torch.equal(y[is_hit].nan_to_num(), own[is_hit].nan_to_num()), (
                name,
                value,
                hit,
            )
