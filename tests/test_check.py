"""The check: cheats are rejected by name, honest modules are accepted, limits are as written."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import json
import os
import random
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.fx
from test_problem import FLAGSHIP
from torch.nn.modules import module as hooks

from tuner.check import produce
from tuner.check.calls import threads
from tuner.check.calls.crossing import Answer, Question, Report, Script, pack, unpack
from tuner.check.calls.exercise import checksum_of
from tuner.check.calls.layouts import laid_out
from tuner.check.calls.parts import copied
from tuner.check.judge.compare import compare, limits_of
from tuner.check.judge.expected import expected
from tuner.check.judge.refusals import tamer
from tuner.check.judge.verdict import CLOSE, judge, merge
from tuner.check.probes.batches import Extent
from tuner.check.probes.majority import by_majority, redrawn
from tuner.check.probes.probe import Probe
from tuner.check.probes.probes import screening_probes, thorough_probes
from tuner.check.probes.traits import traits_of
from tuner.check.produce import answer
from tuner.errors import ProblemError
from tuner.evaluate.judging import Judge
from tuner.evaluate.oracle import Oracle
from tuner.problem.accuracy import Accuracy
from tuner.problem.reference import arguments_of_constructor, load_problem
from tuner.trial import ProbeResult

FLOAT32 = Accuracy("float32")
LOOSE = Accuracy("tolerance", 1e-4, 1e-4)
HERE = Path(__file__).parent
SEED = 20

# Each cheat and what the verdict must say of it.
CHEATS = {
    "aligned_reads_only": "do vector loads assume 16-byte alignment",
    "always_training": "eval mode must use the stored statistics",
    "biased_running_variance": "looks biased: the variance is off by the factor B/(B-1)",
    "computed_when_unpacked": "float32[0] on cpu, in a Later of 0",
    "computed_one_row": "batch 1: it returned an answer where the reference raises",
    "constant_output": "a constant output",
    "detached_output": "the output is detached",
    "dropped_eps": "is eps dropped or changed",
    "edited_inputs": "input 0 was edited by the call",
    "edited_weights": "the weight scale was edited by the call",
    "exits_with_success": "raised in call 1: SystemExit: 0",
    "extra_state": "'workspace' is not in the reference's",
    "folded_at_first_eval": "must use the statistics as they are now",
    "folded_by_sample": "one weight of each edited: output of call 2",
    "ignored_gamma_and_beta": "is a weight ignored",
    "ignored_strides": "are strides ignored",
    "late_thread": "changed after the call had returned",
    "lazy_tensor": "a lazy or disguised tensor",
    "memoised_by_content": "although the weights changed: memoised",
    "memoised_by_pointer": "memoised by pointer",
    "memoised_by_sample": "memoised by a part of the content",
    "memoised_by_version": "version counter",
    "naive_variance": "a variance from sums of squares",
    "non_deterministic": "gave different bits",
    "one_output_for_all_calls": "shares memory with the output of call 1",
    "only_the_first_call": "kept from the first call",
    "only_the_first_calls": "is it right only in the first calls",
    "only_the_known_batches": "some rows: output of call 1",
    "only_the_tested_distribution": "right only for the tested distribution",
    "only_the_tested_shape": "right only for the tested shape",
    "operands_in_bfloat16": "that of bfloat16 operands",
    "operands_in_float16": "that of float16 or TF32 operands",
    "operands_in_tf32": "that of float16 or TF32 operands",
    "other_random_numbers": "must draw the same random numbers in the same order",
    "output_in_the_input": "shares memory with input 0",
    "prints_a_verdict": "a constant output",
    "padded_rows_ignored": "padded input: output of call 1",
    "part_written": "part of the output was never written",
    "patched_comparisons": "a constant output",
    "patched_random_numbers": "must draw the same random numbers",
    "range_of_float16": "a format of less range",
    "replaced_parameters": "an optimiser that was given the old one would train nothing",
    "replayed_first_output": "memoised, or replayed",
    "result_holds_itself": "what a call returned stays in memory when nobody has it any more",
    "ring_of_outputs": "many calls: output of call 1 changed after the call had returned",
    "skipped_running_statistics": "the running statistics were not updated",
    "swallowed_nan": "NaN and Inf must come through",
    "uninitialised_memory": "memory was read that was never written",
    "weights_folded_once": "are the weights folded once and kept",
    "weights_of_the_original": "go on with the weights of old",
    "wrong_gradient": "gradient of input 0",
    "zeroed_inputs": "input 0 was edited by the call",
}  # fmt: skip
ALWAYS_ACCEPTED = [
    "atomic_sums", "in_place_on_own_buffers", "own_thread_pool", "scale_folded_afresh",
    "side_stream_joined", "sums_in_float64", "two_sweeps", "warns", "welford_in_chunks",
]  # fmt: skip
HELD_REFERENCE = {"side_stream_joined", "warns"}  # on a CPU


def load_reference(folder: Path, text: str = FLAGSHIP, **sizes: int):
    path = folder / "reference.py"
    path.write_text(text)
    return load_problem(path, sizes)


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    return load_reference(tmp_path_factory.mktemp("flagship"))


@pytest.fixture(scope="module")
def wide_problem(tmp_path_factory):
    return load_reference(tmp_path_factory.mktemp("wide"), out_features=400)


def expect_all(problem, probes, accuracy=FLOAT32):
    models = {}
    return [expected(problem, probe, accuracy, models=models) for probe in probes]


@pytest.fixture(scope="module")
def thorough(problem):
    return expect_all(problem, thorough_probes(SEED, problem.num_rows()))


@pytest.fixture
def patched_functions():
    """Put back what the patching cheats replace in PyTorch."""
    names = ("allclose", "equal", "rand", "randn")
    kept = {name: getattr(torch, name) for name in names}
    assert_close = torch.testing.assert_close
    yield
    for name, function in kept.items():
        setattr(torch, name, function)
    torch.testing.assert_close = assert_close


def load_candidate(path: Path):
    spec = importlib.util.spec_from_file_location(f"candidate_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pickling looks for a class
    spec.loader.exec_module(module)
    return module.ModelNew


def made(new_class, init_inputs, options):
    positional, named = arguments_of_constructor(init_inputs, options)
    return new_class(*positional, **named)


def ask_all(problem, new_class, expectations) -> list[Answer]:
    init_inputs = problem.init_inputs(42)
    return [
        answer(lambda **options: made(new_class, init_inputs, options), e.question)
        for e in expectations
    ]


def reasons(new_class, problem, expectations) -> list[str]:
    """Return why the probes reject a module, in their order."""
    answers = ask_all(problem, new_class, expectations)
    results = [judge(e, a, FLOAT32) for e, a in zip(expectations, answers, strict=True)]
    return [r.reason for r in results if not r.is_accepted]


def verdict(problem, new_class, expectations, accuracy=FLOAT32, answers=None):
    if answers is None:
        with pytest.MonkeyPatch.context() as patched:
            # Beyond 24 calls of each thread: what is wrong is asked by `asked_until_found`.
            patched.setattr(threads, "AT_ONCE_S", 0.02)
            answers = ask_all(problem, new_class, expectations)
    results = []
    for expectation, first in zip(expectations, answers, strict=True):

        def ask(draw: int, e=expectation, first=first) -> ProbeResult:
            if draw == 0:
                return judge(e, first, accuracy)
            (other,) = expect_all(problem, [redrawn(e.probe, draw)], accuracy)
            return judge(other, ask_all(problem, new_class, [other])[0], accuracy)

        results.append(by_majority(ask))
    return merge(results, accuracy, is_thorough=True)


def asked_until_found(problem, new_class, expectations, words: str) -> list[ProbeResult]:
    """Ask, in order, until a reason has these words, which one must."""
    results = []
    for expectation in expectations:
        (found,) = ask_all(problem, new_class, [expectation])
        results.append(judge(expectation, found, FLOAT32))
        if words in results[-1].reason:
            return results
    raise AssertionError(f"{words!r} is not in {[r.reason for r in results if r.reason]}")


@pytest.mark.parametrize("name", sorted(CHEATS))
def test_the_cheat_is_rejected_and_named(name, problem, thorough, patched_functions):
    new_class = load_candidate(HERE / "cheats" / f"{name}.py")
    results = asked_until_found(problem, new_class, thorough, CHEATS[name])
    check = merge(results, FLOAT32, is_thorough=True)
    assert not check.is_accepted
    assert check.reason.startswith(next(r.reason for r in results if not r.is_accepted))


@pytest.fixture(scope="module")
def wide_thorough(wide_problem):
    """The same questions, as two accuracy classes expect the answers."""
    probes = thorough_probes(1, wide_problem.num_rows())
    return {accuracy: expect_all(wide_problem, probes, accuracy) for accuracy in (FLOAT32, LOOSE)}


@pytest.mark.parametrize("name", ALWAYS_ACCEPTED)
def test_the_honest_module_is_accepted(name, wide_problem, wide_thorough, monkeypatch):
    if name == "own_thread_pool":  # in vain is waited for its threads, 200 times
        monkeypatch.setattr(produce, "LATE_WAIT_S", 0.002)
    new_class = load_candidate(HERE / "honest" / f"{name}.py")
    answers = None
    for accuracy, expectations in wide_thorough.items():
        if name == "atomic_sums":  # declared, as a template declares its atomics
            expectations = [without_same_bits(e) for e in expectations]
        answers = answers or ask_all(wide_problem, new_class, expectations)
        check = verdict(wide_problem, new_class, expectations, accuracy, answers)
        assert check.is_accepted, check.reason
        assert len(check.probes) == len(expectations) > 25
        own = {p.probe.removeprefix("own work, ") for p in check.probes if p.note}
        assert ("fewer rows" in own) == (name in HELD_REFERENCE)
        assert all(probe in " ".join(check.notes) for probe in own)
        if name == "atomic_sums":  # its eval mode is the reference's
            assert own == {"eval", "fewer rows, eval", "gradients, eval"}


@pytest.fixture(scope="module")
def on_cuda(wide_problem):
    probes = thorough_probes(SEED, wide_problem.num_rows(), has_cuda=True)
    models = {}
    return [expected(wide_problem, p, LOOSE, "cuda", models=models) for p in probes]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALWAYS_ACCEPTED)
def test_the_honest_module_is_accepted_on_cuda(name, wide_problem, on_cuda):
    new_class = load_candidate(HERE / "honest" / f"{name}.py")
    expectations = [without_same_bits(e) for e in on_cuda]
    check = verdict(wide_problem, new_class, expectations, LOOSE)
    assert check.is_accepted, check.reason


@pytest.mark.gpu
@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_the_honest_module_is_accepted_on_another_gpu(wide_problem):
    """Where the current one has no part in it."""
    new_class = load_candidate(HERE / "honest" / f"{ALWAYS_ACCEPTED[0]}.py")
    probes = thorough_probes(SEED, wide_problem.num_rows(), has_cuda=True)
    expectations = [expected(wide_problem, p, LOOSE, "cuda:1", models={}) for p in probes]
    expectations = [without_same_bits(e) for e in expectations]
    check = verdict(wide_problem, new_class, expectations, LOOSE)
    assert check.is_accepted, check.reason


CONVOLVED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(64, 96, 1, bias=False)

    def forward(self, x):
        return self.conv(x)

def get_inputs():
    return [torch.rand(16, 64, 128, 128)]

def get_init_inputs():
    return []
"""


@pytest.mark.gpu
def test_a_weight_may_be_moved_to_where_a_gpu_takes_tf32(tmp_path):
    (tmp_path / "reference.py").write_text(CONVOLVED)
    problem = load_problem(tmp_path / "reference.py")

    class Moved(problem.module.Model):
        def forward(self, x):
            return torch.nn.functional.conv2d(x, self.conv.weight.clone())

    accuracy = Accuracy.parse("pytorch")
    probes = [p for p in thorough_probes(SEED, 16, has_cuda=True) if "new tensors" in p.name]
    expectations = [expected(problem, p, accuracy, "cuda", models={}) for p in probes]
    check = verdict(problem, Moved, expectations, accuracy)
    assert check.is_accepted, check.reason


def without_same_bits(e):
    return dataclasses.replace(e, probe=dataclasses.replace(e.probe, wants_same_bits=False))


def test_atomics_that_are_not_declared_are_rejected(wide_problem, wide_thorough):
    new_class = load_candidate(HERE / "honest" / "atomic_sums.py")
    twice = [e for e in wide_thorough[FLOAT32] if e.probe.wants_same_bits]
    check = verdict(wide_problem, new_class, twice)
    assert "gave different bits, but the candidate is declared deterministic" in check.reason


# Cheats that only one question tells: what forward does, and what the verdict says.
ONE_QUESTION = {
    "detached where the input is plain": (
        lambda m, x, y: y if x.requires_grad else y.detach(),
        "gradients of weights: the output is detached",
    ),
    "gradients of dense memory": (
        lambda m, x, y: DenseGradient.apply(y), "gradients of a sum, eval: gradient of input 0",
    ),
    "detached from the second call on": (
        lambda m, x, y: (y.detach() if m.bn.num_batches_tracked == 9 else y),
        "gradients, copied: the output is detached",
    ),
    "no row beyond those as given": (
        lambda m, x, y: torch.cat([y[:64], 0 * y[64:]]), "more rows: output of call 1[64, 0]",
    ),
    "one row in eval": (
        lambda m, x, y: 0 * y if len(x) == 1 else y, "one row, eval: output of call 1",
    ),
    "float64 in float32": (
        lambda m, x, y: y.float().to(y.dtype), "float64 module: output of call 2",
    ),
    "gradients left off": (
        lambda m, x, y: (y, torch.set_grad_enabled(False))[0],
        "gradients enabled is False, was True",
    ),
    "a seed of its own": (lambda m, x, y: (y, torch.manual_seed(0))[0], "seed is 0, was"),
    "state of its first call": (
        lambda m, x, y: (y, m.register_buffer("space", torch.zeros(3)))[0],
        "'space' is not in the reference's",
    ),
    "a tuple of one": (lambda m, x, y: (y,), "on cpu in a tuple"),
    "a graph where gradients are off": (
        lambda m, x, y: with_graph(y), "on cpu, with a graph of gradients though these are off;",
    ),
}  # fmt: skip


def with_graph(y):
    with torch.enable_grad():
        return y if y.requires_grad else y.requires_grad_() * 1.0


class DenseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 0 * gradient if 0 in gradient.stride() else gradient


@pytest.mark.parametrize("name", ONE_QUESTION)
def test_the_cheat_that_only_one_question_tells_is_rejected_and_named(name, problem, thorough):
    change, words = ONE_QUESTION[name]

    class Cheat(problem.module.Model):
        def forward(self, x):
            return change(self, x, super().forward(x))

    asked_until_found(problem, Cheat, thorough, words)


# What a call leaves behind: after it the user's own program is another one.
LEFT_BEHIND = {
    "weights that no longer train": (
        lambda m, x: m.scale.requires_grad_(False), "scale without requires_grad",
    ),
    "an input that requires gradients": (
        lambda m, x: x.requires_grad_(), "input 0 with requires_grad",
    ),
    "another mode": (lambda m, x: m.bn.eval(), "left bn in eval mode, which was in training mode"),
    "random numbers drawn": (lambda m, x: torch.rand(1), "state of PyTorch's random numbers"),
    "random numbers of Python seeded": (lambda m, x: random.seed(0), "state of Python's random"),
    "random numbers of NumPy drawn": (lambda m, x: np.random.rand(), "state of NumPy's random"),
    "denormal numbers flushed": (
        lambda m, x: torch.set_flush_denormal(True), "denormal numbers is lost, was kept",
    ),
    "cuDNN switched off": (
        lambda m, x: setattr(torch.backends.cudnn, "enabled", False), "cuDNN is (False,",
    ),
    "no garbage collection": (lambda m, x: gc.disable(), "garbage collection is False, was True"),
    "a hook on all modules": (
        lambda m, x: hooks.register_module_forward_hook(lambda *_: None),
        "hooks of all modules is 1, was 0",
    ),
    "another directory": (lambda m, x: os.chdir("/"), "working directory is /, was"),
}  # fmt: skip


@pytest.fixture
def as_it_was():
    state = torch.get_rng_state(), random.getstate(), np.random.get_state(), Path.cwd()
    yield
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    os.chdir(state[3])
    torch.set_flush_denormal(False)
    torch.backends.cudnn.enabled = True
    gc.enable()
    hooks._global_forward_hooks.clear()


@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_what_a_call_leaves_behind_is_named(name, problem, thorough, as_it_was):
    leave, words = LEFT_BEHIND[name]

    class Untidy(problem.module.Model):
        def forward(self, x):
            y = super().forward(x)
            leave(self, x)
            return y

    asked_until_found(problem, Untidy, thorough[:1], words)


def test_what_autograd_cannot_use_is_named(problem, thorough):
    class Inference(problem.module.Model):
        def forward(self, x):
            y = super().forward(x)
            with torch.inference_mode(not torch.is_grad_enabled()):
                return y.clone()

    class WritesGradients(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, weight):
            ctx.weight = weight
            return y.clone()

        @staticmethod
        def backward(ctx, gradient):
            ctx.weight.grad = torch.ones_like(ctx.weight)
            return gradient, None

    class Twice(problem.module.Model):
        def forward(self, x):
            return WritesGradients.apply(super().forward(x), self.scale)

    asked_until_found(problem, Inference, thorough, "of no use to autograd (inference mode)")
    asked_until_found(problem, Twice, thorough, "the backward wrote the .grad of scale")


def test_a_module_that_is_put_together_otherwise_is_named(problem, thorough):
    class SharesStatistics(problem.module.Model):
        def __deepcopy__(self, memo):
            new = type(self)(48, 40, (40,))
            new.bn.running_mean = self.bn.running_mean
            return new

    class OtherOrder(problem.module.Model):
        def __init__(self, *args):
            super().__init__(*args)
            self._modules["gemm"] = self._modules.pop("gemm")  # behind bn

    class OtherBuffers(problem.module.Model):
        def __init__(self, *args):
            super().__init__(*args)
            self.bn._buffers["running_mean"] = self.bn._buffers.pop("running_mean")

    class WithoutHooks(problem.module.Model):
        def __call__(self, x):
            return self.forward(x)

    words = "a deep copy shares the memory of bn.running_mean"
    asked_until_found(problem, SharesStatistics, thorough, words)
    words = "parameter 2 is 'bn.weight', the reference's is 'gemm.weight'"
    asked_until_found(problem, OtherOrder, thorough[:1], words)
    assert verdict(problem, OtherBuffers, thorough[:1]).is_accepted
    words = "a __call__ of its own: hooks on the module would not run"
    asked_until_found(problem, WithoutHooks, thorough[:1], words)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_view_of_the_negative_has_the_bits_of_the_values(device, dtype):
    """NaN of any sign and payload as well, which a GPU's own negation makes all alike."""
    value = torch.randn(5, 7, dtype=dtype, device=device)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    value[1], value[2] = torch.nan, -torch.inf
    value.view(whole)[3] = torch.tensor(torch.nan, dtype=dtype).view(whole).item() + 5
    value.view(whole)[4] = -3  # a NaN with its sign
    laid = laid_out(value, "negated")
    assert laid.is_neg() and checksum_of(laid) == checksum_of(value)
    laid._neg_view()[0, 0] += 1
    assert checksum_of(laid) != checksum_of(value)


def test_where_rounding_decides_about_an_infinity_both_are_right():
    most = torch.finfo(torch.float32).max
    want = torch.tensor([1.0, most * (1 + 2e-7), -most * (1 + 1e-3)], dtype=torch.float64)
    assert not compare(torch.tensor([1.0, torch.inf, -torch.inf]), want).num_misplaced
    for wrong in ([1.0, -torch.inf, -torch.inf], [torch.inf, most, -torch.inf],
                  [1.0, torch.nan, -torch.inf]):  # fmt: skip
        assert compare(torch.tensor(wrong), want).num_misplaced == 1
    near = torch.tensor([0.99 * most], dtype=torch.float64)
    assert compare(torch.tensor([torch.inf]), near).num_misplaced == 1


@pytest.mark.parametrize("make", [torch.fx.symbolic_trace, torch.jit.script])
def test_a_traced_or_scripted_module_is_accepted(make, problem, thorough):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's, of torch.jit
        check = verdict(problem, lambda *inputs: make(problem.module.Model(*inputs)), thorough)
    assert check.is_accepted, check.reason


def test_full_size_and_initial_seeds_are_asked(tmp_path):
    problem = load_reference(tmp_path, batch_size=300)
    models, probes = {}, thorough_probes(SEED, 300)

    def each():  # as far as it is asked
        for probe in probes:
            yield expected(problem, probe, FLOAT32, models=models)

    class KeptAtFullSize(problem.module.Model):
        def forward(self, x):
            if len(x) < 258 or torch.is_grad_enabled():
                return super().forward(x)
            if not hasattr(self, "kept"):
                self.kept = super().forward(x)
            return self.kept.clone()

    class OneSeed(problem.module.Model):
        def __init__(self, *args):
            if torch.initial_seed() != 42:
                torch.randn(1)
            super().__init__(*args)

    results = asked_until_found(problem, KeptAtFullSize, each(), "output of call 2")
    check = merge(results, FLOAT32, is_thorough=True)
    assert check.reason.startswith("again at full size: output of call 2"), check.reason
    words = "must draw the same random numbers in the same order"
    results = asked_until_found(problem, OneSeed, each(), words)
    assert words in merge(results, FLOAT32, is_thorough=True).reason


def reference_of(forward: str, inputs: str, init: str = "") -> str:
    return f"""
import torch
import torch.nn as nn
F = nn.functional

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {", ".join("ab"[: inputs.count("torch.")])}):
        return {forward}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""


LINEAR = "self.l = nn.Linear(32, 20)"
UNUSUAL = {
    "chosen by rounding": ("(self.l(a).argmax(1), self.l(a) > 0)", "torch.rand(64, 32)", LINEAR),
    "a frozen parameter": (
        "self.l(a)", "torch.rand(64, 32)", LINEAR + "; self.l.weight.requires_grad_(False)",
    ),
    "a view of its input": ("a.view(-1)", "torch.rand(64, 32)", ""),
    "a buffer among the outputs": (
        "(a * 2, self.m)", "torch.rand(7, 5)", "self.register_buffer('m', torch.rand(5))",
    ),
    "only probabilities": ("F.binary_cross_entropy(a, b)", "torch.rand(64, 9), torch.rand(64, 9)"),
    "a square matrix product": ("a @ b", "torch.rand(90, 90), torch.rand(90, 90)"),
    "float64": ("self.l(a)", "torch.rand(64, 32).double()", LINEAR + ".double()"),
    "bfloat16": ("self.l(a)", "torch.rand(64, 32).bfloat16()", LINEAR + ".bfloat16()"),
    "without gradients of no rows": (  # as a LayerNorm on a GPU
        "(lambda y: (y.requires_grad and y.register_hook(self.f), y)[1])(self.l(a))",
        "torch.rand(64, 32)", LINEAR + "; self.f = lambda g: (g.max(), None)[1]",
    ),
    "integer inputs": (
        "self.e(a)", "torch.randint(0, 50, (64, 7))", "self.e = nn.Embedding(50, 8)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_reference_accepts_itself_and_no_replay(name, tmp_path):
    forward, inputs, *init = UNUSUAL[name]
    problem = load_reference(tmp_path, reference_of(forward, inputs, "".join(init) or "0"))
    expectations = expect_all(problem, thorough_probes(SEED, problem.num_rows()))
    check = verdict(problem, problem.module.Model, expectations)
    assert check.is_accepted, check.reason

    class Replay(problem.module.Model):
        def forward(self, *inputs):
            if torch.is_grad_enabled() or not hasattr(self, "first"):
                self.first = super().forward(*inputs)
            several = isinstance(self.first, tuple)
            return tuple(y.clone() for y in self.first) if several else self.first.clone()

    asked_until_found(problem, Replay, expectations, "output of call 2")


def test_a_backward_that_cannot_be_differentiated_is_asked_without(tmp_path):
    text = reference_of("Square.apply(self.l(a))", "torch.rand(64, 32)", LINEAR)
    function = """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return torch.mul(grad, 2.0 * ctx.saved_tensors[0], out=torch.empty_like(grad))

class Model"""
    problem = load_reference(tmp_path, text.replace("\nclass Model", function, 1))
    probes = thorough_probes(SEED, problem.num_rows())
    asked = [p for p in probes if p.gradient_layout == "in_graph"]
    assert asked
    check = verdict(problem, problem.module.Model, expect_all(problem, asked))
    assert check.is_accepted, check.reason


@pytest.mark.parametrize("mode", ["", " if self.training else self.n"])
def test_what_counts_calls_in_eval_mode_is_not_called_by_several_threads_at_once(mode, tmp_path):
    forward = f"(a * (self.n.add_(1){mode}).clamp(max=10), a)[0]"
    text = reference_of(forward, "torch.rand(64, 32)", "self.register_buffer('n', torch.ones(()))")
    problem = load_reference(tmp_path, text)
    traits = traits_of(problem, problem.make_model(0), "cpu")
    assert traits.updates_in_eval == (mode == "")
    probes = thorough_probes(SEED, problem.num_rows(), traits=traits)
    assert any(p.at_once == "one module" for p in probes) == (mode != "")
    check = verdict(problem, problem.module.Model, expect_all(problem, probes))
    assert check.is_accepted, check.reason


def test_a_sum_may_pass_the_largest_number_on_its_way_and_come_back(tmp_path):
    problem = load_reference(tmp_path, reference_of("a.sum(1)", "torch.rand(24, 16384, 64)"))
    probes = [p for p in thorough_probes(SEED, 24) if p.name == "vast values"]
    expectations = expect_all(problem, probes)

    class InParts(problem.module.Model):
        def forward(self, a):
            return functools.reduce(torch.add, (part.sum(1) for part in a.split(512, 1)))

    class Narrow(problem.module.Model):
        def forward(self, a):
            return (a * 2.0**20).sum(1) * 2.0**-20

    assert expectations[0].probe.distribution == "vast_terms"  # 2^120 is too near
    assert not reasons(InParts, problem, expectations)
    assert "Inf at other places" in reasons(Narrow, problem, expectations)[0]


def test_a_product_of_numbers_near_the_largest_may_be_summed_in_any_order(tmp_path):
    """Where a row and a column of such numbers meet, a sum may pass the largest and come back."""
    inputs = "torch.rand(48, 32), torch.rand(32, 4)"
    problem = load_reference(tmp_path, reference_of("a @ b", inputs))

    class Backwards(problem.module.Model):
        def forward(self, a, b):
            return functools.reduce(
                torch.add, (a[:, k : k + 1] * b[k] for k in reversed(range(32)))
            )

    class Narrow(problem.module.Model):
        def forward(self, a, b):
            return (a * 2.0**20) @ b * 2.0**-20

    near = (p for seed in range(40) for p in thorough_probes(seed, 48))
    expectations = expect_all(problem, [p for p in near if p.name == "values near the largest"])
    assert len(expectations) == 40
    assert not reasons(Backwards, problem, expectations)
    assert "Inf at other places" in reasons(Narrow, problem, expectations)[0]


def test_a_module_that_returns_float8_is_judged(tmp_path):
    text = reference_of("(a * 2).to(torch.float8_e4m3fn)", "torch.rand(24, 8192)")
    problem = load_reference(tmp_path, text)
    vast = [p for p in thorough_probes(SEED, 24) if p.name in ("vast values", "NaN row, eval")]
    assert len(vast) == 2
    expectations = expect_all(problem, [*screening_probes(SEED, Extent(24)), *vast])

    class Same(problem.module.Model):
        pass

    assert not reasons(Same, problem, expectations)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 8, 16, 200])
@pytest.mark.parametrize("row_elements", [2.0**23 + 1, 2.0**26, 2.0**29])
def test_huge_rows_are_asked_a_few_at_a_time(num_rows, row_elements):
    probes = thorough_probes(
        SEED, num_rows, has_cuda=True, row_elements=row_elements, large_batch=num_rows
    )
    extent = Extent(num_rows, row_elements, "gpu")
    room = max(4, int(2**29 / row_elements))  # of what is asked at full size
    batches = {p.name: p.batch for p in probes if p.batch is not None and not p.is_tall}
    most = {name: rows for name, rows in batches.items() if rows > max(room, extent.most_rows)}
    assert set(most) <= {"more rows"}, most
    full = [rows for name, rows in batches.items() if name.endswith("at full size")]
    assert all(rows < num_rows for rows in full)
    assert batches["an odd batch"] % 2 == 1 and batches["an odd batch"] != num_rows
    (more,) = (p for p in probes if p.name == "more rows")
    assert not more.gradients or num_rows * row_elements <= 2**29
    reduced = {p.batch for p in probes if p.is_reduced and p.batch not in full}
    assert num_rows <= 3 or reduced & {2, 3}


def test_where_the_order_of_a_product_decides_about_a_nan_none_is_wrong(tmp_path):
    """Beyond a float first and then times 0 is NaN; times 0 first and then others is 0.

    And an Inf times what is so small that it is 0 is NaN, while Inf times each of it is Inf.
    """
    problem = load_reference(tmp_path, reference_of("a.cumprod(1)", "torch.rand(4, 600)"))

    class InParts(problem.module.Model):
        def forward(self, a):
            first, last = a.tensor_split(2, 1)
            return torch.cat((first.cumprod(1), first.prod(1, True) * last.cumprod(1)), 1)

    class Finite(problem.module.Model):
        def forward(self, a):
            return a.nan_to_num().cumprod(1)

    probes = thorough_probes(SEED, problem.num_rows())
    told_by = [p for n, p in enumerate(probes) if p.distribution == "whole_numbers" or n % 4 == 0]
    expectations = expect_all(problem, told_by)
    whole = [e for e in expectations if e.probe.distribution == "whole_numbers"]
    assert any(y.isnan().any() for e in whole for y in e.oracle.values())
    check = verdict(problem, InParts, expectations)
    assert check.is_accepted, check.reason
    asked_until_found(problem, Finite, expectations, "NaN")


def test_what_a_reference_refuses_is_asked_more_tamely_and_never_the_same_again():
    for num_rows in (None, 64, 512):
        for probe in thorough_probes(SEED, num_rows, has_cuda=True, row_elements=512.0):
            asked = [probe]
            while (tame := tamer(asked[-1])) is not None:
                assert tame not in asked, probe.name
                asked.append(tame)


def test_a_reference_without_options_and_without_a_batch_is_asked_at_its_own_rows(tmp_path):
    inputs = "torch.rand(200, 200), torch.rand(200, 200)"
    problem = load_reference(tmp_path, reference_of("torch.triu(a @ b + b.T @ a.T)", inputs, "0"))
    [probe] = [p for p in thorough_probes(SEED, 512) if p.name == "other options, zeros"]
    assert probe.batch is not None and probe.batch < 512
    found = expected(problem, dataclasses.replace(probe, batch=100), FLOAT32)
    assert not found.error and found.num_rows == 200
    check = verdict(problem, problem.module.Model, [found])
    assert check.is_accepted, check.reason


def test_a_reference_that_returns_a_parameter_even_without_gradients_accepts_itself(tmp_path):
    text = reference_of("(self.l(a), self.l.weight)", "torch.rand(64, 32)", LINEAR)
    problem = load_reference(tmp_path, text)
    expectations = expect_all(problem, screening_probes(SEED, Extent(problem.num_rows())))
    check = verdict(problem, problem.module.Model, expectations)
    assert check.is_accepted, check.reason


def test_a_momentum_of_the_modules_own_has_to_be_no_batch_norms(tmp_path):
    """BatchNorm's may be None, which averages over all calls; a number of the user's may not."""
    text = reference_of("a * (1 - self.momentum)", "torch.rand(64, 8)", "0")
    text = text.replace("super().__init__()", "super().__init__(); self.momentum = 0.01")
    problem = load_reference(tmp_path, text)
    [probe] = [p for p in thorough_probes(SEED, 64) if p.mode == "cumulative"]
    expectations = expect_all(problem, [probe])
    assert not expectations[0].error
    check = verdict(problem, problem.module.Model, expectations)
    assert check.is_accepted, check.reason


def test_complex_numbers_cannot_be_judged(tmp_path):
    problem = load_reference(tmp_path, reference_of("torch.fft.rfft(a)", "torch.rand(8, 6)", "0"))
    with pytest.raises(ProblemError, match="complex numbers, which cannot be judged"):
        expected(problem, Probe("as given"), FLOAT32)


def test_every_honest_module_is_tried():
    from test_trust_classes import HONEST as with_differences

    names = {path.stem for path in (HERE / "honest").glob("*.py")}
    assert names == {*ALWAYS_ACCEPTED, *with_differences, "split_bfloat16", "casts_inputs"}


def test_a_right_answer_where_the_reference_refuses_is_a_difference_and_a_wrong_one_is_rejected(
    problem, thorough
):
    asked = [e for e in thorough if e.probe.name == "float64 input"]
    cast = load_candidate(HERE / "honest" / "casts_inputs.py")
    check = verdict(problem, cast, asked)
    assert check.is_accepted and "the answer is right" in check.differences[0]
    assert check.strictly().reason.startswith("right, but no drop-in: float64 input: it returned")

    class Wrong(cast):
        def forward(self, x):
            return super().forward(x) * (1.0 + 1e-4 * (x.dtype == torch.float64))

    check = verdict(problem, Wrong, asked)
    assert not check.is_accepted and "and the answer is wrong by" in check.reason


SHAPES = [(4, 40, 64), (48, 40, 64), (700, 24, 33), (256, 16, 300)]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def screened(request, tmp_path_factory):
    in_features, out_features, batch_size = request.param
    sizes = {"in_features": in_features, "out_features": out_features, "batch_size": batch_size}
    problem = load_reference(tmp_path_factory.mktemp("shape"), **sizes)
    return problem, expect_all(problem, screening_probes(SEED, Extent(problem.num_rows())))


@pytest.mark.parametrize("operands", ["bfloat16", "float16", "tf32"])
def test_operands_of_fewer_bits_never_get_float32_at_any_shape(operands, screened):
    """Each screening probe by itself tells the class from the next one down."""
    problem, expectations = screened
    new_class = load_candidate(HERE / "cheats" / f"operands_in_{operands}.py")
    check = verdict(problem, new_class, expectations)
    reported = {probe.probe: probe.is_accepted for probe in check.probes}
    assert not check.is_accepted and not reported["as given"], reported


@pytest.mark.parametrize("name", ["scale_folded_afresh", "two_sweeps", "welford_in_chunks"])
def test_float32_in_another_order_gets_float32_at_any_shape(name, screened):
    problem, expectations = screened
    check = verdict(problem, load_candidate(HERE / "honest" / f"{name}.py"), expectations)
    assert check.is_accepted, check.reason


def test_the_reference_itself_is_accepted_by_screening(problem):
    probes = screening_probes(SEED, Extent(problem.num_rows()))
    check = verdict(problem, problem.module.Model, expect_all(problem, probes))
    assert check.is_accepted, check.reason


def test_split_bfloat16_is_judged_by_its_numbers(problem):
    new_class = load_candidate(HERE / "honest" / "split_bfloat16.py")
    probes = [p for p in thorough_probes(SEED, problem.num_rows()) if p.name != "offset"]
    named = {p.name: p for p in probes}
    usual = [named["as given"], named["fresh weights"], named["heavy-tailed"], named["some rows"]]
    loose = verdict(problem, new_class, expect_all(problem, usual, LOOSE), LOOSE)
    assert loose.is_accepted, loose.reason
    strict = verdict(problem, new_class, expect_all(problem, usual))
    assert not strict.is_accepted
    assert strict.probes[0].rms_rel > 2 * strict.probes[0].baseline_rms_rel


def altered(problem, change, *, probe=None, accuracy=FLOAT32):
    """Judge the reference's own answer after `change` was applied to its tensors."""
    probe = probe or Probe("plain", seed_inputs=3, seed_weights=4)
    e = expected(problem, probe, accuracy)
    (a,) = ask_all(problem, problem.module.Model, [e])
    change(e, a.tensors)
    # What the producer would have seen of these outputs.
    late = {f"late.{n}": checksum_of(t) for n, t in a.tensors.items() if n.startswith("call")}
    report = dataclasses.replace(a.report, checksums={**a.report.checksums, **late})
    return judge(e, Answer(report, a.tensors), accuracy)


def spoil(index, factor):
    """Return a change that moves one output element by `factor` times its limit."""

    def change(e, tensors):
        base = e.baseline["call0.output0"]
        limit = max(2 * base.max_abs, 16 * 2**-24 * base.largest)
        exact = e.oracle["call0.output0"][index]
        tensors["call0.output0"][index] = (exact + factor * limit).float()

    return change


def test_float32_limit_is_twice_the_baselines_or_sixteen_ulp(problem):
    assert altered(problem, spoil((3, 5), 0.9)).is_accepted
    result = altered(problem, spoil((3, 5), 1.2))
    assert not result.is_accepted
    assert "output of call 1[3, 5]: got" in result.reason
    assert "with limit" in result.reason


@pytest.mark.parametrize("accuracy", [FLOAT32, LOOSE])
@pytest.mark.parametrize("spoilt", [0.0, 1e30, float("inf"), float("-inf"), float("nan")])
def test_a_cpus_pieces_are_compared_as_a_gpus_tensors_are(spoilt, accuracy, monkeypatch):
    want = torch.linspace(-3.0, 5.0, 960, dtype=torch.float64).view(40, 24)
    got = want.float() * (1.0 + 2e-4 * torch.linspace(0.0, 1.0, 24))
    got[3, 5] = spoilt
    monkeypatch.setattr("tuner.check.judge.sums_of_errors.CACHED_ELEMENTS", 100)
    on_cpu = [compare(g, want.T, None, accuracy) for g in (got.T, got.bfloat16().T)]
    monkeypatch.setattr("tuner.check.judge.compare.Comparison._is_on_cpu", False)
    as_on_gpu = [compare(g, want.T, None, accuracy) for g in (got.T, got.bfloat16().T)]
    for mine, theirs in zip(on_cpu, as_on_gpu, strict=True):
        assert dataclasses.astuple(mine) == pytest.approx(dataclasses.astuple(theirs), rel=1e-12)


def test_under_32_rows_the_limit_is_four_times_the_baselines(problem):
    probe = Probe("few", seed_inputs=3, seed_weights=4, batch=31, distribution="offset")
    assert altered(problem, spoil((3, 5), 1.9), probe=probe).is_accepted
    assert not altered(problem, spoil((3, 5), 2.1), probe=probe).is_accepted


def test_rms_is_judged_as_well_as_the_largest_error(problem):
    probe = Probe("offset", seed_inputs=3, seed_weights=4, distribution="offset")

    def shift_all(e, tensors):
        base = e.baseline["call0.output0"]
        exact = e.oracle["call0.output0"]
        tensors["call0.output0"].copy_(exact + 1.5 * base.max_abs)

    result = altered(problem, shift_all, probe=probe)
    assert not result.is_accepted
    assert "rms error" in result.reason


def test_tolerance_is_judged_element_by_element(problem):
    def shift(by):
        def change(e, tensors):
            exact = e.oracle["call0.output0"]
            tensors["call0.output0"][7, 2] = exact[7, 2] + by * (1e-4 + 1e-4 * abs(exact[7, 2]))

        return change

    assert altered(problem, shift(0.9), accuracy=LOOSE).is_accepted
    result = altered(problem, shift(1.3), accuracy=LOOSE)
    assert not result.is_accepted
    assert "[7, 2]" in result.reason
    assert "rtol=1e-4,atol=1e-4" in result.reason


def test_where_the_baseline_leaves_the_tolerance_twice_its_error_is_allowed(problem):
    probe = Probe("offset", seed_inputs=3, seed_weights=4, distribution="offset")

    def scaled(factor):
        def change(e, tensors):
            base = e.baseline["call0.output0"]
            assert base.num_beyond
            exact = e.oracle["call0.output0"]
            tensors["call0.output0"][0, 0] = exact[0, 0] + factor * base.max_abs

        return change

    assert altered(problem, scaled(1.8), probe=probe, accuracy=LOOSE).is_accepted
    assert not altered(problem, scaled(2.2), probe=probe, accuracy=LOOSE).is_accepted


def test_rows_and_columns_of_a_tail_are_named(problem):
    def tail(e, tensors):
        tensors["call0.output0"][60:] += 1.0

    assert "only rows 60 to 63 are wrong" in altered(problem, tail).reason

    def column(e, tensors):
        tensors["call0.output0"][:, 39] += 1.0

    assert "only column 39 is wrong" in altered(problem, column).reason


def test_a_counter_must_be_exact(problem):
    def forget(e, tensors):
        tensors["buffer.bn.num_batches_tracked"] -= 1

    result = altered(problem, forget)
    assert "buffer bn.num_batches_tracked[]: got 7, expected 8" in result.reason
    assert "the calls were not counted" in result.reason


def test_missing_tensors_and_wrong_shapes_are_rejected(problem):
    assert "is missing" in altered(problem, lambda e, t: t.pop("buffer.bn.running_var")).reason
    result = altered(problem, lambda e, t: t.update({"call0.output0": torch.zeros(2, 2)}))
    assert "has shape [2, 2], not [64, 40]" in result.reason


def test_the_bias_gradient_is_compared_absolutely(problem):
    probe = Probe("gradients", seed_inputs=3, seed_weights=4, gradients="all")

    def change(by):
        def add(e, tensors):
            assert e.baseline["grad0.gemm.bias"].largest < 1e-9
            tensors["grad0.gemm.bias"].zero_().add_(by)

        return add

    assert altered(problem, change(0.0), probe=probe).is_accepted
    assert not altered(problem, change(1e-2), probe=probe).is_accepted


def test_tf32_is_refused_on_the_cpu(problem):
    with pytest.raises(ProblemError, match="tf32 is not available on cpu"):
        expected(problem, Probe("as given"), Accuracy("tf32"))


def test_a_batch_may_not_be_refused(problem, thorough):
    class Only64(problem.module.Model):
        def forward(self, x):
            if x.shape[0] != 64:
                raise RuntimeError("this build does 64 rows only")
            return super().forward(x)

    check = verdict(problem, Only64, thorough)
    assert "this build does 64 rows only" in check.reason


def test_a_module_that_does_not_build_or_load_is_rejected_with_its_words(problem):
    class NoBuild(torch.nn.Module):
        def __init__(self, *args):
            raise KeyError("no such tile")

    class OtherKeys(problem.module.Model):
        def __init__(self, *args):
            super().__init__(*args)
            del self.scale

    e = expect_all(problem, [Probe("plain", seed_weights=1)])
    assert "ModelNew(*get_init_inputs()) raised KeyError" in verdict(problem, NoBuild, e).reason
    reason = verdict(problem, OtherKeys, e).reason
    assert "does not load the reference's state_dict" in reason
    # PyTorch names the keys below its first line; who shows one line shows them all the same.
    assert 'Unexpected key(s) in state_dict: "scale"' in reason.splitlines()[0]


@pytest.mark.parametrize(
    "name",
    ["transposed input", "strided input", "padded input", "misaligned input"],
)
def test_the_hint_to_a_layout_names_rounding_where_the_error_is_of_its_size(
    problem, thorough, name
):
    class Rounds(problem.module.Model):
        def forward(self, x):
            return super().forward(x.bfloat16().float())

    class IgnoresStrides(problem.module.Model):
        def forward(self, x):
            flat = torch.as_strided(x, (x.numel(),), (1,)) if x.stride(0) else x.reshape(-1)
            return super().forward(flat.roll(1).reshape(x.shape))

    e = [one for one in thorough if one.probe.name == name]
    rounded, other = (verdict(problem, cls, e).reason for cls in (Rounds, IgnoresStrides))
    assert "an error of rounding size" in rounded and "strides" not in rounded, rounded
    assert "an error of rounding size" not in other, other
    assert ("vector loads" if name == "misaligned input" else "are strides ignored?") in other


def test_answers_survive_the_channel_bit_by_bit(problem, thorough):
    e = next(e for e in thorough if e.probe.name == "gradients")
    text, blobs = pack(e.question.script, e.question.tensors)
    script, tensors = unpack(Script, text, blobs)
    assert script == e.question.script
    assert tensors.keys() == e.question.tensors.keys()
    (a,) = ask_all(
        problem, problem.module.Model, [dataclasses.replace(e, question=Question(script, tensors))]
    )
    report, received = unpack(Report, *pack(a.report, a.tensors))
    assert all(torch.equal(received[name], t) for name, t in a.tensors.items())
    result = judge(e, Answer(report, received), FLOAT32)
    assert result.is_accepted, result.reason


def test_the_channel_carries_nan_empty_and_scalar_tensors():
    tensors = {
        "nan": torch.tensor([float("nan"), float("inf")]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "half": torch.ones(2, 2, dtype=torch.bfloat16).t(),
        "flags": torch.tensor([True, False]),
    }
    _, received = unpack(Script, *pack(Script(), tensors))
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name].nan_to_num(), tensor.nan_to_num())
        assert received[name].shape == tensor.shape


FLOATS = '{"record": {}, "tensors": [{"name": "x", "dtype": "float32", "shape": [2]}]}'


@pytest.mark.parametrize(
    ("text", "blobs"),
    [
        ("{}", []),
        ("no json", []),
        ('{"record": {}, "tensors": [{"name": "x"}]}', [b""]),
        ('{"record": {}, "tensors": []}', [b"1234"]),
        (FLOATS, [b"1234"]),
        (FLOATS.replace("float32", "load"), [b"12345678"]),
        (FLOATS.replace("[2]", "[-1]"), [b"1234"]),
        (FLOATS.replace("[2]", '["many"]'), [b"1234"]),
        ('{"record": {"calls": "many"}, "tensors": []}', []),
        ("[1, 2]", []),
    ],
)
def test_a_spoiled_message_is_a_value_error(text, blobs):
    with pytest.raises(ValueError):
        unpack(Script, text, blobs)


def test_a_question_tells_neither_seeds_nor_the_probe(thorough):
    e = next(e for e in thorough if e.probe.name == "heavy-tailed")
    text, _ = pack(e.question.script, e.question.tensors)
    assert "heavy" not in text
    assert str(e.probe.seed_inputs) not in text
    assert str(e.probe.seed_weights) not in text


def test_probes_depend_on_the_seed_and_are_json(problem):
    one, two = thorough_probes(1, 64), thorough_probes(2, 64)
    # But for those whose name says what was drawn.
    said = re.compile(r"^drawn .*|\d+ rows|input \d")
    names = [[said.sub("", p.name) for p in probes] for probes in (one, two)]
    assert names[0] == names[1]
    assert one[0].seed_inputs != two[0].seed_inputs
    assert len({p.name for p in one}) == len(one)
    assert json.loads(json.dumps([dataclasses.asdict(p) for p in one]))
    assert any(p.has_side_stream for p in thorough_probes(1, 64, has_cuda=True))


def test_few_probes_run_at_full_size():
    full = [p.name for p in thorough_probes(1, 16384) if p.batch is None]
    assert full == [
        "as given", "offset", "heavy-tailed", "again at full size", "gradients at full size",
        "NaN row, eval", "Inf elements, eval", "wide range at full size",
        "huge values at full size", "vast values at full size", "tiny values at full size",
        "a NaN row at full size", "Inf elements at full size", "eval mode",
        "own work, training", "own work, eval",
    ]  # fmt: skip
    large = {p.name for p in thorough_probes(1, 16384) if (p.batch or 0) > 1024 and not p.is_tall}
    assert large == {"more rows"}


def test_large_modules_are_asked_fewer_rows_and_once_all_of_them():
    usual = thorough_probes(1, 4096, has_cuda=True)
    row = 3 * 393216  # a softmax of KernelBench's: 6 GB in, 6 GB out
    large = thorough_probes(1, 4096, has_cuda=True, row_elements=row)
    assert [p.name for p in large if p.batch is None] == ["as given"]
    by_name = {p.name: p for p in large}
    assert by_name["gradients at full size"].batch == 2**29 // row
    assert by_name["fresh weights"].batch * row <= 2**25
    more = by_name["more rows"]
    assert more.batch > 4096 and more.calls == 1 and not more.gradients
    others = [p for p in large if p.batch and p.name != "more rows" and not p.is_tall]
    assert max(p.batch for p in others) * row <= 2**29
    # What is left out are batches alone, of more rows than there is room for.
    # Of which others there are by chance: 256 whole tiles' rows are too many, 128 are not.
    drawn = re.compile(r"\d+ rows|input \d|^whole tiles$|number of threads")
    left_out = [p for p in usual if p.name not in by_name and not drawn.search(p.name)]
    few = [p.name for p in left_out if not p.mild_more and (p.batch or 0) <= 2**28 // row]
    assert few == []
    # The flagship's are as they were.
    assert thorough_probes(1, 16384, has_cuda=True, row_elements=16400) == thorough_probes(
        1, 16384, has_cuda=True
    )


def test_a_batch_that_is_taken_another_way_in_eval_mode_is_asked_for():
    usual = thorough_probes(1, 64)
    assert thorough_probes(1, 64, large_batch=64) == usual
    *same, large = thorough_probes(1, 64, large_batch=5000)
    assert same == usual and large.mode == "eval" and large.distribution == "nan_row"
    assert 5000 < large.batch < 5033 and large.is_reduced
    assert thorough_probes(1, None, large_batch=5000) == thorough_probes(1, None)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 64, 67, 81, 300, 16384])
def test_which_batches_are_asked_is_secret(num_rows):
    asked = [{p.name: p.batch for p in thorough_probes(s, num_rows)} for s in range(100)]
    for name, least in [("some rows", 20), ("more rows", 20), ("an odd batch", 3)]:
        found = {batches[name] for batches in asked}
        assert num_rows not in found and min(found) > 0
        assert len(found) >= (least if num_rows > 90 or "odd" not in name else 1)
    assert num_rows == 2 or all(batches["an odd batch"] % 2 for batches in asked)
    assert min(batches["more rows"] for batches in asked) > num_rows


TWO_OUTPUTS = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, power):
        super().__init__()
        self.power = power

    def forward(self, x, index, factor):
        picked = x[:, index] * factor
        return picked ** self.power, picked.argmax(1)

def get_inputs():
    return [torch.randn(12, 9), torch.tensor([1, 3, 5]), 1.5]

def get_init_inputs():
    return [2]
"""


def test_any_problem_is_checked_with_integers_numbers_and_several_outputs(tmp_path):
    problem = load_reference(tmp_path, TWO_OUTPUTS)
    probes = [
        p for p in thorough_probes(3, problem.num_rows())
        if p.name not in ("batch 0", "NaN row", "NaN row, eval")  # argmax has no answer there
    ]  # fmt: skip
    expectations = expect_all(problem, [*probes[:20], *probes[20::4]])
    check = verdict(problem, problem.module.Model, expectations)
    assert check.is_accepted, check.reason

    class Wrong(problem.module.Model):
        def forward(self, x, index, factor):
            first, second = super().forward(x, index, factor)
            return first, (second + 1) % 3

    check = verdict(problem, Wrong, expectations)
    assert "output 2 of call 1[0]: got" in check.reason


def test_a_reference_that_draws_random_numbers_cannot_be_judged(tmp_path):
    text = FLAGSHIP.replace("x = self.bn(x)", "x = nn.functional.dropout(self.bn(x))")
    problem = load_reference(tmp_path, text)
    with pytest.raises(ProblemError, match="does it draw random numbers"):
        expected(problem, Probe("as given", weights="initial"), FLOAT32)


def test_a_reference_whose_result_is_rounding_alone_is_named_so(tmp_path):
    text = FLAGSHIP.replace("x = self.bn(x)", "x = (x - x.mean(0)).mean(0)")
    problem = load_reference(tmp_path, text)
    with pytest.raises(ProblemError, match="is it 0 for all inputs"):
        expected(problem, Probe("as given", weights="initial"), FLOAT32)


def test_a_result_that_is_nothing_by_its_first_weights_alone_is_judged(tmp_path):
    """As the mean of a norm whose weights are all 1: 0 as given, and not after training."""
    text = FLAGSHIP.replace("x = self.bn(x)", "x = self.bn(x).mean(0)")
    problem = load_reference(tmp_path, text)
    given, fresh = Probe("as given", weights="initial"), Probe("fresh weights", weights="random")
    for probe in (given, fresh):
        (e,) = expect_all(problem, [probe])
        (right,) = ask_all(problem, problem.module.Model, [e])
        result = judge(e, right, FLOAT32)
        assert result.is_accepted and result.rms_rel < 1e-5, result  # not beside 1e-17

    class Nothing(problem.module.Model):
        def forward(self, x):
            return 0.0 * super().forward(x)

    (e,) = expect_all(problem, [fresh])
    (wrong,) = ask_all(problem, Nothing, [e])
    assert not judge(e, wrong, FLOAT32).is_accepted


def test_inputs_that_do_not_grow_with_the_rows_are_known(tmp_path):
    """Of a second operand of 0.5 GB a probe of 22 calls took 75 GB: it needs a GPU for itself."""
    text = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, a, b):
        return a @ b

def get_inputs():
    return [torch.rand(32, 48), torch.rand(48, 20)]

def get_init_inputs():
    return []
"""
    (tmp_path / "product.py").write_text(text)
    judge = Judge(Oracle(str(tmp_path / "product.py"), {}, "cpu", "float32"))
    assert judge.about()["fixed_elements"] == 48 * 20


def test_nothing_asked_is_nothing_verified():
    check = merge([], FLOAT32, is_thorough=True)
    assert not check.is_accepted


# ---- near misses ----------------------------------------------------------------------------


def in_draws(*ends: str):
    """A probe whose draws end so: "ok", "close" or "wrong"."""

    def ask(draw: int) -> ProbeResult:
        end = ends[draw]
        reason = "" if end == "ok" else f"{end} in draw {draw}"
        return ProbeResult("p", 0.0, 0.0, 0.0, 0.0, end == "ok", reason, is_close=end == "close")

    return by_majority(ask)


@pytest.mark.parametrize(
    ("ends", "is_accepted", "num_draws"),
    [
        (["ok"], True, 1),
        (["wrong"], False, 1),
        (["close", "ok", "ok", "ok"], True, 4),
        (["close", "ok", "close", "ok", "ok"], True, 5),
        (["close", "close", "close"], False, 3),
        (["close", "ok", "close", "ok", "close"], False, 5),
        (["close", "ok", "wrong"], False, 3),
    ],
)
def test_a_near_miss_is_decided_by_most_draws_and_a_wrong_answer_at_once(
    ends, is_accepted, num_draws
):
    result = in_draws(*ends)
    assert (result.is_accepted, result.num_draws) == (is_accepted, num_draws)
    assert bool(result.reason) is not is_accepted


def test_a_probe_drawn_again_asks_the_same_with_other_numbers():
    probe = Probe("offset", distribution="offset", seed_inputs=1, seed_weights=2, calls=2)
    assert redrawn(probe, 0) == probe
    draws = [redrawn(probe, draw) for draw in range(1, 5)]
    assert draws == [redrawn(probe, draw) for draw in range(1, 5)]
    seeds = {(draw.seed_inputs, draw.seed_weights) for draw in (probe, *draws)}
    assert len(seeds) == 5
    same = [dataclasses.replace(draw, seed_inputs=1, seed_weights=2) for draw in draws]
    assert same == [probe] * 4


def test_an_error_just_beyond_the_limit_is_close_and_a_lower_precision_never_is():
    baseline = compare(torch.full((64,), 1.0 + 2e-6), torch.ones(64).double())
    limits = limits_of("call0.output0", baseline, 64, FLOAT32)

    def excess(error: float) -> float:
        return limits.excess(compare(torch.full((64,), 1.0 + error), torch.ones(64).double()))

    assert excess(3e-6) == 0.0 and 1.0 < excess(6e-6) < CLOSE < excess(2e-5)
    nan = compare(torch.full((64,), float("nan")), torch.ones(64).double())
    assert limits.excess(nan) == float("inf")
    # A tolerance is promised for every element, whatever the draw; where PyTorch itself leaves
    # it, its own error counts, which is luck again.
    tight = Accuracy("tolerance", 1e-6, 1e-7)
    for value, is_chance in ((1.0, False), (1.0 + 2e-6, True)):
        own = compare(torch.full((64,), value), torch.ones(64).double(), None, tight)
        error = compare(torch.full((64,), 1.0 + 6e-6), torch.ones(64).double(), None, tight)
        found = limits_of("call0.output0", own, 64, tight).excess(error)
        assert (found < CLOSE) is is_chance, found


def test_an_honest_module_is_accepted_whatever_the_draw(problem):
    # Columns whose weights nearly cancel: PyTorch is lucky with one in some 2 % of the draws.
    new_class = load_candidate(HERE / "honest" / "scale_folded_afresh.py")
    for seed in range(40):
        probe = next(p for p in thorough_probes(seed, 64) if p.name == "expanded input")

        def ask(draw: int, probe: Probe = probe) -> ProbeResult:
            expectations = expect_all(problem, [redrawn(probe, draw)])
            return judge(expectations[0], ask_all(problem, new_class, expectations)[0], FLOAT32)

        result = by_majority(ask)
        assert result.is_accepted, result.reason


@pytest.mark.parametrize(
    ("in_float64", "said", "next_step"),
    [
        ("torch.empty(2**50, dtype=x.dtype)", "memory ran out", "its weights take 0.0 GiB"),
        ("x + torch.ones(3)", "the float64 run of the reference fails", "as by torch.zeros("),
    ],
)
def test_why_a_reference_does_not_run_in_float64_is_said(tmp_path, in_float64, said, next_step):
    text = f"""
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.linear(x) if x.dtype == torch.float32 else {in_float64}
def get_inputs():
    return [torch.rand(4, 8)]
def get_init_inputs():
    return []
"""
    found = load_reference(tmp_path, text)
    probe = thorough_probes(SEED, found.num_rows())[0]
    with pytest.raises(ProblemError, match=said) as caught:
        expected(found, probe, FLOAT32)
    assert next_step in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_copy_in_float64_has_weights_of_its_own(dtype):
    model = torch.nn.Linear(3, 2).to(dtype)
    wide = copied(model, is_wide=True)
    before = wide.weight.clone()
    with torch.no_grad():
        model.weight.fill_(7.0)
    assert wide.weight.dtype == torch.float64 and torch.equal(wide.weight, before)
