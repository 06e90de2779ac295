"""The flagship's module in eval mode: one product with the affine map folded in, where it may.

Most tests run twice: where the template offers no kernels for it, and on the exported file of one
that does.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from families import built_in
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tuner.config.run_config import load_config
from tuner.evaluate.contender import Contender
from tuner.evaluate.verifier import Verifier
from tuner.export.module import export_text
from tuner.kernel.builder import Builder, Toolchain
from tuner.machine.device import describe
from tuner.problem.reference import load_problem
from tuner.session.tuning import Planned, plan
from tuner.trial import Candidate, Check

FAMILY = built_in("gemm_scale_batchnorm")
SIZES = {"batch": 36000, "in_features": 20, "out_features": 30}  # 2^20 outputs and more


def fused_op(*args: object) -> None:
    raise AssertionError("eval mode does not use the operator")


NAMES: dict[str, object] = {
    "torch": torch, "nn": nn, "F": F, "fused_op": fused_op, "fused_eval": None,
}  # fmt: skip
exec(compile(FAMILY.model_new, "model_new.py", "exec"), NAMES)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module of an exported file whose template offers the call for eval mode."""
    text = export_text(
        FAMILY,
        FAMILY.render({"template": "cpu"}, describe("cpu").facts()),
        reference=FAMILY.reference.read_text(),
        sizes=SIZES,
        flags=Toolchain.find("cpu").cpp_flags,
        provenance=[],
    )
    path = tmp_path_factory.mktemp("eval_mode") / "exported_eval_mode.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["without kernels", "with kernels"])
def kind(request: pytest.FixtureRequest) -> type[nn.Module]:
    """ModelNew, both ways."""
    if request.param == "with kernels":
        return request.getfixturevalue("exported").ModelNew
    return NAMES["ModelNew"]  # type: ignore[return-value]


def models(kind: type[nn.Module], **changes: object) -> tuple[nn.Module, nn.Module]:
    """Return our module and the reference in eval mode, with the same fresh weights."""
    problem = load_problem(FAMILY.reference, SIZES)
    theirs = problem.randomise(problem.module.Model(*problem.init_inputs(0)), 1).eval()
    ours = kind(*problem.init_inputs(0)).eval()
    ours.load_state_dict(theirs.state_dict())
    for model in (ours, theirs):
        for name, value in changes.items():
            setattr(model.bn, name, value)
    return ours, theirs


def make_input(num_rows: int = SIZES["batch"], offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_rows, SIZES["in_features"], generator=generator) + offset


def is_folded(model: nn.Module, x: Tensor) -> bool:
    """Return whether a call runs without PyTorch's BatchNorm."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(x)
    return "aten::batch_norm" not in names_of(profiled)


def is_one_call(model: nn.Module, x: Tensor) -> bool:
    """Return whether a call is one of the template's operator for eval mode."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(x)
    return any(name.endswith("::fused_gemm_scale_bn_eval") for name in names_of(profiled))


def names_of(profiled: profile) -> set[str]:
    return {event.key for event in profiled.key_averages()}


def errors(y: Tensor, exact: Tensor) -> tuple[float, float]:
    off = y.double() - exact
    return float(off.square().mean().sqrt()), float(off.abs().max())


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize(
    "changes", [{}, {"weight": None, "bias": None}], ids=["affine", "not affine"]
)
def test_a_folded_call_is_as_accurate_as_the_references(kind, offset, changes):
    ours, theirs = models(kind, **changes)
    x = make_input(offset=offset)
    with torch.no_grad():
        assert is_folded(ours, x) and not is_folded(theirs, x)
        y, own = ours(x), theirs(x)
        exact = theirs.double()(x.double())
    for error, reference in zip(errors(y, exact), errors(own, exact), strict=True):
        assert error <= 1.5 * reference


@torch.no_grad()
def test_weights_and_statistics_are_folded_afresh_and_nothing_changes(kind):
    ours, theirs = models(kind)
    x = make_input()
    ours(x)
    for model in (ours, theirs):
        model.gemm.weight.mul_(-1.5)
        model.bn.running_var.add_(2.0)
        model.scale[:3] = torch.tensor([0.0, -2.0, 1e-3])
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_value_poisons_its_own_row(kind, bad):
    ours, theirs = models(kind)
    x = make_input()
    x[7, 3] = bad
    assert torch.equal(ours(x).isfinite(), theirs(x).isfinite())


@pytest.mark.parametrize(
    "why", ["recorded", "few rows", "float64", "three dimensions", "autocast"]
)
def test_every_other_call_goes_the_references_way(kind, why):
    ours, theirs = models(kind)
    x = make_input(19 if why == "few rows" else SIZES["batch"])
    if why == "float64":
        ours, theirs, x = ours.double(), theirs.double(), x.double()
    elif why == "three dimensions":
        ours.bn, theirs.bn = (nn.BatchNorm1d(100).eval() for _ in range(2))
        x = x.view(360, 100, SIZES["in_features"])
    grad = nullcontext() if why == "recorded" else torch.no_grad()
    cast = torch.autocast("cpu") if why == "autocast" else nullcontext()
    with grad, cast:
        y, own = ours(x), theirs(x)
        assert not is_folded(ours, x)
    assert y.dtype == own.dtype and y.requires_grad == own.requires_grad
    assert torch.equal(y, own)
    if why == "recorded":
        y.sum().backward()
        assert ours.gemm.weight.grad is not None and ours.scale.grad is not None


# ---- the template's kernels -----------------------------------------------------------------


@torch.no_grad()
def test_kernels_are_used_where_the_template_offers_them(exported):
    x = make_input()
    assert is_one_call(models(exported.ModelNew)[0], x)
    assert not is_one_call(models(NAMES["ModelNew"])[0], x)  # type: ignore[arg-type]


def test_calls_in_training_do_not_use_them(exported):
    ours, _ = models(exported.ModelNew)
    assert not is_one_call(ours.train(), make_input(64))


@torch.no_grad()
def test_a_compiled_module_uses_them_in_one_graph(exported):
    ours, theirs = models(exported.ModelNew)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = make_input()
    assert is_one_call(compiled, x)
    assert torch.equal(compiled(x), ours(x))
    torch.testing.assert_close(compiled(x), theirs(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_exported_operator_passes_pytorchs_own_check(exported):
    ours, _ = models(exported.ModelNew)
    vectors = (ours.gemm.bias, ours.scale, ours.bn.weight, ours.bn.bias)
    stored = (ours.bn.running_mean, ours.bn.running_var)
    x = make_input(9)
    arguments = (x, ours.gemm.weight, *vectors, *stored, 1e-5)
    (y,) = exported.fused_eval(*arguments)
    assert torch.allclose(y, ours(x), atol=1e-5) and not is_one_call(ours, x)  # few rows
    found = re.search(r"torch\.ops\.(tuner_\w+)\.", Path(exported.__file__).read_text())
    assert found is not None
    operator = getattr(torch.ops, found[1]).fused_gemm_scale_bn_eval
    arguments = tuple(v.detach() if isinstance(v, Tensor) else v for v in arguments)
    assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


# ---- the verified ------------------------------------------------------------------------------

CONFIG = """\
problem:
  op: gemm_scale_batchnorm
  sizes: {{batch: {batch}, in_features: 20, out_features: 30}}
device: cpu
space: {{template: [cpu], stats: [per_thread]}}
"""


@pytest.fixture(scope="module", params=[100, 36000], ids=["few rows", "many rows"])
def planned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """Problems whose own batch is too small for the kernels of eval mode, and large enough."""
    path = tmp_path_factory.mktemp("eval_mode") / "config.yaml"
    path.write_text(CONFIG.format(batch=request.param))
    return plan(load_config(path))


@pytest.fixture(scope="module")
def verifier(planned: Planned) -> Iterator[Verifier]:
    with Verifier(planned.spec, seed=5, timeout_s=60.0) as verifier:
        yield verifier


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    with Builder(Toolchain.find("cpu"), tmp_path_factory.mktemp("builds"), num_workers=1) as made:
        yield made


def checked(candidate: Candidate, builder: Builder, verifier: Verifier) -> Check:
    build = builder.submit(candidate).result()
    contender = Contender.of_candidate(candidate, build, FAMILY.model_new, builder.environment)
    return verifier.check(contender)


def test_a_kernel_for_eval_mode_is_checked_where_it_is_used(
    planned, builder, verifier, monkeypatch
):
    few = "very many rows;many rows, one of NaN;NaN row;Inf elements;eval mode"
    monkeypatch.setenv("FEW_PROBES", few)
    right, wrong = "s * bias[j] - running_mean[j]", "s * bias[j] + running_mean[j]"
    candidate = planned.example()
    assert candidate.source.count(right) == 1
    planted = replace(candidate, source=candidate.source.replace(right, wrong))
    check = checked(planted, builder, verifier)
    assert not check.is_accepted
    many = "very many rows: "  # where these cost little they come first
    if planned.sizes["batch"] > 2**20 / 30:
        full = ("NaN row, eval: ", "Inf elements, eval: ", "eval mode: ")
        assert check.reason.startswith((many, *full)), check.reason
        return
    assert check.reason.startswith((many, "many rows, one of NaN, eval: ")), check.reason
    check = checked(candidate, builder, verifier)
    assert check.is_accepted
    assert "many rows, one of NaN, eval" in [probe.probe for probe in check.probes]
