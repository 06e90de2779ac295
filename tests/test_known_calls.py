"""Calls that an exported module knows: asked less of, and never taken for what they are not."""

from __future__ import annotations

import copy
import gc
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cpu_machine import GPP
from interpreted import interpreted
from test_in_training_scripts import OPERATORS, counted
from test_matching import TEXT
from test_steps import Taken, derive_with_steps
from test_steps_of_halves import Libdevice
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tuner.evaluate.modules import imported
from tuner.export.module import export_text
from tuner.machine.datasheets import known_device

pytestmark = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
INIT = (
    "self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6); self.n = nn.LayerNorm(6); "
    "self.k = nn.Parameter(torch.rand(1)); self.slope = 0.3; self.act = torch.tanh"
)
FORWARD = "return self.n(self.act(self.b(F.leaky_relu(self.a(x), self.slope))) * self.k + x)"


@pytest.fixture(scope="module")
def block(tmp_path_factory) -> Taken:
    """With parts, parameters, a setting and a function of its own."""
    text = TEXT.format(init=INIT, names="x", forward=FORWARD, inputs="torch.randn(5, 6)")
    return Taken(tmp_path_factory.mktemp("block"), "block", text)


def pair(block: Taken) -> tuple[nn.Module, nn.Module]:
    """Return a replacement that knows its usual calls, and a reference, of the same state."""
    mine, own = block.module["ModelNew"](), block.problem.make_model(0)
    mine.load_state_dict(own.state_dict())
    for _ in range(2):
        asked(mine, given(1))
        with torch.no_grad():
            mine(given(1))
    assert len(block.module["_KNOWN"][id(mine), True].calls) == 2
    return mine, own


def given(seed: int, rows: int = 5) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def asked(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return a result and its gradients, where it has any."""
    x = x.detach().requires_grad_(x.requires_grad) if type(x) is Tensor else x
    y = model(x)
    wanted = [p for p in (*model.parameters(), x) if p.requires_grad and p.numel()]
    if not (y.requires_grad and wanted):
        return [y]
    grads = torch.autograd.grad(y.sin().sum(), wanted, allow_unused=True)
    return [y.detach(), *(g for g in grads if g is not None)]


@contextmanager
def whole_looks(block: Taken) -> Iterator[list[None]]:
    """Give how often all of a call was looked at inside."""
    looks: list[None] = []
    usual = block.module["usual_state"]
    block.module["usual_state"] = lambda *args: looks.append(None) or usual(*args)
    try:
        yield looks
    finally:
        block.module["usual_state"] = usual


def test_a_call_like_one_before_is_looked_at_no_more(block):
    mine, own = pair(block)
    with whole_looks(block) as looks, counted(block) as calls:
        for rows in (5, 5, 3, 3, 5):
            torch.testing.assert_close(asked(mine, given(2, rows)), asked(own, given(2, rows)))
            with torch.no_grad():
                torch.testing.assert_close(mine(given(3, rows)), own(given(3, rows)))
        x = given(4).requires_grad_()
        for _ in range(2):
            torch.testing.assert_close(asked(mine, x), asked(own, x))
    assert len(looks) == 3  # of 3 rows with and without gradients, and of one that wants its own
    assert set(calls) <= {*OPERATORS} and calls.count("fused_op") >= 5


def swapped_names(model: nn.Module) -> None:
    own = model.a._parameters
    weight, bias = own.pop("weight"), own.pop("bias")
    own["bias"], own["weight"] = weight, bias


def in_place(model: nn.Module) -> None:
    model.b.weight.data = torch.linspace(0, 1, 48).view(6, 8)


def parted(model: nn.Module) -> None:
    model.b = nn.Sequential(nn.Linear(8, 8), model.b)


def classed(model: nn.Module) -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2.0

    model.a.__class__ = Twice


def other_forward(model: nn.Module) -> None:
    model.a.forward = lambda x: torch.cat([x, x[:, :2]], 1)


def equal_but_other(model: nn.Module) -> None:
    model.k = nn.Parameter(model.k.detach().clone())
    with torch.no_grad():
        model.k += 1.0


def by_swapping(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


EDITS: dict[str, Callable[[nn.Module], object]] = {
    "a setting": lambda m: setattr(m, "slope", 0.7),
    "a setting of a part": lambda m: setattr(m.n, "eps", 0.5),
    "a function": lambda m: setattr(m, "act", torch.sin),
    "a function with a closure": lambda m: setattr(m, "act", lambda x: x * m.slope),
    "another parameter": equal_but_other,
    "memory of a parameter": in_place,
    "values of a parameter": lambda m: m.b.weight.data.mul_(3.0),
    "no bias": lambda m: setattr(m.a, "bias", None),
    "one tensor for two": lambda m: setattr(m.n, "bias", m.n.weight),
    "swapped with another": lambda m: torch.utils.swap_tensors(
        m.b.weight, nn.Parameter(torch.linspace(0, 1, 48).view(6, 8))
    ),
    "names": lambda m: swapped_names(m) or in_place(m),
    "a part": lambda m: setattr(m, "a", nn.Linear(6, 8, bias=False)),
    "a part in between": parted,
    "the class of a part": classed,
    "the forward of a part": other_forward,
    "a hook": lambda m: m.b.register_forward_hook(lambda part, x, y: y * 2.0),
    "a hook before": lambda m: m.b.register_forward_pre_hook(lambda part, x: (x[0] * 2.0,)),
    "a hook of gradients": lambda m: m.b.register_full_backward_hook(
        lambda part, into, out: tuple(g * 2.0 for g in into)
    ),
    "a hook of its own": lambda m: m.register_forward_hook(lambda part, x, y: y * 2.0),
    "a parametrisation": lambda m: nn.utils.parametrizations.weight_norm(m.a),
    "frozen": lambda m: m.a.requires_grad_(False),
    "all frozen": lambda m: m.requires_grad_(False),
    "float64": lambda m: m.double(),
    "float64 by swapping": by_swapping,
    "a buffer more": lambda m: m.a.register_buffer("more", torch.zeros(1)),
    "layout": lambda m: setattr(m.a.weight, "data", m.a.weight.data.t().contiguous().t()),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_module_is_seen(name, block):
    """As without a call before: each edit that changes what is computed, and each back again."""
    mine, own = pair(block)
    before = copy.deepcopy(own)
    failures = []
    for model in (mine, own):
        torch.manual_seed(0)
        EDITS[name](model)
        try:
            with torch.no_grad():
                model(given(2))
        except (RuntimeError, TypeError) as error:  # of shapes that do not fit
            failures.append(type(error))
    if failures:
        assert name.split()[0] in ("names", "float64") and len(failures) == 2
        return
    for _ in range(3):
        torch.testing.assert_close(asked(mine, given(2)), asked(own, given(2)))
        with torch.no_grad():
            torch.testing.assert_close(mine(given(3)), own(given(3)))
    fresh = block.module["ModelNew"].from_module(before)
    torch.testing.assert_close(asked(fresh, given(2)), asked(before, given(2)))


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "other rows": lambda x: x[:2],
    "turned": lambda x: x.t().contiguous().t(),
    "steps": lambda x: torch.stack([x, x], -1)[..., 0],
    "negative": lambda x: torch._neg_view(x),
    "from the middle": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "wants gradients": lambda x: x.clone().requires_grad_(),
    "a parameter": lambda x: nn.Parameter(x),
    "none": lambda x: x[:0],
}


@pytest.mark.parametrize("name", CALLS)
def test_another_form_of_inputs_is_seen(name, block):
    mine, own = pair(block)
    for _ in range(3):
        x = CALLS[name](given(2))
        torch.testing.assert_close(asked(mine, x), asked(own, x))
        with torch.no_grad():
            torch.testing.assert_close(mine(x), own(x))


def beside(x: Tensor, dim: int, place: int) -> Tensor:
    """Return one half of a tensor whose other half is NaN."""
    halves = [torch.full_like(x, float("nan"))] * 2
    halves[place] = x
    return torch.cat(halves, dim).chunk(2, dim)[place]


# Inputs that are not contiguous, and whether their dimensions lie as those of one that is.
VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "first half": (lambda x: beside(x, 1, 0), True),
    "second half": (lambda x: beside(x, 1, 1), True),
    "columns apart": (lambda x: beside(x[..., None], 2, 0)[..., 0], True),
    "rows apart": (lambda x: beside(x[:, None], 1, 1)[:, 0], True),
    "a row of columns apart": (lambda x: beside(x[:1].t(), 1, 0).t(), True),
    "turned": (lambda x: x.t().contiguous().t(), False),
    "a half, turned": (lambda x: beside(x.t(), 1, 0).t(), False),
    "one column": (lambda x: x[:, :1].expand(x.shape), False),
    "one row": (lambda x: x[:1].expand(x.shape), False),
    "rows that overlap": (lambda x: x.reshape(-1).as_strided(x.shape, (3, 1)), False),
}


def assert_taken(
    taken: Taken, mine: nn.Module, own: nn.Module, whole: Tensor, view: str, is_in_order: bool
) -> None:
    """Hold a view's results and gradients to the reference's: values, strides, and by whom."""
    made = {**VIEWS, **IMAGES}[view][0]
    found = []
    for model in (mine, own):
        of = whole.clone().requires_grad_()
        x = made(of)
        assert not x.is_contiguous()
        with counted(taken) as calls:
            y = model(x)
            grads = torch.autograd.grad(y.sin().sum(), [of, *model.parameters()])
            with torch.no_grad():
                z = model(x)
        assert bool(calls) == (model is mine and is_in_order)
        if calls:
            assert {*calls} == {"fused_kept", "fused_gradients", "fused_op"}
        found.append([y, z, *grads])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        assert got.stride() == expected.stride()


@pytest.mark.parametrize("view", VIEWS)
def test_parts_of_a_larger_tensor_take_the_kernels(view, block):
    """As halves do. Another order of dimensions, or one place for several elements, does not."""
    mine, own = pair(block)
    for seed in (2, 3):  # new, and known
        assert_taken(block, mine, own, given(seed), view, VIEWS[view][1])
    torch.testing.assert_close(asked(mine, given(4)), asked(own, given(4)))


IMAGES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "half of the channels": (lambda x: beside(x, 1, 1), True),
    "half of the pixels": (lambda x: beside(x, 2, 0), True),
    "channels last": (lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), False),
    "half of the last channels": (
        lambda x: beside(x.permute(0, 2, 3, 1), 3, 0).permute(0, 3, 1, 2), False
    ),
}  # fmt: skip


@pytest.mark.parametrize("pixels", [2, 1])
def test_convolutions_see_whether_channels_come_last(pixels, tmp_path):
    """Also by the strides of sizes of 1: of one pixel, too, their results lie as it does."""
    text = TEXT.format(
        init="self.a, self.b = nn.Conv2d(4, 6, 3, padding=2), nn.Conv2d(6, 6, 1)",
        names="x",
        forward="return self.b(torch.tanh(self.a(x)))",
        inputs=f"torch.randn(5, 4, {pixels}, {pixels})",
    )
    taken = Taken(tmp_path, "images", text)
    assert taken.module["_HAS_CALLS"]
    whole = torch.randn(5, 4, pixels, pixels, generator=torch.Generator().manual_seed(1))
    for view, (made, is_in_order) in IMAGES.items():
        if not made(whole).is_contiguous():
            assert_taken(taken, taken.mine, taken.own, whole, view, is_in_order)


def saved_of(y: Tensor, *known: Tensor) -> tuple[set[int], int]:
    """Return which of the known tensors' memory a step saved, and the bytes that it saved more."""
    held = {x.untyped_storage().data_ptr(): x for x in y.grad_fn.saved_tensors}
    places = {x.untyped_storage().data_ptr() for x in known}
    more = sum(x.untyped_storage().nbytes() for place, x in held.items() if place not in places)
    return held.keys() & places, more


def test_a_step_saves_a_part_as_it_lies(block):
    """A copy would be more to keep, and would not tell of an edit."""
    mine, own = pair(block)
    both = torch.randn(5, 12)
    parameters = [*mine.parameters()]
    with counted(block) as calls:
        y = mine(both.chunk(2, 1)[0])
        whole = given(1)
        saved, more = saved_of(y, both, *parameters)
        assert both.untyped_storage().data_ptr() in saved
        assert more == saved_of(mine(whole), whole, *parameters)[1]
    assert calls == ["fused_kept"] * 2
    for model in (mine, own):
        y = model(both.chunk(2, 1)[0])
        both[:, 6:].zero_()  # what PyTorch counts are edits of the memory
        with pytest.raises(RuntimeError, match="inplace"):
            y.sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # jvp's own
@pytest.mark.parametrize("name", ["autocast", "default dtype", "inference", "vmap", "tangents"])
def test_other_circumstances_are_seen(name, block):
    mine, own = pair(block)
    x = given(2)
    made = []
    for model in (mine, own):
        found = []
        if name == "autocast":
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                found.append(model(x))
        elif name == "default dtype":
            torch.set_default_dtype(torch.float64)
            try:
                found.append(model(x))
            finally:
                torch.set_default_dtype(torch.float32)
        elif name == "inference":
            with torch.inference_mode():
                found += [model(x), model(given(2))]
        elif name == "vmap":
            found.append(torch.vmap(model)(x[None]))
        else:
            found += torch.func.jvp(model, (x,), (x,))
        made.append(found)
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "meta"])  # whatever it is: nothing is made there
def test_a_default_device_leaves_the_kernels_in_place(device, block):
    """`torch.set_default_device` is a mode of PyTorch's functions, which others' modes are not."""
    mine, own = pair(block)
    x = given(3)

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with counted(block) as plain:
        expected = asked(mine, x)
    with torch.device(device), counted(block) as calls, whole_looks(block) as looks:
        found = asked(mine, x)
    assert calls == plain and calls and not looks
    assert all(map(torch.equal, found, expected))
    fresh = block.module["ModelNew"]()  # of which nothing is known yet
    fresh.load_state_dict(own.state_dict())
    with torch.device(device), counted(block) as calls:
        found = asked(fresh, x)
    assert calls == plain and all(map(torch.equal, found, expected))
    with Seen(), counted(block) as calls:
        asked(mine, x)
    assert not calls


def check_a_file_in_triton(folder: str) -> None:
    """Ask an exported file with Triton's kernels, interpreted, and count calls without checks."""
    text = TEXT.format(init=INIT, names="x", forward=FORWARD, inputs="torch.randn(5, 6)")
    problem, family = derive_with_steps(Path(folder), "block", text)
    candidate = family.render({"template": "nest_triton"}, known_device("H200").facts())
    exported = export_text(
        family, candidate, reference=text, sizes={}, flags=[], provenance=[], standing="VERIFIED"
    )
    for gpu, cpu in {
        "torch.cuda.current_device()": "-1",
        'device.type != "cuda"': "False",
        'fused_device = "cuda"': 'fused_device = "cpu"',
    }.items():
        assert gpu in exported
        exported = exported.replace(gpu, cpu)
    path = Path(folder) / "exported.py"
    path.write_text(exported)
    file = vars(imported(path))
    file["libdevice"] = Libdevice()
    works: list[int] = []
    work = file["fused_op"].work
    file["fused_op"].work = lambda *args: works.append(1) or work(*args)
    mine, own = file["ModelNew"](), problem.make_model(0)
    mine.load_state_dict(own.state_dict())
    with torch.no_grad():
        for count, rows in enumerate((5, 5, 3, 3, 5)):
            torch.testing.assert_close(mine(given(count, rows)), own(given(count, rows)))
        assert len(works) == 3
        x = CALLS["from the middle"](given(7))
        for _ in range(2):
            torch.testing.assert_close(mine(x), own(x))
        assert len(works) == 3  # kernels were compiled for other addresses
        for _ in range(2):
            x = CALLS["steps"](given(8))
            torch.testing.assert_close(mine(x), own(x))
        assert len(works) == 4  # the second call at once, of a copy
        mine.slope = own.slope = 0.7
        torch.testing.assert_close(mine(given(2)), own(given(2)))
    assert len(works) == 4


@needs_triton
def test_a_known_call_of_a_file_in_triton_takes_its_kernels_at_once(tmp_path):
    interpreted("test_known_calls", "check_a_file_in_triton", str(tmp_path))


def test_nothing_is_kept_alive(block):
    """Who drops a parameter, a part or the module frees its memory at once, without `gc`."""
    mine, _ = pair(block)
    num_known = len(block.module["_KNOWN"])
    gc.disable()
    try:
        parameter, part = weakref.ref(mine.k), weakref.ref(mine.a)
        mine.k, mine.a = nn.Parameter(torch.rand(1)), nn.Linear(6, 8)
        assert parameter() is None and part() is None
        whole, weight = weakref.ref(mine), weakref.ref(mine.b.weight)
        del mine
        assert whole() is None and weight() is None
    finally:
        gc.enable()
    assert len(block.module["_KNOWN"]) == num_known - 1


def test_a_function_that_may_hold_the_module_is_not_kept(block):
    mine, _ = pair(block)
    is_constant = block.module["is_constant"]
    assert is_constant(torch.tanh) and is_constant(nn.functional.relu) and is_constant((1, "a"))
    assert not is_constant(lambda x: mine(x)) and not is_constant([1]) and not is_constant(mine)


CONFIGURED = """
import functools
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

import torch
import torch.nn as nn


class Kind(Enum):
    PLAIN = 1
    SHIFTED = 2


@dataclass(slots=True)
class Base:
    shift: float = 0.25


@dataclass(slots=True)
class Config(Base):
    kind: Kind = Kind.SHIFTED
    scales: list = field(default_factory=lambda: [0.5, 2.0])


class Private:
    __slots__ = ("__k", "scale", "inner")

    def __init__(self):
        self.__k, self.scale = 1.0, 1.0
        self.inner = SimpleNamespace(inner=SimpleNamespace(k=1.0))

    def set(self, k):
        self.__k = k

    def all(self):
        return self.__k * self.scale * self.inner.inner.k


class Called:
    def __init__(self):
        self.k = 2.0

    def __call__(self, x):
        return x * self.k


class Answers(dict):
    def __getattr__(self, name):
        if name[:2] == "__":
            raise AttributeError(name)
        return self[name]


class Model(nn.Module):
    def __init__(self, config, names, act):
        super().__init__()
        self.config, self.names, self.act = config, names, act
        self.weight = nn.Parameter(torch.ones(6))
        self.empty = []
        self._more, self.called, self.answers = Private(), Called(), Answers(k=0.5)
        self.shifted = lambda x, by=1.0: x + by

    def forward(self, x):
        if self.config.kind is Kind.SHIFTED:
            x = x + self.config.shift
        x = self.called(self.shifted(x * self._more.all() + self.answers.k))
        return self.act(x * self.config.scales[0] * self.names["k"].value) * self.weight


def get_inputs():
    return [torch.randn(5, 6)]


def get_init_inputs():
    scale = 0.5
    names = {"k": SimpleNamespace(value=3.0)}
    return [Config(), names, functools.partial(torch.clamp, max=1.0)]
"""


@pytest.fixture(scope="module")
def configured(tmp_path_factory) -> Taken:
    return Taken(tmp_path_factory.mktemp("configured"), "configured", CONFIGURED)


CONFIGS: dict[str, Callable[[nn.Module], object]] = {
    "a field": lambda m: setattr(m.config, "shift", 1.5),  # of a class that it derives from
    "an enumeration": lambda m: setattr(m.config, "kind", type(m.config.kind).PLAIN),
    "an item": lambda m: m.config.scales.__setitem__(0, -1.0),
    "another list": lambda m: setattr(m.config, "scales", [7.0]),
    "an object in a dictionary": lambda m: setattr(m.names["k"], "value", 0.1),
    "another object": lambda m: m.names.update(k=SimpleNamespace(value=-2.0)),
    "what a partial holds": lambda m: m.act.keywords.update(max=0.2),
    "a list that was empty": lambda m: m.empty.append(1.0),
    "the class of an object": lambda m: setattr(
        m.called,
        "__class__",
        type("Doubled", (type(m.called),), {"__call__": lambda self, x: x * self.k * 2.0}),
    ),
    "a private field": lambda m: setattr(m._more, "scale", 3.0),
    "a slot with two underscores": lambda m: m._more.set(5.0),
    "an object that is called": lambda m: setattr(m.called, "k", 7.0),
    "a default": lambda m: setattr(m.shifted, "__defaults__", (4.0,)),
    "a class that answers to any name": lambda m: m.answers.update(k=0.125),
    "a deep object": lambda m: setattr(m._more.inner.inner, "k", 9.0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_calls_of_a_module_with_a_config_are_known_until_it_is_edited(name, configured):
    mine, own = configured.new(), configured.problem.make_model(0)
    with whole_looks(configured) as looks:
        for _ in range(3):
            torch.testing.assert_close(mine(given(1)), own(given(1)))
        assert len(looks) == 1
        for model in (mine, own):
            CONFIGS[name](model)
        torch.testing.assert_close(mine(given(1)), own(given(1)))
        assert len(looks) == 2


@pytest.mark.parametrize("edit", [None, "owner", "list", "class"])
def test_nothing_that_a_config_holds_keeps_the_module(edit, configured):
    def used() -> weakref.ref[nn.Module]:
        mine = configured.new()
        if edit == "class":

            class Inner:
                def owner(self) -> object:
                    return mine

            mine.kind = Inner
        mine(given(1))
        mine(given(1))
        if edit == "owner":
            mine.names["k"].owner = mine
        if edit == "list":
            mine.empty.append(mine.forward)
        return weakref.ref(mine)

    whole = used()
    gc.collect()
    assert whole() is None


def test_a_call_of_another_size_is_not_looked_at_whole(configured, monkeypatch):
    mine, own = configured.new(), configured.problem.make_model(0)
    monkeypatch.setitem(configured.module, "contents_of", None)  # which takes the host longest
    x = given(1)[:, :4].repeat(1, 2)[:, :1]
    torch.testing.assert_close(mine(x), own(x))


def test_a_module_that_changes_at_each_call_is_remembered_no_more(block):
    mine, own = pair(block)
    for count in range(70):
        mine.slope = own.slope = 0.3 if count % 2 else float("0.3")  # another object each time
        mine.k = nn.Parameter(torch.tensor([0.1 * count]))
        own.k = mine.k
        torch.testing.assert_close(asked(mine, given(2)), asked(own, given(2)))
    assert block.module["_KNOWN"][id(mine), True].changes == block.module["_MOST_CHANGES"] - 1


def test_modules_that_are_equal_are_two(block):
    class Compared(block.module["ModelNew"]):
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    for _ in range(2):
        mine, own = Compared(), block.problem.make_model(0)
        mine.load_state_dict(own.state_dict())
        for _ in range(3):
            torch.testing.assert_close(asked(mine, given(2)), asked(own, given(2)))
