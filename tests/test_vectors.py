"""Vector registers: what the machine has, what TUNER_MARCH leaves of it, and code for each level.

The C++ templates' own tests run with the machine's registers. Here a selection of them is run as
code for each narrower level too, and what this machine cannot run is at least compiled.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import test_layer_norm as norm
import test_templates_cpu as gemm
from command_line import tune
from cpu_machine import GPP, VECTORS, compiled, facts_with
from families import built_in

from tuner.errors import InputError
from tuner.kernel.binding import bind
from tuner.kernel.toolchain import CPP_FLAGS, Toolchain
from tuner.machine import vectors as room
from tuner.machine.ceilings import impossible_us
from tuner.machine.device import describe
from tuner.machine.doctor import doctor, environment
from tuner.machine.host import ask_program
from tuner.machine.vectors import MARCH_VARIABLE, known_levels, missing_sets, of_level, vectors
from tuner.trial import Params

LEVELS = known_levels()
on_x86 = pytest.mark.skipif(not LEVELS, reason="only x86-64 has levels with names")


@pytest.fixture
def no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARCH_VARIABLE, raising=False)


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch, no_switch: None):
    """A function that sets the switch, and skips where this processor lacks the level."""

    def to(level: str) -> None:
        if missing := missing_sets(level):
            pytest.skip(f"this processor has no {', '.join(missing)}")
        monkeypatch.setenv(MARCH_VARIABLE, level)

    return to


# ---- the switch -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Processor:
    """A processor as /proc/cpuinfo and `uname -m` tell of it."""

    machine: str
    sets: frozenset[str]
    bits: int
    num_registers: int


PROCESSORS = {
    "AVX-512": Processor("x86_64", room._V4, 512, 32),
    "AVX2": Processor("x86_64", room._V3, 256, 16),
    "SSE": Processor("x86_64", frozenset({"sse2"}), 128, 16),
    "NEON": Processor("aarch64", frozenset({"asimd", "fphp"}), 128, 32),
    "no /proc": Processor("riscv64", frozenset(), 128, 16),
}


def pretend(monkeypatch: pytest.MonkeyPatch, processor: Processor) -> None:
    monkeypatch.setattr(room, "instruction_sets", lambda: processor.sets)
    monkeypatch.setattr(room.platform, "machine", lambda: processor.machine)


@pytest.mark.parametrize("name", PROCESSORS)
def test_registers_are_those_of_the_processor(name, monkeypatch, no_switch):
    processor = PROCESSORS[name]
    pretend(monkeypatch, processor)
    found = vectors()
    assert (found.bits, found.num_registers) == (processor.bits, processor.num_registers)
    assert found.machine_bits == found.bits and found.march == "native"


def test_the_switch_leaves_less_and_says_so(monkeypatch):
    pretend(monkeypatch, PROCESSORS["AVX-512"])
    for level, bits in (("x86-64-v2", 128), ("x86-64-v3", 256), ("x86-64-v4", 512)):
        monkeypatch.setenv(MARCH_VARIABLE, level)
        found = vectors()
        assert (found.march, found.bits, found.machine_bits) == (level, bits, 512)
    monkeypatch.setenv(MARCH_VARIABLE, "x86-64-v3")
    assert str(vectors()) == (
        "16 vector registers of 256 bits (TUNER_MARCH=x86-64-v3; the processor has 512 bits)"
    )


@pytest.mark.parametrize(
    ("processor", "value", "words"),
    [
        (
            "AVX2",
            "x86-64-v4",
            r"cannot run: it has no avx512bw, .*\n.*\n  next: unset TUNER_MARCH",
        ),
        ("AVX2", "x86-64-v33", r"native or x86-64-v2 .*\n  hint: did you mean 'x86-64-v3'"),
        ("NEON", "x86-64-v3", r"got 'x86-64-v3'\n  expected: native\n  next: unset TUNER_MARCH"),
    ],
)
def test_a_level_that_the_processor_lacks_is_refused(processor, value, words, monkeypatch):
    pretend(monkeypatch, PROCESSORS[processor])
    monkeypatch.setenv(MARCH_VARIABLE, value)
    with pytest.raises(InputError, match=words):
        vectors()


def test_the_doctor_lives_with_a_switch_that_is_wrong(monkeypatch):
    monkeypatch.setenv(MARCH_VARIABLE, "x86-64-v33")
    (finding,) = (finding for finding in doctor() if finding.name == "CPU vectors")
    assert not finding.is_ok
    assert "'x86-64-v33'" in finding.detail and MARCH_VARIABLE in finding.remedy


@on_x86
def test_facts_flags_and_keys_follow_the_switch(leave):
    native, device = Toolchain.find("cpu"), describe("cpu")
    assert native.cpp_flags == CPP_FLAGS and "-march" not in native.label
    assert "march" not in environment(device)
    leave("x86-64-v2")
    narrowed, less = Toolchain.find("cpu"), describe("cpu")
    assert less.facts()["device.simd_bits"] == 128
    assert less.facts()["device.simd_registers"] == 16
    expected = ["-march=x86-64-v2" if f == "-march=native" else f for f in CPP_FLAGS]
    assert list(narrowed.cpp_flags) == expected
    assert narrowed.signature("cpp") != native.signature("cpp")
    assert narrowed.label == native.label + "; -march=x86-64-v2"  # what `--resume` compares
    assert environment(less)["march"] == "x86-64-v2"
    # PyTorch's operations, which candidates call, are as fast as ever.
    floors = [impossible_us(1e9, 0.0, d, "fp16x2") for d in (device, less)]
    assert floors[0] == floors[1] > 0


@on_x86
def test_tune_doctor_tells_the_registers_and_the_switch(leave, tmp_path):
    leave("x86-64-v2")
    said = tune("doctor", cwd=tmp_path, env={MARCH_VARIABLE: "x86-64-v2"})
    assert "16 vector registers of 128 bits (TUNER_MARCH=x86-64-v2; the processor has" in said.out


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [("-march=native", "-march=native"), ("-mcpu=native", "-mcpu=native"), ("-O3", None)],
)
def test_off_x86_a_compiler_is_asked_how_it_spells_the_native_processor(
    accepted, expected, tmp_path, monkeypatch, no_switch
):
    pretend(monkeypatch, PROCESSORS["NEON"])
    compiler = tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo c++ 1 || [ "$1" = {accepted} ]\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    found = Toolchain.find("cpu")
    native = [flag for flag in found.cpp_flags if flag.endswith("=native")]
    assert native == ([expected] if expected else [])
    assert len(found.cpp_flags) == len(CPP_FLAGS) - (expected is None)


# ---- code for each level --------------------------------------------------------------------

GEMM: list[Params] = [
    {"template": "cpu", "stats": "gram", "gemm": "own"},
    {"template": "cpu", "stats": "two_pass"},
]
NORM: list[Params] = [
    {"template": "cpu", "stats": "per_thread", "stream_output": True},
    {"template": "cpu", "stats": "two_pass", "split": 3, "huge_pages": False},
]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    """A level that the compiler knows."""
    question = [f"-march={request.param}", "-E", "-x", "c++", os.devnull]
    if GPP is not None and not ask_program([GPP, *question]).is_ok:
        pytest.skip(f"this g++ does not know {request.param}: GCC 11 and later do")
    return str(request.param)


def _skip_unless_it_can_run(level: str) -> None:
    """Skip what was compiled and cannot be run, with the reason."""
    compiled_only = f"compiled with -march={level} and not run: "
    if missing := missing_sets(level):
        pytest.skip(f"{compiled_only}this processor has no {', '.join(missing)}")
    if of_level(level).bits > VECTORS.bits:
        pytest.skip(f"{compiled_only}{MARCH_VARIABLE}={VECTORS.march} leaves less")


@on_x86
@pytest.mark.parametrize("params", GEMM, ids=gemm._name)
def test_gemm_scale_batchnorm_is_as_accurate_at_each_level(level, params):
    registers = of_level(level)
    candidate = built_in("gemm_scale_batchnorm").render(params, facts_with(registers))
    assert f"kWidth = {registers.bits // 32};" in candidate.source
    library = compiled(candidate, registers)
    _skip_unless_it_can_run(level)
    op = bind(candidate.plan, "cpp", library)
    for shape in gemm.SHAPES:
        arguments = gemm._arguments(*shape)
        gemm._assert_float32_class(op, arguments)
        arguments[0] = arguments[0] + 100.0
        gemm._assert_float32_class(op, arguments)


@on_x86
@pytest.mark.parametrize("params", NORM, ids=norm._name)
def test_layer_norm_is_as_accurate_at_each_level(level, params):
    registers = of_level(level)
    candidate = built_in("layer_norm").render(params, facts_with(registers))
    assert f"kWidth = {registers.bits // 32};" in candidate.source
    library = compiled(candidate, registers)
    _skip_unless_it_can_run(level)
    op = bind(candidate.plan, "cpp", library)
    for shape in norm.SHAPES:
        norm._assert_float32_class(op, norm._arguments(*shape))
    norm._check_difficult_inputs(op, (40, 1024), "cpu")
    norm._check_constant_rows(op, "cpu")
