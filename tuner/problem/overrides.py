"""Other values for a file's module-level names, put in where the file assigns them."""

from __future__ import annotations

import ast
from collections.abc import Mapping

__all__ = ["Overrides"]


class Overrides(ast.NodeTransformer):
    """Follow each top-level assignment of a wanted name with `name = value`."""

    def __init__(self, wanted: Mapping[str, int]) -> None:
        self.wanted = wanted
        self.assigned: set[str] = set()

    def _leave(self, node: ast.AST) -> ast.AST:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _leave

    def _follow(self, node: ast.stmt) -> list[ast.stmt]:
        names = [
            part.id
            for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        ]
        self.assigned.update(names)
        extra = [
            ast.copy_location(
                ast.Assign([ast.Name(name, ast.Store())], ast.Constant(self.wanted[name])), node
            )
            for name in names
            if name in self.wanted
        ]
        return [node, *extra]

    visit_Assign = visit_AnnAssign = visit_AugAssign = _follow
