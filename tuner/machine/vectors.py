"""The vector registers that generated C++ may use, and the variable that leaves it fewer.

With TUNER_MARCH=x86-64-v3 a machine with AVX-512 behaves as one without: facts, flags, keys of
builds and exported files all follow. PyTorch's own kernels do not; they obey ATEN_CPU_CAPABILITY.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from tuner.errors import InputError, did_you_mean
from tuner.machine.host import instruction_sets

__all__ = [
    "MARCH_VARIABLE",
    "NATIVE",
    "Vectors",
    "known_levels",
    "missing_sets",
    "of_level",
    "vectors",
]

MARCH_VARIABLE = "TUNER_MARCH"
NATIVE = "native"


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vector registers that code for `-march=<march>` may use.

    Attributes:
        march: what the compiler gets.
        bits: the width of one register.
        num_registers: how many of them there are.
        machine_bits: the widest that the processor has, whatever `march` leaves of it.
    """

    march: str
    bits: int
    num_registers: int
    machine_bits: int

    def __str__(self) -> str:
        text = f"{self.num_registers} vector registers of {self.bits} bits"
        if self.march == NATIVE:
            return text
        return (
            f"{text} ({MARCH_VARIABLE}={self.march}; the processor has {self.machine_bits} bits)"
        )


# The levels of the x86-64 psABI: register width, number of registers, and what a processor must
# have for them, in the words of /proc/cpuinfo. GCC 11 and Clang 12 know their names.
_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_LEVELS = {
    "x86-64-v2": (128, 16, _V2),
    "x86-64-v3": (256, 16, _V3),
    "x86-64-v4": (512, 32, _V4),
}
# Machines whose 128-bit vector registers are 32 or more; SVE and RVV are not used.
_WITH_32_REGISTERS = ("aarch64", "arm64", "ppc64le")


def known_levels() -> list[str]:
    """Return the values of `-march` below which this kind of processor can be asked to stay."""
    return list(_LEVELS) if platform.machine().lower() in ("x86_64", "amd64") else []


def missing_sets(level: str) -> list[str]:
    """Return the instruction sets that a level needs and this processor lacks."""
    return sorted(_LEVELS[level][2] - instruction_sets())


def of_level(level: str) -> Vectors:
    """Return the registers of one of `known_levels()`, also where this processor lacks them."""
    bits, num_registers, _ = _LEVELS[level]
    return Vectors(level, bits, num_registers, _of_the_processor()[0])


def vectors() -> Vectors:
    """Return the vector registers that generated code may use here: as $TUNER_MARCH says.

    Raises:
        InputError: it names no level, or one whose code this processor cannot run.
    """
    level = os.environ.get(MARCH_VARIABLE, "").strip()
    bits, num_registers = _of_the_processor()
    if level in ("", NATIVE):
        return Vectors(NATIVE, bits, num_registers, bits)
    known = [NATIVE, *known_levels()]
    if level not in known:
        raise InputError(
            f"{MARCH_VARIABLE}: got {level!r}\n  expected: {' or '.join(known)}\n"
            f"  {did_you_mean(level, known) or f'next: unset {MARCH_VARIABLE}'}"
        )
    if missing := missing_sets(level):
        raise InputError(
            f"{MARCH_VARIABLE}: got {level!r}, whose code this processor cannot run: it has no "
            f"{', '.join(missing)}\n  expected: a level that it has; the variable leaves code "
            f"less, not more\n  next: unset {MARCH_VARIABLE}"
        )
    return of_level(level)


def _of_the_processor() -> tuple[int, int]:
    """Return the width and the number of its vector registers."""
    sets = instruction_sets()
    if "avx512f" in sets:
        return 512, 32
    # SSE and NEON are 128 bits wide, and so are those of whatever does not tell.
    wide = 256 if "avx2" in sets else 128
    return wide, 32 if platform.machine().lower() in _WITH_32_REGISTERS else 16
