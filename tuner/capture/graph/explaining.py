"""What a user's file raised while it was recorded, as one error with its line and what to do."""

from __future__ import annotations

import ast
import contextlib
import linecache
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from tuner.errors import CaptureError
from tuner.problem.reference import Problem

__all__ = ["CONSTRUCTOR", "depends_on_values", "explained"]

# What PyTorch calls it where code asks for the value of a tensor, or a shape depends on one.
_VALUE_ERRORS = {
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "PendingUnbackedSymbolNotFound",
}
CONSTRUCTOR = "Model(*get_init_inputs())"  # what is recorded first, as errors name it


@contextlib.contextmanager
def explained(problem: Problem, what: str) -> Iterator[None]:
    """Turn whatever the user's code or its recording raises into a CaptureError with its line."""
    try:
        yield
    except CaptureError:
        raise
    except (Exception, SystemExit) as error:
        chain = list(_chain(error))
        line = next((n for e in chain if (n := _line_of(e, problem.source))), 0)
        place = f"{problem.source}:{line}" if line else str(problem.source)
        raise CaptureError(f"{place}: {_reason(chain, what, problem.source, line)}") from error


def depends_on_values(error: BaseException) -> bool:
    """Whether code failed since it wants the numbers of tensors, which fake ones do not have."""
    chain = list(_chain(error))
    kinds = {type(e).__name__ for e in chain}
    words = " ".join(map(str, chain))
    return bool(kinds & _VALUE_ERRORS) or "data-dependent" in words or "data dependent" in words


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and what it was raised from or during, innermost last."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _line_of(error: BaseException, path: Path) -> int:
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 0 for f in reversed(frames) if f.filename == str(path)), 0)


def _reason(chain: list[BaseException], what: str, path: Path, line: int) -> str:
    """Return what went wrong and what to do next."""
    kinds = {type(error).__name__ for error in chain}
    words = " ".join(str(error) for error in chain)
    text = linecache.getline(str(path), line).strip() if line else ""
    if depends_on_values(chain[0]):
        if ".item(" in text or ".tolist(" in text:
            what_for = "reads a number out of a tensor"
            then = "keep it as a tensor, without .item() and .tolist()"
        elif kinds & {"DynamicOutputShapeException"}:
            what_for = "makes a tensor whose size depends on values"
            then = "compute with a mask of fixed size, for example by torch.where"
        elif _only_refuses(path, line):
            what_for = "refuses by the values of a tensor"
            then = "leave that to who calls it; of values only what is computed can be recorded"
        elif not _decides(path, line):
            what_for = "calls what decides by the values of a tensor within PyTorch"
            then = (
                "write out what it computes (a loss by its formula, BatchNorm with a number for "
                "its momentum)"
            )
        else:
            what_for = "decides by the values of a tensor"
            then = "compute both cases and choose by torch.where"
        return (
            f"{what} {what_for}{text and f': {text}'}; expected the same operations for all "
            f"values\n  next: {then}"
        )
    if "fake mode" in words and "match mode" in words:
        return (
            f"{what} keeps a tensor in the module from one call to the next; expected a buffer\n"
            "  next: register it by self.register_buffer, and write to it in place"
        )
    if kinds & {"UnsupportedOperatorException", "UnsupportedFakeTensorException"}:
        return (
            f"{what} calls an operator that cannot be recorded{text and f': {text}'}; expected "
            "PyTorch's own operators\n  next: write it with PyTorch's operators"
        )
    if "MemoryError" in kinds or "allocate memory" in words:
        return (
            f"{what} allocates more memory than there is\n"
            "  next: make its tensors by torch.rand and the like, or smaller"
        )
    if taken := re.search(r"attribute '(\w+)' already exists", words):
        return (
            f"{what} has a parameter or buffer called {taken[1]}, a name that PyTorch's own graph "
            "modules have\n  next: give it another name in the constructor"
        )
    if taken := re.search(r"submodule `(\w+)`: <bound method", words):
        return (
            f"{what} has a submodule called {taken[1]}, the name of a method of nn.Module\n"
            "  next: give it another name in the constructor"
        )
    if what == CONSTRUCTOR and words.startswith("Model.__init__()"):
        return (
            f"{what} failed: {words}\n"
            "  expected: what the constructor takes by position, in order\n"
            "  next: give each in get_init_inputs(), or a default; behind `*,` nothing has a place"
        )
    error = chain[0]
    first = (str(error).strip() or "no message").splitlines()[0]
    return (
        f"{what} failed while it was recorded: {type(error).__name__}: {first}\n"
        "  next: see that the file runs by itself, and that forward only calls PyTorch"
    )


_ASKING = {"bool", "int", "float", "len", "range", "any", "all", "sorted", "min", "max"}


def _decides(path: Path, line: int) -> bool:
    """Whether code at a line may ask a tensor for its values, itself and not what it calls."""
    here = _nodes_at(path, line)
    names = {node.id for node in here if isinstance(node, ast.Name)}
    kinds = ast.If | ast.While | ast.IfExp | ast.Assert | ast.For | ast.BoolOp | ast.Compare
    return not here or bool(names & _ASKING) or any(isinstance(node, kinds) for node in here)


def _nodes_at(path: Path, line: int) -> list[ast.AST]:
    try:
        nodes = ast.walk(ast.parse(path.read_bytes()))
    except (OSError, SyntaxError, ValueError):
        return []
    return [node for node in nodes if getattr(node, "lineno", 0) == line]


def _only_refuses(path: Path, line: int) -> bool:
    """Whether the statement at a line is an assertion, or a condition that only raises."""
    here = _nodes_at(path, line)
    return any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise) and not node.orelse)
        for node in here
    )
