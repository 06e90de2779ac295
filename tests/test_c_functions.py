"""The C functions that steps call are made of the head: one record, or the parameters of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.errors import TemplateError
from tuner.kernel.family import load_family
from tuner.kernel.signatures import mismatches

OP = """\
name: tiny
title: A tiny operator
function: fused_tiny
replaces: [a sum]
sizes: {rows: 4, cols: 8}
arguments:
  - {name: x, shape: [rows, cols]}
  - {name: eps, dtype: float}
outputs:
  - {name: y, shape: [rows, cols]}
flops: 2 * rows * cols
bytes: 8 * rows * cols
extra:
  eval:
    arguments:
      - {name: x, shape: [rows, cols]}
      - {name: stored, shape: [cols], dtype: float64}
      - {name: eps, dtype: float}
    outputs:
      - {name: y, shape: [rows, cols]}
"""

HEAD = """\
---
title: In steps
language: cuda
parameters:
  tile: {about: "columns at a time", default: 8}
  late: {about: "whether there is a second step", default: true, values: [true, false]}
workspace:
  parts: {shape: [rows], dtype: uint8}
steps:
  - {call: fused_tiny_go, args: [x, parts, rows, eps]}
  - {call: fused_tiny_end, args: [parts, y, cols], when: "late"}
extra:
  eval:
    steps:
      - {call: fused_tiny_go, args: ["null", parts, rows, eps]}
      - {call: fused_tiny_end, args: ["null", y, cols], when: "late"}
---
"""

RECORD = """\
{% include "_lib/call.cuh" %}
static const char* go_step(const Call& call, void* stream) { return nullptr; }
static const char* end_step(const Call& call, void* stream) { return nullptr; }
{% include "_lib/steps.cuh" %}
"""

PARAMETERS = """\
{% from "_lib/steps.hpp" import arguments with context %}
extern "C" const char* fused_tiny_go(
    {{ arguments("fused_tiny_go") }}) { return nullptr; }
extern "C" const char* fused_tiny_end(
    {{ arguments("fused_tiny_end") }}) { return nullptr; }
"""


def rendered(folder: Path, head: str, text: str, name: str = "steps.cu.j2"):
    home = folder / "tiny"
    home.mkdir()
    files = {"op.yaml": OP, "reference.py": "# it\n", "model_new.py": "# it\n", name: head + text}
    for file, content in files.items():
        (home / file).write_text(content)
    return load_family("tiny", [folder]).render({"template": "steps"})


def test_a_record_has_all_that_a_call_is_given_and_functions_fill_it_in(tmp_path):
    candidate = rendered(tmp_path, HEAD, RECORD)
    record = candidate.source.split("struct Call {\n")[1].split("};")[0]
    assert [line.strip() for line in record.splitlines()] == [
        "const float* x = nullptr;",
        "const double* stored = nullptr;",
        "float* y = nullptr;",
        "unsigned char* parts = nullptr;",
        "double eps = 0;",
        "int64_t rows = 0;",
        "int64_t cols = 0;",
        "int64_t num_threads = 0;",
    ]
    assert candidate.source.count("call.parts = parts;\n") == 2
    assert "  return end_step(call, stream);\n" in candidate.source
    assert not mismatches(candidate, list).errors


def test_parameters_of_a_function_are_those_of_its_step(tmp_path):
    head = HEAD.replace("language: cuda", "language: cpp")
    candidate = rendered(tmp_path, head, PARAMETERS, "steps.cpp.j2")
    expected = "unsigned char* __restrict parts,\n    int64_t rows,\n    double eps) {"
    assert expected in candidate.source
    assert not mismatches(candidate, list).errors


def test_a_function_of_a_step_that_is_left_out_is_not_made(tmp_path):
    text = rendered(tmp_path, HEAD.replace("default: true", "default: false"), RECORD).source
    assert "fused_tiny_go(" in text and "fused_tiny_end(" not in text


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('["null", y, cols]', "[x, y, cols]", "fused_tiny_end: two steps give it different"),
        ('["null", y, cols]', "[y, cols]", "fused_tiny_end: two steps give it different"),
        ("[parts, y, cols]", "[parts, y, tile]", "fused_tiny_end: two steps give it different"),
        ("[x, parts, rows", "[x, parts, cols", "fused_tiny_go: two steps give it different"),
    ],
)
def test_a_function_is_given_the_same_by_all_steps(old, new, why, tmp_path):
    assert old in HEAD
    with pytest.raises(TemplateError, match=why):
        rendered(tmp_path, HEAD.replace(old, new), RECORD)


def test_what_a_function_is_given_has_a_name(tmp_path):
    head = HEAD.replace("parts, rows", 'parts, "rows * 2"')
    with pytest.raises(TemplateError, match=r"fused_tiny_go: 'rows \* 2' is no operand"):
        rendered(tmp_path, head, RECORD)
