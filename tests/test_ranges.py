"""Masks and positions of `torch.arange`, `tril`, `triu`: in C++, and as Triton kernels."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from cpu_machine import FACTS, FEW_PASSES, GPP, compiled
from interpreted import interpreted
from test_any_module import answers as listed, derive as written, in_float64, text_of_form
from test_scans import assert_as_exact, module_with
from test_steps import Taken, assert_gradients_are_as_exact
from test_steps_of_halves import Libdevice

from tuner.capture.capture import capture
from tuner.capture.graph.graph import Graph
from tuner.capture.nests.index_space import NotOneNest
from tuner.capture.nests.nest import Nest
from tuner.capture.tasks.half_products import PRODUCTS
from tuner.capture.tasks.partitions import partitions_of
from tuner.capture.tasks.stages import stages_of
from tuner.capture.writers.clusters import CLUSTER_TEMPLATE
from tuner.kernel.binding import BoundOp, bind
from tuner.kernel.family import Family, load_family
from tuner.machine.datasheets import known_device
from tuner.problem.reference import load_problem

needs_gpp = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

F = "torch.nn.functional"
X, Y = "torch.randn(5, 33, 40)", "torch.randn(37, 100)"
R, C = "torch.arange(33)[:, None]", "torch.arange(40)[None, :]"
# A forward, what the constructor makes, and the inputs.
FORMS: dict[str, tuple[str, str, str]] = {
    "lower": ("torch.tril(x)", "", X),
    "upper, from a diagonal on": ("torch.triu(x * 2.0, diagonal=3) + y", "", f"{X}, {X}"),
    "of a product": ("torch.triu(x @ y)", "", "torch.randn(33, 20), torch.randn(20, 33)"),
    "causal": (f"torch.where({C} <= {R} + 2, x, -1.0)", "", X),
    "one range for rows and columns": (
        "(lambda i: x * (2 * i[None, :] - 3 < i[:, None] - 1))(torch.arange(33))",
        "", "torch.randn(4, 33, 33)",
    ),
    "positions": ("x + torch.arange(100) + torch.arange(100).float() / 7", "", Y),
    "start and step": ("x * torch.arange(250, 50, -2) - torch.arange(3.0, 103.0)", "", Y),
    # A whole number that is 0 has no sign.
    "signs of zeros": ("x + 1 / (-torch.arange(100)) + 1 / (torch.arange(100) * -3) + "
                       "1 / torch.arange(0, -100, -1)", "", Y),
    "softmax": ("torch.softmax(x.masked_fill(torch.ones(33, 40).tril() == 0, -torch.inf), -1)",
                "", X),
    "softmax of added infinities": (
        "torch.softmax(x + torch.triu(torch.full((33, 40), -torch.inf), 1), dim=-1)", "", X,
    ),
    "softmax, all masked": (f"torch.softmax(x.masked_fill({C} < 2 * {R}, -torch.inf), -1)", "", X),
    "softmax of the middle": (f"torch.softmax(x.masked_fill({R} < {C}, -torch.inf), 1)", "", X),
    "lengths": ("x * (torch.arange(100) < y[:, None])", "", f"{Y}, torch.randint(0, 101, (37,))"),
    "band": (f"x * (({R} - {C}).abs().clamp(max=9) < 4) + torch.minimum({R}, {C})", "", X),
    "slopes": (f"torch.softmax(x - self.s[:, None, None] * ({R} - {C}).abs(), -1)",
               "self.s = nn.Parameter(torch.rand(3))", "torch.randn(2, 3, 33, 40)"),
    "sums": ("((x * torch.arange(100)).sum(-1), x.amax() + (torch.arange(100) < 7).sum())", "", Y),
    "before a product": (
        f"{F}.relu(self.l(torch.sin(torch.arange(40) * 0.1).to(x)) + x[..., :9])",
        "self.l = nn.Linear(40, 9)", X,
    ),
    "results": (f"(x * 2, ({R} <= {C}).float(), torch.arange(33).float())", "", X),
    "of images": (
        "torch.relu(self.c(x) + torch.arange(7)[:, None] * 0.1 - torch.arange(9) + "
        "torch.arange(252).view(4, 7, 9) / 99)",
        "self.c = nn.Conv2d(3, 4, 3, padding=1)", "torch.randn(2, 3, 7, 9)",
    ),
    "between images": (
        "self.d(torch.relu(self.c(x) + torch.arange(252).view(4, 7, 9) / 99))",
        "self.c, self.d = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3)",
        "torch.randn(2, 3, 7, 9)",
    ),
    "pooled": (f"{F}.max_pool2d(torch.tril(x), 2) + "
               f"{F}.max_pool2d(torch.arange(64).view(1, 8, 8).float(), 2)",
               "", "torch.randn(3, 4, 8, 8)"),
    "scanned": ("(x * (torch.arange(100) > 3)).cumsum(1) * torch.arange(100)", "", Y),
    "long rows": ("torch.softmax(x.masked_fill(torch.arange(70001) > 65000, -torch.inf), -1)",
                  "", "torch.randn(2, 70001)"),
    "as many as rows": ("x * torch.arange(len(x))[:, None]", "", Y),
    "of 32 bits": ("x * (torch.arange(40, dtype=torch.int32) - (y[0] > 0).int() > 3 * z)", "",
                   f"{X}, {X}, torch.rand(33, 40) > 0.5"),
    "in float64": (f"torch.tril(x) + {C} / 3", "", X.replace(")", ", dtype=torch.float64)")),
}  # fmt: skip
FOR_ONE_BATCH = {"of a product"}


def derive(folder: Path, name: str, form: tuple[str, str, str]):
    return written(folder, name.replace(" ", "_").replace(",", ""), text_of_form(form))


def bound(folder: Path, family: Family, template: str) -> BoundOp:
    """Return an operator, with blocks in Triton that are smaller than rows and columns."""
    params = {"unroll": 4, "block_rows": 4, "block_columns": 32, "num_warps": 2}
    known = family.templates[template].parameters
    given = {p: value for p, value in params.items() if p in known}
    if not template.endswith("_triton"):
        candidate = family.render({"template": template, **given}, FACTS)
        return bind(candidate.plan, "cpp", compiled(candidate, level=FEW_PASSES))
    facts = known_device("H200").facts()
    candidate = family.render({"template": template, **given}, facts)
    source = folder / f"{template}.py"
    source.write_text(candidate.source)
    operator = bind(candidate.plan, "triton", source)
    if "TRITON_INTERPRET" in os.environ:
        operator.globals["libdevice"] = Libdevice()
    return operator


def check(
    folder: Path,
    name: str,
    form: tuple[str, str, str],
    end: str = "",
    judge=assert_as_exact,
    fewest: int = 1,
) -> None:
    """Compare a module's kernels with PyTorch: of each way to cut it, at three batches.

    Args:
        folder: to write to.
        name: of the form.
        form: the module.
        end: of the templates' names: "" of those in C++.
        judge: raises where results are not as exact as PyTorch's.
        fewest: rows that kernels are for.
    """
    problem, made = derive(folder, name, form)
    family = load_family(made.name, [made.folder])
    others = {*PRODUCTS, CLUSTER_TEMPLATE}
    templates = [t for t in family.templates if t.startswith("nest") and t not in others]
    for template in [t for t in templates if t.endswith("_triton") == bool(end)]:
        model, calls = module_with(family, bound(folder, family, template))
        reference, wide = problem.make_model(0), problem.make_model(0).double()
        model.load_state_dict(reference.state_dict())
        batches = (None,) if name in FOR_ONE_BATCH else (None, fewest, 6)
        for count, batch in enumerate(batches, 1):
            inputs = problem.make_inputs(1, batch=batch)
            with torch.no_grad():
                mine, own = listed(model(*inputs)), listed(reference(*inputs))
                judge(mine, own, listed(wide(*in_float64(inputs))))
            assert len(calls) == count, f"{template}: a call took the reference's way"


@needs_gpp
@pytest.mark.parametrize("name", FORMS)
def test_the_loops_compute_what_the_module_does(name, tmp_path):
    check(tmp_path, name, FORMS[name])


def check_each(
    forms: Mapping[str, tuple[str, str, str]], folder: str, judge=assert_as_exact
) -> None:
    """Compare Triton's kernels of each form with PyTorch, as `check` does."""
    for number, (name, form) in enumerate(forms.items()):
        own = Path(folder) / str(number)
        own.mkdir()
        try:
            check(own, name, form, "_triton", judge)
        except Exception as error:
            raise AssertionError(name) from error


def check_triton(folder: str) -> None:
    """Compare Triton's kernels with PyTorch: in its interpreter where TRITON_INTERPRET is set."""
    check_each(FORMS, folder)


@needs_triton
@pytest.mark.parametrize("check", ["check_triton", "check_triton_steps"])
def test_interpreted_blocks_compute_what_the_module_does(check, tmp_path):
    interpreted("test_ranges", check, str(tmp_path))


# ---- steps of training ------------------------------------------------------------------------

STEPS = {
    "lower": FORMS["lower"],
    "of a product": (
        "torch.triu(self.l(x), -2) * torch.arange(33)", "self.l = nn.Linear(20, 33)",
        "torch.randn(3, 33, 20)",
    ),
    "softmax": FORMS["softmax"],
    "slopes": FORMS["slopes"],
    "sums": (f"((x * self.w).masked_fill({R} < {C}, 0.5) * torch.arange(40) / 40).sum(1)",
             "self.w = nn.Parameter(torch.randn(33, 40))", X),
}  # fmt: skip


class Interpreted(Taken):
    """A module whose step is Triton's, computed by its interpreter."""

    def _bound(self, folder: Path, params: dict[str, object]) -> BoundOp:
        return bound(folder, self.family, "nest_triton")


def check_steps(folder: Path, name: str, kind: type[Taken] = Taken) -> None:
    assert_gradients_are_as_exact(kind(folder, "ranges", text_of_form(STEPS[name])), name)


@needs_gpp
@pytest.mark.parametrize("name", STEPS)
def test_gradients_go_through_masks(name, tmp_path):
    check_steps(tmp_path, name)


def check_triton_steps(folder: str) -> None:
    for number, name in enumerate(STEPS):
        own = Path(folder) / str(number)
        own.mkdir()
        check_steps(own, name, Interpreted)


# ---- what is taken, and what is not -----------------------------------------------------------


def graph_of(folder: Path, forward: str, inputs: str = X) -> Graph:
    path = folder / "ranges.py"
    path.write_text(text_of_form((forward, "", inputs)))
    return capture(load_problem(path))


def test_each_nest_computes_its_own_masks(tmp_path):
    """A mask is neither read nor stored, though two nests need it."""
    graph = graph_of(
        tmp_path,
        f"(lambda m: torch.softmax(x * m, -1) * torch.softmax(x * m, 1))({R} <= {C})",
    )
    default = stages_of(graph)
    for stages in (default, *partitions_of(graph, default).values()):
        assert len(stages.tasks) > 1 and all(isinstance(task, Nest) for task in stages.tasks)
        for nest in stages.nests:
            assert {t.name for t in nest.arguments} <= {"x", *stages.between}
        assert any(nest.indices for nest in stages.nests)
        assert all(len(shape) == 3 for shape in stages.between.values())


INEXACT = [
    "x * torch.arange(0, 2**24 + 40 * 9, 2**24 // 39 + 9)",
    "x * torch.arange(0.0, 4.0, 0.1)",
]


@pytest.mark.parametrize("forward", INEXACT)
def test_what_floats_do_not_compute_exactly_is_refused_with_its_line(forward, tmp_path):
    graph = graph_of(tmp_path, forward)
    with pytest.raises(NotOneNest, match=r"line 12: .*arange"):
        stages_of(graph)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_positions_are_rounded_where_the_module_rounds_them(dtype, tmp_path):
    """Above 256 or 2048 not every whole number is one of these dtypes."""
    inputs = f"torch.randn(7, 5000, dtype=torch.{dtype})"
    form = ("torch.triu(x, 3) - torch.arange(5000).to(x.dtype)", "", inputs)
    problem, made = derive(tmp_path, "halves", form)
    family = load_family(made.name, [made.folder])
    model, calls = module_with(family, bound(tmp_path, family, "nest"))
    (x,) = problem.make_inputs(1)
    got, own = model(x), problem.make_model(0)(x)
    assert calls and torch.equal(got, own)


def test_a_range_as_long_as_the_batch_is_for_any(tmp_path):
    problem, made = derive(tmp_path, "rows", FORMS["as many as rows"])
    family = load_family(made.name, [made.folder])
    model, calls = module_with(family, bound(tmp_path, family, "nest"))
    for batch in (37, 36, 1, 5000):
        (x,) = problem.make_inputs(1, batch=batch)
        assert torch.equal(model(x), problem.make_model(0)(x))
    assert len(calls) == 4
    assert "_FEWEST_ROWS, _MOST_ROWS = 1, 25258 " in family.model_new  # 37 sqrt(2^24 / 36)
