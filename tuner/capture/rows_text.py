"""At which numbers of rows a module's text takes its kernels: PyTorch is faster at few, say.

The text has one line for it, which is filled in when that was measured of the exported file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tuner.by_batch import Way

__all__ = ["ROWS_NAME", "ROWS_TEXT", "asks_rows", "has_rows", "with_rows"]

ROWS_NAME = "_FUSED_ROWS"  # of that line


def asks_rows(names: Sequence[str], batched: str) -> str:
    """Return the lines of a forward that leave some numbers of rows to PyTorch.

    Args:
        names: of forward's arguments.
        batched: the one whose first size it is.
    """
    return _ASKS_ROWS.format(names=", ".join(names), batched=batched)


def with_rows(model_new: str, rows: Mapping[Way, tuple[int, int]] | None) -> str:
    """Return a module's text that takes its kernels at these rows, and PyTorch elsewhere.

    Args:
        model_new: the text; one whose inputs have fixed sizes is returned as it is.
        rows: the fewest and the most, of a `call` and of a `step` of training; None takes any.
    """
    return _ROWS_LINE.sub(f"{ROWS_NAME} = {rows!r}  #", model_new, count=1)


def has_rows(model_new: str) -> bool:
    """Whether a module's text can be told at which rows to take its kernels."""
    return _ROWS_LINE.search(model_new) is not None


_ROWS_LINE = re.compile(rf"^{ROWS_NAME} = .*?  #", re.MULTILINE)


_ASKS_ROWS = """\
        if _FUSED_ROWS and not takes_rows(self, ({names},), {batched}):
            return super().forward({names})
"""


# Of a module whose inputs may have another number of rows.
ROWS_TEXT = """\
_FUSED_ROWS = None  # fewest and most, where PyTorch was measured to be faster elsewhere


def takes_rows(module, inputs, batched):
    # Whether kernels were measured to be as fast as PyTorch at so many rows of what is batched.
    shape = getattr(batched, "shape", ())
    if not shape:
        return True  # for usual_state to refuse
    rows = shape[0]
    fewest, most = _FUSED_ROWS["call"]
    takes_call = not (rows < fewest or rows > most)  # a bool of its own, also for a compiler
    if not torch.is_grad_enabled():
        return takes_call
    fewest, most = _FUSED_ROWS["step"]
    takes_step = not (rows < fewest or rows > most)
    if takes_step == takes_call:
        return takes_call
    is_step = wants_gradients(inputs) or wants_gradients(module.parameters())
    return takes_step if is_step else takes_call


"""
