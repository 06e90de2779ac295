"""Which attributes the code of a module's file may read, so that others are notes on it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

__all__ = ["named_in_code"]

# Of what reads attributes that no text names.
_ANY_NAME = ("vars", "dir", "eval", "exec", "locals", "globals", "__import__")
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller")
_ANY_ATTRIBUTE = ("__dict__", "__getattribute__", "__getattr__", "__setattr__", "__slots__")
_BASES = ("nn.", "torch.")  # whose classes read what they set themselves


def named_in_code(text: str) -> frozenset[str] | None:
    """Return all names and words that a file's code has, None where it may read any attribute.

    What is none of these on a module of one of the file's classes changes no call: a number that
    a framework notes there, say. It may read any where attributes are looked up by computed
    names, where a module is handed to other code, where a class derives from another file's, and
    where functions of other packages are called, which parts may be handed to.
    """
    tree = ast.parse(text)
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found: set[str] = set()
    for node in ast.walk(tree):
        names = _names_of(node, classes)
        if names is None:
            return None
        found.update(names)
    return frozenset(name for name in found if name.isidentifier())


def _names_of(node: ast.AST, classes: set[str]) -> list[str] | None:
    """Return the names of one node; None where it may stand for any."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return None if name in (*_ANY_NAME, *_ANY_ATTRIBUTE) else [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return None if name in _ANY_ATTRIBUTE else [name]
        case ast.ClassDef():
            bases = [ast.unparse(base) for base in node.bases]
            is_known = all(b in classes or b.startswith(_BASES) or b == "object" for b in bases)
            return [node.name] if is_known and not node.keywords else None
        case ast.arg(arg=name) | ast.keyword(arg=str(name)):
            return [name]
        case ast.Constant(value=str(words)):
            return words.split(".") if len(words) < 100 else []
        case ast.Call():
            return None if _reads_any(node) else []
        case ast.ImportFrom(module=module, names=imported):
            is_all = any(alias.name == "*" for alias in imported)
            return None if is_all or node.level or not _is_usual(module or "") else []
        case ast.Import(names=imported):
            return [] if all(_is_usual(alias.name) for alias in imported) else None
    return []


def _is_usual(module: str) -> bool:
    """Whether a module's functions read no attributes of modules that are handed to them."""
    package = module.partition(".")[0]
    return package in ("torch", "numpy") or package in sys.stdlib_module_names


def _reads_any(call: ast.Call) -> bool:
    """Whether a call looks up an attribute by a computed name, or hands `self` to other code."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in _BY_NAME:
        words = call.args[1:2] if name.endswith("attr") else call.args[:1]
        return not all(isinstance(word, ast.Constant) for word in words) or not words
    is_own = name in ("__init__", "super") or any(isinstance(a, ast.Starred) for a in call.args)
    return not is_own and any(_is_self(argument) for argument in _given(call))


def _given(call: ast.Call) -> Iterator[ast.AST]:
    yield from call.args
    yield from (keyword.value for keyword in call.keywords)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
