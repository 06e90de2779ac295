"""Limits that a GPU was given: two of one kind compare only under the same ones."""

from __future__ import annotations

import re

from tuner.machine.host import ask_program

__all__ = ["LIMITS", "limits_of"]

# By nvidia-smi's names. Clocks that were locked are not reported; PyTorch's time shows them.
LIMITS = {
    "power_limit_w": "enforced.power.limit",
    "max_clock_mhz": "clocks.max.sm",
    "max_memory_clock_mhz": "clocks.max.memory",
    "application_clock_mhz": "clocks.applications.graphics",
}
ASK_LIMIT_S = 30.0


def limits_of(uuid: str) -> dict[str, float]:
    """Return the limits of a GPU by the names of `LIMITS`; those that nobody tells are absent."""
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    query = f"--query-gpu={','.join(LIMITS.values())}"
    command = ["nvidia-smi", "-i", name, query, "--format=csv,noheader,nounits"]
    answer = ask_program(command, ASK_LIMIT_S)
    told = answer.text.splitlines()[-1].split(",") if answer.is_ok and answer.text else []
    found = dict(zip(LIMITS, (text.strip() for text in told), strict=False))
    return {what: float(text) for what, text in found.items() if re.fullmatch(r"[\d.]+", text)}
