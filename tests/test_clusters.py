"""Rows in the shared memory of a cluster's blocks: which modules, their CUDA text, its numbers."""

from __future__ import annotations

import ctypes
import functools
import json
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cpu_machine import GPP
from shared_builds import GOLD, header_built_once
from spaces import feasible
from test_any_module import answers, assert_as_exact, derive
from test_cuda_beside import cuda_code, needs_nvcc, needs_triton
from test_matching import TEXT
from test_steps import Taken, assert_gradients_are_as_exact, derive_with_steps

from tuner.capture.capture import capture
from tuner.capture.tasks.stages import stages_of
from tuner.capture.writers.clusters import CLUSTER_TEMPLATE, refusal_of_clusters
from tuner.config.run_config import load_config
from tuner.evaluate.modules import fused, module_of
from tuner.kernel.binding import bind
from tuner.kernel.builder import Builder
from tuner.kernel.compiler_words import parse_resources
from tuner.kernel.family import load_family
from tuner.kernel.toolchain import Toolchain
from tuner.machine.datasheets import known_device
from tuner.planning.deriving import derive_config
from tuner.planning.planning import plan
from tuner.problem.reference import load_problem
from tuner.trial import Status

needs_gpp = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
ROWS = "torch.randn(5, 9001)"
MODULES: dict[str, tuple[str, str, str]] = {
    "softmax": ("torch.softmax(x, -1)", "", ROWS),
    "log_softmax": ("F.log_softmax(x, -1)", "", ROWS),
    "l2_norm": ("x / torch.norm(x, p=2, dim=1, keepdim=True)", "", ROWS),
    "l1_norm": ("x / torch.mean(torch.abs(x), dim=1, keepdim=True)", "", ROWS),
    "instance_norm": ("self.n(x)", "self.n = nn.InstanceNorm2d(3)",
                      "torch.randn(2, 3, 92, 101) + 3"),
    "layer_norm": ("self.n(x)", "self.n = nn.LayerNorm(9001)", ROWS),
    "group_norm": ("self.n(x)", "self.n = nn.GroupNorm(2, 4)", "torch.randn(2, 4, 50, 99)"),
    "two_tensors": ("torch.softmax(x + y, -1) * torch.sigmoid(y)", "", f"{ROWS}, {ROWS}"),
    "of_rows": ("x * y / (x - x.amin(-1, True)).square().sum(-1, True)", "",
                f"{ROWS}, torch.randn(5, 1)"),
    "range": ("(x - x.amin(-1, True)) / (x.amax(-1, True) - x.amin(-1, True))", "", ROWS),
    "masked": ("torch.where(x > x.mean(-1, True), x, 0.5 * x)", "", ROWS),
    "two_results": ("(x - x.mean(-1, True), x.mean(-1, True))", "", ROWS),
}  # fmt: skip
OTHERS = {
    "short rows": (("torch.softmax(x, -1)", "", "torch.randn(5, 8000)"), "a program holds"),
    "too long": (("torch.softmax(x, -1)", "", "torch.randn(2, 1000000)"), "no cluster holds"),
    "read once": (("x.var(-1)", "", ROWS), "read once"),
    "pointwise": (("torch.relu(x)", "", ROWS), "reduces nothing"),
    "places": (("(x - x.amax(-1, True), x.argmax(-1))", "", ROWS), "numbers of columns"),
    "two nests": (("torch.softmax(torch.softmax(x, -1), 0)", "", ROWS), "more than one nest"),
    "channels": (("torch.softmax(x, 1)", "", "torch.randn(2, 9001, 5)"), "in one piece"),
    "halves": (("torch.softmax(x.half(), -1)", "", ROWS), "float32"),
    "doubles": (("torch.softmax(x.double(), -1)", "", ROWS), "float64"),
    "scans": (("torch.cumsum(x, -1)", "", ROWS), "scans"),
}  # fmt: skip


def text_of(module: tuple[str, str, str]) -> str:
    forward, init, inputs = module
    names = "x, y" if inputs.count("torch.randn") > 1 else "x"
    return TEXT.format(forward=f"return {forward}", init=init or "...", inputs=inputs, names=names)


@functools.cache
def made_of(module: tuple[str, str, str]):
    """The problem, what was derived of it, its family; for the tests to look at."""
    problem, made = derive(Path(tempfile.mkdtemp()), "rows", text_of(module))
    return problem, made, load_family(made.name, [made.folder])


def candidate_of(family, **params: int):
    facts = known_device("H200").facts()
    return family.render({"template": CLUSTER_TEMPLATE, **params}, facts)


def cuda_of(source: str) -> str:
    """What is given to nvcc."""
    found = re.search(r'CudaCode\(\n    r"""(.*?)"""', source, re.S)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", MODULES)
def test_long_rows_that_are_read_again_have_the_template(name):
    _, made, family = made_of(MODULES[name])
    assert CLUSTER_TEMPLATE in family.templates
    # Last: a short search tries few, and nvcc takes seconds.
    assert json.loads(made.config.read_text())["space"]["template"][-1] == CLUSTER_TEMPLATE


@pytest.mark.parametrize("name", OTHERS)
def test_others_do_not_and_it_is_said_why(name, tmp_path):
    module, reason = OTHERS[name]
    path = tmp_path / "rows.py"
    path.write_text(text_of(module))
    stages = stages_of(capture(load_problem(path)))
    assert reason in refusal_of_clusters(stages)
    _, _, family = made_of(module)
    assert CLUSTER_TEMPLATE not in family.templates


@pytest.mark.parametrize("name", [*MODULES])
def test_steps_of_training_have_gradients_by_triton(name, tmp_path):
    """As those of the other template have, whatever a search takes."""
    _, family = derive_with_steps(tmp_path, "rows", text_of(MODULES[name]))
    facts = known_device("H200").facts()
    beside = family.render({"template": "nest_triton"}, facts).plan
    mine = candidate_of(family).plan
    assert {*mine.extra} == {*beside.extra}
    for call, plan_of_call in mine.extra.items():
        other = beside.extra[call]
        assert (plan_of_call is None) == (other is None)
        if other is not None:
            assert plan_of_call.outputs == other.outputs
            assert plan_of_call.arguments == other.arguments
    assert mine.extra["gradients"] is not None


@needs_nvcc
@pytest.mark.parametrize(
    ("name", "threads"),
    [("softmax", 256), ("softmax", 512)]  # the more threads, the fewer registers each has
    + [(name, 1024) for name in ("softmax", "l2_norm", "instance_norm", "two_tensors")],
)
def test_no_kernel_spills(name, threads, monkeypatch, tmp_path):
    _, _, family = made_of(MODULES[name])
    candidate = candidate_of(family, cluster_threads=threads)
    make = cuda_code(monkeypatch, tmp_path / "cache")
    code = make(cuda_of(candidate.source), ["-std=c++17", "-O3", "-arch=sm_90a"])
    (kernel,) = parse_resources(code.log, None)
    assert (kernel.spill_store_bytes, kernel.stack_bytes) == (0, 0)
    assert 0 < kernel.registers <= 65536 // threads


@needs_nvcc
def test_no_kernel_of_a_step_spills(monkeypatch, tmp_path):
    _, family = derive_with_steps(tmp_path, "rows", text_of(MODULES["range"]))
    make = cuda_code(monkeypatch, tmp_path / "cache")
    code = make(cuda_of(candidate_of(family).source), ["-std=c++17", "-O3", "-arch=sm_90a"])
    kernels = parse_resources(code.log, None)
    assert len(kernels) == 3  # of a call, of one that keeps something, of gradients
    assert {(k.spill_store_bytes, k.stack_bytes) for k in kernels} == {(0, 0)}


# ---- the kernel's text, run by threads of this machine -----------------------------------------

EMULATED = [  # blocks, threads, bytes of a chunk, of a ring that holds little more than a slice
    (1, 64, 8192, 44_000),
    (2, 96, 4096, 26_000),
    (4, 64, 1024, 11_000),
    (16, 64, 2048, 6200),
]
# All of them with a row that begins anywhere, and each with other modules.
CASES = [("l2_norm", how) for how in EMULATED]
CASES += [(name, EMULATED[i % 4]) for i, name in enumerate(MODULES) if name != "l2_norm"]


def emulated(
    source: str, folder: Path, ring: int, columns: int = 9001, space: str = "cluster_rows"
) -> ctypes.CDLL:
    """Compile kernels of a space of names for this machine, with a ring of so many bytes."""
    text = re.sub(r"\b9001\b", str(columns), cuda_of(source))
    rows = text.index(f"namespace {space} {{")
    launch = text.index("// How a kernel of", rows)
    kernel = text.index("__global__ void", launch)
    end = text.find("// Rows that are read once", kernel)
    begin = text[rows:launch].replace("220 * 1024", str(ring))
    made = f"{begin}\nCLUSTER_START\n{text[kernel : end if end > 0 else None]}"
    (folder / "rows.cpp").write_text(re.sub(rf"\b{space}\b", "cluster_rows", made))
    command = [str(GPP), "-std=c++20", "-O1", "-fno-strict-aliasing", "-fPIC", "-pthread", "-w"]
    # Its includes, of threads and barriers, are half of the compiler's work.
    command += header_built_once(Path(__file__).with_name("cluster_emulation.hpp"), command)
    subprocess.run(
        [*command, *GOLD, "-shared", "-o", "rows.so", "rows.cpp"], cwd=folder, check=True
    )
    return ctypes.CDLL(str(folder / "rows.so"))


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same numbers, whose first one lies so many floats behind a multiple of 16 bytes."""
    room = torch.full((x.numel() + 8,), float("nan"))
    first = (-(room.data_ptr() // 4) % 4 + by) % 8
    place = room[first : first + x.numel()]
    place.copy_(x.reshape(-1))
    return place.view(x.shape)


def operator_of(library: ctypes.CDLL, plan, by: int, calls: list):
    """A call by the emulated kernel; its tensors lie `by` and more floats off."""
    (step,) = plan.steps

    def operator(*given):
        calls.append(given)
        known = {a.name: t for a, t in zip(plan.arguments, given, strict=True)}
        sizes = {
            size: number
            for a, t in zip(plan.arguments, given, strict=True)
            for size, number in zip(a.shape, t.shape, strict=True)
        }
        values, moved = {}, []
        for number, name in enumerate(step.args[:-1]):
            if name in known:
                values[name] = shifted(known[name].detach(), by + number)
                library.allow(
                    ctypes.c_void_p(values[name].data_ptr()),
                    ctypes.c_int64(values[name].numel()),
                )
            else:
                (output,) = [o for o in plan.outputs if o.name == name]
                shape = [int(eval(str(s), {}, dict(sizes))) for s in output.shape]
                values[name] = shifted(torch.full(shape, float("nan")), by)
            moved.append(ctypes.c_void_p(values[name].data_ptr()))
        rows = int(eval(step.args[-1], {}, dict(sizes)))
        getattr(library, step.function)(*moved, ctypes.c_int64(rows), None)
        return tuple(values[o.name] for o in plan.outputs)

    return operator


def run_emulated(library: ctypes.CDLL, family, candidate, module, by: int):
    """The module by the emulated kernel."""
    calls: list = []
    operator = operator_of(library, candidate.plan, by, calls)
    module = module_of(family.model_new)
    module |= {"fused_op": operator, "fused_device": "cpu"}
    return module["ModelNew"](), calls


@needs_gpp
@pytest.mark.parametrize(("name", "how"), CASES, ids=str)
def test_the_kernel_computes_what_the_module_does(name, how, tmp_path):
    blocks, threads, chunk, ring = how
    problem, _, family = made_of(MODULES[name])
    params = {"cluster_blocks": blocks, "cluster_threads": threads, "cluster_chunk": chunk}
    num_staged = 2 if name == "two_tensors" else 1
    candidate = candidate_of(family, **params)
    library = emulated(candidate.source, tmp_path, ring * num_staged)
    model, calls = run_emulated(library, family, candidate, problem, by=blocks % 4)
    model.load_state_dict(problem.make_model(0).state_dict())
    wide = problem.make_model(0).double()
    inputs = problem.make_inputs(1)
    with torch.no_grad():
        got, exact = model(*inputs), wide(*(x.double() for x in inputs))
    assert len(calls) == 1
    pairs = zip(got, exact, strict=True) if isinstance(got, tuple) else [(got, exact)]
    for mine, true in pairs:
        assert mine.shape == true.shape
        assert (mine - true).abs().max() <= 2e-6 * true.abs().max()


@needs_gpp
@pytest.mark.parametrize("name", ["l1_norm", "range", "layer_norm"])
def test_what_a_step_keeps_is_of_the_same_rows(name, tmp_path):
    _, family = derive_with_steps(tmp_path, "rows", text_of(MODULES[name]))
    params = {"cluster_blocks": 2, "cluster_threads": 96, "cluster_chunk": 4096}
    candidate = candidate_of(family, **params)
    forward, kept = candidate.plan, candidate.plan.extra["kept"]
    assert "CudaCode" in candidate.source and len(kept.steps) == 1
    library = emulated(candidate.source, tmp_path, 26_000)
    torch.manual_seed(1)
    given = [torch.randn(5, 9001), torch.randn(9001), torch.randn(9001)][: len(kept.arguments)]
    (made,) = operator_of(library, forward, 1, [])(*given)
    again, *found = operator_of(library, kept, 2, [])(*given)
    assert torch.equal(made, again)
    (x, *_), of_rows = (t.double() for t in given), {"l1_norm": lambda x: (x.abs().mean(1),)}
    of_rows["range"] = lambda x: (x.amin(1), x.amax(1), x.amin(1))
    of_rows["layer_norm"] = lambda x: (x.mean(1), x.var(1, correction=0))
    for number, exact in zip(found, of_rows[name](x), strict=True):
        torch.testing.assert_close(number.double().view(5), exact, rtol=1e-5, atol=1e-6)


@needs_gpp
@pytest.mark.parametrize("name", ["softmax", "l1_norm", "l2_norm", "range", "instance_norm"])
def test_gradients_in_clusters_are_as_exact_as_pytorchs(name, tmp_path):
    problem, family = derive_with_steps(tmp_path, "rows", text_of(MODULES[name]))
    candidate = candidate_of(family)
    forward = candidate.plan.extra.get("kept", candidate.plan)
    backward = candidate.plan.extra["gradients"]
    (step,) = backward.steps
    space = f"cluster_rows_{step.function.rpartition('_')[2]}"
    model, inputs, found = problem.make_model(0), problem.make_inputs(1), []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        y = model(*leaves)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
        found.append(torch.autograd.grad(y, leaves, grad.to(dtype)))
    known = {"x": inputs[0], "grad_0": grad}
    for plan_of_call, of in ((forward, "cluster_rows"), (backward, space)):
        (tmp_path / of).mkdir()
        library = emulated(candidate.source, tmp_path / of, 220 * 1024, space=of)
        given = []
        for argument in plan_of_call.arguments:
            value = known[argument.name.removesuffix("_gradients")]
            sizes = (-1,) if len(argument.shape) == 1 else (len(inputs[0]), -1)
            given.append(value.reshape(sizes))
        made = operator_of(library, plan_of_call, 1, [])(*given)
        names = [o.name.removesuffix("_out").removesuffix("_kept") for o in plan_of_call.outputs]
        known |= dict(zip(names, made, strict=True))
    own, exact = found
    assert_as_exact([m.reshape(o.shape) for m, o in zip(made, own, strict=True)], own, exact)


def run_alone(library: ctypes.CDLL, function: str, x: torch.Tensor, by: int) -> torch.Tensor:
    """A kernel of one tensor: its rows."""
    x, y = shifted(x, by), shifted(torch.full_like(x, float("nan")), by)
    library.allow(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.numel()))
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y)]
    getattr(library, function)(*pointers, ctypes.c_int64(len(x)), None)
    return y


@needs_gpp
@pytest.mark.parametrize("columns", [1, 3, 40, 131])
@pytest.mark.parametrize("blocks", [1, 4])
def test_few_columns_leave_some_blocks_without_any(blocks, columns, tmp_path):
    _, _, family = made_of(MODULES["l2_norm"])
    params = {"cluster_blocks": blocks, "cluster_threads": 64, "cluster_chunk": 64}
    candidate = candidate_of(family, **params)
    (step,) = candidate.plan.steps
    library = emulated(candidate.source, tmp_path, 80 * 10, columns)
    for rows, by in ((1, 0), (1, 1), (5, 2), (6, 3)):
        x = torch.randn(rows, columns)
        got = run_alone(library, step.function, x, by)
        torch.testing.assert_close(got, F.normalize(x, dim=1, eps=0.0), rtol=1e-6, atol=0)


@needs_gpp
def test_rows_with_infinities_are_as_pytorchs_and_equal_each_time(tmp_path):
    _, _, family = made_of(MODULES["softmax"])
    params = {"cluster_blocks": 4, "cluster_threads": 96, "cluster_chunk": 1024}
    candidate = candidate_of(family, **params)
    (step,) = candidate.plan.steps
    library = emulated(candidate.source, tmp_path, 3 * 1040, 1500)
    x = unusual(torch.randn(9, 1500))
    first = run_alone(library, step.function, x, 1)
    torch.testing.assert_close(first, torch.softmax(x, -1), rtol=2e-6, atol=0, equal_nan=True)
    for _ in range(2):
        again = run_alone(library, step.function, x, 1)
        assert torch.equal(first.view(torch.int32), again.view(torch.int32))


def unusual(x: torch.Tensor) -> torch.Tensor:
    """Rows of which some hold NaN, Inf, or numbers near the largest, and one is far from 0."""
    x[0, 3], x[1, 700], x[2, 5] = float("nan"), float("inf"), float("-inf")
    x[3] = float("-inf")
    x[4] = 3e38
    x[5] += 1000
    x[6, ::2] *= 1e20
    x[7] = 0
    return x


# ---- on a GPU -----------------------------------------------------------------------------------

LONG = {
    "softmax": "torch.randn(11, 65535)",
    "log_softmax": "torch.randn(301, 20001)",
    "l2_norm": "torch.randn(300, 65535)",
    "l1_norm": "torch.randn(2, 65535)",
    "instance_norm": "torch.randn(30, 3, 127, 129) + 3",
    "layer_norm": "torch.randn(1000, 9001) + 100",
    "two_tensors": "torch.randn(150, 30001), torch.randn(150, 30001)",
    "of_rows": "torch.randn(140, 9001), torch.randn(140, 1)",
    "two_results": "torch.randn(9, 250002)",
}
HOW = [(1, 256, 8192), (2, 512, 16384), (4, 1024, 8192), (8, 512, 32768), (16, 256, 16384)]


@pytest.mark.gpu
@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("name", LONG)
def test_clusters_compute_what_the_module_does(name, how, off, tmp_path):
    forward, init, _ = MODULES[name]
    problem, _, family = made_of((forward, init, LONG[name]))
    params = dict(zip(("cluster_blocks", "cluster_threads", "cluster_chunk"), how, strict=True))
    facts = {**known_device("H200").facts(), "template": CLUSTER_TEMPLATE, **params}
    rules = family.constraints([CLUSTER_TEMPLATE], dict.fromkeys(params, ()))
    if not all(rule.expression.evaluate(facts) for rule in rules):
        pytest.skip("no whole row fits")
    candidate = candidate_of(family, **params)
    path = tmp_path / "source.py"
    path.write_text(candidate.source)
    operator = bind(candidate.plan, "triton", path)
    module = module_of(family.model_new)
    module |= {**fused(operator), "fused_device": "cuda"}
    model, reference = module["ModelNew"]().cuda(), problem.make_model(0).cuda()
    wide = problem.make_model(0).double().cuda()
    for kind in ("usual", "unusual"):
        inputs = [on_gpu(x, off) for x in problem.make_inputs(1)]
        if kind == "unusual" and inputs[0].dim() == 2 and len(inputs[0]) > 8:
            unusual(inputs[0])
        with torch.no_grad():
            mine, own = answers(model(*inputs)), answers(reference(*inputs))
            exact = answers(wide(*(x.double() for x in inputs)))
            again = [answers(model(*inputs)) for _ in range(2)]
        torch.cuda.synchronize()
        for other in again:
            pairs = zip(mine, other, strict=True)
            assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)
        if kind == "usual":
            assert_as_exact(mine, own, exact)
            continue
        for got, theirs, true in zip(mine, own, exact, strict=True):
            is_there = theirs.isfinite() & true.isfinite()
            assert torch.equal(got.isnan() & true.isnan(), true.isnan())
            assert_as_exact([got[is_there]], [theirs[is_there]], [true[is_there]])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*LONG])
def test_gradients_beside_clusters_are_as_exact_as_pytorchs(name, tmp_path):
    forward, init, _ = MODULES[name]
    text = text_of((forward, init, LONG[name]))
    taken = Taken(tmp_path, "rows", text, "cuda", template=CLUSTER_TEMPLATE)
    assert_gradients_are_as_exact(taken, "rows")


def on_gpu(x: torch.Tensor, off: int) -> torch.Tensor:
    """The same on the GPU, its first number so many floats behind a multiple of 16 bytes."""
    place = torch.empty(x.numel() + off, device="cuda")[off:].view(x.shape)
    return place.copy_(x)


# ---- how it is asked for ------------------------------------------------------------------------


def test_it_is_searched_beside_the_others_where_rows_are_long(tmp_path):
    path = tmp_path / "rows.py"
    for columns, wanted in ((65535, {"nest_triton", CLUSTER_TEMPLATE}), (1000, {"nest_triton"})):
        path.write_text(text_of(("torch.softmax(x, -1)", "", f"torch.randn(3, {columns})")))
        (tmp_path / "config.yaml").write_text("problem: {module: rows.py}\n")
        config = load_config(derive_config(tmp_path / "config.yaml"), {"device": "cuda"})
        rows = feasible(plan(config, may_assume=True).space)
        assert {row["template"] for row in rows} == wanted


def test_it_is_had_by_asking(tmp_path):
    path = tmp_path / "rows.py"
    path.write_text(text_of(("torch.softmax(x, -1)", "", "torch.randn(3, 65535)")))
    config = tmp_path / "config.yaml"
    config.write_text("problem: {module: rows.py}\nspace: {template: [nest_cluster]}\n")
    planned = plan(load_config(derive_config(config), {"device": "cuda"}), may_assume=True)
    rows = feasible(planned.space)
    assert {row["template"] for row in rows} == {CLUSTER_TEMPLATE}
    # 65,535 columns are 256 KB, and one block has 220.
    assert {row["cluster_blocks"] for row in rows} == {2, 4}
    assert {row["cluster_threads"] for row in rows} == {256, 512, 1024}


@pytest.mark.parametrize(
    ("gpu", "facts", "reason"),
    [
        ("H200", {"cluster_blocks": 2}, ""),
        ("H200", {"cluster_blocks": 1}, "hold a whole row"),
        ("H200", {"cluster_blocks": 2, "device.has_nvcc": False}, "nvcc"),
        ("A100", {"cluster_blocks": 2}, "sm_90a"),
    ],
)
def test_what_must_hold_has_a_reason(gpu, facts, reason):
    _, _, family = made_of(("torch.softmax(x, -1)", "", "torch.randn(3, 65535)"))
    rules = family.constraints([CLUSTER_TEMPLATE], {"cluster_blocks": (1, 2)})
    known = {**known_device(gpu).facts(), **facts, "template": CLUSTER_TEMPLATE}
    broken = [rule.why for rule in rules if not rule.expression.evaluate(known)]
    assert bool(broken) == bool(reason) and reason in "".join(broken), broken


@needs_nvcc
@needs_triton
def test_it_is_compiled_ahead_of_a_gpu(tmp_path):
    toolchain = Toolchain("cuda", None, capability=90, triton="installed")
    _, _, family = made_of(MODULES["softmax"])
    candidate = candidate_of(family)
    sizes = [dict(family.op.sizes)]
    with Builder(toolchain, tmp_path / "cache", num_workers=1, triton_sizes=sizes) as builder:
        build = builder.submit(candidate).result(240)
    assert build.status is Status.CORRECT, build
    assert "rows_kernel" in str(build.kernels) and not build.error
