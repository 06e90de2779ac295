"""Read what compilers wrote: the line that says why, kernels' resources, the machine code.

The only room that tells failures apart by words of a log; each of them has a test.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import struct
import subprocess
from collections.abc import Sequence
from typing import Any

from tuner.errors import StorageError, ToolchainError
from tuner.trial import KernelResources

__all__ = [
    "COMPILER_KILLED",
    "DISK_FULL",
    "first_error",
    "hash_code",
    "last_line",
    "matches",
    "parse_resources",
    "require_disk",
    "shortened",
]

ERROR_CHARS = 400

DISK_FULL = (
    "No space left on device",
    "Disk quota exceeded",
    "fatal error: when writing output to",  # g++ then names a stale, unrelated error
)
COMPILER_KILLED = (
    "died due to signal",  # nvcc
    "Killed signal terminated program",  # g++
    "out of memory allocating",  # g++
    "virtual memory exhausted",  # g++, ld
    "`ptxas` failed with error code -",  # Triton
)
_ERRORS = (
    re.compile(r"^.*\b(?:fatal )?error\s*(?:#\d+(?:-D)?)?\s*:.*$", re.M),  # g++, nvcc, ptxas
    re.compile(r"^ptxas fatal\s*:.*$", re.M),
    re.compile(r"^.*undefined (?:reference|symbol).*$", re.M),
    re.compile(r"^nvcc fatal\s*:.*$", re.M),
)
_LINKER_SUMMARY = "collect2: error:"  # says only that the linker has said why above


def require_disk(said: str) -> None:
    """Raise a StorageError where a compiler said that the disk is full: no verdict on its text."""
    if matches(DISK_FULL, said):
        raise StorageError(
            "a compiler found no space left on the disk\n"
            "  next: free some, in $TMPDIR and the user's cache, then `tune --resume`"
        )


def matches(words: Sequence[str], log: str) -> bool:
    """Whether one of the words is in the log."""
    return any(word in log for word in words)


def first_error(log: str, code: int) -> str:
    """Return the line of the log that says why, shortened; the first if there are several."""
    found: list[re.Match[str]] = []
    for pattern in _ERRORS:  # of each the first alone: a runaway log has hundreds of thousands
        those = (m for m in pattern.finditer(log) if not m[0].startswith(_LINKER_SUMMARY))
        found += itertools.islice(those, 1)
    if found:
        line = min(found, key=lambda match: match.start())[0]
    else:
        lines = [line for line in log.splitlines() if line.strip()]
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        line = f"the compiler {how}" + (f": {lines[-1]}" if lines else "")
    return shortened(line.strip())


def shortened(line: str) -> str:
    """Cut a line to ERROR_CHARS."""
    return line if len(line) <= ERROR_CHARS else line[: ERROR_CHARS - 3] + "..."


_ENTRY = re.compile(r"Compiling entry function '([^']+)' for")
_PROPERTIES = re.compile(r"Function properties for '?([^'\s]+)'?")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+)(?:\+\d+)? bytes smem")


def parse_resources(log: str, demangler: str | None) -> tuple[KernelResources, ...]:
    """Read ptxas -v: one record a kernel; device functions that were not inlined are left out."""
    kernels: dict[str, dict[str, int]] = {}
    entry = described = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = described = match[1]
            kernels.setdefault(entry, {})
        elif match := _PROPERTIES.search(line):
            described = match[1]
        elif (match := _STACK.search(line)) and described in kernels:
            stack, stores, loads = (int(number) for number in match.groups())
            kernels[described].update(stack=stack, stores=stores, loads=loads)
        elif (match := _USED.search(line)) and entry:
            smem = _SMEM.search(line)
            kernels[entry].update(registers=int(match[1]), smem=int(smem[1]) if smem else 0)
    names = _demangle(list(kernels), demangler)
    return tuple(
        KernelResources(
            name=name,
            registers=found.get("registers", 0),
            smem_bytes=found.get("smem", 0),
            spill_store_bytes=found.get("stores", 0),
            spill_load_bytes=found.get("loads", 0),
            stack_bytes=found.get("stack", 0),
        )
        for name, found in zip(names, kernels.values(), strict=True)
    )


def _demangle(names: list[str], demangler: str | None) -> list[str]:
    """Readable names without their parameters; as they are if the demangler fails."""
    if not names or demangler is None:
        return names
    try:
        done = subprocess.run(
            [demangler, "-p", *names], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return names
    lines = done.stdout.splitlines()
    return lines if len(lines) == len(names) else names


# The number that nvcc derives from the text and puts into names of internal linkage.
_MODULE_ID = re.compile(rb"(?<=_)[0-9a-f]{8}(?=_9_source_cu)")


def hash_code(elf: bytes) -> str:
    """Hash all that a shared object, or a cubin, loads into memory, device code included.

    Left out: the build id and what is not loaded (symbols with the compiler's temporary
    names). nvcc's module id is blanked, since it changes with every comment of the text.
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ToolchainError("the compiler did not write a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_at = struct.unpack_from("<HHH", elf, 58)
    fields: list[tuple[Any, ...]] = [
        struct.unpack_from("<IIQQQQ", elf, table + number * size) for number in range(count)
    ]
    names = fields[names_at][4]
    digest = hashlib.sha256()
    for name_at, kind, flags, _, offset, length in fields:
        if not flags & _SHF_ALLOC or kind == _SHT_NOTE:
            continue
        name = elf[names + name_at : elf.index(b"\0", names + name_at)]
        digest.update(name + struct.pack("<QQ", kind, length))
        if kind != _SHT_NOBITS:
            digest.update(_MODULE_ID.sub(b"0" * 8, elf[offset : offset + length]))
    return digest.hexdigest()


_SHF_ALLOC, _SHT_NOTE, _SHT_NOBITS = 2, 7, 8  # <elf.h>


def last_line(error: BaseException) -> str:
    """Return the line that says most: ptxas's own error, else the last."""
    # Triton points at a place with a last line of nothing but a caret.
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" \t^~")]
    said = [line for line in lines if re.match(r"ptxas\b.*\b(error|fatal)\b", line)]
    said = said or [line for line in lines[:1] if line.startswith("`ptxas`")]
    return f"{type(error).__name__}: {(said or lines[-1:])[0]}" if lines else type(error).__name__
