"""Sums and products of all elements up to each one: as tasks, in C++, and as Triton kernels."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpu_machine import FACTS, GPP, compiled
from interpreted import interpreted

from tuner.capture.capture import capture
from tuner.capture.derive import derived
from tuner.capture.graph.settings import settings_of
from tuner.capture.nests.nest import Nest
from tuner.capture.tasks.stages import stages_of
from tuner.capture.tasks.step_records import Captured
from tuner.evaluate.modules import fused, module_of
from tuner.kernel.binding import bind
from tuner.kernel.family import load_family
from tuner.machine.datasheets import known_device
from tuner.problem.draws import widened
from tuner.problem.reference import load_problem
from tuner.trial import to_json

needs_gpp = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

FILE = """import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(5, 5)

    def forward(self, x, y, z):
        {forward}


def get_inputs():
    return [torch.randn{shape}, torch.randn{shape}, torch.rand{shape} > 0.3]


def get_init_inputs():
    return []
"""
ZEROS = "torch.zeros_like(x.select({d}, 0).unsqueeze({d}))"
# Each along a dimension, as problems 89 to 93 of KernelBench's first level write them.
FORMS = {
    "sum": "torch.cumsum(x, dim={d})",
    "product": "torch.cumprod(x, dim={d})",
    "backwards": "torch.cumsum(x.flip({d}), dim={d}).flip({d})",
    "exclusive": f"torch.cumsum(torch.cat(({ZEROS}, x), dim={{d}}).narrow({{d}}, 0, x.size({{d}}))"
    ", dim={d})",
    "exclusive, of all but the last row": f"torch.cumsum(torch.cat(({ZEROS}, x), dim={{d}})[:-1], "
    "dim={d})",
    "exclusive, joined afterwards": f"torch.cat(({ZEROS}, torch.cumsum("
    "x.narrow({d}, 0, x.size({d}) - 1), dim={d})), dim={d})",
    "exclusive product": "torch.cumprod(torch.cat((torch.ones_like(x.narrow({d}, 0, 2)), "
    "x.narrow({d}, 0, x.size({d}) - 2)), {d}), {d})",
    "exclusive, backwards": "torch.cat((x.narrow({d}, 1, x.size({d}) - 1), torch.zeros_like("
    "x.narrow({d}, 0, 1))), {d}).flip({d}).cumsum({d}).flip({d})",
    "masked": "torch.cumsum(x * z, dim={d})",
    "between others": "torch.relu(torch.cumsum(x * y.abs(), {d})) * 0.5 - y",
    "backwards between others": "((x * 0.5).flip({d}).cumprod({d}).flip({d}) + x) * y",
    "two at once": "x.cumsum({d}) * (1 + 0.01 * y).cumprod({d}).cumsum({d})",
    "of every second one, from the end": "x.flip({d}).narrow({d}, 1, 4)[..., ::2].cumsum({d})",
}
SHAPES = {(37, 101): 1, (3, 21, 50): 1, (130, 9): 0, (2, 5, 4, 19): 3, (3, 2, 7, 5): 2}


def file_of(folder: Path, name: str, forward: str, shape: tuple[int, ...]) -> Path:
    path = folder / f"{name}.py"
    path.write_text(FILE.format(forward=forward, shape=shape))
    return path


def tasks_of(folder: Path, forwards: Iterable[str], shape: tuple[int, ...] = (37, 101)):
    """Return the tasks of each of several forwards."""
    path = file_of(folder, "scans", f"return {', '.join(forwards)}", shape)
    graph = capture(load_problem(path))
    return [stages_of(replace(graph, outputs=(output,))).tasks for output in graph.outputs]


@pytest.mark.parametrize("shape", [(37, 101), (3, 21, 50)])
def test_a_scan_is_one_nest_with_all_around_it(shape, tmp_path):
    forms = [form.format(d=1) for form in FORMS.values()]
    for form, tasks in zip(FORMS, tasks_of(tmp_path, forms, shape), strict=True):
        (nest,) = tasks
        assert len(nest.scans) == (3 if form == "two at once" else 1) and len(nest.passes) == 1
        assert nest.is_backwards == ("backwards" in form)
        assert nest.space.is_across == (len(shape) == 3)


# What cannot share a nest with a scan, in the order of its tasks: scans, others.
APART = {
    "(x / x.sum(1, keepdim=True)).cumsum(1)": [0, 1],
    "x.cumsum(1).amax(1)": [1, 0],
    "x.cumsum(1) + x.flip(1).cumsum(1).flip(1)": [1, 1],
    "x.cumsum(1).cumsum(0)": [1, 1],
    "(x * y).flip(1).cumsum(1)": [0, 1],  # which reads what was stored from its end
    "torch.cat([x[:, :5], y], 1).cumsum(1)": [None, None, 1],
    "self.l(x[:, :5]).cumsum(1).exp()": [None, None, 1],
    # What was cut off may not be read in place of zeros: a call pads.
    "torch.cat([x[:, :50], torch.zeros_like(x[:, :9])], 1).cumsum(1)": [None, None, 1],
}


def test_what_cannot_share_a_nest_with_a_scan_has_its_own(tmp_path):
    for (forward, expected), tasks in zip(APART.items(), tasks_of(tmp_path, APART), strict=True):
        scans = [len(t.scans) if isinstance(t, Nest) else None for t in tasks]
        assert scans == expected, forward


# ---- what is computed -------------------------------------------------------------------------


def all_forms(folder: Path, shape: tuple[int, ...]):
    """A module of all forms: its problem, and the operator that was derived."""
    results = ", ".join(form.format(d=SHAPES[shape]) for form in FORMS.values())
    path = file_of(folder, "forms", f"return {results}", shape)
    problem = load_problem(path)
    graph = capture(problem)
    settings = settings_of(problem.make_model(0), False)
    made = derived(Captured(graph), path.read_text(), "forms", settings, False, folder / "derived")
    return problem, load_family(made.name, [made.folder])


def module_with(family, operator, device: str = "cpu"):
    calls = []

    def counted(*args):
        calls.append(args)
        return operator(*args)

    module = module_of(family.model_new)
    module |= {**fused(operator), "fused_op": counted, "fused_device": torch.device(device)}
    return module["ModelNew"](), calls


def assert_as_exact(got, own, exact) -> None:
    """At most twice as far from float64 as PyTorch is; the same where that is no number."""
    for mine, theirs, true in zip(got, own, exact, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        if not theirs.is_floating_point():
            assert torch.equal(mine, theirs)
            continue
        assert torch.equal(mine.isnan(), theirs.isnan())
        is_finite = theirs.isfinite()
        assert torch.equal(mine[~is_finite].nan_to_num(), theirs[~is_finite].nan_to_num())
        error, limit = (mine - true)[is_finite].abs(), (theirs - true)[is_finite].abs()
        assert error.numel() == 0 or error.max() <= max(
            2.0 * limit.max(), 2.0**-24 * true[is_finite].abs().max()
        )


def odd(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Numbers that are infinite, none, beyond float32 on the way, or too small for it."""
    x = x.clone()
    rows = x.movedim(dim, -1).reshape(-1, x.shape[dim])
    middle = x.shape[dim] // 2
    rows[0, middle] = math.nan
    rows[1, middle] = math.inf
    rows[2, middle // 2], rows[2, middle] = -math.inf, math.inf
    rows[3] = 3e38
    rows[4, ::2], rows[4, 1::2] = 2e38, 1e-38
    rows[5] = 1e-44
    rows[6], rows[6, 0], rows[6, -1] = 1e20, 0.0, 0.0
    rows[7] = torch.arange(len(rows[7])).remainder(23) * 1e30
    rows[8, ::2], rows[8, 1::2] = 1e38, 1e-30
    rows[8, middle:] = 1e-44
    return rows.reshape(x.movedim(dim, -1).shape).movedim(-1, dim).contiguous()


def answers(problem, model, shape: tuple[int, ...], device: str = "cpu"):
    """What a model, the reference and float64 give, on usual numbers and on odd ones."""
    reference = problem.make_model(0).to(device)
    wide = problem.make_model(0).double().to(device)
    inputs = [x.to(device) for x in problem.make_inputs(1)]
    for given in (inputs, [odd(inputs[0], SHAPES[shape]), *inputs[1:]]):
        with torch.no_grad():
            yield model(*given), reference(*given), wide(*map(widened, given))


WAYS = [{"unroll": 2, "huge_pages": False}, {"unroll": 1, "stream_output": True, "width": 4}]


@needs_gpp
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loops_are_as_exact_as_pytorch(shape, tmp_path):
    problem, family = all_forms(tmp_path, shape)
    params = WAYS[list(SHAPES).index(shape) % 2]
    candidate = family.render({"template": "nest", **params}, FACTS)
    model, calls = module_with(family, bind(candidate.plan, "cpp", compiled(candidate)))
    for got, own, exact in answers(problem, model, shape):
        assert_as_exact(got, own, exact)
    assert len(calls) == 2, "a call took the reference's way"


BLOCKS = {  # by whether columns lie apart in memory
    False: {"block_rows": 4, "block_columns": 32, "num_warps": 2, "stages": 2},
    True: {"block_rows": 16, "block_columns": 8, "num_warps": 4, "stages": 2},
}


def blocks_of(folder: Path, shape: tuple[int, ...]):
    problem, family = all_forms(folder, shape)
    params = BLOCKS[SHAPES[shape] < len(shape) - 1]
    facts = known_device("H200").facts()
    candidate = family.render({"template": "nest_triton", **params}, facts)
    source = folder / "source.py"
    source.write_text(candidate.source)
    (folder / "plan.json").write_text(to_json(candidate.plan))
    return problem, family, candidate, source


def check_blocks(folder: str, shape: tuple[int, ...], device: str) -> None:
    """Compare the Triton kernels with PyTorch; with TRITON_INTERPRET set, on the CPU."""
    problem, family, candidate, source = blocks_of(Path(folder), shape)
    model, calls = module_with(family, bind(candidate.plan, "triton", source), device)
    usual, unusual = answers(problem, model.to(device), shape, device)
    assert_as_exact(*usual)
    # Whether zero times what is beyond float64 is met depends on which are multiplied first, and
    # PyTorch's own kernels on a GPU take neither the same ones first nor float64.
    sums = [number for number, form in enumerate(FORMS.values()) if "cumprod" not in form]
    assert_as_exact(*([values[number] for number in sums] for values in unusual))
    assert len(calls) == 2, "a call took the reference's way"


@needs_triton
@pytest.mark.parametrize("shape", [(37, 101), (3, 21, 50)])
def test_interpreted_blocks_are_as_exact_as_pytorch(shape, tmp_path):
    interpreted("test_scans", "check_blocks", str(tmp_path), shape, "cpu")


@needs_triton
@pytest.mark.parametrize("shape", [(37, 101), (3, 21, 50)])
def test_blocks_compile_ahead_for_a_hopper_gpu(shape, tmp_path):
    source = blocks_of(tmp_path, shape)[-1]
    ran = subprocess.run(
        [sys.executable, "-m", "tuner.kernel.triton_build", str(source),
         str(tmp_path / "plan.json"), str(tmp_path), "--arch", "90"],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout)
    assert not found["error"] and not found["note"] and found["kernels"]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_on_a_gpu_are_as_exact_as_pytorch(shape, tmp_path):
    check_blocks(str(tmp_path), shape, "cuda")
