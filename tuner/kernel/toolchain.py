"""The compilers of this machine: found, asked for their versions, and the commands they get.

What shapes the machine code besides a candidate's text (compiler, version, flags, processor) is
part of a toolchain's signature, and so of every build's key.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tuner.errors import ToolchainError
from tuner.machine.host import ask_program, find_gpu_program, find_host_compiler
from tuner.machine.platforms import PLATFORMS, SOURCE_NAMES, Kind, platform_of
from tuner.machine.vectors import NATIVE, vectors
from tuner.trial import Language, content_key

__all__ = ["CPP_FLAGS", "Toolchain"]

CPP_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",  # not -ffast-math: NaN and Inf must behave as in the reference
)
CUDA_FLAGS = (
    "-std=c++17",
    "-O3",
    # What torch.utils.cpp_extension adds: the exported text must mean the same while searching.
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
)
LAYOUT_VERSION = 2  # of a cache folder and of the commands below; part of every key


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The compilers found on this machine, and the flags they get.

    Attributes:
        kind: of the device.
        host_compiler: for C++; None where there is none.
        device_compiler: nvcc; None where there is none, or the device is a CPU.
        capability: of an NVIDIA GPU, 90 for 9.0.
        cpp_flags: what shapes the code of `.cpp` text (an export's `extra_cflags`); its
            `-march` follows $TUNER_MARCH.
        device_flags: what shapes the code of GPU texts (an export's `extra_cuda_cflags`).
        link_flags: for both, as the host compiler spells them.
        versions: (compiler, version text) pairs, for the record and for cache keys.
        variables: environment variables that these compilers obey, and their values.
        cpu: model and instruction sets, which code for the `native` processor depends on.
        demangler: path of c++filt or cu++filt; None leaves kernel names as they are.
        triton: version of the Triton that is installed; None where there is none.
    """

    kind: Kind
    host_compiler: str | None
    device_compiler: str | None = None
    capability: int | None = None
    cpp_flags: tuple[str, ...] = CPP_FLAGS
    device_flags: tuple[str, ...] = CUDA_FLAGS
    link_flags: tuple[str, ...] = ("-Wl,-z,defs", "-Wl,-s")  # a missing symbol is a build error
    versions: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    cpu: str = ""
    demangler: str | None = None
    triton: str | None = None

    @classmethod
    def find(
        cls,
        kind: Kind,
        capability: int | None = None,
        languages: Collection[Language] | None = None,
    ) -> Toolchain:
        """Find the compilers for a device.

        Args:
            kind: of the device.
            capability: 90 for compute capability 9.0; needed for kind "cuda".
            languages: what must be compilable; by default that of the device's own compiler.

        Raises:
            ToolchainError: a compiler is missing, does not run, or is too old for the GPU; the
                message says what to install.
            InputError: $TUNER_MARCH names no level that this processor has.
        """
        own = PLATFORMS[kind].language
        wanted = [own] if languages is None else languages
        host = find_host_compiler()
        own_compiler = find_gpu_program("nvcc") if kind == "cuda" else None
        flags: tuple[str, ...] = CUDA_FLAGS
        if kind == "cuda":
            if capability is None:
                raise ToolchainError("the GPU's compute capability is needed to compile for it")
            flags = (*CUDA_FLAGS, _gencode(capability))
        toolchain = cls(
            kind=kind,
            host_compiler=host,
            device_compiler=own_compiler,
            capability=capability,
            cpp_flags=_cpp_flags(host),
            device_flags=flags,
            versions=tuple((path, _version(path)) for path in (host, own_compiler) if path),
            variables=tuple((v, os.environ[v]) for v in _OBEYED if v in os.environ),
            cpu=_describe_cpu(),
            demangler=shutil.which("c++filt") or shutil.which("cu++filt"),
            triton=_triton_version(),
        )
        for language in wanted:
            toolchain.require(language)
        if own_compiler is not None and kind == "cuda" and own in wanted:
            _check_architecture(own_compiler, capability or 0)
        return toolchain

    def require(self, language: Language) -> None:
        """Raise ToolchainError if `language` cannot be compiled here."""
        if language == "triton":
            if self.kind == "cuda" and self.triton is None:
                raise ToolchainError("Triton is not installed\n  hint: pip install triton")
            return
        if self.host_compiler is None:
            raise ToolchainError(
                "no C++ compiler found: looked for $CXX, g++, c++ and clang++ on PATH\n"
                "  hint: install g++ (apt install g++, dnf install gcc-c++)"
            )
        if language == "cuda" and self.device_compiler is None:
            raise ToolchainError(
                "nvcc not found: looked in $CUDA_HOME/bin, $CUDA_PATH/bin, on PATH and in "
                "/usr/local/cuda/bin\n"
                "  hint: install the CUDA toolkit (its version should be your PyTorch's "
                "torch.version.cuda), or set CUDA_HOME"
            )

    def signature(self, language: Language) -> str:
        """Key of all that shapes the machine code of `language` besides the text."""
        if language == "triton":
            triton = (self.triton, platform.machine())
            return content_key(LAYOUT_VERSION, "triton", triton, self.capability)
        is_native = any(flag.endswith(f"={NATIVE}") for flag in self.cpp_flags)
        cpu = self.cpu if is_native and language == "cpp" else ""
        flags = self.flags(language)
        versions = [version for path, version in self.versions if self._uses(path, language)]
        machine = (platform.machine(), cpu, self.variables)
        return content_key(LAYOUT_VERSION, language, flags, self.link_flags, versions, machine)

    @property
    def label(self) -> str:
        """The compilers' versions in one line, and what their code was left of the processor."""
        named = next((f for f in self.cpp_flags if f.startswith("-march=")), "")
        narrowed = [named] if named and not named.endswith(f"={NATIVE}") else []
        return "; ".join([*(text for _, text in self.versions), *narrowed])

    def flags(self, language: Language) -> tuple[str, ...]:
        """What shapes the code of texts in a language; Triton takes nothing."""
        if language == "triton":
            return ()
        return self.device_flags if platform_of(language).is_gpu else self.cpp_flags

    def _uses(self, path: str, language: Language) -> bool:
        return path == self.host_compiler or platform_of(language).is_gpu

    def command(self, language: Language) -> list[str]:
        """Compose the command that turns SOURCE_NAMES[language] of its folder into artefact.so."""
        self.require(language)
        if language == "triton":
            return [sys.executable, "-I", "-c", _CHECK_PYTHON, SOURCE_NAMES[language]]
        assert self.host_compiler is not None
        output = ["-shared", "-o", "artefact.so", SOURCE_NAMES[language]]
        if language == "cpp":
            return [self.host_compiler, *self.cpp_flags, "-fPIC", *self.link_flags, *output]
        assert self.device_compiler is not None
        linker = [flag.removeprefix("-Wl,") for flag in self.link_flags]
        ours = ["-ccbin", self.host_compiler, "-Xcompiler", "-fPIC", "-Xptxas", "-v"]
        # Uncompressed, so that `hash_code` sees the symbols of the device code.
        ours += ["-no-compress", *(part for flag in linker for part in ("-Xlinker", flag))]
        return [self.device_compiler, *self.device_flags, *ours, *output]


_OBEYED = (
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
)

# Prints a syntax error in the form of a C++ compiler's. Nothing of the text is run.
_CHECK_PYTHON = """
import sys
name = sys.argv[1]
try:
    compile(open(name, "rb").read(), name, "exec")
except SyntaxError as error:
    sys.exit(f"{name}:{error.lineno}: error: {type(error).__name__}: {error.msg}\\n  {error.text}")
except (ValueError, RecursionError, MemoryError) as error:
    sys.exit(f"{name}: error: {type(error).__name__}: {error}")
"""


def _cpp_flags(host: str | None) -> tuple[str, ...]:
    """Return CPP_FLAGS with `-march=native` as $TUNER_MARCH and this compiler want it."""
    march = vectors().march
    wanted = [f"-march={march}"]
    if march == NATIVE and host is not None and platform.machine() not in ("x86_64", "AMD64"):
        # Elsewhere some compilers spell it `-mcpu`, and some know no native processor at all.
        spellings = [f"-march={NATIVE}", f"-mcpu={NATIVE}"]
        question = ["-E", "-x", "c++", os.devnull]
        wanted = [flag for flag in spellings if ask_program([host, flag, *question]).is_ok][:1]
    at = CPP_FLAGS.index(f"-march={NATIVE}")
    return (*CPP_FLAGS[:at], *wanted, *CPP_FLAGS[at + 1 :])


def _gencode(capability: int) -> str:
    """Code for exactly this GPU; on Hopper with its own instructions (wgmma, TMA multicast)."""
    number = "90a" if capability == 90 else str(capability)
    return f"-gencode=arch=compute_{number},code=sm_{number}"


def _check_architecture(nvcc: str, capability: int) -> None:
    known = [int(code) for code in re.findall(r"sm_(\d+)", _ask(nvcc, "--list-gpu-code"))]
    if known and capability not in known:
        raise ToolchainError(
            f"{nvcc} cannot compile for compute capability {capability / 10:.1f}; it knows "
            f"{', '.join(f'{code / 10:.1f}' for code in sorted(known))}\n"
            "  hint: install a CUDA toolkit that knows this GPU and set CUDA_HOME to it"
        )


def _triton_version() -> str | None:
    """Return the installed Triton's version, without importing it."""
    for name in ("triton", "pytorch-triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _version(program: str) -> str:
    """Return the line of `--version` that names the build: nvcc's last, another's first."""
    lines = _ask(program, "--version").strip().splitlines()
    if not lines:
        raise ToolchainError(f"{program} --version prints nothing; is it a compiler?")
    return lines[-1] if "nvcc" in Path(program).name else lines[0]


def _ask(program: str, question: str) -> str:
    try:
        return subprocess.run(
            [program, question],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{program} {question} does not work: {error}") from None


def _describe_cpu() -> str:
    """Model and instruction sets: two virtual machines may share a model name, not the sets."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.M)
    sets = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.M)
    return f"{model[1] if model else platform.machine()} {content_key(sets[1] if sets else '')}"
