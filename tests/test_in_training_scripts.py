"""An exported module in a user's own training script: what works there goes on working."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from cpu_machine import GPP
from test_steps import Taken
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tuner.capture.modules.rows_text import with_rows
from tuner.capture.steps.step_text import without_steps
from tuner.evaluate.modules import arguments_for, imported, module_of

pytestmark = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
OPERATORS = ("fused_op", "fused_kept", "fused_gradients", "fused_weight_gradients")


def named(taken: Taken, name: str) -> Taken:
    """Keep the module that was just executed by a name, at which the compiler finds it again."""
    module = sys.modules["model_new"]
    assert vars(module) is taken.module
    taken.module["__name__"], sys.modules[name] = name, module
    return taken


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Taken:
    """With a part, whose settings are tuples: relu of a convolution."""
    return Taken(tmp_path_factory.mktemp("images"), "convolution_relu_scale")


@pytest.fixture(scope="module")
def gate(tmp_path_factory) -> Taken:
    """With parameters of its own alone: RMSNorm and a gate."""
    return named(Taken(tmp_path_factory.mktemp("gate"), "rms_norm_gate"), "model_new_gate")


@pytest.fixture(scope="module")
def gate_by_rows(gate) -> Taken:
    """The same in a file that leaves few rows to the reference."""
    taken = copy.copy(gate)
    rows = {"call": (8, 2**63 - 1), "step": (16, 2**63 - 1)}
    taken.module = module_of(with_rows(gate.family.model_new, rows))
    taken.module |= {n: gate.module[n] for n in (*OPERATORS, "fused_device") if n in gate.module}
    return named(taken, "model_new_gate_by_rows")


@pytest.fixture(params=["gate", "gate_by_rows"])
def either_gate(request) -> Taken:
    return request.getfixturevalue(request.param)


@contextmanager
def counted(taken: Taken) -> Iterator[list[str]]:
    """Give the names of the operators that are called inside."""
    calls: list[str] = []
    real = {name: taken.module.get(name) for name in OPERATORS}

    def counting(name: str) -> Callable[..., object]:
        def call(*args: object) -> object:
            calls.append(name)
            return real[name](*args)

        return call

    taken.module |= {name: counting(name) for name, known in real.items() if known}
    try:
        yield calls
    finally:
        taken.module |= real


@pytest.fixture(autouse=True, params=["new", "known"])
def is_known(request, monkeypatch) -> None:
    """Whether modules had calls before, with and without gradients, after which less is asked."""
    monkeypatch.setattr(sys.modules[__name__], "HAS_CALLS_BEFORE", request.param == "known")


HAS_CALLS_BEFORE = False


def models(taken: Taken) -> list[nn.Module]:
    """Return a replacement and a reference, equal."""
    made = [taken.module["ModelNew"](), taken.problem.make_model(0)]
    for model in made:
        if HAS_CALLS_BEFORE and "fused_device" in taken.module:
            inputs = taken.problem.make_inputs(7)
            for is_with_gradients in (True, False):
                with torch.set_grad_enabled(is_with_gradients):
                    model(*inputs)
        model.load_state_dict(taken.own.state_dict())
    return made


def step(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Return the result and the gradients of one step."""
    made = model(*inputs)
    made.sin().sum().backward()
    return {"": made.detach(), **{n: p.grad for n, p in model.named_parameters()}}


def assert_same(taken: Taken, ask: Callable[[nn.Module], object], *names: str) -> None:
    """Ask a replacement and a reference; the first calls the operators of these names."""
    mine, own = models(taken)
    with counted(taken) as calls:
        got = ask(mine)
    torch.testing.assert_close(got, ask(own), rtol=1e-4, atol=1e-5)
    assert calls == [*names]


# ---- hooks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
def test_hooks_on_gradients_of_a_part_are_called(kind, images):
    """They were passed over in a step: its kernels have no place for them."""

    def ask(model: nn.Module) -> dict[str, Tensor]:
        def halved(part: nn.Module, *gradients: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
            return tuple(g if g is None else g * 0.5 for g in gradients[0])

        getattr(model.c, f"register_{kind}")(halved)
        x = images.problem.make_inputs(1)[0].requires_grad_()
        return {**step(model, [x]), "x": x.grad}

    assert_same(images, ask)


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_hook"])
def test_hooks_on_all_modules_are_called_for_each_part(kind, images):
    """Counters of floating-point operations find by them which part computes what."""

    def ask(model: nn.Module) -> dict[str, int]:
        seen: dict[str, int] = {}

        def count(part: nn.Module, *_: object) -> None:
            kind = type(part).__name__.removesuffix("New")
            seen[kind] = seen.get(kind, 0) + 1

        handle = getattr(nn.modules.module, f"register_module_{kind}")(count)
        try:
            step(model, [images.problem.make_inputs(1)[0].requires_grad_()])
        finally:
            handle.remove()
        return seen

    assert_same(images, ask)


def test_a_counter_of_floating_point_operations_sees_the_references(images):
    def ask(model: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            model(*images.problem.make_inputs(1))
        assert counter.get_total_flops() > 0
        return counter.get_total_flops()

    assert_same(images, ask)


# ---- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("stride", (1, 1)), ("padding", (0, 2))])
def test_an_edited_tuple_of_a_part_is_taken(name, value, images):
    """A stride that was edited later, as for segmentation, was passed over in silence."""

    def ask(model: nn.Module) -> dict[str, Tensor]:
        setattr(model.c, name, value)
        return step(model, images.problem.make_inputs(1))

    assert_same(images, ask)


CONFIGURED = """
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.axes, self.scales = F.gelu, [-1], {"out": 0.5}
        self.lowest, self.unknown = float("-inf"), float("nan")

    def shifted(self, x):
        return x + 1.0

    def forward(self, x):
        x = self.shifted(self.act(x)).clamp_min(self.lowest)
        return (x - x.mean(self.axes, keepdim=True)) * self.scales["out"]


def get_inputs():
    return [torch.randn(32, 24)]


def get_init_inputs():
    return []
"""
EDITS: dict[str, Callable[[nn.Module], object]] = {
    "none": lambda model: None,
    "function": lambda model: setattr(model, "act", torch.relu),
    "list": lambda model: model.axes.append(-2),
    "dict": lambda model: model.scales.update(out=2.0),
    "method": lambda model: setattr(model, "shifted", torch.tanh),
}


@pytest.fixture(scope="module")
def configured(tmp_path_factory) -> Taken:
    return Taken(tmp_path_factory.mktemp("configured"), "configured", CONFIGURED)


@pytest.mark.parametrize("edit", EDITS)
def test_edited_functions_lists_and_methods_are_taken(edit, configured):
    """An infinite attribute, which Python has no literal for, was no Python in the file."""

    def ask(model: nn.Module) -> Tensor:
        EDITS[edit](model)
        with torch.no_grad():
            return model(*configured.problem.make_inputs(1))

    assert_same(configured, ask, *(["fused_op"] if edit == "none" else []))


def test_a_class_of_ones_own_may_replace_what_forward_calls(configured):
    (x,) = configured.problem.make_inputs(1)
    for more, names in (({}, ["fused_op"]), ({"shifted": lambda _, x: x * 3.0}, [])):
        found = []
        for base in (configured.module["ModelNew"], type(configured.own)):
            parts = {"forward": lambda me, x, base=base: base.forward(me, x), **more}
            kind = type("Mine", (base,), parts)
            with counted(configured) as calls, torch.no_grad():
                found.append(kind()(x))
            assert calls == (names if base is configured.module["ModelNew"] else [])
        torch.testing.assert_close(*found)


def test_another_default_dtype_takes_the_reference(tmp_path):
    """What a forward makes without a dtype has another one then; a file gave float32 still."""
    text = CONFIGURED.replace("(x - x.mean", "torch.arange(x.shape[-1]) / 3 + (x - x.mean")
    assert text != CONFIGURED
    taken = Taken(tmp_path, "made", text)

    def ask(model: nn.Module) -> list[Tensor]:
        inputs = taken.problem.make_inputs(1)
        with torch.no_grad():
            found = [model(*inputs)]
            torch.set_default_dtype(torch.float64)
            try:
                return [*found, model(*inputs)]
            finally:
                torch.set_default_dtype(torch.float32)

    assert_same(taken, ask, "fused_op")


# ---- others than eager ------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python:torch.jit.TracerWarning")
def test_a_traced_module_takes_any_number_of_rows(either_gate):
    """Sizes were written into the trace: with other rows it gave a wrong shape, without a word."""

    def ask(model: nn.Module) -> Tensor:
        model.requires_grad_(False)
        traced = torch.jit.trace(model, tuple(either_gate.problem.make_inputs(1)))
        return traced(*(x[:9] for x in either_gate.problem.make_inputs(2)))

    mine, own = models(either_gate)
    torch.testing.assert_close(ask(mine), ask(own))


def test_a_module_is_traced_symbolically(either_gate):
    def ask(model: nn.Module) -> Tensor:
        inputs = either_gate.problem.make_inputs(1)
        return torch.fx.symbolic_trace(model)(*inputs).detach()

    assert_same(either_gate, ask)
    # With PyTorch's steps the module itself asks who wants gradients.
    given = {name: value for name, value in either_gate.module.items() if name[:6] == "fused_"}
    module = module_of(without_steps(either_gate.family.model_new))
    module.update(given)
    plain = module["ModelNew"](*arguments_for(either_gate.problem, module, "model_new.py"))
    plain.load_state_dict(either_gate.own.state_dict())
    torch.testing.assert_close(ask(plain), ask(either_gate.own))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_any_batch_and_nothing_of_the_file(strict, either_gate):
    """The comparison with the fewest rows was a constraint on the batch, and refused."""

    def ask(model: nn.Module) -> Tensor:
        x, y = either_gate.problem.make_inputs(1)
        shapes = ({0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC})
        model.requires_grad_(False)
        found = torch.export.export(model, (x, y), dynamic_shapes=shapes, strict=strict)
        named = {str(n.target) for n in found.graph.nodes if n.op == "call_function"}
        assert named and all(name.startswith("aten.") for name in named)
        return found.module()(x[:5], y[:5])

    assert_same(either_gate, ask)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_module_is_scripted_as_the_reference(gate, tmp_path):
    """The compiler of scripts reads a forward's text, which has to stand in a file."""
    path = tmp_path / "exported.py"
    path.write_text(f"import torch\nimport torch.nn as nn\n{gate.family.model_new}")
    taken = copy.copy(gate)
    taken.module = vars(imported(path))

    def ask(model: nn.Module) -> dict[str, Tensor]:
        return step(torch.jit.script(model), gate.problem.make_inputs(1))

    assert_same(taken, ask)


# ---- other tensors ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_sparse_weights_take_the_reference(tmp_path):
    taken = Taken(tmp_path, "linear_relu_linear")

    def ask(model: nn.Module) -> Tensor:
        model.requires_grad_(False)
        part = next(p for p in model.modules() if isinstance(p, nn.Linear))
        part.weight = nn.Parameter(part.weight.to_sparse_csr(), requires_grad=False)
        return model(*taken.problem.make_inputs(1))

    assert_same(taken, ask)


class Wrapped(torch.Tensor):
    """A tensor that makes PyTorch's own operations in a way of its own, as DTensor does."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function.namespace == "aten", f"no rule for {function}"
        args = [x.inner if isinstance(x, cls) else x for x in args]
        return cls(function(*args, **(kwargs or {})))


def test_tensors_that_dispatch_themselves_take_the_reference(gate):
    def ask(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(*map(Wrapped, gate.problem.make_inputs(1))).inner

    assert_same(gate, ask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_inputs_are_the_references(either_gate):
    def ask(model: nn.Module) -> str:
        x, y = (torch.nested.nested_tensor([x, x[:3]]) for x in either_gate.problem.make_inputs(1))
        with pytest.raises(RuntimeError) as caught:
            model(x, y)
        return str(caught.value)

    mine, own = models(either_gate)
    assert ask(mine) == ask(own)


# ---- what a step holds ------------------------------------------------------------------------


def held_inputs(model: nn.Module, inputs: list[Tensor], kept: list[Tensor]) -> bool:
    """Whether a computed input of a step is still held when only its loss is, after a backward."""
    x = inputs[0].requires_grad_() * 1.0
    held = weakref.ref(x)
    kept.append(model(x, *inputs[1:]).sin().sum())
    del x
    kept[-1].backward()
    gc.collect()
    return held() is not None


def test_a_loss_that_is_kept_holds_no_inputs(gate):
    """A list of losses of a training held all inputs of all steps."""
    kept: list[Tensor] = []

    def ask(model: nn.Module) -> bool:
        return held_inputs(model, gate.problem.make_inputs(1), kept)

    assert_same(gate, ask, "fused_op", "fused_gradients")
    with pytest.raises(RuntimeError, match="second time"):
        kept[0].backward()


@pytest.mark.parametrize("is_differentiated", [False, True])
def test_checkpoint_holds_nothing_between(is_differentiated, gate):
    """A step's inputs were held beside what is saved: checkpoint saved no memory."""

    def ask(model: nn.Module) -> tuple[bool, list[Tensor]]:
        held: list[weakref.ref[Tensor]] = []

        def part(x: Tensor, y: Tensor) -> Tensor:
            x = x * 1.0
            held.append(weakref.ref(x))
            return model(x, y)

        x, y = (x.requires_grad_() for x in gate.problem.make_inputs(1))
        made = torch.utils.checkpoint.checkpoint(part, x, y, use_reentrant=False)
        gc.collect()
        is_held = held[0]() is not None
        found = torch.autograd.grad(made.sin().sum(), (x, y), create_graph=is_differentiated)
        if is_differentiated:
            found = torch.autograd.grad(sum(g.square().sum() for g in found), (x, y, model.w))
        assert not is_held
        return is_held, [g / g.abs().max() for g in found]

    again = ["fused_op"] if is_differentiated else []  # for the second backward
    assert_same(gate, ask, "fused_op", "fused_op", *again, "fused_gradients")


def test_what_is_saved_goes_through_the_users_hooks(gate):
    def ask(model: nn.Module) -> tuple[bool, dict[str, Tensor]]:
        inputs = gate.problem.make_inputs(1)
        x = inputs[0].requires_grad_() * 1.0
        held = weakref.ref(x)

        def packed(tensor: Tensor) -> Tensor:
            return tensor.detach().clone()  # to another place

        with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
            made = model(x, inputs[1])
        del x
        gc.collect()
        made.sin().sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        return held() is not None, {**gradients, "x": inputs[0].grad}

    assert_same(gate, ask, "fused_op", "fused_gradients")


def test_a_backward_under_autocast_is_as_exact_as_the_forward_was(images):
    """Its forward was computed again in bfloat16."""

    def ask(model: nn.Module) -> dict[str, Tensor]:
        made = model(*images.problem.make_inputs(1)).sin().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made.backward()
        return {n: p.grad for n, p in model.named_parameters()}

    assert_same(images, ask, "fused_kept")


def test_inputs_made_in_inference_mode_are_data(gate):
    """PyTorch saves what it computes of them; a step by kernels would have to save them."""

    def ask(model: nn.Module) -> dict[str, Tensor]:
        with torch.inference_mode():
            inputs = [x.clone() for x in gate.problem.make_inputs(1)]
        return step(model, inputs)

    assert_same(gate, ask)
