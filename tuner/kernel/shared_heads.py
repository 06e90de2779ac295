"""What heads share: parts that several templates include, and conditions that have a name.

`uses: [scale_batchnorm]` adds what `_lib/scale_batchnorm.yaml`, the head of that part, declares;
what the template declares itself comes first and wins. `where: {is_split: "precision in [...]"}`
names a condition, or a number, once: expressions of the head mean it by its name, and so does the
text.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.config.document import Document, with_known
from tuner.errors import ExpressionError
from tuner.space.expression import Expression

__all__ = ["joined", "part_files", "with_conditions", "with_names"]

_EXPRESSIONS = {"expr", "when", "deterministic", "shape", "args"}  # keys of a head


def part_files(names: Iterable[str], roots: Sequence[Path], document: Document) -> list[Path]:
    """Return the files of the parts that a head uses; one that is not there is reported."""
    files = []
    for number, name in enumerate(names):
        homes = [root / "_lib" / f"{name}.yaml" for root in roots]
        found = next((file for file in homes if file.is_file()), None)
        if found is None:
            known = sorted({f.stem for root in roots for f in (root / "_lib").glob("*.yaml")})
            message = with_known(f"there is no _lib/{name}.yaml", name, known or ["none"])
            document.report(f"uses[{number}]", message)
        else:
            files.append(found)
    return files


def joined(document: Document, part: Document) -> None:
    """Add a part's data to a head's: lists one after the other, of entries the head's own win."""
    data = document.data
    for key, value in part.data.items():
        if isinstance(value, dict):
            own = data.setdefault(key, {})
            added = [name for name in value if name not in own]
            data[key] = {**own, **{name: value[name] for name in added}}
            places = {f"{key}.{name}": f"{key}.{name}" for name in added}
        elif isinstance(value, list):
            own = data.setdefault(key, [])
            places = {f"{key}[{len(own) + i}]": f"{key}[{i}]" for i in range(len(value))}
            data[key] = [*own, *value]
        else:
            places = {} if key in data else {key: key}
            data.setdefault(key, value)
        document.places.elsewhere |= {at: (part.places, there) for at, there in places.items()}


def with_conditions(document: Document) -> dict[str, Any]:
    """Return a head's data with every condition of `where` written out in its expressions.

    What is wrong with a condition itself is reported, and it is left out.
    """
    trees: dict[str, ast.expr] = {}
    data = document.data
    for name, text in data.get("where", {}).items():  # one may use those before it
        try:
            Expression.parse(text)
        except ExpressionError as error:
            document.report(f"where.{name}", str(error))
            continue
        trees[name] = ast.parse(with_names(text, trees.get), mode="eval").body
    written = {key: _written_out(value, trees, key in _EXPRESSIONS) for key, value in data.items()}
    return {**written, "where": {name: ast.unparse(tree) for name, tree in trees.items()}}


def _written_out(data: Any, trees: Mapping[str, ast.expr], is_expression: bool) -> Any:
    if isinstance(data, dict):
        return {k: _written_out(value, trees, k in _EXPRESSIONS) for k, value in data.items()}
    if isinstance(data, list):
        return [_written_out(value, trees, is_expression) for value in data]
    if not (is_expression and isinstance(data, str) and any(name in data for name in trees)):
        return data
    try:
        return with_names(data, trees.get)
    except SyntaxError:  # refused where it is judged
        return data


def with_names(text: str, tree_of: Callable[[str], ast.expr | None]) -> str:
    """Return an expression with names, dotted ones too, replaced where `tree_of` gives a tree.

    Raises:
        SyntaxError: it is no expression.
    """
    return ast.unparse(_Named(tree_of).visit(ast.parse(text, mode="eval")))


class _Named(ast.NodeTransformer):
    def __init__(self, tree_of: Callable[[str], ast.expr | None]) -> None:
        self.tree_of = tree_of

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.tree_of(node.id) or node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self.tree_of(ast.unparse(node)) or node
