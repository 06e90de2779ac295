"""What a user's file imports from its own folder or package.

A file of a package says `from .layers import Norm`. It is executed from copies as well, which lie
elsewhere, so that its text names the package, `from model_parts.layers import Norm`, and its path
where it says `__file__`.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["advice_on", "import_root", "modules_beside", "text_of"]

LIBRARIES = {"numpy", "torch", "triton"}  # also where somebody runs them from their sources
MOST_MODULES = 200


def import_root(path: Path) -> Path:
    """Return the folder from which a file's own folder or package is imported."""
    folder = path.resolve().parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return folder


def text_of(path: Path) -> str:
    """Return the text of a file as it means the same elsewhere, line for line.

    Relative imports name the package, and `__file__` is the file's own path.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
    """
    text = path.read_bytes().decode()
    package = path.resolve().parent.relative_to(import_root(path)).parts
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError):  # whoever executes it says so
        return text
    lines = text.split("\n")
    own = repr(str(path.resolve()))
    edits: list[tuple[ast.expr | ast.stmt, str, str]] = []
    for node in nodes:
        if isinstance(node, ast.Name) and node.id == "__file__":
            edits.append((node, node.id, own))
        elif isinstance(node, ast.ImportFrom) and 0 < node.level <= len(package):
            named = ".".join(
                [*package[: len(package) + 1 - node.level], *filter(None, [node.module])]
            )
            dots = rf"from\s+\.+\s*{re.escape(node.module or '')}"
            edits.append((node, dots, f"from {named}" + ("" if node.module else " ")))
    for node, old, new in sorted(edits, key=lambda edit: -edit[0].col_offset):
        _replace(lines, node, old, new)  # what is before it in its line stays in place
    return "\n".join(lines)


def _replace(lines: list[str], node: ast.expr | ast.stmt, old: str, new: str) -> None:
    """Replace a pattern with which a node begins; several nodes may stand in one line."""
    line = lines[node.lineno - 1].encode()  # as the column counts
    before, after = line[: node.col_offset].decode(), line[node.col_offset :].decode()
    if found := re.match(old, after):  # in an f-string Python 3.11 gives another place
        lines[node.lineno - 1] = before + new + after[found.end() :]


def advice_on(error: BaseException) -> str:
    """Return what to do about an error of a user's file, as a line; empty where that is open."""
    found = {
        ModuleNotFoundError: "install it, or name the folder that has it in PYTHONPATH",
        SystemExit: 'what the file does as a program belongs below `if __name__ == "__main__":`',
    }.get(type(error))
    if "no known parent package" in str(error):
        found = "make its folder a package (an __init__.py in it), or import without the dot"
    return f"\n  next: {found}" if found else ""


def modules_beside(path: Path) -> dict[str, Path]:
    """Return the files of modules that a file imports which was executed, of its user's alone.

    Those that these import are among them, up to some number; neither Python's nor installed
    packages' are.
    """
    found: dict[str, Path] = {}
    left = _imported(text_of(path), "")
    while left and len(found) < MOST_MODULES:
        name = left.pop()
        module = sys.modules.get(name)
        if name in found or module is None or not _is_users(name, module):
            continue
        found[name] = Path(str(module.__file__))
        left |= _imported(found[name].read_text(errors="replace"), str(module.__package__))
    return dict(sorted(found.items()))


def _is_users(name: str, module: ModuleType) -> bool:
    """Whether a module's file is Python that is not installed, nor the tuner's own."""
    file = Path(getattr(module, "__file__", None) or "")
    if name.partition(".")[0] in LIBRARIES:
        return False
    others = (Path(os.__file__).parent, Path(__file__).parents[1])
    is_installed = {"site-packages", "dist-packages"} & {*file.parts}
    is_others = any(file.is_relative_to(folder) for folder in others)
    return file.is_absolute() and file.suffix == ".py" and not (is_installed or is_others)


def _imported(text: str, package: str) -> set[str]:
    """Return names of modules, and of what is imported from them, in the text of a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found
