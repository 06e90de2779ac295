"""LayerNorm: the second operator's module, and its C++ and CUDA templates.

Without a GPU: the C++ template with real g++ and the CUDA one through nvcc alone. With one
(`-m gpu`): every CUDA strategy against float64, next to PyTorch's own error.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cpu_machine import FACTS, NARROW, compiled
from families import built_in
from shared_builds import built_once
from torch import Tensor, nn

from tuner.kernel.binding import BoundOp, bind
from tuner.kernel.family import Family
from tuner.problem.reference import load_problem
from tuner.trial import Candidate, Params

EPS = 1e-5
FLOOR = 16 * 2.0**-24  # of the largest output
CPU_CONFIGS: list[Params] = [
    {"template": "cpu"},
    {"template": "cpu", "stats": "two_pass", "split": 4, "stream_output": True, "piece": 64},
    {"template": "cpu", "stats": "two_pass", "split": 3, "width": NARROW, "huge_pages": False},
    {"template": "cpu", "stats": "per_thread", "width": NARROW, "stream_output": True},
    {"template": "cpu", "stats": "per_thread", "max_threads": 1},
    {"template": "cpu", "stats": "atomics"},
    {"template": "cpu", "stats": "atomics", "split": 5, "stream_output": True},
]
CUDA_CONFIGS: list[Params] = [
    {"template": "cuda"},
    {"template": "cuda", "split": 3, "norm_rows": 1, "norm_columns": 512, "vector": 2},
    {"template": "cuda", "split": 1000, "threads": 128, "norm_rows": 16, "reverse": False},
    {"template": "cuda", "stats": "atomics", "threads": 1024, "unroll": 1, "stream_output": False},
    {"template": "cuda", "stats": "atomics", "split": 1, "vector": 1, "threads": 32},
    {"template": "cuda", "stats": "shared_memory"},
    {"template": "cuda", "stats": "shared_memory", "threads": 1024, "held": 32, "unroll": 8},
    {"template": "cuda", "stats": "shared_memory", "threads": 256, "block_rows": 8},
    {"template": "cuda", "stats": "shared_memory", "threads": 128, "block_rows": 2,
     "held": 64, "vector": 2, "stream_output": False},
]  # fmt: skip
SHAPES = [(1, 1), (7, 13), (40, 1024), (33, 770), (3, 100_000), (1000, 6)]
GPU_SHAPES = [*SHAPES, (4096, 1024), (70_000, 36), (2, 1_000_001)]
H200 = {"device.kind": "cuda", "device.capability": 90, "device.num_sms": 132}


def _name(params: Params) -> str:
    return "-".join(str(value) for value in params.values())


@functools.cache
def _family() -> Family:
    return built_in("layer_norm")


# ---- building -------------------------------------------------------------------------------


def _nvcc() -> str:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).is_file():
        pytest.skip("needs nvcc, which is not on the PATH nor in /usr/local/cuda/bin")
    return nvcc


def _compile_cuda(candidate: Candidate, arch: str, *, is_whole: bool = True) -> tuple[Path, str]:
    """Build a library, or only the kernels: the host's half is a third of the work."""
    command = [_nvcc(), "-O3", "-std=c++17", f"-arch={arch}", "-Xptxas", "-v"]
    command += ["-Xcompiler", "-fPIC", "-shared"] if is_whole else ["-cubin"]
    return built_once(candidate.source, ".cu", command)


@functools.cache
def _cpu_op(index: int) -> BoundOp:
    candidate = _family().render(CPU_CONFIGS[index], FACTS)
    return bind(candidate.plan, "cpp", compiled(candidate))


@functools.cache
def _cuda_op(index: int) -> BoundOp:
    major, minor = torch.cuda.get_device_capability()
    candidate = _family().render(CUDA_CONFIGS[index], H200)
    return bind(candidate.plan, "cuda", _compile_cuda(candidate, f"sm_{major}{minor}")[0])


def _each(build: Callable[[int], BoundOp], configs: list[Params]) -> pytest.MarkDecorator:
    ops = [functools.partial(build, index) for index in range(len(configs))]
    return pytest.mark.parametrize("op", ops, ids=list(map(_name, configs)))


cpu_op = _each(_cpu_op, CPU_CONFIGS)
cuda_op = _each(_cuda_op, CUDA_CONFIGS)
Op = Callable[[], BoundOp]  # built at the first test that asks


# ---- what is right --------------------------------------------------------------------------


def _arguments(rows: int, cols: int, device: str = "cpu") -> list[Tensor]:
    draw = torch.Generator(device).manual_seed(rows * 1009 + cols)
    x = torch.rand(rows, cols, generator=draw, device=device)
    weight, bias = (torch.randn(cols, generator=draw, device=device) for _ in range(2))
    return [x, weight, bias]


def _reference(arguments: list[Tensor], dtype: torch.dtype, eps: float = EPS) -> list[Tensor]:
    x, weight, bias = (tensor.to(dtype) for tensor in arguments)
    y, mean, rstd = torch.native_layer_norm(x, [x.shape[1]], weight, bias, eps)
    return [y, mean.reshape(-1), rstd.reshape(-1)]


def _assert_float32_class(op: BoundOp, arguments: list[Tensor], eps: float = EPS) -> None:
    exact = _reference(arguments, torch.float64, eps)
    baseline = _reference(arguments, torch.float32, eps)
    for name, mine, theirs, true in zip(
        ("y", "mean", "rstd"), op(*arguments, eps), baseline, exact, strict=True
    ):
        assert mine.dtype == torch.float32 and mine.shape == true.shape
        for norm in (torch.amax, lambda e: e.square().mean().sqrt()):
            error, own = (norm((t.double() - true).abs()).item() for t in (mine, theirs))
            floor = FLOOR * true.abs().max().item()
            assert error <= max(2.0 * own, floor), (name, error, own, floor)


def _heavy_tailed(x: Tensor) -> Tensor:
    draw = torch.Generator(x.device).manual_seed(5)
    factor = (1.5 * torch.randn(x.shape, generator=draw, device=x.device)).exp()
    tailed = torch.randn(x.shape, generator=draw, device=x.device) * factor
    return tailed.clamp(-1e4, 1e4)


def _first_is_outlier(x: Tensor) -> Tensor:
    # Sums about the first element of a row, or of a part, would lose the others.
    x = x.clone()
    x[:, :: max(1, x.shape[1] // 4)] = 1e4
    return x


def _check_difficult_inputs(op: BoundOp, shape: tuple[int, int], device: str) -> None:
    x, weight, bias = _arguments(*shape, device)
    for changed in (x + 100.0, x * 1e-6, x * 1e6, _heavy_tailed(x), _first_is_outlier(x)):
        _assert_float32_class(op, [changed, weight, bias])


def _check_constant_rows(op: BoundOp, device: str) -> None:
    for cols in (1, 5, 96, 1001, 40_000):
        x, weight, bias = _arguments(9, cols, device)
        x = x[:, :1].expand(9, cols).contiguous() * 1000.0
        y, mean, rstd = op(x, weight, bias, EPS)
        assert torch.equal(y, bias.expand(9, cols)), cols
        assert torch.equal(mean, x[:, 0]), cols
        torch.testing.assert_close(rstd, torch.full_like(rstd, EPS**-0.5), rtol=1e-6, atol=0)


def _check_bad_values(op: BoundOp, device: str) -> None:
    for value, cols in itertools.product((float("nan"), float("inf")), (7, 4096, 50_000)):
        for column in (0, cols - 1):
            arguments = _arguments(5, cols, device)
            arguments[0][2, column] = value
            y, _, rstd = op(*arguments, EPS)
            assert y[2].isnan().all() and rstd[2].isnan()
            assert torch.equal(y.isnan(), _reference(arguments, torch.float32)[0].isnan())


def _check_repeats(op: BoundOp, device: str) -> None:
    arguments = _arguments(17, 5000, device)
    first = op(*arguments, EPS)
    for _ in range(3):
        assert all(map(torch.equal, first, op(*arguments, EPS)))


# ---- the C++ template -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@cpu_op
def test_cpu_is_as_accurate_as_pytorch_float32(op: Op, shape: tuple[int, int]) -> None:
    _assert_float32_class(op(), _arguments(*shape))


@pytest.mark.parametrize("shape", [(7, 13), (40, 1024), (5, 10_007)], ids=str)
@cpu_op
def test_cpu_is_as_accurate_on_difficult_inputs(op: Op, shape: tuple[int, int]) -> None:
    _check_difficult_inputs(op(), shape, "cpu")


@cpu_op
def test_cpu_constant_rows_give_the_bias_exactly(op: Op) -> None:
    _check_constant_rows(op(), "cpu")


@cpu_op
def test_cpu_bad_values_poison_their_row_alone(op: Op) -> None:
    _check_bad_values(op(), "cpu")


@pytest.mark.parametrize("index", range(len(CPU_CONFIGS)), ids=map(_name, CPU_CONFIGS))
def test_cpu_repeats_give_the_same_bits_unless_declared(index: int) -> None:
    params = CPU_CONFIGS[index]
    is_split_by_atomics = params.get("stats") == "atomics" and params.get("split", 1) != 1
    assert _family().render(params, FACTS).is_deterministic == (not is_split_by_atomics)
    if not is_split_by_atomics:
        _check_repeats(_cpu_op(index), "cpu")


@cpu_op
def test_cpu_eps_counts(op: Op) -> None:
    arguments = _arguments(6, 50)
    arguments[0] *= 1e-4
    for eps in (1e-12, 1e-5, 0.5):
        _assert_float32_class(op(), arguments, eps)


# ---- the CUDA template ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "arch"), [(0, "sm_90a"), (1, "sm_80"), (3, "sm_90a"), (5, "sm_80"), (7, "sm_90a")]
)
def test_cuda_compiles_without_warnings(index: int, arch: str) -> None:
    candidate = _family().render(CUDA_CONFIGS[index], H200)
    _, log = _compile_cuda(candidate, arch, is_whole=index < 2)
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == 6 and max(registers) <= 255  # two kernels, or two forms of one


@pytest.mark.parametrize("params", CUDA_CONFIGS, ids=_name)
def test_configurations_of_the_gpu_tests_obey_the_constraints(params: Params) -> None:
    template = _family().template("cuda")
    varied = {n: item.values for n, item in template.parameters.items() if item.values}
    env = {**H200, **template.filled(params), "template": "cuda"}
    rules = _family().constraints(["cuda"], varied)
    assert [rule.why for rule in rules if not rule.expression.evaluate(env)] == []


@pytest.mark.parametrize("params", [*CPU_CONFIGS, *CUDA_CONFIGS], ids=_name)
def test_text_may_stand_in_an_exported_file(params: Params) -> None:
    source = _family().render(params, {**FACTS, **H200}).source
    for word in (r"\bpass\b", r"\btry\s*:", r"\bexcept\b", '"""', "torch", "use_fast_math"):
        assert not re.search(word, source), word
    assert not source.endswith("\\")


@pytest.fixture(scope="module")
def _compiled_together() -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(_cuda_op, range(len(CUDA_CONFIGS))))


@pytest.mark.gpu
@pytest.mark.usefixtures("_compiled_together")
class TestOnTheGpu:
    @pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
    @cuda_op
    def test_is_as_accurate_as_pytorch_float32(self, op: Op, shape: tuple[int, int]) -> None:
        _assert_float32_class(op(), _arguments(*shape, "cuda"))

    @cuda_op
    def test_is_as_accurate_on_rows_of_4_million(self, op: Op) -> None:
        _assert_float32_class(op(), _arguments(16, 4_194_304, "cuda"))

    @pytest.mark.parametrize("shape", [(7, 13), (4096, 1024), (5, 100_002)], ids=str)
    @cuda_op
    def test_is_as_accurate_on_difficult_inputs(self, op: Op, shape: tuple[int, int]) -> None:
        _check_difficult_inputs(op(), shape, "cuda")

    @cuda_op
    def test_constant_rows_give_the_bias_exactly(self, op: Op) -> None:
        _check_constant_rows(op(), "cuda")

    @cuda_op
    def test_bad_values_poison_their_row_alone(self, op: Op) -> None:
        _check_bad_values(op(), "cuda")

    @pytest.mark.parametrize("index", range(len(CUDA_CONFIGS)), ids=map(_name, CUDA_CONFIGS))
    def test_repeats_give_the_same_bits_unless_declared(self, index: int) -> None:
        if _family().render(CUDA_CONFIGS[index], H200).is_deterministic:
            _check_repeats(_cuda_op(index), "cuda")

    @cuda_op
    def test_works_on_a_stream_of_its_own_and_in_a_graph(self, op: Op) -> None:
        arguments = _arguments(64, 3000, "cuda")
        expected = _reference(arguments, torch.float32)[0]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            arguments[0].mul_(2.0)
            y = op()(*arguments, 4 * EPS)[0]
        stream.synchronize()
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = op()(*arguments, EPS)[0]
        arguments[0].copy_(torch.rand_like(arguments[0]))
        graph.replay()
        torch.cuda.synchronize()
        fresh = _reference(arguments, torch.float32)[0]
        torch.testing.assert_close(y, fresh, rtol=1e-5, atol=1e-5)


# ---- the module -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def modules() -> tuple[type[nn.Module], type[nn.Module], list[tuple[int, ...]]]:
    """The reference's Model, the ModelNew around our operator, and the shapes it was given."""
    op, calls = _cpu_op(0), []

    @torch.library.custom_op("tuner_test_layer_norm::fused", mutates_args=())
    def fused(
        x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(tuple(x.shape))
        return op(x, weight, bias, eps)

    @fused.register_fake
    def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(x), x.new_empty(len(x)), x.new_empty(len(x))

    names: dict[str, object] = {"torch": torch, "nn": nn, "F": nn.functional, "fused_op": fused}
    exec(_family().model_new, names)
    fused.register_autograd(names["backward"], setup_context=names["setup_context"])
    return load_problem(_family().reference).module.Model, names["ModelNew"], calls


def _pair(modules: tuple, shape: object, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    model, model_new, calls = modules
    calls.clear()
    theirs, mine = model(shape), model_new(shape)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=draw))
    mine.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(mine.state_dict(), strict=True)
    return theirs, mine


@pytest.mark.parametrize(
    ("normalized", "shape"),
    [((32,), (8, 32)), (32, (8, 32)), ((4, 6, 5), (3, 4, 6, 5)), ((6, 5), (2, 3, 6, 5)),
     ((7,), (7,)), ((4, 6), (4, 6)), ((9,), (2, 3, 4, 9))],
)  # fmt: skip
def test_module_gives_the_references_output_and_gradients(modules, normalized, shape) -> None:
    theirs, mine = _pair(modules, normalized)
    for training in (True, False):
        theirs.train(training)
        mine.train(training)
        x = torch.randn(shape, requires_grad=True)
        grad = torch.randn(shape)
        expected, y = theirs(x), mine(x)
        assert modules[2], "the fused operator was not called"
        assert y.shape == expected.shape and y.is_contiguous()
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        wanted = torch.autograd.grad(expected, [x, *theirs.parameters()], grad)
        given = torch.autograd.grad(y, [x, *mine.parameters()], grad)
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)


def test_module_can_be_differentiated_twice(modules) -> None:
    theirs, mine = _pair(modules, (12,))
    x = torch.randn(5, 12, requires_grad=True)
    seconds = []
    for model in (theirs, mine):
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*seconds, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("frozen", ["weight", "bias", "x"])
def test_module_leaves_out_gradients_that_nobody_needs(modules, frozen: str) -> None:
    theirs, mine = _pair(modules, (12,))
    x = torch.randn(5, 12, requires_grad=frozen != "x")
    for model in (theirs, mine):
        if frozen != "x":
            getattr(model.ln, frozen).requires_grad_(False)
        model(x).sum().backward()
    for (_, wanted), (_, given) in zip(
        theirs.named_parameters(), mine.named_parameters(), strict=True
    ):
        assert (wanted.grad is None) == (given.grad is None)


def test_module_reads_weights_afresh_and_survives_copies(modules) -> None:
    theirs, mine = _pair(modules, (16,))
    x = torch.randn(4, 16)
    mine(x)
    with torch.no_grad():
        for model in (theirs, mine):
            model.ln.weight.mul_(-3.0)
            model.ln.bias.data.copy_(torch.arange(16.0))
            model.ln.eps = 0.5
    for model in (mine, copy.deepcopy(mine)):
        torch.testing.assert_close(model(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keywords", [{"elementwise_affine": False}, {"bias": False}], ids=str)
def test_module_without_weight_or_bias_follows_the_reference(modules, keywords) -> None:
    theirs, mine = _pair(modules, (16,))
    x = torch.randn(4, 16, requires_grad=True)
    results = []
    for model in (theirs, mine):
        model.ln = nn.LayerNorm((16,), **keywords)
        y = model(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])))
    assert modules[2], "the fused operator was not called"
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "view",
    [lambda x: x.t().contiguous().t(), lambda x: x[::2], lambda x: x[:1].expand(6, 16),
     lambda x: torch.cat([x.reshape(-1), x[0]])[1:97].view(6, 16)],
)  # fmt: skip
def test_module_takes_any_strides_and_alignment(modules, view) -> None:
    theirs, mine = _pair(modules, (16,))
    x = view(torch.randn(6, 16))
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16)])
def test_module_takes_no_rows(modules, shape) -> None:
    theirs, mine = _pair(modules, (16,))
    assert mine(torch.randn(shape)).shape == theirs(torch.randn(shape)).shape


@pytest.mark.parametrize(
    ("convert", "kind"),
    [(lambda m: m.double(), torch.float64), (lambda m: m.bfloat16(), torch.bfloat16),
     (lambda m: m, torch.bfloat16)],
)  # fmt: skip
def test_module_follows_the_reference_in_other_dtypes(modules, convert, kind) -> None:
    theirs, mine = (convert(model) for model in _pair(modules, (16,)))
    x = torch.randn(4, 16, dtype=kind)
    assert torch.equal(mine(x), theirs(x))
    assert not modules[2]


def test_module_follows_the_reference_under_autocast(modules) -> None:
    theirs, mine = _pair(modules, (16,))
    x = torch.randn(4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, given = theirs(x), mine(x)
    assert given.dtype == wanted.dtype and torch.equal(given, wanted)


def test_module_refuses_mixed_dtypes_and_devices_by_name(modules) -> None:
    _, mine = _pair(modules, (16,))
    with pytest.raises(RuntimeError, match=r"float64.*float32"):
        mine(torch.randn(4, 16).double())
    with pytest.raises(RuntimeError, match=r"meta.*cpu"):
        mine(torch.randn(4, 16, device="meta"))


@pytest.mark.parametrize("shape", [(4, 15), (15,), (16, 1), ()])
def test_module_refuses_a_wrong_shape_like_the_reference(modules, shape) -> None:
    theirs, mine = _pair(modules, (16,))
    x = torch.randn(shape)
    with pytest.raises(RuntimeError) as wanted:
        theirs(x)
    with pytest.raises(RuntimeError) as given:
        mine(x)
    assert str(given.value) == str(wanted.value)


def test_reference_takes_sizes_from_a_config() -> None:
    problem = load_problem(_family().reference, {"rows": 6, "cols": 50})
    (x,) = problem.make_inputs(0)
    assert x.shape == (6, 50)
    assert problem.make_model(0).ln.normalized_shape == (50,)
    assert dict(_family().op.sizes) == dict(load_problem(_family().reference).sizes)
