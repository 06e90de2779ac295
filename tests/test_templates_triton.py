"""The Triton templates: they render, compute what they should, and compile without a GPU.

What needs Triton is skipped where it is not installed; of that, Triton's interpreter runs the
kernels on the CPU, and only the tests marked gpu need a device.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from families import built_in
from spaces import feasible

from tuner.errors import InputError
from tuner.machine.datasheets import known_device
from tuner.space.expression import Expression
from tuner.space.search_space import SearchSpace
from tuner.trial import Candidate, Params, to_json

FACTS = {"device.num_sms": 132, "device.kind": "cuda", "device.capability": 90}
SMALL = {"block_m": 32, "block_n": 32, "block_k": 16, "num_warps": 4}  # quick to interpret

has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="triton is not installed")

SPLIT = ["bf16x3", "fp16x3"]
AHEAD = [*SPLIT, "fp16", "fp16_fp8x2"]  # x and weight are split before they are multiplied
GEMM: list[Params] = [
    *(
        {"precision": precision, "stats": stats}
        for precision in ["ieee", "tf32", "tf32x3", "bf16x3_registers", *SPLIT, "fp16"]
        for stats in ["atomics", "two_pass", "shared_memory"]
    ),
    *(
        {"precision": precision, "order": order, "centre": centre}
        for precision in SPLIT
        for order, centre in [
            ("separate", True),
            ("chunks", False),
            ("sweeps", True),
        ]
    ),
    {"precision": "tf32", "round_operands": False},
    {"precision": "fp16_fp8x2", "order": "chunks", "promote_k": 256},
    {"precision": "fp16_fp8x2", "order": "sweeps"},
    {"precision": "fp16_fp8x2", "block_k": 32, "order": "separate", "stats": "atomics"},
    {"precision": "tf32x3", "load": "descriptors", "persistent": True, "stats": "shared_memory"},
    {"precision": "fp16x3", "load": "descriptors", "persistent": True, "block_k": 32},
    {"precision": "fp16x3", "load": "descriptors", "centre": True, "stats": "shared_memory"},
]
LAYER_NORM: list[Params] = [
    {},
    {"block_columns": 64},
    {"block_columns": 64, "block_rows": 4},
    {"split": 4, "block_columns": 64, "norm_columns": 128},
    {"split": 64, "block_columns": 64, "norm_columns": 128, "reverse": True},
]
CASES = [("gemm_scale_batchnorm", p) for p in GEMM] + [("layer_norm", p) for p in LAYER_NORM]


def name_of(case: object) -> str:
    if isinstance(case, dict):
        return "-".join(str(v) for v in case.values()) or "default"
    return str(case)


def rendered(op: str, params: Params) -> Candidate:
    return built_in(op).render({"template": "triton", **params}, FACTS)


# ---- the text ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "params"), CASES, ids=name_of)
def test_text_is_python_that_a_static_checker_accepts(op: str, params: Params) -> None:
    candidate = rendered(op, params)
    compile(candidate.source, "candidate.py", "exec")
    assert not re.search(r'\bpass\b|\btry\s*:|\bexcept\b|"""', candidate.source)
    assert max(map(len, candidate.source.splitlines())) <= 120
    for step in candidate.plan.steps:
        assert f"\ndef {step.function}(" in candidate.source


@pytest.mark.parametrize(("op", "params"), CASES, ids=name_of)
def test_plan_names_only_what_the_call_has(op: str, params: Params) -> None:
    family = built_in(op)
    plan = rendered(op, params).plan
    sizes = dict(family.op.sizes)
    tensors = {t.name for t in (*plan.arguments, *plan.outputs, *plan.workspace)}
    for tensor in plan.workspace:
        assert all(int(Expression.parse(d).evaluate(sizes)) > 0 for d in tensor.shape)
    for step in plan.steps:
        for arg in step.args:
            assert arg == "null" or arg in tensors or Expression.parse(arg).names <= set(sizes)


def test_only_atomics_are_declared_not_deterministic() -> None:
    stats = {s: rendered("gemm_scale_batchnorm", {"stats": s}) for s in ["atomics", "two_pass"]}
    assert not stats["atomics"].is_deterministic
    assert stats["two_pass"].is_deterministic


def feasible_precisions(facts: dict, *values: str) -> set[str]:
    """Return those of `values` with which every other parameter's default can work."""
    family = built_in("gemm_scale_batchnorm")
    varied = {"template": ("triton",), "precision": values}
    space = SearchSpace.build(
        family.parameters(["triton"], varied, {}), family.constraints(["triton"], varied), facts
    )
    return {str(params["precision"]) for params in feasible(space)}


def test_defaults_can_work_with_every_precision_and_an_unknown_one_is_infeasible() -> None:
    known = built_in("gemm_scale_batchnorm").templates["triton"].parameters["precision"].values
    assert known is not None and "bf16" not in known
    facts = dict(known_device("H200").facts())
    assert feasible_precisions(facts, *map(str, known), "bf16") == set(known)


def test_without_triton_nothing_is_feasible_and_the_reason_is_reported() -> None:
    facts = {**known_device("H200").facts(), "device.has_triton": False}
    with pytest.raises(InputError, match="Triton is installed"):
        feasible_precisions(facts, "fp16x3")


# ---- judging ----------------------------------------------------------------------------------

# Runs in a process of its own: Triton reads TRITON_INTERPRET when it is imported, and the cache
# folder must be watched from its first use. Prints a list of [case, shape, errors] as JSON.
JUDGE = r"""
import json, os, sys, warnings
from pathlib import Path
if "TRITON_INTERPRET" in os.environ:
    from interpreted import mend_interpreter
    mend_interpreter()
warnings.filterwarnings("ignore")
import torch
from tuner.kernel.binding import bind
from tuner.plans import Plan
from tuner.trial import from_json

def gemm_oracle(x, w, b, s, g, be, eps):
    z = (x @ w.T + b) * s
    m, v = z.mean(0), z.var(0, unbiased=False)
    return (z - m) / torch.sqrt(v + eps) * g + be, m, z.var(0)

def gemm_torch(x, w, b, s, g, be, eps):
    z = torch.nn.functional.linear(x, w, b) * s
    y = torch.nn.functional.batch_norm(z, None, None, g, be, True, 0.1, eps)
    return y, z.mean(0), z.var(0)

def norm_oracle(x, w, b, eps):
    m, v = x.mean(1), x.var(1, unbiased=False)
    r = 1 / torch.sqrt(v + eps)
    return (x - m[:, None]) * r[:, None] * w + b, m, r

def norm_torch(x, w, b, eps):
    return torch.native_layer_norm(x, [x.shape[1]], w, b, eps)[:1] + norm_oracle(x, w, b, eps)[1:]

def gemm_inputs(shape, generator, kind):
    B, K, N = shape
    x = torch.rand(B, K, generator=generator) - 0.5
    w = (torch.rand(N, K, generator=generator) * 2 - 1) / K**0.5
    b, s, g, be = (torch.randn(N, generator=generator) for _ in range(4))
    if N > 4: s[:3] = torch.tensor([0.0, -1.0, 1e-3])
    x = {"offset": x + 100, "constant": x[:1].expand(B, K).clone(),
         "large": x * 1e6, "tiny": x * 1e-6}.get(kind, x)
    return [x, w, b, s, g, be, 1e-5]

def norm_inputs(shape, generator, kind):
    R, C = shape
    x = torch.randn(R, C, generator=generator)
    x = {"offset": x + 100, "constant": x[:, :1].expand(R, C).clone(),
         "large": x * 1e6, "tiny": x * 1e-6}.get(kind, x)
    return [x, torch.randn(C, generator=generator), torch.randn(C, generator=generator), 1e-5]

def errors(got, want):
    result = []
    for g, w in zip(got, want):
        d = g.double() - w
        result.append([(d.pow(2).mean() / w.pow(2).mean()).sqrt().item(), d.abs().max().item(),
                       w.abs().max().item()])
    return result

def main(jobs):
    report = []
    for job in jobs:
        device = job["device"]
        gemm = job["op"] == "gemm_scale_batchnorm"
        make, oracle, plain = ((gemm_inputs, gemm_oracle, gemm_torch) if gemm else
                               (norm_inputs, norm_oracle, norm_torch))
        call = bind(from_json(Plan, job["plan"]), "triton", Path(job["source"]))
        for shape in job["shapes"]:
            for kind in job["kinds"]:
                args = make(shape, torch.Generator().manual_seed(sum(shape)), kind)
                args = [a.to(device) if torch.is_tensor(a) else a for a in args]
                exact = oracle(*(a.double() if torch.is_tensor(a) else a for a in args))
                got, again = call(*args), call(*args)
                report.append({
                    "case": job["case"], "shape": shape, "kind": kind,
                    "errors": errors(got, exact), "plain": errors(plain(*args), exact),
                    "same": all(torch.equal(a, b) for a, b in zip(got, again)),
                })
        shape = job["shapes"][-1]
        args = make(shape, torch.Generator().manual_seed(0), "plain")
        args = [a.to(device) if torch.is_tensor(a) else a for a in args]
        if gemm:
            args[1][0, 0] = float("nan")  # one row of weight: one column of the output
            y = call(*args)[0]
            poisoned, clean = y[:, 0], y[:, 1:]
        else:
            args[0][0, 0] = float("nan")
            y = call(*args)[0]
            poisoned, clean = y[0], y[1:]
        report.append({"case": job["case"], "shape": shape, "kind": "nan",
                       "same": bool(poisoned.isnan().all() and clean.isfinite().all())})
    print(json.dumps(report))

main(json.loads(Path(sys.argv[1]).read_text()))
"""

TOLERANCE = {"tf32": 2e-2, "fp16": 2e-2, "fp16_fp8x2": 2e-3}  # of operands in the unit range


def job_of(folder: Path, op: str, params: Params, device: str, **what: object) -> dict:
    candidate = rendered(op, params)
    place = folder / candidate.key
    place.mkdir(exist_ok=True)
    (place / "source.py").write_text(candidate.source)
    (place / "plan.json").write_text(to_json(candidate.plan))
    return {
        "op": op,
        "case": {"op": op, **params},
        "plan": to_json(candidate.plan),
        "source": str(place / "source.py"),
        "device": device,
        **what,
    }


def judged(folder: Path, jobs: list[dict], **environment: str) -> list[dict]:
    script, work = folder / "judge.py", folder / "jobs.json"
    script.write_text(JUDGE)
    work.write_text(json.dumps(jobs))
    ran = subprocess.run(
        [sys.executable, str(script), str(work)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def complaint(row: dict) -> str:
    """Return why a row of the judge's report is not good enough, or nothing."""
    case = row["case"]
    if row["kind"] == "nan":
        return "" if row["same"] else "a NaN does not poison its column, and only that"
    if not row["same"] and case.get("stats") != "atomics":
        return "two calls differ"
    is_gemm = case["op"] == "gemm_scale_batchnorm"
    precision = case.get("precision", "fp16x3") if is_gemm else ""
    is_centred = precision in AHEAD and case.get("centre", True)
    shape = row["shape"]
    if precision in AHEAD:  # its mean comes from float32 sums, whatever the products round
        (_, largest, scale), (_, plain, _) = row["errors"][1], row["plain"][1]
        if largest > max(2 * plain, 4 * 2**-24 * scale, 1e-12):
            return f"the mean's error is {largest:.1e}; PyTorch {plain:.1e}"
    for (rms, largest, scale), (plain_rms, plain, _) in zip(
        row["errors"], row["plain"], strict=True
    ):
        if precision in TOLERANCE:
            if shape[0] < 32 or (row["kind"] == "offset" and not is_centred):
                continue  # two rows may differ by less than such a precision sees
            if largest > TOLERANCE[precision] * max(scale, 1.0):
                return f"error {largest:.1e}"
            continue
        # bfloat16 has 2 x 8 bits of the 24; small batches amplify any error; a tensor core
        # truncates what it adds, which an offset that is not centred makes plain.
        is_exact = precision in ("", "ieee")
        factor = 8 if precision.startswith("bf16") else 2 if is_exact else 3
        factor *= 2 if shape[0] < 32 else 1
        # x + 100 without centring: |mean| / std magnifies how h is rounded, in whatever order.
        if row["kind"] == "offset" and not is_centred:
            factor *= 8 if is_exact else 16
        # A truncating accumulator biases the variance by some 2^-18 of it where a whole chunk of k
        # is added in one (seen at k = 1024 on an H200); momentum divides that by 10 before the
        # class float32 looks at it.
        units = 256 if precision.startswith("bf16") else 16 if is_exact else 64
        floor = max(units * 2**-24 * scale, 1e-12)  # far below eps: a variance that is zero
        if largest > max(factor * plain, floor) and rms > factor * plain_rms:
            return f"error {largest:.1e}, rms {rms:.1e}; PyTorch {plain:.1e}, rms {plain_rms:.1e}"
    return ""


def table(report: list[dict]) -> str:
    lines = []
    for row in report:
        words = " ".join(f"{k}={v}" for k, v in row["case"].items())
        if "errors" in row:
            (rms, largest, _), (plain_rms, plain, _) = row["errors"][0], row["plain"][0]
            words += f" | {row['shape']} {row['kind']} | rms {rms:.1e} max {largest:.1e}"
            words += f" | PyTorch rms {plain_rms:.1e} max {plain:.1e}"
        wrong = complaint(row)
        lines.append(f"{words} | {'WRONG: ' + wrong if wrong else 'ok'}")
    return "\n".join(lines)


# ---- on the CPU, by Triton's interpreter ------------------------------------------------------


@needs_triton
@pytest.mark.timeout(1200)  # five minutes on two cores
def test_interpreted_gemm_kernels_are_right(tmp_path: Path) -> None:
    chosen = [
        {"precision": "ieee", "stats": "atomics"},
        {"precision": "tf32x3", "stats": "shared_memory", "persistent": True},
        {"precision": "tf32x3", "load": "descriptors"},
        {"precision": "fp16", "split_programs": 4},
        {"precision": "fp16x3", "stats": "two_pass", "split_block": 64, "split_programs": 4},
        {"precision": "fp16x3", "centre": False, "stats": "atomics", "promote_k": 128},
        {"precision": "fp16x3", "order": "sweeps", "persistent": True},
        {"precision": "fp16x3", "order": "separate", "load": "descriptors", "block_k": 64},
        {"precision": "fp16_fp8x2", "block_k": 32, "promote_k": 128},
        {"precision": "fp16_fp8x2", "block_k": 64, "order": "sweeps"},
        {"precision": "fp16_fp8x2", "block_k": 32, "order": "separate"},
    ]  # bf16x3 is left to the GPU: the interpreter multiplies bfloat16's bits as integers
    jobs = [
        job_of(
            tmp_path,
            "gemm_scale_batchnorm",
            {**SMALL, **params},
            "cpu",
            shapes=[[2, 7, 1], [33, 300, 37]],
            kinds=["plain", "offset", "large", "tiny"],
        )
        for params in chosen
    ]
    report = judged(tmp_path, jobs, TRITON_INTERPRET="1")
    print(table(report))
    assert [row for row in report if complaint(row)] == []


@needs_triton
def test_interpreted_layer_norm_kernels_are_right(tmp_path: Path) -> None:
    jobs = [
        job_of(
            tmp_path,
            "layer_norm",
            params,
            "cpu",
            shapes=[[2, 1], [1, 3000], [7, 37], [5, 1024]],
            kinds=["plain", "offset", "constant", "large"],
        )
        for params in LAYER_NORM
    ]
    report = judged(tmp_path, jobs, TRITON_INTERPRET="1")
    print(table(report))
    assert [row for row in report if complaint(row)] == []


# ---- compiled ahead, without a GPU ------------------------------------------------------------


def ahead(folder: Path, job: dict, sizes: list[dict], cache: Path, arch: int = 90) -> dict:
    source = Path(job["source"])
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "tuner.kernel.triton_build"),
            *(str(source), str(source.parent / "plan.json"), str(folder)),
            *("--arch", str(arch), "--sizes", json.dumps(sizes)),
        ],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TRITON_CACHE_DIR": str(cache),
        },
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout)


def binaries(cache: Path) -> set[str]:
    return {str(file) for file in cache.rglob("*.cubin")}


@needs_triton
def test_second_build_finds_every_kernel_in_the_cache(tmp_path: Path) -> None:
    job = job_of(tmp_path, "gemm_scale_batchnorm", {"precision": "fp16x3"}, "cpu")
    cache = tmp_path / "cache"
    first = ahead(tmp_path, job, [{}], cache)
    made = binaries(cache)
    second = ahead(tmp_path, job, [{}], cache)
    assert first["error"] == first["note"] == ""
    assert binaries(cache) == made and len(made) == 7
    assert second["kernels"] == first["kernels"]
    assert second["binary_key"] == first["binary_key"] != ""
    gemm = next(k for k in first["kernels"] if k["name"].endswith("gemm_kernel"))
    assert 64 < gemm["registers"] <= 255 and gemm["smem_bytes"] > 48 * 1024


@needs_triton
def test_too_much_shared_memory_is_a_compile_error_with_numbers(tmp_path: Path) -> None:
    params: Params = {"precision": "fp16x3", "block_k": 128, "stages": 5}
    job = job_of(tmp_path, "gemm_scale_batchnorm", params, "cpu")
    report = ahead(tmp_path, job, [{"in_features": 8192}], tmp_path / "cache")
    assert re.search(
        r"needs \d+ bytes of shared memory, a block of sm_90 has 232448", report["error"]
    )


@needs_triton
def test_kernel_that_does_not_compile_is_named(tmp_path: Path) -> None:
    job = job_of(tmp_path, "layer_norm", {}, "cpu")
    source = Path(job["source"])
    source.write_text(source.read_text().replace("tl.sqrt_rn(m2", "tl.no_such_word(m2"))
    report = ahead(tmp_path, job, [{}], tmp_path / "cache")
    assert report["error"].startswith("fused_layer_norm_rows_kernel: ")
    assert report["binary_key"] == ""


@needs_triton
def test_host_code_that_refuses_is_left_to_the_worker(tmp_path: Path) -> None:
    job = job_of(tmp_path, "layer_norm", {}, "cpu")
    source = Path(job["source"])
    text = source.read_text().replace(
        "    block = min(", '    raise RuntimeError("not today")\n    block = min('
    )
    source.write_text(text)
    report = ahead(tmp_path, job, [{}], tmp_path / "cache")
    assert report["error"] == "" and "not today" in report["note"]


# ---- on a GPU ---------------------------------------------------------------------------------

GEMM_SHAPES = [[2, 7, 1], [33, 100, 5], [1000, 64, 129], [1024, 1024, 1024]]
NORM_SHAPES = [[2, 1], [33, 100], [3, 100_003], [4096, 1024]]
NORM_SIZES = ["rows", "cols"]
GEMM_SIZES = ["batch", "in_features", "out_features"]


@pytest.fixture
def gpu_arch() -> int:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@pytest.mark.gpu
@needs_triton
def test_kernels_are_right_and_the_worker_compiles_nothing(tmp_path: Path, gpu_arch: int) -> None:
    jobs, sizes = [], []
    for op, params in CASES:
        gemm = op == "gemm_scale_batchnorm"
        if gpu_arch < 90 and (params.get("load") == "descriptors" or "fp8" in str(params)):
            continue
        shapes = GEMM_SHAPES if gemm else NORM_SHAPES
        kinds = ["plain", "offset", "constant", "large", "tiny"]
        jobs.append(job_of(tmp_path, op, params, "cuda", shapes=shapes, kinds=kinds))
        names = GEMM_SIZES if gemm else NORM_SIZES
        sizes.append([dict(zip(names, shape, strict=True)) for shape in shapes])
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(
            pool.map(
                lambda job, shapes: ahead(tmp_path, job, shapes, cache, gpu_arch), jobs, sizes
            )
        )
    assert [b["error"] + b["note"] for b in built if b["error"] or b["note"]] == []
    made = binaries(cache)
    report = judged(tmp_path, jobs, TRITON_CACHE_DIR=str(cache))
    print(table(report))
    assert binaries(cache) - made == set(), "the worker compiled kernels that builders had made"
    assert [table([row]) for row in report if complaint(row)] == []
