"""An exported module behaves exactly like what it replaces: each point for every operator.

The default suite takes the CPU template of each operator; on a GPU all others are taken as well.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from families import built_in
from torch import Tensor, nn

from tuner.export.module import export_text
from tuner.kernel.builder import Toolchain
from tuner.kernel.family import family_names
from tuner.machine.device import describe
from tuner.problem.reference import Problem, load_problem

GEMM, NORM = "gemm_scale_batchnorm", "layer_norm"
SIZES = {  # on the CPU those of test_export.py: the library is built once for both
    ("cpu", GEMM): {"batch": 6, "in_features": 5, "out_features": 7},
    ("cpu", NORM): {"rows": 6, "cols": 24},
    ("cuda", GEMM): {"batch": 96, "in_features": 64, "out_features": 128},
    ("cuda", NORM): {"rows": 96, "cols": 128},
}
CASES = [
    pytest.param((op, name), marks=() if t.language == "cpp" else pytest.mark.gpu)
    for op in family_names()
    for name, t in built_in(op).templates.items()
]


@dataclass(frozen=True)
class Case:
    """An exported module, imported from its file, and the reference that it replaces."""

    op: str
    device: str
    new: ModuleType
    problem: Problem
    is_deterministic: bool

    @property
    def sizes(self) -> list[int]:
        return list(SIZES[self.device, self.op].values())

    def input(self, *rows: int, seed: int = 3) -> Tensor:
        """Return a normal input with that many rows, by default the problem's own."""
        generator = torch.Generator().manual_seed(seed)
        shape = (*(rows or self.sizes[:1]), self.sizes[1])
        return torch.randn(shape, generator=generator).to(self.device)

    def models(self, seed: int = 1) -> tuple[nn.Module, nn.Module]:
        """Return a replacement and a reference with the same weights, none as it began."""
        made = []
        for kind, inputs in (
            (self.new.ModelNew, self.new.get_init_inputs()),
            (self.problem.module.Model, self.problem.init_inputs(0)),
        ):
            torch.manual_seed(seed)
            made.append(self.problem.randomise(kind(*inputs), seed).to(self.device))
        return made[0], made[1]


@pytest.fixture(scope="session", params=CASES, ids="-".join)
def case(request, tmp_path_factory) -> Case:
    op, template = request.param
    family = built_in(op)
    language = family.templates[template].language
    kind = "cpu" if language == "cpp" else "cuda"
    device = describe(kind)
    toolchain = Toolchain.find(kind, device.capability, [language])
    candidate = family.render({"template": template}, device.facts())
    text = export_text(
        family,
        candidate,
        reference=family.reference.read_text(),
        sizes=SIZES[kind, op],
        flags=toolchain.flags(language),
        provenance=[],
    )
    path = tmp_path_factory.mktemp("drop_in") / f"{op}_{template}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    problem = load_problem(family.reference, SIZES[kind, op])
    return Case(op, kind, module, problem, candidate.is_deterministic)


@pytest.fixture
def pair(case) -> SimpleNamespace:
    ours, theirs = case.models()
    return SimpleNamespace(ours=ours, theirs=theirs, x=case.input())


def assert_close(ours: Tensor, theirs: Tensor, scale: float = 1.0) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-4 * scale, atol=2e-5 * scale, equal_nan=True)


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    mine, others = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(others)
    for name in mine:
        assert_close(mine[name], others[name])


@contextmanager
def fused_calls(case: Case) -> Iterator[list[int]]:
    """Count the calls that go through the fused operator."""
    calls, real = [0], case.new.fused_op

    def counted(*args: object) -> object:
        calls[0] += 1
        return real(*args)

    case.new.fused_op = counted
    try:
        yield calls
    finally:
        case.new.fused_op = real


def outcome(call: Callable[[], Tensor]) -> Tensor | Exception:
    try:
        return call()
    except (RuntimeError, ValueError, TypeError) as error:
        return error


def test_the_usual_call_goes_through_the_fused_operator(case, pair):
    with fused_calls(case) as calls:
        assert_close(pair.ours(pair.x), pair.theirs(pair.x))
    assert calls == [1]


# ---- buffers, modes, state ------------------------------------------------------------------


def test_buffers_follow_the_reference_after_each_call_also_without_gradients(case, pair):
    for k in range(3):
        x = case.input(seed=k) + k
        assert_close(pair.ours(x), pair.theirs(x))
        with torch.no_grad():
            assert_close(pair.ours(x), pair.theirs(x))
        assert_same_state(pair.ours, pair.theirs)


def test_eval_mode_changes_nothing_and_training_goes_on_after_it(pair):
    pair.ours.eval(), pair.theirs.eval()
    before = copy.deepcopy(pair.ours.state_dict())
    assert_close(pair.ours(pair.x), pair.theirs(pair.x))
    assert_close(pair.ours(pair.x[:1]), pair.theirs(pair.x[:1]))
    assert all(torch.equal(before[name], value) for name, value in pair.ours.state_dict().items())
    pair.ours.train(), pair.theirs.train()
    assert_close(pair.ours(pair.x), pair.theirs(pair.x))
    assert_same_state(pair.ours, pair.theirs)


@torch.no_grad()
def test_each_number_of_rows_in_eval_mode(case, pair):
    """Where a template has kernels for it, they take few rows as well on a GPU."""
    pair.ours.eval(), pair.theirs.eval()
    for rows in (0, 1, 2, 3, 31, 129, 300):
        x = case.input(rows)
        assert_close(pair.ours(x), pair.theirs(x))


def batch_norm(**options: object) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.bn = nn.BatchNorm1d(model.bn.num_features, **options).to(model.scale.device)

    return change


def layer_norm(**options: object) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        device = model.ln.weight.device
        model.ln = nn.LayerNorm(model.ln.normalized_shape, **options).to(device)

    return change


def setting(child: str, name: str, value: object) -> Callable[[nn.Module], None]:
    return lambda model: setattr(getattr(model, child), name, value)


VARIANTS = {
    GEMM: {
        "frozen": lambda model: model.bn.eval(),
        "cumulative": setting("bn", "momentum", None),
        "untracked": batch_norm(track_running_stats=False),
        "no affine": batch_norm(affine=False),
        "neither": batch_norm(affine=False, track_running_stats=False),
        "eps": setting("bn", "eps", 0.5),
        "momentum": setting("bn", "momentum", 0.9),
    },
    NORM: {
        "no affine": layer_norm(elementwise_affine=False),
        "no bias": layer_norm(bias=False),
        "eps": setting("ln", "eps", 0.5),
    },
}


@pytest.mark.parametrize("variant", sorted({name for v in VARIANTS.values() for name in v}))
def test_settings_of_the_modules_inside_behave_as_pytorchs(case, pair, variant):
    change = VARIANTS[case.op].get(variant)
    if change is None:
        pytest.skip(f"{case.op} has no such setting")
    for model in (pair.ours, pair.theirs):
        change(model)
    for k in range(3):
        x = case.input(seed=k)
        assert_close(pair.ours(x), pair.theirs(x))
        assert_same_state(pair.ours, pair.theirs)
    pair.ours.eval(), pair.theirs.eval()
    assert_close(pair.ours(pair.x), pair.theirs(pair.x))


def test_equal_seeds_give_equal_weights(case):
    state = []
    for kind, inputs in (
        (case.new.ModelNew, case.new.get_init_inputs()),
        (case.problem.module.Model, case.problem.init_inputs(0)),
    ):
        torch.manual_seed(5)
        state.append(kind(*inputs).state_dict())
    assert list(state[0]) == list(state[1])
    assert all(torch.equal(state[0][name], state[1][name]) for name in state[0])


def test_state_loads_strictly_both_ways_and_through_a_file(case, pair):
    pair.theirs(pair.x), pair.ours(case.input(seed=9))
    ours, theirs = case.models(seed=2)
    file = io.BytesIO()
    torch.save(pair.theirs.state_dict(), file)
    file.seek(0)
    assert str(ours.load_state_dict(torch.load(file), strict=True)).startswith("<All")
    assert_close(ours(pair.x), pair.theirs(pair.x))
    theirs.load_state_dict(pair.ours.state_dict(), strict=True)
    assert_close(pair.ours(pair.x), theirs(pair.x))


def test_copies_are_models_of_their_own(case, pair):
    before = copy.deepcopy(pair.ours.state_dict())
    twin = copy.deepcopy(pair.ours)
    assert_close(twin(pair.x), pair.theirs(pair.x))
    assert all(torch.equal(before[name], value) for name, value in pair.ours.state_dict().items())


def test_weights_are_read_afresh_at_every_call(case, pair):
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pair.ours, pair.theirs)]
    for _ in range(3):
        for model, optimiser in zip((pair.ours, pair.theirs), optimisers, strict=True):
            optimiser.zero_grad()
            model(pair.x).square().mean().backward()
            optimiser.step()
        assert_close(pair.ours(pair.x), pair.theirs(pair.x), scale=10)
    donor = case.models(seed=7)[1].state_dict()
    for model in (pair.ours, pair.theirs):
        model.load_state_dict(donor)
    assert_close(pair.ours(pair.x), pair.theirs(pair.x))
    for model in (pair.ours, pair.theirs):
        for parameter in model.parameters():
            if parameter.ndim == 1:  # 0, negative and tiny ones among them
                values = torch.linspace(-1.0, 1.0, parameter.numel(), device=parameter.device)
                parameter.data.copy_(values.round(decimals=1) ** 3)
    assert_close(pair.ours(pair.x), pair.theirs(pair.x))


# ---- autograd -------------------------------------------------------------------------------


def gradients(model: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    (model(x) * upstream).sum().backward()
    return {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("is_training", [True, False])
def test_gradients_are_the_references(pair, is_training):
    pair.ours.train(is_training), pair.theirs.train(is_training)
    upstream = torch.randn(pair.ours(pair.x).shape).to(pair.x.device)
    mine, others = (gradients(m, pair.x, upstream) for m in (pair.ours, pair.theirs))
    largest = max(float(g.abs().max()) for g in others.values())
    assert mine.keys() == others.keys()
    for name in mine:  # absolutely: that of a bias before a batch normalisation is 0
        torch.testing.assert_close(
            mine[name], others[name], rtol=1e-3, atol=1e-5 * largest, msg=name
        )


def test_second_derivatives_are_the_references(pair):
    found = []
    for model in (pair.ours, pair.theirs):
        x = pair.x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    largest = float(found[1].abs().max())
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-3 * largest)


def test_gradcheck_in_float64_where_the_references_path_is_taken(case):
    """The fused operator is float32; its formula is checked around PyTorch's operations in
    test_templates_cuda.py."""
    ours, _ = case.models()
    x = case.input(4).double().requires_grad_()
    assert torch.autograd.gradcheck(ours.double().eval(), (x,))


def test_frozen_parameters_get_no_gradient_and_the_others_do(pair):
    parameters = dict(pair.ours.named_parameters())
    frozen = next(iter(parameters))
    parameters[frozen].requires_grad_(False)
    pair.ours(pair.x).square().sum().backward()
    assert [name for name, p in parameters.items() if p.grad is None] == [frozen]


def test_an_output_is_never_silently_detached(pair):
    assert pair.ours(pair.x).requires_grad
    with torch.no_grad():
        assert not pair.ours(pair.x).requires_grad
    with torch.inference_mode():
        assert pair.ours(pair.x).is_inference()


# ---- the compiler, graphs, PyTorch's own check ----------------------------------------------


def test_it_compiles_into_one_graph(case, pair):
    compiled = torch.compile(copy.deepcopy(pair.ours), fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        x = case.input(seed=seed)
        assert_close(compiled(x), pair.theirs(x))
    assert_same_state(compiled._orig_mod, pair.theirs)
    x = pair.x.clone().requires_grad_()
    compiled(x).square().sum().backward()
    assert_close(x.grad, gradients(pair.theirs, pair.x, 2 * pair.theirs(pair.x).detach())["x"], 50)


def test_pytorchs_own_check_of_operators_finds_nothing(case, pair):
    seen: list[tuple] = []
    real = case.new.fused_op

    def spy(*args: object) -> object:
        seen.append(args)
        return real(*args)

    case.new.fused_op = spy
    try:
        pair.ours(pair.x.requires_grad_())
    finally:
        case.new.fused_op = real
    args = tuple(
        a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in seen[0]
    )
    if not hasattr(real, "default"):  # Triton's: a function that calls the operator
        namespace = re.search(r"torch\.ops\.(tuner_\w+)", inspect.getsource(case.new))[1]
        real = getattr(getattr(torch.ops, namespace), real.__name__.removeprefix("called_"))
    report = torch.library.opcheck(real.default, args)
    assert set(report.values()) == {"SUCCESS"}


@pytest.mark.gpu
def test_a_cuda_graph_captures_and_replays_it(case, pair):
    if case.device == "cpu":
        pytest.skip("a CPU has no graphs")
    with torch.no_grad():
        pair.ours(pair.x), pair.theirs(pair.x)  # warm-up: libraries load at the first call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            pair.ours(pair.x), pair.theirs(pair.x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = pair.ours(pair.x)
        for seed in (11, 12):
            pair.x.copy_(case.input(seed=seed))
            graph.replay()
            assert_close(y, pair.theirs(pair.x))
    assert_same_state(pair.ours, pair.theirs)


# ---- dtypes, devices, shapes ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_wrong_dtype_is_a_runtime_error_that_names_both(pair, dtype):
    with pytest.raises(RuntimeError) as caught:
        pair.ours(pair.x.to(dtype))
    assert str(dtype) in str(caught.value) and "torch.float32" in str(caught.value)


def test_a_wrong_device_is_a_runtime_error_that_names_both(case, pair):
    with pytest.raises(RuntimeError, match=rf"meta.*{case.device}"):
        pair.ours(pair.x.to("meta"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_converted_module_gives_the_references_bits(pair, dtype):
    x = pair.x.to(dtype)
    ours, theirs = pair.ours.to(dtype)(x), pair.theirs.to(dtype)(x)
    assert ours.dtype == dtype and torch.equal(ours, theirs)


def test_autocast_gives_the_references_dtype_and_values(case, pair):
    with torch.autocast(case.device, dtype=torch.bfloat16):
        ours, theirs = pair.ours(pair.x), pair.theirs(pair.x)
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 17, 65, 257])
def test_any_number_of_rows_gives_the_references_answer_or_error(case, pair, num_rows):
    x = case.input(num_rows)
    if num_rows == 2:  # two close rows would divide by next to nothing
        x = torch.stack([torch.linspace(-2, 2, x.shape[1]), torch.linspace(2, 1, x.shape[1])])
        x = x.to(case.device)
    ours, theirs = outcome(lambda: pair.ours(x)), outcome(lambda: pair.theirs(x))
    if isinstance(theirs, Exception):
        assert type(ours) is type(theirs) and str(ours) == str(theirs)
    else:
        assert_close(ours, theirs, scale=10 if num_rows == 2 else 1)
    assert_same_state(pair.ours, pair.theirs)


@pytest.mark.parametrize("shape", [(6, 9), (9,), (2, 3, 9), ()])
def test_a_wrong_feature_count_is_a_runtime_error_and_leaves_the_state(case, pair, shape):
    before = copy.deepcopy(pair.ours.state_dict())
    with pytest.raises(RuntimeError):
        pair.ours(torch.randn(shape).to(case.device))
    assert all(torch.equal(before[name], value) for name, value in pair.ours.state_dict().items())


@pytest.mark.parametrize("rows", [(), (2, 3)])
def test_other_ranks_give_the_references_answer_or_error(case, pair, rows):
    x = torch.randn(*rows, case.sizes[1]).to(case.device)
    ours, theirs = outcome(lambda: pair.ours(x)), outcome(lambda: pair.theirs(x))
    assert isinstance(ours, Exception) == isinstance(theirs, Exception)
    if isinstance(theirs, Tensor):
        assert_close(ours, theirs)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements_are_right_or_refused(case, most_of_the_gpu):
    if case.device == "cpu":
        pytest.skip("takes a GPU's memory")
    ours, theirs = case.models()
    rows = 2**31 // min(case.sizes[1:]) + 129
    if torch.cuda.mem_get_info()[0] < 8 * 4 * rows * max(case.sizes[1:]):
        pytest.skip("takes 8 tensors of that size")
    x = torch.randn(rows, case.sizes[1], device="cuda")
    with torch.no_grad():
        y = outcome(lambda: ours(x))
        if isinstance(y, Exception):  # refused aloud is allowed, wrong is not
            assert not isinstance(y, torch.OutOfMemoryError), y
            return
        expected = theirs(x)
        for part in (slice(0, 256), slice(rows // 2, rows // 2 + 256), slice(-256, None)):
            assert_close(y[part], expected[part], scale=10)


# ---- strides, alignment, values -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["transposed", "strided", "expanded", "misaligned", "reversed"])
def test_strides_and_alignment_do_not_matter(case, pair, kind):
    rows, cols = pair.x.shape
    x = {
        "transposed": pair.x.t().contiguous().t(),
        "strided": case.input(rows).repeat_interleave(2, 1)[:, ::2],
        "expanded": case.input(rows)[:, :1].expand(rows, cols),
        "misaligned": torch.cat([pair.x.new_zeros(1), pair.x.reshape(-1)])[1:].view(rows, cols),
        "reversed": case.input(2 * rows)[::2],
    }[kind]
    if kind == "expanded" and case.op == NORM:
        x = pair.x[:1].expand(rows, cols)  # rows of equal values would have a variance of 0
    if kind == "expanded":  # sums of weights near zero: the reference itself is off by more
        exact = copy.deepcopy(pair.theirs).double()(x.double())
        ours, theirs = pair.ours(x), pair.theirs(x)
        assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + 1e-5
    else:
        assert_close(pair.ours(x), pair.theirs(x))
    assert_same_state(pair.ours, pair.theirs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_value_poisons_what_it_poisons_in_the_reference(pair, bad):
    pair.x[2, 3] = bad
    ours, theirs = pair.ours(pair.x), pair.theirs(pair.x)
    assert torch.isnan(ours).any() and torch.equal(torch.isnan(ours), torch.isnan(theirs))
    assert_close(ours, theirs)


def test_a_bad_weight_poisons_what_it_poisons_in_the_reference(pair):
    for model in (pair.ours, pair.theirs):
        next(model.parameters()).data.view(-1)[3] = float("nan")
    ours, theirs = pair.ours(pair.x), pair.theirs(pair.x)
    assert torch.isnan(ours).any() and not torch.isnan(ours).all()
    assert_close(ours, theirs)


def test_an_offset_costs_no_more_than_it_costs_the_reference(pair):
    x = pair.x + 100
    exact = copy.deepcopy(pair.theirs).double()(x.double())
    error = (pair.ours(x) - exact).abs().max()
    assert error <= 2 * (pair.theirs(x) - exact).abs().max() + 1e-5


def test_constant_inputs_give_what_float64_gives(pair):
    x = torch.full_like(pair.x, 3.0)
    exact = copy.deepcopy(pair.theirs).double()(x.double())
    assert (pair.ours(x) - exact).abs().max() < 1e-2  # 1 / sqrt(eps) magnifies rounding


# ---- determinism, memory, streams, instances ------------------------------------------------


def test_the_same_input_gives_the_same_bits_also_when_determinism_is_demanded(
    case, pair, monkeypatch
):
    if not case.is_deterministic:
        pytest.skip("its atomics are declared")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else PyTorch refuses cuBLAS
    first = pair.ours(pair.x)
    torch.use_deterministic_algorithms(True)
    try:
        again = pair.ours(pair.x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, again)


def test_outputs_have_memory_of_their_own(case, pair):
    twin = copy.deepcopy(pair.ours)
    outputs = [pair.ours(pair.x), pair.ours(pair.x), twin(pair.x)]
    others = [pair.x, *pair.ours.state_dict().values(), *twin.state_dict().values()]
    places = [t.untyped_storage().data_ptr() for t in (*outputs, *others)]
    assert len(set(places)) == len(places)
    kept = outputs[0].clone()
    pair.ours(case.input(seed=8))
    assert torch.equal(outputs[0], kept)


def test_inputs_and_weights_are_left_as_they_were(pair):
    x = pair.x.clone()
    before = [p.detach().clone() for p in pair.ours.parameters()]
    pair.ours(pair.x).square().sum().backward()
    assert torch.equal(x, pair.x)
    assert all(torch.equal(a, b) for a, b in zip(before, pair.ours.parameters(), strict=True))


def test_two_instances_in_turn_do_not_disturb_each_other(case, pair):
    other, other_reference = case.models(seed=4)
    for k in range(2):
        x = case.input(13, seed=k)
        assert_close(pair.ours(pair.x), pair.theirs(pair.x))
        assert_close(other(x), other_reference(x))
    assert_same_state(pair.ours, pair.theirs)
    assert_same_state(other, other_reference)


@pytest.mark.gpu
def test_it_is_right_on_another_stream(case, pair):
    if case.device == "cpu":
        pytest.skip("a CPU has no streams")
    expected = pair.theirs(pair.x)
    stream = torch.cuda.Stream()
    held = pair.x.clone()
    pair.x.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        pair.x.copy_(held)  # whoever does not wait for this stream reads zeros
        y = pair.ours(pair.x)
    stream.synchronize()
    assert_close(y, expected)
