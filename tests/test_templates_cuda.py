"""The flagship's CUDA templates `library` and `simt`, and its drop-in module.

Without a GPU: rendering, constraints, nvcc's verdict, and the module around a fused op that
PyTorch computes. With one (`-m gpu`): every strategy against float64, at awkward shapes.
"""

from __future__ import annotations

import copy
import random
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from families import built_in
from torch import nn

from tuner.kernel.binding import BoundOp, bind
from tuner.kernel.family import Family
from tuner.trial import Candidate, Params

EPS = 1e-5
H200 = {
    "device.kind": "cuda",
    "device.capability": 90,
    "device.num_sms": 132,
    "device.smem_bytes_max": 232448,
    "device.smem_bytes_sm": 233472,
    "device.regs_per_sm": 65536,
}
CONFIGS: list[Params] = [
    {"template": "library"},
    {"template": "library", "finalise": "fused", "norm_columns": 512, "norm_vector": 2},
    {"template": "library", "stats": "atomics", "stats_vector": 2},
    {"template": "library", "stats": "atomics", "finalise": "fused", "scale_mode": "prescaled"},
    {"template": "library", "stats": "shared_memory", "stats_columns": 32, "stats_rows": 16384},
    {"template": "library", "stats": "shared_memory", "scale_mode": "prescaled"},
    {"template": "simt"},
    {"template": "simt", "stats": "atomics", "min_blocks": 2, "scale_mode": "epilogue"},
    {"template": "simt", "stats": "shared_memory", "stages": 2, "group_m": 1},
    {"template": "simt", "load": "registers", "stages": 2, "finalise": "fused"},
    {"template": "simt", "load": "registers", "stages": 2, "block_m": 64, "block_n": 256,
     "thread_n": 16, "block_k": 8, "stats": "shared_memory", "scale_mode": "epilogue"},
    {"template": "simt", "block_m": 32, "block_n": 32, "thread_m": 4, "thread_n": 4,
     "block_k": 32, "stages": 5},
    {"template": "simt", "block_m": 256, "block_n": 128, "thread_m": 16, "block_k": 8,
     "stages": 4, "stats": "atomics", "finalise": "fused"},
]  # fmt: skip
SHAPES = [(2, 7, 1), (33, 64, 5), (1000, 100, 129), (2, 512, 1024), (1024, 512, 1024), (33, 7, 36)]


def _name(params: Params) -> str:
    return "-".join(str(value) for value in params.values())


@pytest.fixture(scope="module")
def family() -> Family:
    return built_in("gemm_scale_batchnorm")


def _nvcc() -> str:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).is_file():
        pytest.skip("needs nvcc, which is not on the PATH nor in /usr/local/cuda/bin")
    return nvcc


def _compile(candidate: Candidate, arch: str, target: Path, *flags: str) -> str:
    """Compile to `target` and return ptxas's account of registers and spills."""
    source = target.with_suffix(".cu")
    source.write_text(candidate.source, encoding="utf-8")
    command = [_nvcc(), "-O3", "-std=c++17", f"-arch={arch}", "-Xptxas", "-v", *flags]
    done = subprocess.run([*command, "-o", target, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    return done.stderr


def _sample(family: Family, template: str, rng: random.Random) -> Params:
    """Draw a configuration that obeys the template's own constraints."""
    head = family.template(template).parameters
    varied = {name: item.values for name, item in head.items() if item.values is not None}
    constraints = family.constraints([template], varied)
    while True:
        params: Params = {name: rng.choice(values) for name, values in varied.items()}
        params["template"] = template
        if all(c.expression.evaluate({**H200, **params}) for c in constraints):
            return params


# ---- without a GPU --------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["library", "simt"])
def test_random_feasible_configurations_compile(
    template: str, family: Family, tmp_path: Path
) -> None:
    rng = random.Random(3)
    for arch in ("sm_90a", "sm_80"):
        for _ in range(2):
            candidate = family.render(_sample(family, template, rng), H200)
            _compile(candidate, arch, tmp_path / "k.cubin", "-cubin")


@pytest.mark.parametrize("template", ["library", "simt"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_defaults_do_not_spill(template: str, arch: str, family: Family, tmp_path: Path) -> None:
    log = _compile(family.render({"template": template}), arch, tmp_path / "k.cubin", "-cubin")
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill stores", log)]
    assert len(spills) >= 3
    assert not any(spills), log


@pytest.mark.parametrize("params", CONFIGS, ids=_name)
def test_text_may_stand_in_an_exported_file(params: Params, family: Family) -> None:
    source = family.render(params, H200).source
    for word in (r"\bpass\b", r"\btry\s*:", r"\bexcept\b", '"""', r"torch", "use_fast_math"):
        assert not re.search(word, source), word


def test_module_text_may_stand_in_an_exported_file(family: Family) -> None:
    for word in (r"\bpass\b", r"\btry\b", r"\bexcept\b", r"\bimport\b", '"""', r"\.item\("):
        assert not re.search(word, family.model_new), word


@pytest.mark.parametrize("params", CONFIGS, ids=_name)
def test_configurations_of_the_gpu_tests_obey_the_constraints(
    params: Params, family: Family
) -> None:
    template = family.template(str(params["template"]))
    varied = {n: item.values for n, item in template.parameters.items() if item.values}
    env = {**H200, **template.filled(params), "template": template.name}
    broken = [
        c.why
        for c in family.constraints([template.name], varied)
        if not c.expression.evaluate(env)
    ]
    assert broken == []


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"block_m": 32, "thread_m": 16}, "a warp is 4 threads high"),
        ({"block_m": 256, "block_n": 256, "thread_m": 4, "thread_n": 4}, "at most 1024 threads"),
        ({"block_k": 32, "stages": 5, "block_m": 256, "block_n": 256}, "fit in shared memory"),
        ({"thread_m": 16, "thread_n": 16}, "255 registers"),
        ({"min_blocks": 4}, "registers of one multiprocessor"),
        ({"load": "registers", "stages": 3}, "two in shared memory suffice"),
    ],
)
def test_infeasible_configurations_are_refused_with_the_reason(
    params: Params, reason: str, family: Family
) -> None:
    template = family.template("simt")
    varied = {n: item.values for n, item in template.parameters.items() if item.values}
    env = {**H200, **template.filled(params), "template": "simt"}
    broken = [
        c.why for c in family.constraints(["simt"], varied) if not c.expression.evaluate(env)
    ]
    assert any(reason in why for why in broken), broken


# ---- the drop-in module, around an op that PyTorch computes -----------------------------------


def _reference(family: Family) -> type[nn.Module]:
    namespace: dict[str, object] = {}
    exec(family.reference.read_text(encoding="utf-8"), namespace)
    model = namespace["Model"]
    assert isinstance(model, type)
    return model


def _module(family: Family, fused_op: object) -> dict[str, object]:
    namespace: dict[str, object] = {
        "torch": torch, "nn": nn, "F": nn.functional, "fused_op": fused_op,
        "fused_eval": None,
    }  # fmt: skip
    exec(family.model_new, namespace)
    return namespace


@pytest.fixture(scope="module")
def modules(family: Family) -> tuple[type[nn.Module], type[nn.Module], object]:
    """Return Model, ModelNew and the op between, with the family's own autograd formula."""

    @torch.library.custom_op("tests_gemm_scale_batchnorm::fused", mutates_args=())
    def fused(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor,
        gamma: torch.Tensor, beta: torch.Tensor, eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        z = nn.functional.linear(x, weight, bias) * scale
        mean, var = z.mean(0), z.var(0, unbiased=False)
        return (z - mean) * torch.rsqrt(var + eps) * gamma + beta, mean, z.var(0)

    @fused.register_fake
    def _(x, weight, bias, scale, gamma, beta, eps):
        rows = weight.shape[0]
        return x.new_empty(x.shape[0], rows), x.new_empty(rows), x.new_empty(rows)

    namespace = _module(family, fused)
    fused.register_autograd(namespace["backward"], setup_context=namespace["setup_context"])
    return _reference(family), namespace["ModelNew"], fused  # type: ignore[return-value]


def _pair(modules, **kwargs) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    old = modules[0](7, 5, (5,), **kwargs)
    torch.manual_seed(0)
    return old, modules[1](7, 5, (5,), **kwargs)


def _assert_same_state(old: nn.Module, new: nn.Module) -> None:
    assert list(old.state_dict()) == list(new.state_dict())
    for name, value in old.state_dict().items():
        torch.testing.assert_close(new.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_equal_seeds_give_equal_weights(modules) -> None:
    old, new = _pair(modules)
    for name, value in old.state_dict().items():
        assert torch.equal(new.state_dict()[name], value)
    new.load_state_dict(old.state_dict(), strict=True)
    old.load_state_dict(copy.deepcopy(new).state_dict(), strict=True)


@pytest.mark.parametrize("momentum", [0.1, None, 1, 0.0])
def test_buffers_and_gradients_follow_the_reference_in_every_mode(modules, momentum) -> None:
    old, new = _pair(modules, momentum=momentum)
    for batch in (4, 33, 2):
        inputs = [torch.rand(batch, 7).requires_grad_() for _ in range(2)]
        inputs[1].data.copy_(inputs[0].data)
        answers = [old(inputs[0]), new(inputs[1])]
        torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-5)
        grad = torch.randn_like(answers[0])
        for answer in answers:
            answer.backward(grad)
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-3, atol=1e-4)
        for mine, theirs in zip(new.parameters(), old.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=2e-4)
            mine.grad = theirs.grad = None
    x = torch.rand(9, 7)
    with torch.no_grad():
        old(x), new(x)
    _assert_same_state(old, new)
    assert not new.bn.running_mean.requires_grad
    for freeze in (lambda m: m.bn.eval(), lambda m: m.eval()):
        freeze(old), freeze(new)
        torch.testing.assert_close(new(x), old(x), rtol=1e-4, atol=1e-5)
        _assert_same_state(old, new)


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ],
)
def test_other_batch_norms_behave_as_pytorchs(modules, options) -> None:
    old, new = _pair(modules)
    old.bn, new.bn = nn.BatchNorm1d(5, **options), nn.BatchNorm1d(5, **options)
    for _ in range(2):
        x = torch.rand(8, 7)
        torch.testing.assert_close(new(x), old(x), rtol=1e-4, atol=1e-5)
    _assert_same_state(old, new)
    torch.testing.assert_close(new.eval()(x), old.eval()(x), rtol=1e-4, atol=1e-5)


def test_one_row_is_pytorchs_value_error(modules) -> None:
    old, new = _pair(modules)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as mine:
        new(torch.rand(1, 7))
    with pytest.raises(ValueError) as theirs:
        old(torch.rand(1, 7))
    assert str(mine.value) == str(theirs.value)
    _assert_same_state(old, new)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.rand(3, 6), ["6 features", "takes 7"]),
        (torch.rand(3, 7).double(), ["torch.float64", "torch.float32"]),
        (torch.ones(3, 7, dtype=torch.int64), ["torch.int64", "torch.float32"]),
        (torch.rand(3, 7, device="meta"), ["meta", "cpu"]),
    ],
)
def test_wrong_inputs_are_refused_by_name(modules, x, words) -> None:
    _, new = _pair(modules)
    with pytest.raises(RuntimeError) as error:
        new(x)
    assert all(word in str(error.value) for word in words), error.value


def test_other_dtypes_and_autocast_take_the_references_path(modules) -> None:
    old, new = _pair(modules)
    x = torch.rand(9, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, theirs = new(x), old(x)
    assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert torch.equal(new.double()(x.double()), old.double()(x.double()))


def test_gradients_are_right_to_the_second_order(modules) -> None:
    torch.manual_seed(0)
    shapes = [(6, 4), (3, 4), (3,), (3,), (3,), (3,)]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def y(*args):
        return modules[2](*args, EPS)[0]

    assert torch.autograd.gradcheck(y, inputs)
    assert torch.autograd.gradgradcheck(y, inputs)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_whole_graph_compiles(modules, momentum) -> None:
    old, new = _pair(modules, momentum=momentum)
    compiled = torch.compile(new, fullgraph=True, backend="aot_eager")
    for batch in (4, 33):
        x = torch.rand(batch, 7)
        torch.testing.assert_close(compiled(x), old(x), rtol=1e-4, atol=1e-5)
    _assert_same_state(old, new)


# ---- on a GPU -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ops(family: Family, tmp_path_factory) -> dict[str, BoundOp]:
    """Build and bind every configuration, in parallel."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}" + ("a" if major == 9 else "")
    folder = tmp_path_factory.mktemp("kernels")

    def built(number: int) -> BoundOp:
        candidate = family.render(CONFIGS[number], H200)
        target = folder / f"k{number}.so"
        _compile(candidate, arch, target, "-shared", "-Xcompiler", "-fPIC")
        return bind(candidate.plan, "cuda", target)

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(map(_name, CONFIGS), pool.map(built, range(len(CONFIGS))), strict=True))


def _inputs(batch: int, in_features: int, out_features: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(batch + in_features + out_features)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    weight = (2 * rand(out_features, in_features) - 1) / in_features**0.5
    bias, scale, beta = (2 * rand(3, out_features) - 1).unbind(0)
    values = [rand(batch, in_features), weight, bias, scale, 0.5 + rand(out_features), beta]
    return [value.clone().to("cuda" if torch.cuda.is_available() else "cpu") for value in values]


def _float64(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    x, weight, bias, scale, gamma, beta = (value.double() for value in inputs)
    z = (x @ weight.t() + bias) * scale
    mean, var = z.mean(0), z.var(0, unbiased=False)
    return (z - mean) * torch.rsqrt(var + EPS) * gamma + beta, mean, z.var(0)


def _eager(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    x, weight, bias, scale, gamma, beta = inputs
    z = nn.functional.linear(x, weight, bias) * scale
    var, mean = torch.var_mean(z, 0)
    y = nn.functional.batch_norm(z, None, None, gamma, beta, training=True, eps=EPS)
    return y, mean, var


def _rms(value: torch.Tensor) -> float:
    return value.double().square().mean().sqrt().item()


def assert_accurate(op, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Assert that the op's errors against float64 are at most twice eager float32's."""
    answers, oracle, eager = op(*inputs, EPS), _float64(inputs), _eager(inputs)
    floor = 5e-7 * max(1.0, _rms(oracle[1]))  # a few roundings of the largest number in play
    for name, mine, right, theirs in zip(
        ("y", "mean", "var"), answers, oracle, eager, strict=True
    ):
        error, bound = _rms(mine - right), 2 * _rms(theirs - right) + floor
        assert error <= bound, f"{name}: rms error {error:.2e}, bound {bound:.2e}"
    return answers


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", list(map(_name, CONFIGS)))
def test_outputs_are_as_accurate_as_eager_float32(name, shape, ops) -> None:
    assert_accurate(ops[name], _inputs(*shape))


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(map(_name, CONFIGS)))
def test_offsets_zero_scales_and_constant_columns_stay_exact(name, ops) -> None:
    inputs = _inputs(300, 72, 133)
    x, weight, _bias, scale, _gamma, beta = inputs
    x += 100.0
    assert_accurate(ops[name], inputs)
    x -= 100.0
    scale[0] = 0.0
    scale[1] = -abs(scale[1])
    scale[2] = 1e-20
    weight[3] = 0.0
    y, _, var = assert_accurate(ops[name], inputs)
    assert torch.equal(y[:, 0], beta[0].expand(300))
    assert torch.equal(y[:, 3], beta[3].expand(300))
    assert var[3] == 0
    x[:] = x[:1].clone()  # every column constant, at a value that is not zero
    y, _, var = ops[name](*inputs, EPS)
    assert var.max() < 1e-12
    if name.startswith("simt"):  # cuBLAS need not treat all rows alike
        assert torch.equal(y, beta.expand(300, 133))
    torch.testing.assert_close(y, beta.expand(300, 133), rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", list(map(_name, CONFIGS)))
def test_bad_values_poison_the_columns_that_see_them(name, value, ops) -> None:
    inputs = _inputs(70, 16, 40)
    inputs[1][7, 5] = value
    y, mean, var = ops[name](*inputs, EPS)
    assert torch.equal(y.isnan(), _eager(inputs)[0].isnan())
    assert y[:, 7].isnan().all() and y.isnan().sum() == 70
    assert not mean[7].isfinite() and not var[7].isfinite()
    inputs[0][33, 5] = value
    y, mean, var = ops[name](*inputs, EPS)
    assert y.isnan().all() and not mean.isfinite().any() and not var.isfinite().any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(map(_name, CONFIGS)))
def test_repeats_give_the_same_bits_unless_atomics_are_declared(name, ops, family) -> None:
    inputs = _inputs(1000, 64, 129)
    first = ops[name](*inputs, EPS)
    params = dict(zip(map(_name, CONFIGS), CONFIGS, strict=True))[name]
    is_deterministic = family.render(params, H200).is_deterministic
    assert is_deterministic == (params.get("stats") != "atomics")
    for _ in range(3):
        for mine, before in zip(ops[name](*inputs, EPS), first, strict=True):
            if is_deterministic:
                assert torch.equal(mine, before)
            else:
                torch.testing.assert_close(mine, before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(map(_name, CONFIGS)))
def test_another_stream_and_a_cuda_graph(name, ops) -> None:
    inputs = _inputs(130, 64, 132)
    expected = ops[name](*inputs, EPS)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        answers = ops[name](*inputs, EPS)
    stream.synchronize()
    torch.testing.assert_close(answers, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answers = ops[name](*inputs, EPS)
    for value in answers:
        value.zero_()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(answers, expected)


@pytest.mark.gpu
def test_module_keeps_the_references_buffers_on_the_gpu(ops, family) -> None:
    model = _reference(family)
    for op in ops.values():
        new = _module(family, op)["ModelNew"]
        torch.manual_seed(0)
        old_module = model(64, 129, (129,)).cuda()
        new_module = new(64, 129, (129,)).cuda()  # type: ignore[operator]
        new_module.load_state_dict(old_module.state_dict())
        with torch.no_grad():
            for _ in range(3):
                x = torch.rand(100, 64, device="cuda")
                torch.testing.assert_close(new_module(x), old_module(x), rtol=1e-4, atol=1e-4)
        _assert_same_state(old_module, new_module)
