"""Limits that a GPU was given, and clocks: two of one kind compare only under the same limits."""

from __future__ import annotations

import contextlib
import re

import psutil

from tuner.machine.host import ask_program
from tuner.machine.platforms import is_gpu

__all__ = ["LIMITS", "clocks_of", "limits_of"]

# By nvidia-smi's names. Clocks that were locked are not reported; PyTorch's time shows them.
LIMITS = {
    "power_limit_w": "enforced.power.limit",
    "max_clock_mhz": "clocks.max.sm",
    "max_memory_clock_mhz": "clocks.max.memory",
    "application_clock_mhz": "clocks.applications.graphics",
}
ASK_LIMIT_S = 30.0
_CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "temperature.gpu")


def limits_of(uuid: str) -> dict[str, float]:
    """Return the limits of a GPU by the names of `LIMITS`; those that nobody tells are absent."""
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    query = f"--query-gpu={','.join(LIMITS.values())}"
    command = ["nvidia-smi", "-i", name, query, "--format=csv,noheader,nounits"]
    answer = ask_program(command, ASK_LIMIT_S)
    said = answer.text.splitlines()[-1].split(",") if answer.is_ok and answer.text else []
    found = dict(zip(LIMITS, (text.strip() for text in said), strict=False))
    return {what: float(text) for what, text in found.items() if re.fullmatch(r"[\d.]+", text)}


def clocks_of(device: str) -> dict[str, str]:
    """Return the clocks of a device as they are now, with their limits, as far as they are known.

    Args:
        device: as PyTorch names it. Asks nvidia-smi; initialises no CUDA.
    """
    if not is_gpu(device):
        with contextlib.suppress(OSError, NotImplementedError):
            found = psutil.cpu_freq()
            if found is not None:
                return {"cpu_mhz": f"{found.current:.0f}", "cpu_mhz_max": f"{found.max:.0f}"}
        return {}
    query = [f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader"]
    number = device.partition(":")[2] or "0"
    answer = ask_program(["nvidia-smi", *query, f"--id={number}"], ASK_LIMIT_S)
    values = [value.strip() for value in answer.text.split(",")] if answer.is_ok else []
    return dict(zip(_CLOCKS, values, strict=True)) if len(values) == len(_CLOCKS) else {}
