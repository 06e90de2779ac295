"""An exported module in a user's own training script: what works there goes on working."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from cpu_machine import GPP
from test_steps import Taken
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(GPP is None, reason="needs g++, which is not on the PATH")
OPERATORS = ("fused_op", "fused_kept", "fused_gradients", "fused_weight_gradients")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Taken:
    """With a part, whose settings are tuples: relu of a convolution."""
    return Taken(tmp_path_factory.mktemp("images"), "convolution_relu_scale")


@pytest.fixture(scope="module")
def gate(tmp_path_factory) -> Taken:
    """With parameters of its own alone: RMSNorm and a gate."""
    return Taken(tmp_path_factory.mktemp("gate"), "rms_norm_gate")


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


def models(taken: Taken) -> list[nn.Module]:
    """Return a replacement and a reference, equal and fresh."""
    made = [taken.module["ModelNew"](), taken.problem.make_model(0)]
    for model in made:
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
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            model(*images.problem.make_inputs(1))
        assert counter.get_total_flops() > 0
        return counter.get_total_flops()

    assert_same(images, ask)
