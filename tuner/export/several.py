"""Several kernels in one file: their names kept apart, and the one for each number of rows.

Each kernel's text stands as it would by itself, but what it names at its top level ends in
`_of_kernel_2` and so on: a number alone may end a name of the first kernel already. A call looks
at how many rows it has and takes the kernel for them.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.by_batch import MOST, Way
from tuner.plans import Plan

__all__ = [
    "KEPT_TEXTS", "KERNELS_NAME", "Dispatch", "apart", "dispatch_text", "futures_apart",
    "named_in", "take_kernel", "way_of",
]  # fmt: skip

KERNELS_NAME = "_FUSED_KERNELS"  # of the line that says which kernel is for how many rows
KEPT_TEXTS = 16  # whose names are known: a run writes its files many times
_WAYS: dict[str, Way] = {
    "eval": "eval", "kept": "step", "gradients": "step", "weight_gradients": "step",
}  # of extra operators, which several of a kind are numbered behind  # fmt: skip
_NUMBER = re.compile(r"_\d+$")


_Place = tuple[int, int, str]  # line, byte of it, name


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Which kernel is for how many rows.

    `ranges` has by way, few rows first, the most rows of each range and the kernel's place.
    `size` is what the operator's declaration calls the first dimension of tensors that grow with
    the rows, and `each` how many of it one row is.
    """

    ranges: Mapping[Way, tuple[tuple[int, int], ...]]
    size: str
    each: int = 1


def way_of(operator: str) -> Way:
    """Return the way to call a module in which an operator, `op` or an extra one, is called."""
    return _WAYS.get(_NUMBER.sub("", operator), "call")


def take_kernel(names: dict[str, Any], kernel: int) -> None:
    """Let an imported file take one of its kernels at any number of rows; `names` are its own."""
    ways = names[KERNELS_NAME]
    names[KERNELS_NAME] = dict.fromkeys(ways, ((MOST, kernel),))


def dispatch_text(
    plans: Sequence[Plan], operators: Sequence[Mapping[str, str]], dispatch: Dispatch
) -> str:
    """Return the text of `fused_op` and of the extra operators, which take one kernel each.

    A kernel that does not offer an extra operator leaves it to the next one that does.

    Args:
        plans: of the kernels.
        operators: what calls each kernel's operators, by name, those that are offered.
        dispatch: which is for how many rows.
    """
    parts = [f"{KERNELS_NAME} = {dict(dispatch.ranges)!r}  # most rows, and the kernel for them"]
    parts.append(_KERNEL_FOR)
    for name in ("op", *plans[0].extra):
        calls = [plan if name == "op" else plan.extra.get(name) for plan in plans]
        offered = {place: call for place, call in enumerate(calls) if call is not None}
        if not offered:
            parts.append(f"fused_{name} = None")
            continue
        taken = [min(offered, key=lambda at: abs(at - place)) for place in range(len(calls))]
        called = [operators[at][name] for at in taken]
        parts.append(_operator(name, offered[taken[0]], called, dispatch))
    return "\n\n\n".join(parts)


def _operator(name: str, call: Plan, operators: Sequence[str], dispatch: Dispatch) -> str:
    """Return the text of one operator."""
    names = f"_{name.upper()}_BY_KERNEL"
    listed = "".join(f"    {operator},\n" for operator in operators)
    shapes = [a.shape for a in call.arguments]
    place = next((i for i, s in enumerate(shapes) if s and s[0] == dispatch.size), None)
    if place is None:  # of one batch alone, as steps of training may be: that of the last kernel
        made = f"{names}[-1](*args)"
    else:
        rows = f"args[{place}].shape[0]" + (f" // {dispatch.each}" if dispatch.each > 1 else "")
        made = f'{names}[kernel_for({rows}, "{way_of(name)}")](*args)'
    result = made if len(call.outputs) > 1 else f"({made},)"
    return f"{names} = (\n{listed})\n\n\ndef fused_{name}(*args):\n    return {result}"


_KERNEL_FOR = """\
def kernel_for(rows, way):
    for most, kernel in _FUSED_KERNELS[way]:
        if rows <= most:
            return kernel"""


# ---- names that are kept apart ----------------------------------------------------------------


@functools.lru_cache(KEPT_TEXTS)
def apart(text: str, ending: str) -> str:
    """Return a Python text in which all that it names at its top level ends in `ending`.

    What it imports keeps its name, and so does what a function names itself, such as a parameter,
    and what stands in for an import that fails.
    """
    tree = ast.parse(text)
    names = _given(tree.body) - _imported(tree.body)
    lines = [line.encode() for line in text.split("\n")]
    for line, column, name in sorted(_places(tree, names, lines), reverse=True):
        at, end = lines[line - 1], column + len(name.encode())
        assert at[column:end] == name.encode(), (name, at)
        lines[line - 1] = at[:end] + ending.encode() + at[end:]
    return b"\n".join(lines).decode()


@functools.lru_cache(KEPT_TEXTS)
def futures_apart(text: str) -> tuple[str, str]:
    """Return the imports from `__future__`, which begin a file, and a text without them."""
    lines, found = text.split("\n"), list[str]()
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            found.insert(0, ast.unparse(node))
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            before = lines[first].encode()[: node.col_offset].decode()
            behind = lines[last - 1].encode()[node.end_col_offset :].decode()
            is_alone = not (before + behind).partition("#")[0].strip()
            lines[first:last] = [f"{before}{'' if is_alone else '...'}{behind}"]
    return "\n".join(found), "\n".join(lines)


@functools.lru_cache(KEPT_TEXTS)
def named_in(text: str) -> frozenset[str]:
    """Return what a Python text names at its top level, imports apart."""
    return frozenset(_given(ast.parse(text).body))


def _imported(body: Sequence[ast.stmt]) -> set[str]:
    """Return what statements of the top level import, in a `try` as well."""
    inner = [n for node in body if isinstance(node, ast.Try | ast.If) for n in ast.walk(node)]
    imports = (n for n in (*body, *inner) if isinstance(n, ast.Import | ast.ImportFrom))
    return {alias.asname or alias.name.partition(".")[0] for n in imports for alias in n.names}


def _given(body: Sequence[ast.stmt]) -> set[str]:
    """Return what statements of the top level name, imports apart."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        for part in ("body", "orelse", "finalbody", "handlers"):
            inner = getattr(node, part, [])
            for each in inner if isinstance(inner, list) else []:
                found |= _given(each.body if isinstance(each, ast.ExceptHandler) else [each])
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.With):
            targets = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            found |= {n.id for n in targets if isinstance(n.ctx, ast.Store)}
    return found


def _places(node: ast.AST, names: set[str], lines: Sequence[bytes]) -> Iterator[_Place]:
    """Yield where a text means one of these names."""
    if isinstance(node, ast.Name):
        if node.id in names:
            yield node.lineno, node.col_offset, node.id
        return
    if isinstance(node, ast.Global) and names & {*node.names}:
        start = lines[node.lineno - 1]
        for name in names & {*node.names}:
            yield node.lineno, start.index(name.encode(), node.col_offset + len("global")), name
        return
    if isinstance(node, ast.ClassDef):
        yield from _name_of(node, names, lines)
        for outside in (*node.decorator_list, *node.bases, *(k.value for k in node.keywords)):
            yield from _places(outside, names, lines)
        own = names - _given(node.body)  # which its methods do not see
        for each in node.body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _in_function(each, own, names, lines)
            else:
                yield from _places(each, own, lines)
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _in_function(node, names, names, lines)
        return
    if isinstance(node, ast.Lambda):
        names = names - {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
    for child in ast.iter_child_nodes(node):
        yield from _places(child, names, lines)


def _in_function(
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    outside: set[str],
    inside: set[str],
    lines: Sequence[bytes],
) -> Iterator[_Place]:
    """Yield places of a function; `outside` are the names around it, `inside` those in it."""
    yield from _name_of(node, outside, lines)
    arguments = node.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    around = [*node.decorator_list, *arguments.defaults, *arguments.kw_defaults]
    for each in (*around, *(a.annotation for a in every), node.returns):
        if each is not None:
            yield from _places(each, outside, lines)
    for statement in node.body:
        yield from _places(statement, inside - _local(node), lines)


def _name_of(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
    names: set[str],
    lines: Sequence[bytes],
) -> Iterator[_Place]:
    if node.name in names:
        start = lines[node.lineno - 1].index(b" ", node.col_offset + len("def"))
        at = lines[node.lineno - 1].index(node.name.encode(), start)
        yield node.lineno, at, node.name


def _local(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names that are a function's own."""
    arguments = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    stored, shared = set(), set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node is not function:
            stored.add(node.name)
        elif isinstance(node, ast.Global):
            shared |= {*node.names}
    return (arguments | stored) - shared
