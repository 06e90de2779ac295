"""Files with Triton's kernels: calls past PyTorch's dispatcher, launches past Triton's look."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import itertools
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_any_module import derive
from torch.utils._python_dispatch import TorchDispatchMode

from tuner.export.module import export_text
from tuner.export.python_operators import python_binding, python_calls
from tuner.export.registration import cpp_binding
from tuner.kernel.family import builtin_folder, load_family
from tuner.machine.datasheets import known_device
from tuner.plans import Argument, Plan, Step, Tensor

PLAN = Plan(
    "fused_direct",
    (
        Argument("x", shape=("rows", "cols")),
        Argument("w", shape=("cols",)),
        Argument("eps", "float"),
    ),
    (Tensor("y", ("rows", "cols")),),
    (),
    (Step("call", "fused_direct_go", ("x", "w", "y", "eps")),),
)
NUMBERS = itertools.count()


class Direct:
    """A call as an exported file has it, and how often its operator checked arguments."""

    def __init__(self):
        name = f"tests_of_direct_{next(NUMBERS)}"
        text = f"{python_calls(PLAN, name)}\n\n{python_binding(PLAN, name)}"
        for gpu, cpu in (
            ('device.type != "cuda"', "False"),
            ("torch.cuda.current_device()", "-1"),
        ):
            assert gpu in text
            text = text.replace(gpu, cpu)
        self.names = {"torch": torch, "fused_direct_go": self.go}
        exec(text, self.names)
        torch.library.register_fake(f"{name}::fused_direct")(lambda x, w, eps: torch.empty_like(x))
        self.operator = getattr(torch.ops, name).fused_direct
        self.num_checks, self.num_works = 0, 0
        prepared = self.names["_prepared"]

        def counted(tensor, name, *rest):
            self.num_checks += name == "x"
            return prepared(tensor, name, *rest)

        self.names["_prepared"] = counted

    def go(self, x, w, y, eps):
        assert x.is_contiguous() and not x.data_ptr() % 16
        self.num_works += 1
        torch.add(x * w, eps, out=y)

    def __call__(self, *args):
        return self.names["called_fused_direct"](*args)


@pytest.fixture
def direct():
    return Direct()


def test_a_form_that_was_checked_is_not_checked_again(direct):
    x, w = torch.randn(5, 8), torch.randn(8)
    for number in range(3):
        assert torch.equal(direct(x + number, w, 0.5), (x + number) * w + 0.5)
    assert (direct.num_checks, direct.num_works) == (1, 3)
    direct(x, torch.nn.Parameter(w, requires_grad=False), 2.0)
    direct(torch.randn(7, 8), w, 0.5)  # another form
    assert (direct.num_checks, direct.num_works) == (2, 5)
    with torch.inference_mode():
        assert torch.equal(direct(x, w, 0.5), x * w + 0.5)
    assert direct.num_checks == 2


def test_what_kernels_do_not_expect_is_made_so_each_time(direct):
    x, w = torch.randn(8, 8), torch.randn(8)
    direct(x, w, 0.5)
    shifted = torch.randn(65)[1:].view(8, 8)
    assert shifted.data_ptr() % 16
    negative = torch.view_as_complex(torch.randn(8, 8, 2)).conj().imag
    assert negative.is_neg()
    for _ in range(2):
        for odd in (x.t(), shifted, negative):
            assert torch.equal(direct(odd, w, 0.5), odd * w + 0.5)
    assert (direct.num_checks, direct.num_works) == (7, 7)


def test_what_an_operator_refuses_is_refused_each_time(direct):
    x, w = torch.randn(8, 8), torch.randn(8)
    direct(x, w, 0.5)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"x is torch\.float64 on cpu, expected torch\.float32"
        ):
            direct(x.double(), w, 0.5)
        with pytest.raises(RuntimeError, match=r"w has shape \[7\], expected \[8\]"):
            direct(x, w[:7], 0.5)
        with pytest.raises(RuntimeError, match="x has shape"):
            direct(x[0], w, 0.5)
    assert direct.num_works == 1


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def test_whoever_looks_sees_the_operator(direct):
    x, w = torch.randn(8, 8), torch.randn(8)
    direct(x, w, 0.5)
    with Seen() as seen:
        direct(x, w, 0.5)
    assert direct.operator in seen.operators
    with torch.profiler.profile() as profile:
        direct(x, w, 0.5)
    assert any("fused_direct" in event.key for event in profile.key_averages())
    with torch.device("cpu"):  # a mode of functions
        direct(x, w, 0.5)
    assert direct.num_checks == 4


def test_a_compiler_and_fake_tensors_see_the_operator(direct):
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, w = torch.randn(8, 8), torch.randn(8)
    direct(x, w, 0.5)
    called = direct.names["called_fused_direct"]
    compiled = torch.compile(lambda x: called(x, w, 0.5) * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), (x * w + 0.5) * 2)
    works = direct.num_works
    with FakeTensorMode() as mode:
        made = direct(mode.from_tensor(x), mode.from_tensor(w), 0.5)
    assert isinstance(made, torch._subclasses.FakeTensor) and direct.num_works == works
    with mode:
        fake = torch.empty(8, 8)
    assert isinstance(direct(fake, mode.from_tensor(w), 0.5), torch._subclasses.FakeTensor)
    assert direct.num_works == works


def test_what_wants_gradients_goes_through_the_operators_autograd(direct):
    x, w = torch.randn(8, 8), torch.randn(8)
    direct(x, w, 0.5)
    made = direct(x.requires_grad_(), w, 0.5)
    with pytest.raises(RuntimeError, match=r"autograd|requires_grad|grad_fn"):
        made.sum().backward()
    checks = direct.num_checks
    with torch.no_grad():
        assert not direct(x, w, 0.5).requires_grad
    assert direct.num_checks == checks


def test_many_numbers_of_rows_are_forgotten_again(direct):
    w = torch.randn(2)
    for rows in range(1, 1200):
        direct(torch.ones(rows, 2), w, 0.0)
    assert len(direct.names["_TAKEN"]) <= 1024
    assert direct.num_works == direct.num_checks == 1199


def test_work_needs_nothing_that_the_first_import_alone_defines():
    plan = replace(
        PLAN,
        steps=(
            Step("aten", "relu", ("x",), gives="z"),
            Step("call", "fused_direct_go", ("z", "w", "y", "eps")),
        ),
        outputs=(Tensor("y", ("cdiv(rows, 1)", "cols")),),
    )
    tree = ast.parse(python_calls(plan, "mine"))
    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert {"_dense", "cdiv"} <= called
    assert called - defined - {*dir(builtins)} == {"fused_direct_go", "op", "work"}


OWN_NAMES = """
import torch, torch.nn as nn

def cdiv(a):
    return a / 3.0

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(cdiv(x))

def get_inputs():
    return [torch.randn(4, 100)]

def get_init_inputs():
    return []
"""


def test_a_modules_own_functions_stay_beside_those_of_its_kernels(tmp_path):
    _, made = derive(tmp_path, "own_names", OWN_NAMES)
    family = load_family(made.name, [made.folder])
    candidate = family.render({"template": "nest_triton"}, known_device("H200").facts())
    text = export_text(family, candidate, reference=OWN_NAMES, sizes={}, flags=[], provenance=[])
    names = [n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    assert names.count("cdiv") == 1 and "cdiv_of_kernel_1" in names
    function = candidate.plan.function
    assert f"return (called_{function}_of_kernel_1(*args),)" in text
    assert f"def called_{function}_of_kernel_1(*args):" in text
    plain = OWN_NAMES.replace("cdiv", "thirds")
    _, made = derive(tmp_path, "plain", plain)
    family = load_family(made.name, [made.folder])
    candidate = family.render({"template": "nest_triton"}, known_device("H200").facts())
    text = export_text(family, candidate, reference=plain, sizes={}, flags=[], provenance=[])
    assert "_of_kernel_1" not in text


# ---- launches ---------------------------------------------------------------------------------

KERNEL = """\
import torch
import triton
import triton.language as tl

{launch}

@launched
@triton.jit(do_not_specialize=["count"])
def shifted_kernel(x, more, out, count, step, factor, BLOCK: tl.constexpr, IS_TWICE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at * step, mask=at < count, other=0.0) * factor
    if more is not None:
        value += tl.load(more + at, mask=at < count, other=0.0)
    if IS_TWICE:
        value = value * 2
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < count)
"""


# With fewer arguments than the other one, whose launcher is no launcher of this.
FILLING = """

@launched
@triton.jit
def filled_kernel(out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.full([BLOCK], 7.0, tl.float32))
"""


def loaded(path: Path):
    """Execute the file of kernels, whose functions Triton then knows nothing of."""
    text = (builtin_folder() / "_lib" / "triton_launch.py").read_text()
    path.write_text(KERNEL.format(launch=text) + FILLING)
    spec = importlib.util.spec_from_file_location("launches", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["launches"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def launches(tmp_path):
    """A module with a kernel, whose form's number of looks by Triton is counted."""
    module = loaded(tmp_path / "launches.py")
    looks = []
    run = module.shifted_kernel.kernel.run

    def counted(self, *args, **options):
        looks.append(args)
        return run(*args, **options)

    module.shifted_kernel.kernel.run = types.MethodType(counted, module.shifted_kernel.kernel)
    yield module, looks
    del sys.modules["launches"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_launch_of_a_form_that_was_compiled_does_the_same_without_triton(launches):
    module, looks = launches
    base = torch.randn(4096, device="cuda")
    forms = list(
        itertools.product(
            (base[:1024], base[1:1025], base[:1024].half()),  # aligned or not, another dtype
            (None, base[16:]),
            (1024, 1000),
            (1, 3),
            (2.0, 0.5),
            (False, True),
        )
    )

    def check(x, more, count, step, factor, is_twice):
        count = min(count, len(x) // step)
        out = torch.zeros(1024, dtype=x.dtype, device="cuda")
        module.shifted_kernel[(8,)](
            x, more, out, count, step, factor, BLOCK=128, IS_TWICE=is_twice, num_warps=4
        )
        wanted = x[: count * step : step].float() * factor + (0 if more is None else more[:count])
        wanted = wanted * (2 if is_twice else 1)
        torch.testing.assert_close(out[:count].float(), wanted, rtol=1e-3, atol=1e-3)
        assert not out[count:].any()

    for form in forms:
        check(*form)
    first = len(looks)
    assert first == len(module.shifted_kernel.compiled) <= len(forms)
    for form in reversed(forms):
        check(*form)
    assert len(looks) == first
    module.LAUNCHES_AT_ONCE = False
    check(*forms[0])
    assert len(looks) == first + 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_first_launches_in_many_threads_take_their_own_launchers(tmp_path):
    # Triton loads launchers by one name: without a lock between threads some launch took that of
    # the other kernel, "function takes exactly 39 arguments (41 given)" (seen in a check).
    x = torch.ones(4096, device="cuda")

    def launch(module, block, num_warps):
        shifted, filled = torch.zeros_like(x), torch.zeros_like(x)
        grid, options = (4096 // block,), {"BLOCK": block, "num_warps": num_warps}
        module.shifted_kernel[grid](x, None, shifted, 4096, 1, 3.0, IS_TWICE=False, **options)
        module.filled_kernel[grid](filled, **options)
        return bool((shifted == 3).all()) and bool((filled == 7).all())

    forms = [(block, warps) for block in (64, 128, 256, 512) for warps in (1, 2, 4, 8)]
    for _ in range(12):  # the first time compiles
        module = loaded(tmp_path / "launches.py")
        with ThreadPoolExecutor(len(forms)) as pool:
            done = [pool.submit(launch, module, *form) for form in forms]
            assert all(one.result() for one in done)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_launch_is_on_the_current_stream_and_in_graphs(launches):
    module, looks = launches
    x, out = torch.ones(256, device="cuda"), torch.zeros(256, device="cuda")

    def launch():
        module.shifted_kernel[(2,)](
            x, None, out, 256, 1, 3.0, BLOCK=128, IS_TWICE=False, num_warps=4
        )

    launch()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        launch()
    x.fill_(2.0)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert out.eq(6.0).all() and len(looks) == 1
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x.fill_(5.0)
        launch()
    assert out.eq(6.0).all()  # on a stream that waits still
    side.synchronize()
    assert out.eq(15.0).all() and len(looks) == 1


# ---- the same in C++ --------------------------------------------------------------------------


def test_calls_are_methods_where_cpp_has_them_and_return_no_views():
    """There is no `at::unfold`; a convolution of one dimension gives a view of one of two."""
    steps = (Step("aten", "unfold", ("x", "-1", "2", "1"), gives="y"),)
    plan = replace(PLAN, steps=steps)
    text = cpp_binding(plan, "cpp", "mine")
    assert "const at::Tensor y = " in text and "x.unfold(-1, 2, 1)" in text
    assert "at::unfold(" not in text and "at::AutoDispatchBelowADInplaceOrView" in text
    between = replace(PLAN, steps=(Step("aten", "relu", ("x",), gives="z"), *PLAN.steps))
    text = cpp_binding(between, "cpp", "mine")
    assert (
        "x.relu()" in text
        and "ATen/ops/" not in text
        and "AutoDispatchBelowADInplaceOrView" not in text
    )
