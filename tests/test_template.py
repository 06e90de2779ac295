"""Families load, refuse what is wrong by file and line, span a space, and render."""

from __future__ import annotations

from pathlib import Path

import pytest
from spaces import feasible

from tuner.errors import TemplateError
from tuner.kernel.family import builtin_folder, family_names, load_family
from tuner.plans import Step, Tensor
from tuner.space.search_space import SearchSpace
from tuner.trial import to_json

OP = """\
name: tiny
title: A tiny operator
function: fused_tiny
replaces: [a sum]
sizes: {rows: 4, cols: 8}
arguments:
  - {name: x, shape: [rows, cols]}
  - {name: weight, shape: [cols, cols]}
  - {name: eps, dtype: float}
outputs:
  - {name: y, shape: [rows, cols]}
flops: 2 * rows * cols
bytes: 8 * rows * cols
"""

TILED = """\
---
title: In tiles
language: cpp
requires:
  - {expr: "device.kind == 'cpu'", why: "it is C++"}
  - {expr: "tile * unroll <= 32", why: "the tile stays in registers"}
parameters:
  tile: {about: "columns at a time", default: 8}
  unroll: {about: "rows at a time", default: 2, values: [1, 2, 4]}
  stats: {about: "how sums meet", default: two_pass, values: [two_pass, atomics]}
  slices: {about: "how many partial sums", default: 3, when: "stats == 'two_pass'"}
workspace:
  partial: {shape: ["cdiv(rows, tile)", 2 * slices, cols], when: "stats == 'two_pass'"}
  sums: {shape: [cols], dtype: float64, zero: true, when: "stats == 'atomics'"}
steps:
  - {aten: mm, args: [x, weight.t], out: y}
  - {call: fused_tiny_go, args: [y, partial, sums, rows, "cols * tile", eps, num_threads, null]}
  - {call: fused_tiny_more, args: [y, device.num_cores], when: "unroll > 1"}
optimisations:
  - {text: "tiles"}
  - {text: "atomic sums", when: "stats == 'atomics'"}
deterministic: "stats != 'atomics'"
---
// {{ op }} in tiles of {{ tile }}, {{ params.unroll }} rows at a time
{% include "_lib/sums.hpp" %}
{% for row in range(unroll) %}
{% if row %}
// row {{ row }}
{% endif %}
{% endfor %}
"""

SIMPLE = """\
---
title: As simple as can be
language: cpp
parameters:
  tile: {about: "columns at a time", default: 4}
  simple_only: {about: "only here", default: 1}
steps:
  - {call: fused_tiny_simple, args: [x, y, rows, cols]}
---
// simple {{ tile }} {{ simple_only }}
"""

SUMS = """\
// sums by {{ stats }}{% if stats == "two_pass" %} in {{ slices }} slices{% endif +%}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of families with one of them, of two templates."""
    root = tmp_path / "mine"
    write(root, "tiny/op.yaml", OP)
    write(root, "tiny/reference.py", "# reference\n")
    write(root, "tiny/model_new.py", "# model\n")
    write(root, "tiny/tiled.cpp.j2", TILED)
    write(root, "tiny/simple.cpp.j2", SIMPLE)
    write(root, "_lib/sums.hpp", SUMS)
    return root


def write(root: Path, name: str, text: str | bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def edited(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


def refusal(folder: Path) -> str:
    with pytest.raises(TemplateError) as caught:
        load_family("tiny", [folder])
    return str(caught.value)


# ---- what is wrong is named by file and line ------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "title: In tiles\n",
            "",
            ["tiled.cpp.j2:2: title: missing", "title: missing"],
        ),
        (
            "title: In",
            "titel: In",
            ["cpp.j2:2: titel: unknown key 'titel'", "did you mean 'title'?"],
        ),
        (
            'unroll: {about: "rows at a time", default: 2,',
            'unroll: {about: "rows at a time", defualt: 2,',
            [
                "tiled.cpp.j2:9: parameters.unroll.defualt: unknown key 'defualt'",
                "hint: did you mean 'default'?",
            ],
        ),
        (
            "args: [x, weight.t], out: y}",
            "arg: [x], out: y}",
            ["j2:16: steps[0].arg: unknown key 'arg'"],
        ),
        ("language: cpp", "language: rust", ["tiled.cpp.j2:3: language: expected 'cuda'"]),
        ("language: cpp", "language: cuda", ["j2:3: language: cuda", "ends in .cu.j2"]),
        ("title: In tiles", "title: In: tiles", ["tiled.cpp.j2:2: not YAML", "hint: quote"]),
        ("parameters:\n", "parameters:\n\t\n", ["tiled.cpp.j2:8: not YAML"]),
        (
            "{aten: mm, args: [x, weight.t], out: y}",
            "{aten: mm, call: f, args: [x], out: y}",
            ["tiled.cpp.j2:16: steps[0]: a step has either `call:` or `aten:`"],
        ),
        (
            "{aten: mm, args: [x, weight.t], out: y}",
            "{args: [x]}",
            ["tiled.cpp.j2:16: steps[0]: a step has either `call:` or `aten:`"],
        ),
        ("weight.t], out: y}", "weight.t]}", ["j2:16: steps[0]: an `aten:` step needs `out:`"]),
        ("weight.t], out: y}", "weight.t], out: z}", ["j2:16: steps[0]: an `aten:` step needs"]),
        ("aten: mm", "aten: mm(", ["j2:16: steps[0]: 'mm(' is no function's name"]),
        ("[y, partial,", "[x.t, partial,", ["j2:17: steps[1]: 'x.t': only an `aten:` step"]),
        ("[y, partial,", "[yy, partial,", ["j2:17: steps[1]: 'yy': unknown name 'yy'"]),
        ("tile * unroll <= 32", "tile * unrol <= 32", ["j2:6: requires[1]", "mean 'unroll'?"]),
        ("tile * unroll <= 32", "tile *", ["j2:6: requires[1]: expression 'tile *'"]),
        ("tile * unroll <= 32", "__import__('os')", ["j2:6: requires[1]: expression"]),
        ("tile * unroll <= 32", "tile.__class__ == 1", ["j2:6: requires[1]"]),
        (
            "default: 3, when: \"stats == 'two_pass'\"",
            "default: 3, when: \"stat == 'two_pass'\"",
            ["j2:11: parameters.slices", "did you mean 'stats'?"],
        ),
        ('"cdiv(rows, tile)"', '"cdiv(row, tile)"', ["j2:13: workspace.partial", "mean 'rows'?"]),
        (
            "zero: true, when: \"stats == 'atomics'\"",
            "zero: true, when: 'rows > 1'",
            ["j2:14: workspace.sums", "unknown name 'rows'"],  # the sizes come with the call
        ),
        ('when: "unroll > 1"', 'when: "unroll >"', ["j2:18: steps[2]: expression 'unroll >'"]),
        ("\"stats != 'atomics'\"\n---", '"stat"\n---', ["j2:22: deterministic", "mean 'stats'?"]),
        ("  tile: {about", "  rows: {about", ["j2:8: parameters.rows: this name is taken"]),
        ("  tile: {about", "  two-words: {about", ["j2:8: parameters.two-words: this name is"]),
        ("  sums: {shape", "  y: {shape", ["j2:14: workspace.y: this name is taken"]),
        (
            "  sums: {shape",
            "  guard: {shape",
            ["j2:14: workspace.guard: this name is reserved: the exp", "reserved: Pointer, cdiv"],
        ),
        (
            "  tile: {about",
            "  params: {about",
            [
                "j2:8: parameters.params: this name is reserved: the text has all",
                "  reserved: num_threads, op, params, template, and the words of Python\n",
            ],
        ),
        ("default: 2, values: [1,", "default: 3, values: [1,", ["j2:9: parameters.unroll: its d"]),
        ("{{ tile }}", "{{ tiel }}", ["j2:24: undefined variable 'tiel'", "did you mean 'tile'?"]),
        (
            "{{ op }}",
            "{{ nothing_like_it }}",
            ["j2:24: undefined", "next: declare nothing_l"],
        ),
        ("_lib/sums.hpp", "_lib/sum.hpp", ["j2:25: includes '_lib/sum.hpp'", "'_lib/sums.hpp'?"]),
        ("{% if row %}", "{% fi row %}", ["tiled.cpp.j2:27: ", "unknown tag 'fi'"]),
        ("{% endfor %}", "", ["tiled.cpp.j2:30: ", "Unexpected end of template"]),
        ("{{ op }}", "{{ op }", ["tiled.cpp.j2:24: "]),
    ],
)
def test_a_wrong_template_is_refused_with_file_line_and_reason(folder, old, new, expected):
    write(folder, "tiny/tiled.cpp.j2", edited(TILED, old, new))
    message = refusal(folder)
    for part in expected:
        assert part in message
    assert str(folder / "tiny" / "tiled.cpp.j2") in message.splitlines()[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "no head"),
        ("no head at all", "no head"),
        ("---\ntitle: x\n", "no head"),
        (" ---\ntitle: x\n---\n", "no head"),
        ("---\n\n---\ntext", "nothing is written here\n  known: requires, parameters"),
        ("---\n- a list\n---\ntext", ":2: expected keys, got a list\n  known: requires, "),
        (b"---\ntitle: \xff\xfe\n---\n", "cannot be read: 'utf-8' codec"),
    ],
)
def test_a_file_without_a_usable_head_is_refused(folder, content, expected):
    path = write(folder, "tiny/tiled.cpp.j2", content)
    message = refusal(folder)
    assert message.startswith(str(path)) and expected in message


def test_every_error_of_a_head_is_reported_at_once(folder):
    text = edited(edited(TILED, "title:", "titel:"), 'about: "rows at', 'abuot: "rows at')
    write(folder, "tiny/tiled.cpp.j2", text)
    message = refusal(folder)
    assert "titel" in message and "abuot" in message and message.count(": missing") == 2
    text = edited(edited(TILED, "{{ tile }}", "{{ tiel }}"), "tile * unroll", "tile * unrol")
    write(folder, "tiny/tiled.cpp.j2", text)
    assert "unrol'" in refusal(folder) and "tiel" in refusal(folder)


# ---- what heads share -----------------------------------------------------------------------

SUMS_HEAD = """\
# What sums.hpp asks of a template.
requires:
  - {expr: "slices <= rows", why: "a slice has a row"}
parameters:
  slices: {about: "how many partial sums", default: 5, when: "stats == 'two_pass'"}
  depth: {about: "of the tree", default: 2}
workspace:
  sums: {shape: [cols], dtype: float64, zero: true, when: "stats == 'atomics'"}
deterministic: "stats != 'atomics'"
"""
SHARING = edited(TILED, "language: cpp\n", "language: cpp\nuses: [sums]\n")
SHARING = edited(
    SHARING,
    "  sums: {shape: [cols], dtype: float64, zero: true, when: \"stats == 'atomics'\"}\n",
    "",
)
SHARING = edited(SHARING, "deterministic: \"stats != 'atomics'\"\n", "")


def test_a_template_has_what_its_parts_declare_and_its_own_words_win(folder):
    write(folder, "_lib/sums.yaml", SUMS_HEAD)
    write(folder, "tiny/tiled.cpp.j2", SHARING)
    template = load_family("tiny", [folder]).templates["tiled"]
    assert template.filled({})["slices"] == 3  # its own; the part's is 5
    assert list(template.parameters) == ["tile", "unroll", "stats", "slices", "depth"]
    assert [rule.why for rule in template.head.requires][-1] == "a slice has a row"
    assert template.head.workspace["sums"].zero
    assert template.head.deterministic == "stats != 'atomics'"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("slices <= rows", "slics <= rows", "sums.yaml:3: requires[0]: 'slics <= rows': unknown"),
        ("default: 2}", "default: 2, values: [1]}", "sums.yaml:6: parameters.depth: its default"),
        ("  depth: {", "  rows: {", "sums.yaml:6: parameters.rows: this name is taken"),
        ("zero: true", "zeroed: true", "sums.yaml:8: workspace.sums.zeroed: unknown key"),
        ("requires:", "steps:", "sums.yaml:2: steps: unknown key 'steps'"),
    ],
)
def test_what_is_wrong_with_a_part_is_reported_with_its_own_file_and_line(
    folder, old, new, expected
):
    write(folder, "_lib/sums.yaml", edited(SUMS_HEAD, old, new))
    write(folder, "tiny/tiled.cpp.j2", SHARING)
    assert expected in refusal(folder)


def test_a_part_that_is_not_there_is_reported_with_those_that_are(folder):
    write(folder, "_lib/sums.yaml", SUMS_HEAD)
    write(folder, "tiny/tiled.cpp.j2", edited(SHARING, "uses: [sums]", "uses: [sum]"))
    message = refusal(folder)
    assert "tiled.cpp.j2:4: uses[0]: there is no _lib/sum.yaml" in message
    assert "did you mean 'sums'?" in message


WHERE = """\
where:
  is_exact: "stats == 'two_pass'"
  is_wide: "is_exact and tile >= 16"
"""
NAMED = edited(TILED, "requires:\n", WHERE + "requires:\n")
NAMED = edited(NAMED, "default: 3, when: \"stats == 'two_pass'\"", 'default: 3, when: "is_exact"')
NAMED = edited(NAMED, "{{ op }} in", "{% if is_wide %}wide{% endif %} {{ op }} in")


def test_a_named_condition_is_meant_by_its_name_in_head_and_text(folder):
    write(folder, "tiny/tiled.cpp.j2", NAMED)
    family = load_family("tiny", [folder])
    assert family.templates["tiled"].head.parameters["slices"].when == "stats == 'two_pass'"
    wide = family.render({"template": "tiled", "tile": 16, "unroll": 1})
    narrow = family.render({"template": "tiled", "tile": 8, "unroll": 1})
    assert "wide" in wide.source and "wide" not in narrow.source


@pytest.mark.parametrize(
    ("old", "new", "place", "reason"),
    [
        ("tile >= 16", "tiel >= 16", "j2:6: where.is_wide: ", "mean 'tile'?"),
        ("tile >= 16", "rows >= 16", "j2:6: where.is_wide: ", "unknown name 'rows'"),
        ("tile >= 16", "tile >=", "j2:6: where.is_wide: expression", ""),
        ("is_wide:", "unroll:", "j2:6: where.unroll: this name is taken", ""),
        ('when: "is_exact"', 'when: "is_exat"', "parameters.slices", "unknown name 'is_exat'"),
    ],
)
def test_a_wrong_condition_is_refused_with_its_line(folder, old, new, place, reason):
    write(folder, "tiny/tiled.cpp.j2", edited(NAMED, old, new))
    message = refusal(folder)
    assert place in message and reason in message


def test_errors_in_an_included_file_name_that_file_and_line(folder):
    path = write(folder, "_lib/sums.hpp", "\n// {{ slcies }}\n")
    message = refusal(folder)
    assert message.startswith(f"{path}:2: undefined variable 'slcies'")
    assert "did you mean 'slices'?" in message
    write(folder, "_lib/sums.hpp", "\n\n{% if %}")
    assert refusal(folder).startswith(f"{path}:3: ")
    write(folder, "_lib/sums.hpp", '\n{% include "_lib/deeper.hpp" %}')
    assert refusal(folder).startswith(f"{path}:2: includes '_lib/deeper.hpp'")


def test_an_include_may_use_what_its_includer_sets(folder):
    text = edited(TILED, "// {{ op }}", "{% set here = 3 %}\n// {{ op }}")
    write(folder, "tiny/tiled.cpp.j2", text)
    write(folder, "_lib/sums.hpp", "// {{ here }}\n")
    assert "// 3\n" in load_family("tiny", [folder]).render({"template": "tiled"}).source


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ 1 // (tile - tile) }}", "ZeroDivisionError"),
        ("{{ stats + 1 }}", "TypeError"),
        ("{{ params.nothing }}", "has no attribute 'nothing'"),
        ('{% include "tiny/tiled.cpp.j2" %}', "RecursionError"),
        ('{% include stats ~ ".hpp" %}', "two_pass.hpp"),
        ("{% for n in range(10000000) %}{% endfor %}", "OverflowError"),
    ],
)
def test_what_fails_only_when_rendered_has_its_file_and_line_too(folder, text, reason):
    path = write(folder, "tiny/tiled.cpp.j2", TILED.replace("{% if row %}", text + "{% if row %}"))
    family = load_family("tiny", [folder])
    with pytest.raises(TemplateError) as caught:
        family.render({"template": "tiled"})
    assert reason in str(caught.value)
    assert str(caught.value).startswith((f"{path}:27:", f"{path}:2"))


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ params.__init__.__globals__ }}",
        "{{ range.__self__ }}",
        "{{ '{0.__class__}'.format(op) }}",
        "{{ (lipsum.__globals__)['os'].popen('id') }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self._TemplateReference__context }}",
    ],
)
def test_a_template_cannot_reach_pythons_internals(folder, text):
    write(folder, "tiny/tiled.cpp.j2", TILED + text + "\n")
    with pytest.raises(TemplateError) as caught:
        print(load_family("tiny", [folder]).render({"template": "tiled"}).source)
    assert ":31: does not render" in str(caught.value)


def test_a_template_cannot_read_files_outside_its_folders(folder, tmp_path):
    write(tmp_path, "secret", "42")
    for name in ("../secret", str(tmp_path / "secret"), "tiny/../../secret"):
        write(folder, "tiny/tiled.cpp.j2", TILED + f'{{% include "{name}" %}}\n')
        assert "does not exist" in refusal(folder)


# ---- the operator's own file ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("function: fused_tiny\n", "", "op.yaml:1: function: missing"),
        ("title:", "titel:", "hint: did you mean 'title'?"),
        ("name: tiny", "name: tony", "op.yaml:1: name: 'tony' is not the folder's name 'tiny'"),
        ("{name: x, shape: [rows, cols]}", "{name: x}", "op.yaml:7: arguments[0]: x: a tensor"),
        ("{name: eps, dtype: float}", "{name: eps, dtype: float, shape: [rows]}", "arguments[2]"),
        ("flops: 2 * rows", "flops: 2 * row", "op.yaml:12: flops: '2 * row * cols': unknown"),
        ("bytes: 8 *", "bytes: 8 * /", "op.yaml:13: bytes: expression"),
        ("y, shape: [rows, cols]", "y, shape: [rows, colz]", "op.yaml:11: outputs[0].shape"),
        ("sizes: {rows: 4,", "sizes: {rows: four,", "op.yaml:5: sizes.rows"),
        (
            "{name: x, shape: [rows, cols]}",
            "{name: x, shape: [row, cols]}",
            "op.yaml:7: arguments[0].shape: 'row' is not among `sizes:`\n"
            "  known: rows, cols\n  hint: did you mean",
        ),
        ("{name: x, shape: [rows,", "{name: x, shape: [2 * rows,", "2 * rows: this name is no id"),
        (
            "{name: eps,",
            "{name: stream,",
            "op.yaml:9: arguments[2]: stream: this name is reserved: it is the CUDA stream, which "
            "every function of CUDA gets last\n  reserved: Pointer, cdiv, dense, expect,",
        ),
        ("{name: eps,", "{name: num_threads,", "num_threads: this name is reserved: it is how ma"),
        ("{name: eps,", "{name: double,", "double: this name is reserved: it is a word of C++\n"),
        ("{name: eps,", "{name: lambda,", "it is a word of Python\n  reserved: "),
        ("{name: eps,", "{name: x,", "arguments[2]: x: this name is taken: it is another of the"),
        ("{name: y,", "{name: rows,", "outputs[0]: rows: this name is taken: it is a size"),
    ],
)
def test_a_wrong_operator_file_is_refused_with_its_line(folder, old, new, expected):
    path = write(folder, "tiny/op.yaml", edited(OP, old, new))
    message = refusal(folder)
    assert message.startswith(str(path)) and expected in message


# ---- extra operators --------------------------------------------------------------------------

ALSO_OP = (
    OP
    + """\
extra:
  eval:
    arguments:
      - {name: x, shape: [rows, cols]}
      - {name: stored, shape: [cols]}
      - {name: momentum, dtype: float}
    outputs: [{name: z, shape: [rows, cols]}]
    rows: "cols if device.kind == 'cpu' else 256"
  score:
    arguments: [{name: x, shape: [rows, cols]}]
    outputs: [{name: points, shape: [rows]}]
"""
)
ALSO_TILED = edited(
    TILED,
    "deterministic:",
    """\
extra:
  eval:
    when: "tile > 2"
    steps:
      - {call: fused_tiny_fold, args: [stored, sums, partial, momentum, cols]}
      - {aten: mul, args: [x, stored], out: z}
      - {call: fused_tiny_more, args: [z, device.num_cores], when: "unroll > 1"}
deterministic:""",
)


def test_a_template_offers_further_calls_where_their_condition_holds(folder):
    write(folder, "tiny/op.yaml", ALSO_OP)
    write(folder, "tiny/tiled.cpp.j2", ALSO_TILED)
    family = load_family("tiny", [folder])
    assert [s.function for s in family.extra.values()] == ["fused_tiny_eval", "fused_tiny_score"]
    assert family.extra["score"].rows is None and family.extra["eval"].rows is not None
    assert family.extra["eval"].rows.evaluate({"cols": 8, "device.kind": "cpu"}) == 8
    facts = {"device.num_cores": 6}
    params = {"template": "tiled", "stats": "atomics", "unroll": 1}
    plan = family.render(params, facts).plan
    further = plan.extra["eval"]
    assert further is not None and plan.extra["score"] is None
    assert [argument.name for argument in further.arguments] == ["x", "stored", "momentum"]
    assert [output.name for output in further.outputs] == ["z"]
    assert [tensor.name for tensor in further.workspace] == ["sums"]
    assert further.steps == (
        Step("call", "fused_tiny_fold", ("stored", "sums", "null", "momentum", "cols")),
        Step("aten", "mul", ("x", "stored"), "z"),
    )
    none = {"eval": None, "score": None}
    assert family.render({**params, "tile": 2}, facts).plan.extra == none
    assert family.render({"template": "simple"}).plan.extra == none


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("  eval:\n", "  op:\n", "op.yaml:15: extra.op: this name is taken, or is no name"),
        ("  eval:\n", "  device:\n", "op.yaml:15: extra.device: this name is taken, or is no n"),
        ("  eval:\n", "  in use:\n", "op.yaml:15: extra.in use: this name is taken, or is no"),
        (
            "    outputs: [{name: z,",
            "    output: [{name: z,",
            "op.yaml:15: extra.eval.outputs: missing",
        ),
        (
            "{name: stored, shape: [cols]}",
            "{name: stored, shap: [cols]}",
            "op.yaml:18: extra.eval.arguments[1].shap: unknown key 'shap'\n"
            "  known: name, dtype, shape\n  hint: did you mean 'shape'?",
        ),
        (
            "{name: momentum, dtype: float}",
            "{name: momentum}",
            "extra.eval.arguments[2]: momentum",
        ),
        (
            "z, shape: [rows, cols]",
            "z, shape: [colz]",
            "op.yaml:20: extra.eval.outputs[0].shape: ",
        ),
        ('rows: "cols if', 'rows: "colz if', "op.yaml:21: extra.eval.rows: "),
        (
            "    arguments: [{name: x, shape: [rows, cols]}]",
            "    arguments: [{name: n, dtype: int}]",
            "op.yaml:23: extra.score.arguments: at least one of them is a tensor",
        ),
    ],
)
def test_a_wrong_further_call_is_refused_with_its_line(folder, old, new, expected):
    path = write(folder, "tiny/op.yaml", edited(ALSO_OP, old, new))
    message = refusal(folder)
    assert message.startswith(str(path)) and expected in message


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "  eval:\n",
            "  evil:\n",
            "tiled.cpp.j2:23: extra.evil: the operator has no such extra operator\n"
            "  known: eval, score\n  hint: did you mean 'eval'?",
        ),
        (
            "  eval:\n",
            "  quite:\n",
            "extra.quite: the operator has no such extra operator\n  known: eval, score",
        ),
        ("tile > 2", "tyle > 2", "tiled.cpp.j2:23: extra.eval: 'tyle > 2': unknown name 'tyle'"),
        ("    steps:", "    step:", "tiled.cpp.j2:23: extra.eval.steps: missing"),
        (
            "args: [stored, sums,",
            "arg: [stored, sums,",
            "tiled.cpp.j2:26: extra.eval.steps[0].arg: unknown key 'arg'\n"
            "  known: call, aten, args, out, gives, pick, layout, when\n"
            "  hint: did you mean 'args'?",
        ),
        # A tensor of another call, and one that no call has.
        (
            "args: [stored, sums,",
            "args: [y, sums,",
            "j2:26: extra.eval.steps[0]: 'y': unknown name",
        ),
        (
            "args: [stored, sums,",
            "args: [stored, sumz,",
            "j2:26: extra.eval.steps[0]: 'sumz': unk",
        ),
        ("momentum, cols]", "eps, cols]", "j2:26: extra.eval.steps[0]: 'eps': unknown name"),
        (
            "args: [x, stored], out: z",
            "args: [x, stored], out: y",
            "j2:27: extra.eval.steps[1]: an ",
        ),
        (
            '[z, device.num_cores], when: "unroll > 1"',
            '[z, device.num_cores], when: "unrol > 1"',
            "tiled.cpp.j2:28: extra.eval.steps[2]: 'unrol > 1': unknown name",
        ),
        # Its tensors are no names for workspace or parameters, whatever the own call has.
        ("  sums: {", "  stored: {", "tiled.cpp.j2:14: workspace.stored: this name is taken"),
        ("  slices: {", "  momentum: {", "tiled.cpp.j2:11: parameters.momentum: this name is tak"),
    ],
)
def test_a_wrong_offer_of_a_further_call_is_refused_with_its_line(folder, old, new, expected):
    write(folder, "tiny/op.yaml", ALSO_OP)
    path = write(folder, "tiny/tiled.cpp.j2", edited(ALSO_TILED, old, new))
    message = refusal(folder)
    assert message.startswith(str(path)) and expected in message


def test_a_key_of_an_earlier_release_is_answered_with_todays(folder):
    write(folder, "tiny/op.yaml", OP + "also: {eval: {arguments: [], outputs: []}}\n")
    assert refusal(folder).endswith("op.yaml:14: also: it is called extra now")


def test_workspace_has_sizes_that_every_call_with_it_knows(folder):
    others = edited(ALSO_OP, "      - {name: stored, shape: [cols]}", "      - {name: stored}")
    others = others.replace("stored}", "stored, shape: [length]}")
    others = others.replace("- {name: x, shape: [rows, cols]}\n      - {name: st", "- {name: st")
    others = others.replace(
        "outputs: [{name: z, shape: [rows, cols]}]", "outputs: [{name: z, shape: [length]}]"
    )
    write(folder, "tiny/op.yaml", others)
    write(folder, "tiny/tiled.cpp.j2", edited(ALSO_TILED, "[x, stored], out", "[stored], out"))
    assert "j2:14: workspace.sums: 'cols': unknown name" in refusal(folder)


def test_a_further_call_of_an_operator_without_any_is_refused(folder):
    write(folder, "tiny/tiled.cpp.j2", ALSO_TILED)
    expected = (
        "extra.eval: the operator has no such extra operator\n  known: none (`extra:` of op.yaml"
    )
    assert expected in refusal(folder)


def test_what_is_missing_is_named(folder, tmp_path):
    with pytest.raises(TemplateError, match="unknown operator 'tinny'") as caught:
        load_family("tinny", [folder])
    assert "hint: did you mean 'tiny'?" in str(caught.value)
    with pytest.raises(TemplateError, match="not a folder"):
        load_family("tiny", [tmp_path / "nowhere"])
    (folder / "tiny" / "model_new.py").unlink()
    assert "model_new.py is missing" in refusal(folder)
    write(folder, "tiny/model_new.py", "")
    for name in ("tiled", "simple"):
        (folder / "tiny" / f"{name}.cpp.j2").unlink()
    assert "no template (*.cu.j2, *.cpp.j2, *.triton.py.j2)" in refusal(folder)


def test_a_folder_in_the_place_of_a_file_is_no_template(folder):
    (folder / "tiny" / "odd.cpp.j2").mkdir()
    assert set(load_family("tiny", [folder]).templates) == {"tiled", "simple"}
    (folder / "tiny" / "op.yaml").unlink()
    (folder / "tiny" / "op.yaml").mkdir()
    assert "unknown operator 'tiny'" in refusal(folder)


def test_two_templates_of_one_name_are_refused(folder):
    cuda = edited(SIMPLE, "language: cpp", "language: cuda")
    write(folder, "tiny/simple.cu.j2", cuda)
    assert "a second template named 'simple'" in refusal(folder)


def test_an_unknown_template_is_refused_with_those_there(folder):
    family = load_family("tiny", [folder])
    with pytest.raises(TemplateError, match="has no template 'tild'") as caught:
        family.render({"template": "tild"})
    assert "known: simple, tiled" in str(caught.value)
    assert "hint: did you mean 'tiled'?" in str(caught.value)


# ---- the user's own folders -----------------------------------------------------------------


def test_a_users_folder_adds_to_and_overrides_another(folder, tmp_path):
    own = tmp_path / "own"
    write(own, "tiny/extra.cpp.j2", SIMPLE)
    write(own, "tiny/simple.cpp.j2", edited(SIMPLE, "// simple", "// simple, but mine"))
    write(own, "_lib/sums.hpp", "// other sums\n")
    family = load_family("tiny", [own, folder])
    assert set(family.templates) == {"extra", "simple", "tiled"}
    assert "but mine" in family.render({"template": "simple"}).source
    assert "// other sums" in family.render({"template": "tiled"}).source
    assert family.reference == folder / "tiny" / "reference.py"


def test_a_users_template_joins_a_family_that_comes_with_the_tuner(tmp_path):
    name = family_names()[0]
    template = edited(SIMPLE, "fused_tiny_simple, args: [x, y, rows, cols]", "f, args: [x, y]")
    write(tmp_path, f"{name}/users_own.cpp.j2", template)
    assert set(load_family(name, [tmp_path]).templates) == {
        *load_family(name).templates,
        "users_own",
    }
    assert "tiny" not in family_names()


def test_every_family_that_comes_with_the_tuner_loads_and_renders():
    facts = {"device.kind": "cuda", "device.num_sms": 132, "device.capability": 90}
    facts |= {
        "device.smem_bytes_max": 232448,
        "device.simd_bits": 256,
        "device.simd_registers": 16,
    }
    assert len(family_names()) >= 2
    for name in family_names():
        family = load_family(name)
        assert family.reference.parent == builtin_folder() / name
        for template in family.templates:
            candidate = family.render({"template": template}, facts)
            assert candidate.source.strip() and candidate.plan.steps
            assert "{{" not in candidate.source and "{%" not in candidate.source


# ---- the space that a family spans ----------------------------------------------------------

VARIED = {
    "tile": (4, 8, 16),
    "unroll": (1, 2, 4, 8),
    "stats": ("two_pass", "atomics"),
    "slices": (1, 2),
    "simple_only": (0, 1),
}


def space_of(folder: Path, names: list[str], varied: dict, kind: str = "cpu") -> list[dict]:
    family = load_family("tiny", [folder])
    space = SearchSpace.build(
        family.parameters(names, varied),
        family.constraints(names, varied),
        {"device.kind": kind, "rows": 4, "cols": 8},
    )
    return feasible(space)


def test_a_parameter_of_one_template_is_absent_for_the_other(folder):
    feasible = space_of(folder, ["tiled", "simple"], VARIED)
    simple = [params for params in feasible if params["template"] == "simple"]
    assert [set(params) for params in simple] == [{"template", "tile", "simple_only"}] * 6
    tiled = [params for params in feasible if params["template"] == "tiled"]
    assert not any("simple_only" in params for params in tiled)
    # tile * unroll <= 32 and unroll in 1, 2, 4 leave 8 pairs; 2 slices with one of the stats.
    assert len(tiled) == 8 * (2 + 1)
    assert {(p["tile"], p["unroll"]) for p in tiled} == {
        (tile, unroll) for tile in (4, 8, 16) for unroll in (1, 2, 4) if tile * unroll <= 32
    }


def test_a_parameter_exists_only_under_its_heads_when(folder):
    for params in space_of(folder, ["tiled"], VARIED):
        assert ("slices" in params) == (params["stats"] == "two_pass")


def test_a_when_about_a_parameter_that_is_not_varied_is_judged_by_its_default(folder):
    varied = {"slices": (1, 2, 3)}
    assert len(space_of(folder, ["tiled"], varied)) == 3  # stats is two_pass
    text = edited(TILED, "default: two_pass", "default: atomics")
    write(folder, "tiny/tiled.cpp.j2", text)
    assert space_of(folder, ["tiled"], varied) == [{"template": "tiled"}]


def test_defaults_stand_in_requirements_for_what_is_not_varied(folder):
    feasible = space_of(folder, ["tiled"], {"tile": (8, 16, 32)})  # unroll is 2
    assert [params["tile"] for params in feasible] == [8, 16]
    family = load_family("tiny", [folder])
    texts = [c.expression.text for c in family.constraints(["tiled"], {"tile": (8,)})]
    assert "tile * 2 <= 32" in texts


def test_values_that_the_text_does_not_know_are_rejected_with_a_reason(folder):
    family = load_family("tiny", [folder])
    constraints = family.constraints(["tiled", "simple"], {"unroll": (2, 3)})
    assert "template tiled knows unroll: 1, 2, 4" in [c.why for c in constraints]
    assert space_of(folder, ["tiled"], {"unroll": (2, 3)}) == [{"template": "tiled", "unroll": 2}]


def test_a_template_for_another_device_leaves_the_others(folder):
    feasible = space_of(folder, ["tiled", "simple"], {"tile": (4, 8)}, kind="cuda")
    assert {params["template"] for params in feasible} == {"simple"}


def test_parameters_that_no_searched_template_uses_do_not_appear(folder):
    feasible = space_of(folder, ["simple"], VARIED)
    assert len(feasible) == 6 and set(feasible[0]) == {"template", "tile", "simple_only"}


def test_every_feasible_configuration_renders(folder):
    family = load_family("tiny", [folder])
    seen = set()
    for params in space_of(folder, ["tiled", "simple"], VARIED):
        candidate = family.render(params, {"device.num_cores": 2})
        assert candidate.params == params
        seen.add(candidate.key)
    assert len(seen) == 24 + 6


# ---- rendering ------------------------------------------------------------------------------


def test_a_plan_holds_numbers_for_parameters_and_names_for_what_the_call_knows(folder):
    family = load_family("tiny", [folder])
    facts = {"device.num_cores": 2}
    plan = family.render({"template": "tiled", "tile": 16}, facts).plan
    assert plan.workspace == (Tensor("partial", ("cdiv(rows, 16)", "2 * 3", "cols")),)
    assert plan.steps == (
        Step("aten", "mm", ("x", "weight.t"), "y"),
        Step(
            "call",
            "fused_tiny_go",
            ("y", "partial", "null", "rows", "cols * 16", "eps", "num_threads", "null"),
        ),
        Step("call", "fused_tiny_more", ("y", "2")),
    )
    plan = family.render({"template": "tiled", "unroll": 1, "stats": "atomics"}, facts).plan
    assert plan.workspace == (Tensor("sums", ("cols",), "float64", zero=True),)
    assert plan.steps[-1].args[1:3] == ("null", "sums")


def test_negative_parameters_keep_their_meaning_inside_expressions(folder):
    text = edited(TILED, '"cols * tile"', '"cols * tile ** 2"')
    write(folder, "tiny/tiled.cpp.j2", text)
    params = {"template": "tiled", "tile": -2}
    step = load_family("tiny", [folder]).render(params, {"device.num_cores": 2}).plan.steps[1]
    assert step.args[4] == "cols * (-2) ** 2"


def test_optimisations_and_determinism_follow_the_parameters(folder):
    family = load_family("tiny", [folder])
    usual = family.render({"template": "tiled"})
    atomics = family.render({"template": "tiled", "stats": "atomics"})
    assert usual.is_deterministic and usual.optimisations == ("tiles",)
    assert not atomics.is_deterministic and atomics.optimisations == ("tiles", "atomic sums")


def test_rendering_does_not_change_what_was_given(folder):
    write(folder, "tiny/simple.cpp.j2", SIMPLE + "{{ params.clear() or '' }}{{ tile }}\n")
    family = load_family("tiny", [folder])
    params = {"template": "simple", "tile": 5}
    for _ in range(2):
        candidate = family.render(params)
        assert params == {"template": "simple", "tile": 5} == candidate.params
        assert candidate.source.endswith("5\n")


def test_the_rendered_family_is_the_golden_one(folder, golden):
    family = load_family("tiny", [folder])
    facts = {"device.num_cores": 2}
    parts = []
    for params in (
        {"template": "tiled"},
        {"template": "tiled", "unroll": 1, "stats": "atomics", "tile": 4},
        {"template": "simple", "tile": 7},
    ):
        candidate = family.render(params, facts)
        parts += [f"==== {params}", candidate.source, to_json(candidate.plan), ""]
    golden("tiny_family.txt", "\n".join(parts))
