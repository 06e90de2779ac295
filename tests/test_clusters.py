"""Rows in the shared memory of a cluster's blocks: which modules, their CUDA text, its numbers."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch
from cpu_machine import GPP
from test_any_module import derive
from test_cuda_beside import cuda_code, needs_nvcc

from tuner.capture.capture import capture
from tuner.capture.clusters import CLUSTER_TEMPLATE, refusal_of_clusters
from tuner.capture.stages import stages_of
from tuner.evaluate.modules import module_of
from tuner.kernel.compiler_words import parse_resources
from tuner.kernel.family import load_family
from tuner.machine.datasheets import known_device
from tuner.problem.reference import load_problem

TEXT = """
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {names}):
        return {forward}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""
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
    return TEXT.format(forward=forward, init=init or "...", inputs=inputs, names=names)


def made_of(folder: Path, module: tuple[str, str, str]):
    problem, made = derive(folder, "rows", text_of(module))
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
def test_long_rows_that_are_read_again_have_the_template(name, tmp_path):
    _, made, family = made_of(tmp_path, MODULES[name])
    assert CLUSTER_TEMPLATE in family.templates
    # It has not run on a GPU: nobody gets it who does not ask.
    assert CLUSTER_TEMPLATE not in made.config.read_text()


@pytest.mark.parametrize("name", OTHERS)
def test_others_do_not_and_it_is_said_why(name, tmp_path):
    module, reason = OTHERS[name]
    path = tmp_path / "rows.py"
    path.write_text(text_of(module))
    stages = stages_of(capture(load_problem(path), with_sizes=False))
    assert reason in refusal_of_clusters(stages)
    _, _, family = made_of(tmp_path, module)
    assert CLUSTER_TEMPLATE not in family.templates


@needs_nvcc
@pytest.mark.parametrize("threads", [256, 512, 1024])
@pytest.mark.parametrize("name", ["softmax", "l2_norm", "instance_norm", "two_tensors"])
def test_no_kernel_spills(name, threads, monkeypatch, tmp_path):
    _, _, family = made_of(tmp_path, MODULES[name])
    candidate = candidate_of(family, cluster_threads=threads)
    make = cuda_code(monkeypatch, tmp_path / "cache")
    code = make(cuda_of(candidate.source), ["-std=c++17", "-O3", "-arch=sm_90a"])
    (kernel,) = parse_resources(code.log, None)
    assert (kernel.spill_store_bytes, kernel.stack_bytes) == (0, 0)
    assert 0 < kernel.registers <= 65536 // threads


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


def emulated(source: str, folder: Path, ring: int) -> ctypes.CDLL:
    """Compile a text's kernel for this machine, with a ring of so many bytes."""
    text = cuda_of(source)
    rows = text.index("// Rows that are read once")
    launch = text.index("// How a kernel of")
    kernel = text.index("__global__ void", launch)
    begin = text[rows:launch].replace("220 * 1024", str(ring))
    header = Path(__file__).with_name("cluster_emulation.hpp")
    (folder / "rows.cpp").write_text(
        f'#include "{header}"\n{begin}\nCLUSTER_START\n{text[kernel:]}'
    )
    command = [GPP, "-std=c++20", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-pthread"]
    command += ["-w", "-o", "rows.so", "rows.cpp"]
    subprocess.run([str(part) for part in command], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "rows.so"))


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same numbers, whose first one lies so many floats behind a multiple of 16 bytes."""
    room = torch.full((x.numel() + 8,), float("nan"))
    first = (-(room.data_ptr() // 4) % 4 + by) % 8
    place = room[first : first + x.numel()]
    place.copy_(x.reshape(-1))
    return place.view(x.shape)


def run_emulated(library: ctypes.CDLL, family, candidate, module, by: int):
    """The module by the emulated kernel; its tensors lie `by` and more floats off."""
    (step,) = candidate.plan.steps
    calls = []

    def operator(*given):
        calls.append(given)
        known = {a.name: t for a, t in zip(candidate.plan.arguments, given, strict=True)}
        sizes = {
            size: number
            for a, t in zip(candidate.plan.arguments, given, strict=True)
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
                (output,) = [o for o in candidate.plan.outputs if o.name == name]
                shape = [int(eval(str(s), {}, dict(sizes))) for s in output.shape]
                values[name] = shifted(torch.full(shape, float("nan")), by)
            moved.append(ctypes.c_void_p(values[name].data_ptr()))
        rows = int(eval(step.args[-1], {}, dict(sizes)))
        getattr(library, step.function)(*moved, ctypes.c_int64(rows), None)
        return tuple(values[o.name] for o in candidate.plan.outputs)

    module = module_of(family.model_new)
    module |= {"fused_op": operator, "fused_device": "cpu"}
    return module["ModelNew"](), calls


@pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
@pytest.mark.parametrize(("name", "how"), CASES, ids=str)
def test_the_kernel_computes_what_the_module_does(name, how, tmp_path):
    blocks, threads, chunk, ring = how
    problem, _, family = made_of(tmp_path, MODULES[name])
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
