"""This machine's CPU as the tests of C++ templates need it: facts, vector widths, compiling."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from shared_builds import GOLD, built_once

from tuner.machine.device import describe
from tuner.machine.vectors import Vectors, vectors
from tuner.trial import Candidate, Value

FACTS = describe("cpu").facts()
VECTORS = vectors()
WIDTH = VECTORS.bits // 32  # floats in a register
NARROW = max(4, WIDTH // 2)  # another width that the templates know, where there is one
GPP = shutil.which("g++")
# For tests of one file after the other that ask what generated code computes. It takes a third of
# the compiler's time at -O3, as a search compiles; tests of each template and each kind of loop
# keep that, and its warnings.
FEW_PASSES = "-O1"


def facts_with(registers: Vectors) -> dict[str, Value]:
    """Return this machine's facts as they were with other vector registers."""
    return {
        **FACTS,
        "device.simd_bits": registers.bits,
        "device.simd_registers": registers.num_registers,
    }


def compiled(candidate: Candidate, registers: Vectors = VECTORS, *, level: str = "-O3") -> Path:
    """Compile a candidate of a C++ template as code for these registers; a warning is an error.

    Args:
        candidate: of C++.
        registers: those of the code.
        level: how far it is optimised; `FEW_PASSES` where only values are asked.
    """
    if GPP is None:
        pytest.skip("needs g++, which is not on the PATH")
    flags = [level, f"-march={registers.march}", "-fopenmp", "-std=c++17", "-shared", "-fPIC"]
    flags += GOLD
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    return built_once(candidate.source, ".cpp", [GPP, *flags, *warnings])[0]
