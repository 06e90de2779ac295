"""docs/trust.md names tests that are there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", TEXT)))


@functools.cache
def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_test_that_a_promise_names_is_there(file):
    there = functions_of(file)
    assert [name for other, name in NAMED if other == file and name not in there] == []


def test_every_promise_names_a_test():
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and "---" not in line]
    promises = [row for row in rows if not row.startswith("| promise ")]
    assert len(promises) > 40
    assert [row for row in promises if not re.search(r"`test_\w+\.py::test_\w+`", row)] == []


def test_what_needs_a_gpu_says_so():
    for file, name in NAMED:
        marks = ast.unparse(ast.Module(functions_of(file)[name].decorator_list, []))
        is_reported = f"`{file}::{name}` (gpu)" in TEXT
        assert is_reported == ("pytest.mark.gpu" in marks), name
