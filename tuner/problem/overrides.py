"""Other values for a file's module-level names, put in where the file assigns them."""

from __future__ import annotations

import ast
from collections.abc import Mapping

__all__ = ["Overrides", "text_at"]


class Overrides(ast.NodeTransformer):
    """Give each wanted name its value wherever the file assigns it at the top level."""

    def __init__(self, wanted: Mapping[str, int]) -> None:
        self.wanted = wanted
        self.assigned: set[str] = set()

    def _leave(self, node: ast.AST) -> ast.AST:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _leave

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[ast.stmt]:
        stored = [n for n in ast.walk(node) if isinstance(getattr(n, "ctx", None), ast.Store)]
        names = [n.id for n in stored if isinstance(n, ast.Name)]
        self.assigned.update(names)
        values = {name: ast.Constant(self.wanted[name]) for name in names if name in self.wanted}
        if len(stored) == len(values) == 1 and not isinstance(node, ast.AugAssign):
            node.value = ast.copy_location(next(iter(values.values())), node)
            return [node]
        more = [ast.Assign([ast.Name(n, ast.Store())], value) for n, value in values.items()]
        return [node, *(ast.copy_location(statement, node) for statement in more)]

    visit_Assign = visit_AnnAssign = visit_AugAssign = _assign


def text_at(text: str, sizes: Mapping[str, int]) -> str:
    """Return a file's text, without its comments, in which these sizes stand."""
    return ast.unparse(ast.fix_missing_locations(Overrides(sizes).visit(ast.parse(text))))
