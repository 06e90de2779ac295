"""At which numbers of rows a module's text takes its kernels: PyTorch is faster at few, say.

The text has one line for it, which is filled in when that was measured of the exported file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tuner.by_batch import Way

__all__ = [
    "IN_EVAL_NAME",
    "ROWS_NAME",
    "ROWS_TEXT",
    "asks_few",
    "asks_rows",
    "has_rows",
    "takes_generated_steps",
    "ways_in",
    "why_no_steps",
    "with_rows",
    "without_rows",
    "without_rows_line",
]  # fmt: skip

ROWS_NAME = "_FUSED_ROWS"  # of that line
IN_EVAL_NAME = "call_in_eval"  # what takes calls in eval mode where these have kernels too


def asks_few(names: Sequence[str], batched: str) -> str:
    """Return the lines of a forward that leave few rows to PyTorch, before all else.

    Args:
        names: of forward's arguments.
        batched: the one whose first size it is.
    """
    return _ASKS_FEW.format(names=", ".join(names), batched=batched)


def asks_rows(names: Sequence[str]) -> str:
    """Return the lines of a forward, behind those, that leave it other numbers of rows."""
    return _ASKS_ROWS.format(names=", ".join(names))


def with_rows(model_new: str, rows: Mapping[Way, tuple[int | tuple[int, int], ...]] | None) -> str:
    """Return a module's text that takes its kernels at these rows, and PyTorch elsewhere.

    Args:
        model_new: the text; one whose inputs have fixed sizes is returned as it is.
        rows: by way the fewest and the most, and then ranges between that are PyTorch's all the
            same; None takes any.
    """
    return _ROWS_LINE.sub(f"{ROWS_NAME} = {rows!r}  #", model_new, count=1)


def has_rows(model_new: str) -> bool:
    """Whether a module's text can be determined at which rows to take its kernels."""
    return _ROWS_LINE.search(model_new) is not None


def ways_in(model_new: str) -> tuple[Way, ...]:
    """Return the ways to call a module for which its text has kernels.

    A text that was generated says whether it takes steps; one around a family's operator has
    those of one mode, and one that was written by hand what it asks for.
    """
    is_generated = takes_generated_steps(model_new)
    is_matched = _has_line("    _OPERATOR = ", model_new)
    has_steps = is_matched or not is_generated or _has_line("_TAKES_STEPS = True", model_new)
    ways: tuple[Way, ...] = ("call", "step") if has_steps else ("call",)
    has_eval = (
        _has_line(f"def {IN_EVAL_NAME}(", model_new) if is_generated else '"eval"' in model_new
    )
    return (*ways, "eval") if has_eval else ways


def takes_generated_steps(model_new: str) -> bool:
    """Whether a text, or the one that it stands around, was generated with its steps, if any."""
    return _has_line("def usual_state(", model_new)


def _has_line(start: str, text: str) -> bool:
    """Whether a line begins so: a user's own names may end like ours."""
    return f"\n{start}" in f"\n{text}"


def why_no_steps(model_new: str) -> str:
    """Return why a generated text has no kernels for steps of training; "" where it has some."""
    found = re.search(r"^_TAKES_STEPS = False  # (.*)$", model_new, re.MULTILINE)
    return found[1] if found else ""


def without_rows(model_new: str) -> str:
    """Return the text of a family's module that leaves it to another one which rows it takes."""
    return _ASKED.sub("", without_rows_line(model_new))


def without_rows_line(model_new: str) -> str:
    """Return a module's text that asks a line which another one before it has."""
    return _ROWS_LINE_WHOLE.sub("", model_new, count=1)


_ROWS_LINE_WHOLE = re.compile(rf"^{ROWS_NAME} = .*\n\n*", re.MULTILINE)
_ASKED = re.compile(rf"^        if {ROWS_NAME} and not .*\n            return .*\n", re.MULTILINE)
_ROWS_LINE = re.compile(rf"^{ROWS_NAME} = .*?  #", re.MULTILINE)


# Few rows first, without a call, and the reference by its own name: a call or `super` cost 0.1 us
# each, where all of a call of the reference may take 17 us.
_ASKS_FEW = """\
        fused_shape = ()
        if _FUSED_ROWS and not _is_exporting():  # a comparison would fix the exported rows
            if isinstance({batched}, torch.Tensor) and not {batched}.is_nested:
                fused_shape = {batched}.shape
            if fused_shape and fused_shape[0] < _LEAST_ROWS:
                return Model.forward(self, {names})
"""
_ASKS_ROWS = """\
        if fused_shape and not takes_rows(fused_shape[0], self, {names}):
            return Model.forward(self, {names})
"""


# Of a module whose inputs may have another number of rows.
ROWS_TEXT = """\
_FUSED_ROWS = None  # fewest, most, gaps, where PyTorch was measured to be faster elsewhere
_LEAST_ROWS = min(rows[0] for rows in _FUSED_ROWS.values()) if _FUSED_ROWS else 0


def is_within(rows, fewest, most, *gaps):
    for low, high in gaps:
        if low <= rows <= high:
            return False
    return not (rows < fewest or rows > most)  # a bool of its own, also for a compiler


def takes_rows(rows, module, *inputs):
    # Whether kernels were measured to be as fast as PyTorch at so many rows.
    takes_call = is_within(rows, *_FUSED_ROWS["call"])
    if not torch.is_grad_enabled():
        return takes_call
    takes_step = is_within(rows, *_FUSED_ROWS["step"])
    if takes_step == takes_call:
        return takes_call
    is_step = wants_gradients(inputs) or is_trained(module)
    return takes_step if is_step else takes_call


"""
