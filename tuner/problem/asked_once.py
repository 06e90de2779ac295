"""What a forward asks that a capture answers once, for all calls: found in its file's text."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["conditions_in", "data_line"]

# Functions and attributes that tell in what circumstances a call is made.
CIRCUMSTANCES = {
    "environ", "getenv", "grad_fn", "is_compiling", "is_contiguous", "is_dynamo_compiling",
    "is_exporting", "is_grad_enabled", "is_inference", "is_inference_mode_enabled", "is_leaf",
    "requires_grad",
}  # fmt: skip
NOT_CALLED = {"__init__", "get_inputs", "get_init_inputs"}


def conditions_in(text: str) -> list[tuple[int, str]]:
    """Return conditions about the circumstances of a call, as lines and texts.

    Which way they go is decided while the forward is captured: with gradients, by the compiler.
    """
    found = []
    for function in _functions(text):
        for node in ast.walk(function):
            if isinstance(node, ast.If | ast.IfExp | ast.While) and _asks(node.test):
                found.append((node.test.lineno, ast.unparse(node.test)))
    return sorted(set(found))


def data_line(text: str) -> int | None:
    """Return the first line that reads `.data`, on which PyTorch's capture may crash."""
    lines = [
        node.lineno
        for function in _functions(text)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == "data"
    ]
    return min(lines, default=None)


def _functions(text: str) -> Iterator[ast.AST]:
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError):  # whoever executes it says so
        return
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name not in NOT_CALLED:
            yield node


def _asks(test: ast.expr) -> bool:
    words = {n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute)}
    words |= {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    return bool(words & CIRCUMSTANCES)
