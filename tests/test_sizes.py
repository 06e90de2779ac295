"""Several tuned sizes in one file: asked for, chosen between, kept apart, checked, tuned."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_machine import GPP
from test_cheats import task_of

import tuner
from benchmarks import several_sizes
from tuner.by_batch import MOST, NO_ROWS, AtBatch, ByBatch, Way, least_of
from tuner.choosing import Kernels, chosen_at, decided, ranges_of
from tuner.config.run_config import Listed, RunConfig, config_of as config_of_run, parse_config
from tuner.errors import ConfigError, InputError, ProblemError
from tuner.evaluate.contender import Contender
from tuner.evaluate.modules import imported
from tuner.evaluate.verifier import Verifier
from tuner.export.certificate import read_certificate
from tuner.export.several import KERNELS_NAME, apart, take_kernel, way_of
from tuner.planning.deriving import derive_config, derive_operator
from tuner.planning.observing import Observer
from tuner.planning.planning import Planned, plan
from tuner.problem.reference import load_problem
from tuner.review.summary import summary
from tuner.review.workloads import workloads_of
from tuner.run import Run, open_run
from tuner.session.sizes import planned_sizes, sources_beside, suggested, tuned_of
from tuner.session.tuning import verify_certificate
from tuner.trial import Check, Outcome, ProbeResult, Status, Trial
from tuner.verification.together import Tuned, file_of

needs_gpp = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")


# ---- what is asked for ----------------------------------------------------------------------


def config_of(sizes: str, **overrides: int | str) -> RunConfig:
    text = f"problem:\n  op: layer_norm\n  sizes: {sizes}\n"
    return parse_config(text, Path("x.yaml"), overrides)


def test_a_size_may_have_several_values_and_the_largest_is_the_problems():
    config = config_of("{rows: [64, 1024, 16], cols: 8}")
    assert config.listed == Listed("rows", (16, 64, 1024))
    assert config.problem.sizes == {"rows": 1024, "cols": 8}
    assert config.at(64).problem.sizes == {"rows": 64, "cols": 8}
    assert config_of("{rows: [64, 16]}", size=16).problem.sizes == {"rows": 16}
    assert config_of("{rows: [64]}").listed is None
    assert config_of("{cols: 8}", batch="64,128").listed == Listed("batch", (64, 128))
    assert config_of("{cols: 8}", batch="64").problem.sizes == {"cols": 8, "batch": 64}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("{rows: [64, 16], cols: [8, 9]}", "one size with several values, got 2: rows, cols"),
        ("{rows: [64, x]}", "sizes.rows: expected whole numbers above 0, got [64, x]"),
        ("{rows: []}", "sizes.rows: expected whole numbers above 0, got []"),
        ("{rows: [3, 3]}", "sizes.rows: a value is there twice: [3, 3]"),
        ("{rows: [1, 2, 3, 4, 5, 6, 7, 8, 9]}", "expected at most 8 values, got 9"),
    ],
)
def test_what_is_no_list_of_sizes_is_an_error_with_its_line(sizes, said):
    with pytest.raises(ConfigError) as raised:
        config_of(sizes)
    (problem,) = raised.value.problems
    assert problem.startswith("x.yaml:3: problem.sizes") and said in problem


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ("few", "expected whole numbers above 0, such as 64 or 64,1024, got few"),
        ("64,0", "expected whole numbers above 0, such as 64 or 64,1024, got 64, 0"),
        ("64,64", "a value is there twice: [64, 64]"),
        ("1,2,3,4,5,6,7,8,9", "expected at most 8 values, got 9"),
    ],
)
def test_rows_on_the_command_line_that_cannot_be_are_refused_before_anything_runs(batch, said):
    with pytest.raises(ConfigError) as raised:
        config_of("{cols: 8}", batch=batch)
    assert raised.value.problems == (f"--batch: {said}",)
    with pytest.raises(InputError, match=re.escape(f"test_sizes.py: batch: {said}")):
        derive_operator(Path(__file__), batch=batch)


def test_several_sizes_are_of_the_rows_alone():
    with pytest.raises(InputError, match="cols is no number of rows: inputs have 4, 4"):
        planned_sizes(config_of("{rows: 4, cols: [8, 16]}", device="cpu"), plan)


def test_batch_is_the_rows_of_a_file_that_sets_no_such_number(tmp_path):
    reference = Path(tuner.__file__).parent.parent / "templates/layer_norm/reference.py"
    problem = load_problem(reference, {"cols": 8, "batch": 37})
    assert problem.num_rows() == 37 and problem.stand_ins()[0].shape == (37, 8)
    few, more = problem.make_inputs(0)[0], problem.make_inputs(0, batch=100)[0]
    assert few.shape == (37, 8) and more.shape == (100, 8) and torch.equal(more[:37], few)


def test_more_rows_than_can_be_joined_from_draws_are_refused_at_once(tmp_path):
    (tmp_path / "gate.py").write_text(GATE)
    problem = load_problem(tmp_path / "gate.py", {"batch": 10**15})
    said = r"gate.py: get_inputs\(\) gives 50 rows; 10+ of them take 20000000000000 calls"
    with pytest.raises(ProblemError, match=said):
        problem.num_rows()
    with pytest.raises(ProblemError, match=said):
        derive_operator(tmp_path / "gate.py", batch=[4, 10**15])


def test_an_operator_is_derived_at_the_largest_of_several_batches(tmp_path):
    few, *_, most = planned_of(tmp_path, "gate", "cpu")
    assert few.outline is None and most.outline is not None  # whose graph is of other shapes
    shapes = {"x": (200, 24), "gate": (200, 24), "weight": (24,)}
    assert {given.name: given.shape for given in most.outline.given} == shapes
    assert few.family.model_file == most.family.model_file


# ---- which kernel is chosen -----------------------------------------------------------------


def at(rows: int, kernel: int, speedup: float, way: Way = "call", error: float = 0.01) -> AtBatch:
    low, high = speedup * (1 - error), speedup * (1 + error)
    return AtBatch(rows, way, False, speedup, low, high, 10.0 * speedup, 10.0, kernel=kernel)


TWO = Kernels(((8, 0), (128, 1)), {"call": (0, 1)}, faster=frozenset({8, 128}))


def measured(speedups: dict[int, tuple[float, float]], error: float = 0.01) -> ByBatch:
    found = [at(n, k, s, error=error) for n, both in speedups.items() for k, s in enumerate(both)]
    return ByBatch(128, tuple(found))


def test_the_nearer_of_two_sizes_has_its_kernel_until_it_is_measured():
    assert TWO.by_nearest("call") == ((32, 0), (MOST, 1))  # halfway in the logarithm
    assert ranges_of({1: 0, 4: 1, 16: 1, 64: 0}) == ((2, 0), (32, 1), (MOST, 0))
    assert [chosen_at(n, ((2, 0), (MOST, 1))) for n in (1, 2, 3)] == [0, 0, 1]


def test_the_fastest_kernel_is_taken_and_the_usual_one_where_they_hardly_differ():
    speedups = {4: (2.0, 1.5), 8: (2.0, 2.5), 16: (1.5, 2.0), 64: (2.01, 2.0), 128: (3.0, 2.0)}
    found = decided(measured({**speedups, 512: (1.5, 2.0)}), TWO)
    # At the tuned sizes the races decide, whatever was measured here.
    assert found.kernels == {"call": ((11, 0), (MOST, 1))}
    assert [(a.num_rows, a.kernel) for a in least_of(found.measured, "call")] == [
        (4, 0), (8, 0), (16, 1), (64, 1), (128, 1), (512, 1),
    ]  # fmt: skip
    assert len(found.others) == 6 and found.tuned == (8, 128)
    unclear = decided(measured(speedups, error=0.4), TWO)
    assert unclear.kernels == {"call": ((32, 0), (MOST, 1))}


def test_pytorch_is_taken_outside_between_and_where_no_race_was_won():
    speedups = {2: (0.5, 0.4), 4: (1.2, 1.0), 8: (2.0, 1.0), 16: (0.9, 0.8), 32: (0.8, 0.9),
                128: (1.0, 2.0), 256: (1.0, 2.0), 512: (0.5, 0.6)}  # fmt: skip
    found = decided(measured(speedups), TWO)
    assert found.rows["call"] == (4, 256) and found.rows["step"] == NO_ROWS
    assert found.gaps == {"call": ((12, 64),)}
    assert found.stated == {"call": (4, 256, (12, 64)), "step": NO_ROWS}
    assert found.words[0] == (
        "calls: the module's own forward below 4 rows and at 12 to 64 rows and above 256 rows"
    )
    slow = {8: (0.8, 0.7), 128: (1.0, 2.0)}
    unsure = Kernels(TWO.tuned, TWO.offers, faster=frozenset({128}))
    assert decided(measured(slow), unsure).rows["call"] == (128, MOST)
    assert decided(measured(slow), TWO).rows["call"] == (8, MOST)
    none = Kernels(TWO.tuned, TWO.offers)
    assert decided(measured({8: (0.8, 0.7), 128: (0.7, 0.8)}), none).rows["call"] == NO_ROWS


def test_a_size_without_a_kernel_is_no_anchor_and_steps_take_what_has_them():
    kernels = Kernels(
        ((8, None), (64, 0), (128, 1)), {"call": (0, 1), "step": (1,)},
        frozenset({"call", "step"}), frozenset({64, 128}),
    )  # fmt: skip
    found = [at(n, k, 0.8 if n == 8 else 2.0) for n in (8, 64, 128) for k in (0, 1)]
    found += [at(n, 1, 2.0, "step") for n in (8, 64, 128)]
    rule = decided(ByBatch(128, tuple(found)), kernels)
    assert rule.rows == {"call": (64, MOST), "step": (8, MOST)}
    assert rule.kernels == {"call": ((90, 0), (MOST, 1)), "step": ((MOST, 1),)}


# ---- names that are kept apart --------------------------------------------------------------

TEXT = """\
import torch as t
LIMIT, names = 3, ["helper"]  # é
def helper(x, LIMIT=LIMIT):
    return x + LIMIT
if LIMIT:
    COUNT = 0
class Kept:
    size = LIMIT
    def helper(self):
        global COUNT
        COUNT += 1
        return helper(self.size, LIMIT=2), t.helper, "helper"
@helper
def decorated(helper: LIMIT) -> Kept:
    return helper, [LIMIT for names in (1, 2)], (lambda LIMIT: LIMIT + COUNT)
"""

APART = """\
import torch as t
LIMIT_2, names_2 = 3, ["helper"]  # é
def helper_2(x, LIMIT=LIMIT_2):
    return x + LIMIT
if LIMIT_2:
    COUNT_2 = 0
class Kept_2:
    size = LIMIT_2
    def helper(self):
        global COUNT_2
        COUNT_2 += 1
        return helper_2(self.size, LIMIT=2), t.helper, "helper"
@helper_2
def decorated_2(helper: LIMIT_2) -> Kept_2:
    return helper, [LIMIT_2 for names in (1, 2)], (lambda LIMIT: LIMIT + COUNT_2)
"""


def test_what_a_text_names_at_its_top_level_gets_an_ending_and_nothing_else():
    assert apart(TEXT, "_2") == APART


def test_each_operator_is_of_the_way_to_call_a_module_that_it_belongs_to():
    steps = ("kept", "gradients", "weight_gradients", "gradients_1", "weight_gradients_1")
    assert {way_of(name) for name in steps} == {"step"}
    assert (way_of("op"), way_of("eval")) == ("call", "eval")


@pytest.mark.parametrize(
    "text",
    [
        'x = f"""é\n  {COUNT} {COUNT + 1}\n"""\n',
        'x = (f"a"\n  f"é{COUNT}" f"{3:{COUNT}} {COUNT!r:>5}")\n',
        'x = f"{{COUNT}} {[COUNT for _ in range(COUNT)]}"\n',
    ],
)
def test_names_in_texts_with_values_are_replaced(text):
    given: list[dict[str, object]] = [{}, {}]
    exec(f"COUNT = 1\n{text}", given[0])
    exec(apart(f"COUNT = 1\n{text}", "_2"), given[1])
    assert given[0]["x"] == given[1]["x_2"] and "COUNT" not in given[1]


# ---- files ----------------------------------------------------------------------------------

GATE = """\
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features))

    def forward(self, x, gate):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * self.weight * torch.sigmoid(gate)

def get_inputs():
    return [torch.randn(50, 24), torch.randn(50, 24)]

def get_init_inputs():
    return [24]
"""
SIZES = (4, 32, 200)
# Of each operator, what its two kernels differ in; the first one is for two of the sizes. A
# captured module comes first: it is the one of `make test`.
PARAMS = {
    "gate": ({"template": "nest", "unroll": 1}, {"template": "nest", "unroll": 4}),
    "layer_norm": ({"template": "cpu", "stream_output": True},
                   {"template": "cpu", "stream_output": False}),
    "gemm_scale_batchnorm": ({"template": "cpu", "stats": "two_pass"},
                             {"template": "cpu", "stats": "gram"}),
}  # fmt: skip
ON_GPU = {
    "layer_norm": ({"template": "cuda"}, {"template": "triton", "num_warps": 2}),
    "gate": ({"template": "nest_triton", "num_warps": 1},
             {"template": "nest_triton", "num_warps": 4}),
    "gemm_scale_batchnorm": ({"template": "simt"}, {"template": "triton"}),
}  # fmt: skip


def planned_of(folder: Path, op: str, device: str) -> list[Planned]:
    """Return plans of an operator by hand, or of a captured module, at each size."""
    path = folder / "config.yaml"
    if op == "gate":
        (folder / "gate.py").write_text(GATE)
        problem = f"{{module: gate.py, sizes: {{batch: {[*SIZES]}}}}}"
    else:
        further = "cols: 24" if op == "layer_norm" else "in_features: 24, out_features: 40"
        problem = f"{{op: {op}, sizes: {{batch: {[*SIZES]}, {further}}}}}"
    path.write_text(f"problem: {problem}\ndevice: {device}\n")
    config = tuner.load_config(derive_config(path))
    return planned_sizes(config, lambda config: plan(config, may_assume=True))


def tuned_by(plans: Sequence[Planned], params: tuple[dict, dict]) -> list[Tuned]:
    """Return what searches might have found: one kernel for two sizes, another between."""
    few, many = (
        Trial(n, "", given, "", Outcome(Status.CORRECT)) for n, given in enumerate(params)
    )
    return [Tuned(p, t, "run", True) for p, t in zip(plans, (few, many, few), strict=True)]


class Files:
    """The file of three sizes, imported."""

    def __init__(self, folder: Path, op: str, device: str) -> None:
        self.device = device
        self.plans = planned_of(folder, op, device)
        params = (PARAMS if device == "cpu" else ON_GPU)[op]
        self.tuned = tuned_by(self.plans, params)
        (folder / "export").mkdir()
        path = folder / "export" / "model_new.py"
        toolchain = self.plans[-1].find_toolchain()
        self.file = file_of(self.tuned, toolchain, path, folder)
        self.measured = file_of(
            self.tuned, toolchain, path, folder,
            ByBatch(
                200, rows={"call": (4, MOST), "step": NO_ROWS}, tuned=SIZES,
                kernels={"call": ((60, 1), (MOST, 0)), "step": ((MOST, 0),)},
                gaps={"call": ((20, 30),)},
            ),
        )  # fmt: skip
        self.text = self.file.text_of("unverified", None, ())
        self.file.write()
        self.module: ModuleType = imported(self.file.unverified_path)
        spec = self.plans[-1].spec
        self.problem = load_problem(Path(spec.reference), dict(spec.sizes), spec.mode)
        self.own = self.problem.make_model(0).to(device)
        self.mine = self.module.ModelNew(*self.problem.init_inputs(0)).to(device)
        self.mine.load_state_dict(self.own.state_dict())

    def inputs(self, rows: int) -> list[torch.Tensor]:
        return self.problem.make_inputs(1, batch=rows, device=self.device)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Callable[[str, str], Files]:
    """What makes the file of an operator on a device, once."""
    return functools.cache(lambda op, device: Files(tmp_path_factory.mktemp(op), op, device))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(f"{op} on {device}", marks=marks)
        for device, marks in (("cpu", needs_gpp), ("cuda", pytest.mark.gpu))
        for op in PARAMS
    ],
)
def files(request, made) -> Files:
    op, _, device = request.param.split()
    return made(op, device)


@pytest.fixture
def taken(files, monkeypatch) -> list[int]:
    """The kernels that calls of the operator take, in order."""
    calls: list[int] = []

    def counted(kernel: int, operator: Callable) -> Callable:
        def call(*args):
            calls.append(kernel)
            return operator(*args)

        return call

    operators = files.module._OP_BY_KERNEL
    counting = tuple(counted(kernel, operator) for kernel, operator in enumerate(operators))
    monkeypatch.setattr(files.module, "_OP_BY_KERNEL", counting)
    return calls


KERNEL_AT = {1: 0, 4: 0, 11: 0, 12: 1, 32: 1, 80: 1, 81: 0, 200: 0, 500: 0}


def assert_close(mine: Any, own: Any, atol: float = 1e-4) -> None:
    torch.testing.assert_close(mine, own, rtol=1e-4, atol=atol)


def test_each_number_of_rows_takes_the_kernel_of_the_nearest_size(files, taken):
    assert files.file.kernels.num_kernels == 2 and len(files.module._OP_BY_KERNEL) == 2
    for rows, kernel in KERNEL_AT.items():
        if rows == 1 and hasattr(files.own, "bn"):  # a batch of one has no variance
            continue
        inputs = files.inputs(rows)
        with torch.no_grad():
            assert_close(files.mine(*inputs), files.own(*inputs))
        assert taken == [kernel], rows
        taken.clear()


def test_gradients_are_those_of_each_kernel(files):
    for rows in (3, 20, 150):
        found = []
        for model in (files.mine, files.own):
            leaves = [x.requires_grad_() for x in files.inputs(rows)]
            model(*leaves).square().sum().backward()
            found.append([*(x.grad for x in leaves), *(p.grad for p in model.parameters())])
            model.zero_grad()
        # The gradient of a bias before BatchNorm is rounding noise.
        assert_close(*found, atol=1e-2 if hasattr(files.own, "bn") else 1e-4)


def test_eval_mode_and_a_live_modules_parameters_work_at_every_size(files):
    new = files.module.ModelNew
    live = new.from_module(files.own) if hasattr(new, "from_module") else files.mine
    for rows in (3, 20, 150):
        inputs = files.inputs(rows)
        with torch.no_grad():
            expected = files.own.eval()(*inputs)
            assert_close(live.eval()(*inputs), expected)
    for model in (live, files.own):
        model.train()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_the_choice_is_compiled_in_one_graph_with_the_module(files):
    for is_dynamic in (False, True):
        torch._dynamo.reset()
        whole = torch.compile(files.mine, backend="eager", fullgraph=True, dynamic=is_dynamic)
        for rows in (6, 20, 150):
            inputs = files.inputs(rows)
            with torch.no_grad():
                assert_close(whole(*inputs), files.own(*inputs))


def test_one_kernel_can_be_taken_at_any_number_of_rows(files, taken, monkeypatch):
    monkeypatch.setattr(files.module, KERNELS_NAME, getattr(files.module, KERNELS_NAME))
    for kernel in (0, 1):
        take_kernel(vars(files.module), kernel)
        with torch.no_grad():
            files.mine(*files.inputs(4))
            files.mine(*files.inputs(32))
    assert taken == [0, 0, 1, 1]


def test_what_was_measured_changes_two_lines_and_nothing_that_is_compiled(files):
    text = files.measured.text_of("unverified", None, ())
    lines = zip(files.text.splitlines(), text.splitlines(), strict=False)
    code = [line for line in text.splitlines() if not line.startswith("#")]
    before = [line for line in files.text.splitlines() if not line.startswith("#")]
    changed = [now for then, now in zip(before, code, strict=True) if then != now]
    assert len(changed) == 2 and len([*lines]) > 2
    kernels = {"call": ((60, 1), (MOST, 0)), "step": ((MOST, 0),)}
    assert changed[0].startswith(f"{KERNELS_NAME} = {kernels!r}  #")
    assert changed[1].startswith(f"_FUSED_ROWS = {{'call': (4, {MOST}, (20, 30)), 'step': ")
    assert files.measured.compiled_as == files.file.compiled_as
    said = [line for line in text.splitlines() if line.startswith("# ")]
    assert "#   batch = 32: kernel 2 (run run, trial 1)" in said


def test_the_inputs_stand_once_in_a_file(files):
    functions = [n.name for n in ast.parse(files.text).body if isinstance(n, ast.FunctionDef)]
    assert functions.count("get_inputs") == functions.count("get_init_inputs") == 1
    device = files.module.fused_device
    model = files.module.ModelNew(*files.module.get_init_inputs()).to(device)
    inputs = [x.to(device) for x in files.module.get_inputs()]
    assert model(*inputs).isfinite().all()


def test_the_header_names_each_size_and_kernel(files):
    assert files.text.count("\n# Kernel ") == 2
    assert "\n# Tuned for 3 sizes:\n#   batch = 4: kernel 1 (run run, trial 0)\n" in files.text
    assert files.file.contender.further_rows == SIZES


@needs_gpp
def test_gaps_and_borders_are_obeyed_by_the_module(made, monkeypatch):
    files = made("gate", "cpu")
    rows = files.measured.by_batch.stated
    calls: list[int] = []
    kept = files.module._OP_BY_KERNEL[0]
    operators = tuple(
        lambda *args, kernel=kernel: calls.append(kernel) or kept(*args) for kernel in (0, 1)
    )
    kernels = files.measured.by_batch.kernels
    for name, value in (("_OP_BY_KERNEL", operators), ("_FUSED_ROWS", rows), ("_LEAST_ROWS", 4),
                        ("_FUSED_KERNELS", kernels)):  # fmt: skip
        monkeypatch.setattr(files.module, name, value)
    for number, kernel in {3: None, 4: 1, 19: 1, 20: None, 30: None, 31: 1, 61: 0}.items():
        inputs = files.inputs(number)
        with torch.no_grad():
            assert_close(files.mine(*inputs), files.own(*inputs))
        assert calls == ([] if kernel is None else [kernel]), number
        calls.clear()


def test_no_name_of_one_kernel_is_another_kernels(tmp_path):
    """Gradients of a captured module have kernels that end in a number in each of them."""
    plans = planned_of(tmp_path, "gate", "cuda")
    toolchain: Any = SimpleNamespace(flags=lambda language: [], label="none")
    made = file_of(tuned_by(plans, ON_GPU["gate"]), toolchain, tmp_path / "x.py", tmp_path)
    tree = ast.parse(made.text_of("unverified", None, ()))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = [name for name in functions if name.startswith("fused_")]
    assert len(names) == len(set(names)) and any(name.endswith("_rows_2") for name in names)


def test_kernels_of_several_languages_stand_in_one_text(tmp_path):
    plans = planned_of(tmp_path, "layer_norm", "cuda")
    tuned = tuned_by(plans, ON_GPU["layer_norm"])
    more = Trial(3, "", {"template": "triton", "num_warps": 4}, "", Outcome(Status.CORRECT))
    tuned = [*tuned[:2], Tuned(plans[2], more, "run", True)]
    toolchain: Any = SimpleNamespace(
        flags=lambda language: [], label="nvcc"
    )  # nothing is compiled
    text = file_of(tuned, toolchain, tmp_path / "x.py", tmp_path).text_of("unverified", None, ())
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert len(names) == len(set(names))
    assert {
        "fused_layer_norm_rows_of_kernel_2",
        "fused_layer_norm_rows_of_kernel_3",
        "fused_op",
    } <= set(names)
    assert (
        re.search(r"^SOURCE = ", text, re.MULTILINE) and text.count("cuda_sources=[SOURCE]") == 1
    )


@needs_gpp
def test_the_benchmark_times_the_choice_and_names_twelve_sizes(made, monkeypatch):
    monkeypatch.setattr(several_sizes, "TURNS", 4)
    monkeypatch.setattr(several_sizes, "CALLS", 2)
    files = made("gate", "cpu")
    reference = Path(files.plans[-1].spec.reference)
    found = several_sizes.dispatched(files.file.unverified_path, reference, [2, 12], "cpu")
    assert [(each["num_rows"], each["kernel"]) for each in found] == [(2, 1), (12, 2)]
    assert all(each["call_us"] > 0 for each in found)
    rows = several_sizes.unseen_rows((32, 512, 8192))
    assert len(rows) == 12 and rows[0] == 16 and rows[-1] == 16384
    assert not {*rows} & {32, 512, 8192} and rows == sorted(rows)
    assert len({*several_sizes.unseen_rows((1, 2))}) == 12


# ---- what is checked ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Iterator[Verifier]:
    with Verifier(task_of(tmp_path_factory.mktemp("both")), seed=21, timeout_s=60.0) as verifier:
        yield verifier


TWO_KERNELS = """\
import torch
import torch.nn as nn

_FUSED_KERNELS = {"call": ((48, 0), (2**63 - 1, 1)), "step": ((48, 0), (2**63 - 1, 1))}


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        y = self.bn(self.gemm(x) * self.scale)
        rows = len(x)
        kernel = next((k for most, k in _FUSED_KERNELS["call"] if rows <= most), 0)
        return y.half().to(y.dtype) if WRONG else y
"""


def checked(verifier: Verifier, folder: Path, wrong: str) -> Check:
    path = folder / "file.py"
    path.write_text(TWO_KERNELS.replace("WRONG", wrong))
    contender = Contender(path.name, {"file": str(path)}, further_rows=(100, 64))
    return verifier.check(contender)


def names(results: Sequence[ProbeResult]) -> list[str]:
    return [result.probe for result in results]


def test_each_kernel_is_asked_on_few_rows_and_at_borders_and_tuned_sizes(
    verifier, tmp_path, monkeypatch
):
    monkeypatch.setenv("FEW_PROBES", "batch 2;kernels at ")
    right = checked(verifier, tmp_path, "False")
    assert right.is_accepted, right.reason
    asked = names(right.probes)
    assert {f"kernels at {rows} rows" for rows in (48, 49, 100)} <= {*asked}
    assert "kernels at 64 rows" not in asked  # the problem's own
    assert "batch 2, by kernel 2" in asked and "as given, by kernel 1" in asked
    assert "batch 2, by kernel 1" not in asked and "as given, by kernel 2" not in asked


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ("kernel == 1 and 1 < rows < 40", ", by kernel 2"),  # which no call of the file reaches
        ("kernel == 0 and rows == 48", "kernels at 48 rows"),
        ("kernel == 1 and rows == 49", "kernels at 49 rows"),
        ("rows == 100", "kernels at 100 rows"),
    ],
)
def test_a_kernel_that_is_wrong_anywhere_is_rejected(
    verifier, tmp_path, wrong, where, monkeypatch
):
    monkeypatch.setenv("FEW_PROBES", "batch 2;kernels at ")
    check = checked(verifier, tmp_path, wrong)
    assert not check.is_accepted
    assert check.probes[-1].probe.endswith(where) or where.startswith("kernels")
    if ", by kernel" in where:
        assert check.reason.endswith("so it is by kernel 2, which the file takes at other rows")


# ---- a whole run ----------------------------------------------------------------------------

CONFIG = """\
problem: {module: gate.py, sizes: {batch: [8, 300]}}
device: cpu
effort: quick
space:
  {template: [nest], unroll: [1, 2], stream_output: [false], huge_pages: [false], keep: [true]}
search: {trials: 2}
measure: {finalists: 20ms}
"""


class Stopping(Observer):
    """Asks for an end in the verification of the first size; keeps what is said."""

    def __init__(self) -> None:
        self.is_stopped = False
        self.lines: list[str] = []

    def on_finalist(self, entry) -> None:
        self.is_stopped = True

    def on_stage(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, few) -> list[Run]:
    """The runs of two sizes: stopped in the first, which is resumed and goes on to the next."""
    os.environ["FEW_PROBES"] = "kernels at "
    folder = tmp_path_factory.mktemp("runs")
    (folder / "gate.py").write_text(GATE)
    (folder / "config.yaml").write_text(CONFIG)
    config = tuner.load_config(derive_config(folder / "config.yaml"))
    view = Stopping()
    first = tuner.tune(
        config, runs_dir=folder / "runs", observer=view, should_stop=lambda: view.is_stopped
    )
    assert "size 1 of 2: batch = 8" in view.lines and "size 2" not in " ".join(view.lines)
    last = tuner.resume(first.path)
    return [first, last]


@needs_gpp
@pytest.mark.timeout(3600)
def test_a_run_of_each_size_ends_with_one_file_of_all(runs):
    first, last = runs
    assert first.path != last.path and last.environment().beside == (first.path.name,)
    sizes = [run.environment().sizes["batch"] for run in runs]
    assert sizes == [8, 300]
    result = last.result()
    exported = result.exported
    if not exported.at_sizes:  # a busy machine may find that no kernel is faster
        notes = " ".join(result.notes)
        assert result.is_fallback or "slower than PyTorch at" in notes or "is rejected" in notes
        return
    assert [*exported.at_sizes] == ["batch = 8", "batch = 300"]
    assert exported.check.is_accepted and exported.by_batch.tuned == (8, 300)
    text = last.export_path.read_text()
    assert "# Tuned for 2 sizes:\n#   least speed-up over PyTorch eager: " in text
    assert "at batch = " in summary(last).verdict and "tuned sizes" in summary(last).verdict
    assert len(workloads_of(result)) >= 3
    certificate = read_certificate(last.export_path)
    assert certificate.sizes == {"batch": 300} and certificate.by_batch.tuned == (8, 300)
    asked = names(exported.check.probes)
    assert "kernels at 8 rows" in asked


@needs_gpp
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("few")
def test_its_certificate_claims_the_race_at_each_size_and_is_repeated_there(runs):
    last = runs[-1]
    exported, reference = last.result().exported, last.path.parent.parent / "gate.py"
    certificate = read_certificate(last.export_path)
    raced = {words: race for words, race in exported.at_sizes.items() if race.interval}
    claims = {f"batch = {one.sizes['batch']}": one for one in certificate.at_sizes}
    assert {*claims} == {*raced} - {"batch = 300"}
    for words, claim in claims.items():
        assert claim.interval == raced[words].interval
        assert claim.latency_us == raced[words].latency_us
    points = {p.what: p for p in verify_certificate(last.export_path, reference=reference).points}
    assert points["the reference"].holds and points["the code"].holds
    for words in raced if claims else ():
        assert points[f"the interval at {words}, from its own samples"].holds is True
        point = points[f"the speed-up at {words}"]
        assert point.is_claim and raced[words].interval.words in point.detail


@needs_gpp
@pytest.mark.timeout(3600)
def test_a_search_starts_from_what_was_best_at_other_sizes(runs):
    first, last = runs
    planned = plan(config_of_run(last))
    found = tuned_of(first, planned)
    if found.trial is not None:
        found_too = suggested(planned, [found], tuner.planning.earlier.Earlier())
        assert found_too.first[0].params == found.trial.params
        assert found_too.first[0].words.endswith(f"of run {first.path.name}")
        assert last.trials()[0].params == found.trial.params
    assert sources_beside(planned, [found], first.path.parent) == []  # two trials tell too little


@needs_gpp
@pytest.mark.timeout(3600)
def test_the_benchmark_finds_the_regret_at_a_size_never_tuned(runs, monkeypatch, capsys):
    monkeypatch.setattr(several_sizes, "ROUNDS", {"cpu": 1})
    (found,) = several_sizes.unseen(runs[-1].path, [20], {"trials": 1, "timeout_s": 10.0})
    assert found["num_rows"] == 20 and found["best_us"] > 0 and found["regret"] > -1.0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("      20 rows: PyTorch ") and said[1].startswith("worst ")


@needs_gpp
@pytest.mark.timeout(3600)
def test_a_first_size_that_was_followed_is_not_followed_again(runs):
    first, last = runs
    view = Stopping()
    again = tuner.resume(first.path, observer=view)
    assert again.path == first.path
    assert view.lines[-1] == f"the next size was begun: tune --resume {last.path}"
    assert open_run(first.path).result() is not None
