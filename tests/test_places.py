"""An error in a template's own line names the template's file and line, with real compilers."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import tune
from test_build import needs_nvcc
from tiny_operator import NAME, TEMPLATE, config_text, write_family

from tuner.kernel.builder import Builder
from tuner.kernel.family import family_names, load_family
from tuner.kernel.places import in_template
from tuner.kernel.toolchain import Toolchain
from tuner.run import open_run
from tuner.trial import Candidate, Status

BODY = """\
---
title: Lines of every origin
language: cpp
parameters:
  count: {about: "lines", default: 2}
  deep: {about: "a branch", default: true}
steps:
  - {call: fused_doubled_values_sweep, args: [x, y, rows, cols]}
---
{# a comment
   of two lines #}

{% set name = "plain" %}
{% macro twice(what) -%}
// macro {{ what }} one
// macro {{ what }} two
{%- endmacro %}
// {{ name }} 18
{% for i in range(count) %}
// loop {{ i }} 20
  {% if deep %}
  // if {{ i }} 22
  {% endif %}
{% endfor %}
{{ twice("x") }}
{% raw %}
// {{ raw }} 27
{% endraw %}
{% include "_lib/inner.hpp" %}
// after 30
{% filter upper %}
// filter 32
{% endfilter %}
"""
INNER = "// inner 1\n{% if deep %}\n// inner 3\n{% endif %}\n{% include '_lib/leaf.hpp' %}\n"
WANTED = [
    ("// plain 18", "lines.cpp.j2:18"),
    ("// loop 0 20", "lines.cpp.j2:20"),
    ("  // if 0 22", "lines.cpp.j2:22"),
    ("// loop 1 20", "lines.cpp.j2:20"),
    ("  // if 1 22", "lines.cpp.j2:22"),
    ("// macro x one", "lines.cpp.j2:15"),
    ("// macro x two", "lines.cpp.j2:16"),
    ("// {{ raw }} 27", "lines.cpp.j2:27"),
    ("// inner 1", "inner.hpp:1"),
    ("// inner 3", "inner.hpp:3"),
    ("// leaf 1", "leaf.hpp:1"),
    ("// after 30", "lines.cpp.j2:30"),
    ("// FILTER 32", "lines.cpp.j2:32"),
]


FACTS = {"device.kind": "cuda", "device.simd_bits": 256, "device.simd_registers": 16}


def family_of(folder: Path, template: str, name: str):
    write_family(folder, template, name)
    (folder / "_lib").mkdir(exist_ok=True)
    (folder / "_lib" / "inner.hpp").write_text(INNER)
    (folder / "_lib" / "leaf.hpp").write_text("// leaf 1\n")
    return load_family(NAME, [folder])


def test_every_rendered_line_knows_its_line_of_the_template(tmp_path):
    family = family_of(tmp_path, BODY, "lines.cpp.j2")
    candidate = family.render({"template": "lines"})
    places = family.places(candidate)
    lines = candidate.source.split("\n")
    assert len(places) == len(lines)
    found = [(t, p.rpartition("/")[2]) for t, p in zip(lines, places, strict=True) if t.strip()]
    assert found == WANTED


def test_what_is_rendered_and_its_key_have_no_marks(tmp_path):
    family = family_of(tmp_path, BODY, "lines.cpp.j2")
    before = family.render({"template": "lines"})
    family.places(before)
    after = family.render({"template": "lines"})
    assert after == before and after.key == before.key and "\ue000" not in after.source


def test_a_text_that_measures_itself_has_no_places_rather_than_wrong_ones(tmp_path):
    text = BODY + "{% set part %}\n// a\n{% endset %}\n// {{ part | length }}\n"
    family = family_of(tmp_path, text, "lines.cpp.j2")
    assert family.places(family.render({"template": "lines"})) == []


@pytest.mark.parametrize("name", family_names())
def test_every_line_of_the_families_that_come_with_the_tuner_has_a_place(name):
    family = load_family(name)
    for template in family.templates:
        candidate = family.render({"template": template}, FACTS)
        places = family.places(candidate, FACTS)
        lines = candidate.source.split("\n")
        assert len(places) == len(lines), template
        for text, place in zip(lines, places, strict=True):
            file, _, number = place.rpartition(":")
            theirs = Path(file).read_text().split("\n")[int(number) - 1]
            is_plain = "{{" not in theirs and "{%" not in theirs
            if text.strip() and is_plain:
                assert text.strip() in theirs or theirs.strip() in text, (place, text)


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("source.cpp:2:5: error: no", "t.j2:8: error: no"),
        ("source.cu(1): error: no", "t.j2:7: error: no"),
        ("source.py:2: error: SyntaxError: no", "t.j2:8: error: SyntaxError: no"),
        ("source.cpp:99:1: error: no", "source.cpp:99:1: error: no"),
        ("/usr/include/a.h:2:1: error: no", "/usr/include/a.h:2:1: error: no"),
    ],
)
def test_a_message_names_the_template_in_place_of_the_text(message, wanted):
    assert in_template(message, ["t.j2:7", "t.j2:8"]) == wanted


def built(tmp_path: Path, candidate: Candidate, toolchain: Toolchain):
    with Builder(toolchain, tmp_path / "cache", num_workers=1) as builder:
        return builder.submit(candidate).result(120)


def test_a_cpp_error_names_the_templates_line_in_the_trial(tmp_path):
    folder = write_family(tmp_path / "mine")
    (tmp_path / "c.yaml").write_text(config_text(folder, space={"mode": ["broken"]}))
    tune("--config", "c.yaml", cwd=tmp_path)
    (run,) = [open_run(p) for p in (tmp_path / "runs").iterdir()]
    (trial,) = run.trials()
    line = TEMPLATE.split("\n").index("  this_is_not_declared(n);") + 1
    path = folder / NAME / "sweep.cpp.j2"
    assert trial.outcome.reason.startswith(f"{path}:{line}: error: ‘this_is_not_declared’") or (
        trial.outcome.reason.startswith(f"{path}:{line}: error: 'this_is_not_declared'")
    ), trial.outcome.reason


def test_a_python_syntax_error_names_the_templates_line(tmp_path):
    text = BODY.replace("language: cpp", "language: triton")
    text = text.split("---\n{#")[0] + "---\n{% if deep %}\nx = 1\n{% endif %}\ndef f(:\n"
    family = family_of(tmp_path / "mine", text, "lines.triton.py.j2")
    candidate = family.render({"template": "lines"})
    build = built(tmp_path, candidate, Toolchain.find("cpu", None))
    assert build.status is Status.COMPILE
    line = text.split("\n").index("def f(:") + 1
    reported = family.explained(candidate, build.error)
    assert reported.startswith(f"{tmp_path}/mine/{NAME}/lines.triton.py.j2:{line}: error: Syn"), (
        reported
    )


@needs_nvcc
def test_a_cuda_error_names_the_templates_line(tmp_path):
    text = BODY.replace("language: cpp", "language: cuda")
    text += "__global__ void k() {\n  nowhere();\n}\n"
    family = family_of(tmp_path / "mine", text, "lines.cu.j2")
    candidate = family.render({"template": "lines"})
    build = built(tmp_path, candidate, Toolchain.find("cuda", 90))
    line = text.split("\n").index("  nowhere();") + 1
    reported = family.explained(candidate, build.error)
    assert reported.startswith(f"{tmp_path}/mine/{NAME}/lines.cu.j2:{line}: error: "), reported
