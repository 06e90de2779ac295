"""The exported file stands alone; that it is a drop-in replacement is in test_drop_in.py."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tuner.errors import TemplateError
from tuner.export.module import _inputs, export_text, fallback_text
from tuner.export.several import futures_apart
from tuner.kernel.builder import Toolchain
from tuner.kernel.family import family_names, load_family
from tuner.machine.device import describe
from tuner.problem.reference import load_problem

OP = "gemm_scale_batchnorm"
SIZES = {"batch": 6, "in_features": 5, "out_features": 7}
HOSTILE = (
    "two\nlines",
    "carriage\rreturn",
    "quotes \" ' \"\"\" '''",
    "NUL \x00 and bell \x07",
    "ends in a backslash \\",
    "separators \u2028 \u2029 \x85 \x0b \x0c",
    "right-to-left \u202e and a lone surrogate \ud800",
    "naïve 中文 ⚡",
    "import os; os.abort()",
    "tune pass --try: 1 /data/pass/x except",
)
CPU_FACTS = describe("cpu").facts()
FACTS = {
    "device.kind": "cuda",
    "device.capability": 90,
    "device.num_sms": 132,
    "device.smem_bytes_max": 232448,
}


def text_of(**changes) -> str:
    family = load_family(OP)
    options = {
        "reference": family.reference.read_text(),
        "sizes": SIZES,
        "flags": Toolchain.find("cpu").cpp_flags,
        "provenance": [],
        **changes,
    }
    return export_text(family, family.render({"template": "cpu"}, CPU_FACTS), **options)


@pytest.fixture(scope="session")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("export") / "model_new.py"
    path.write_text(text_of(provenance=HOSTILE), encoding="utf-8")
    return path


def imported(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def new(path):
    """The exported module, compiled once for all tests."""
    return imported(path, "exported_once")


# ---- the file -------------------------------------------------------------------------------


def test_it_runs_in_a_process_that_has_no_tuner(path, new, tmp_path):
    code = textwrap.dedent("""
        import importlib.util, sys
        sys.modules["tuner"] = None  # importing it raises
        spec = importlib.util.spec_from_file_location("alone", sys.argv[1])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.ModelNew(*module.get_init_inputs())
        y = model(*module.get_inputs())
        y.sum().backward()
        print(list(y.shape), model.gemm.weight.grad is not None)
        assert not [name for name in sys.modules if name.startswith("tuner.")]
    """)
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(path)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[6, 7] True\n"


def test_nothing_of_the_tuner_is_imported_or_named_by_path(path, repository):
    text = path.read_text(encoding="utf-8")
    roots = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert roots == {"contextlib", "fcntl", "inspect", "os", "torch"}
    assert str(repository) not in text and "/home" not in text


def test_it_can_be_imported_twice_and_executed_as_kernelbench_does(path, new):
    second = imported(path, "exported_twice")
    context: dict = {}
    exec(compile(path.read_text(encoding="utf-8"), "<string>", "exec"), context)
    x = torch.randn(6, 5)
    outputs = []
    for model_class in (new.ModelNew, second.ModelNew, context["ModelNew"]):
        torch.manual_seed(3)
        outputs.append(model_class(*context["get_init_inputs"]())(x))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_hostile_lines_stay_in_the_header_as_one_comment_each(path):
    text = path.read_text(encoding="utf-8")
    header = text.split("\n\nimport inspect\n")[0].rstrip("\n")
    assert all(
        line.startswith("#") for line in re.split(r"[\n\r\x0b\x0c\x85\u2028\u2029]", header)
    )
    assert "\x00" not in text and "\u202e" not in text
    assert "# two\\nlines" in header and "naïve 中文 ⚡" in header
    assert "# import os; os.abort()" in header
    assert static_errors(text, "cpp") == []
    without = [line for line in text_of().splitlines() if not line.startswith("#")]
    assert [line for line in text.splitlines() if not line.startswith("#")] == without


def test_the_header_tells_what_it_replaces_and_needs(path):
    header = path.read_text(encoding="utf-8").split("\nimport inspect\n")[0]
    for words in ("Replaces: torch.nn.Linear", "Template: cpu", "Deterministic: yes", "Needs:"):
        assert words in header


def test_sizes_in_force_are_those_of_the_file(new):
    (x,) = new.get_inputs()
    assert x.shape == (6, 5)
    assert new.get_init_inputs() == [5, 7, (7,)]
    assert new.scale_shape == (7,)  # what follows from a size follows the new one


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("n = 1", {"n": 9}),
        ("n: int = 1", {"n": 9}),
        ("n = other = 1", {"n": 9, "other": 1}),
        ("n, other = 1, 2", {"n": 9, "other": 2}),
        ("n = 1\nother = n + 1", {"n": 9, "other": 10}),
        ("n = 1\nn *= 2", {"n": 9}),
        ("if True:\n    n = 1", {"n": 9}),
        ("def f():\n    n = 1\n    return n\nn = 3\nother = f()", {"n": 9, "other": 1}),
    ],
)
def test_a_size_is_overridden_wherever_the_file_assigns_it(line, expected):
    space: dict = {}
    reference = f'"""Doc."""\nfrom __future__ import annotations\n{line}\n'
    exec(_inputs(reference, {"n": 9}, ""), space)
    assert {name: space[name] for name in expected} == expected


USERS = """\
import torch.nn.functional as F
n = 4
class Model:
    ...
def get_inputs():
    return [scaled(n)]
def scaled(n):
    return F.relu(n)
"""


@pytest.mark.parametrize(
    ("behind", "is_again"),
    [
        ("class ModelNew(Model):\n    n = 5\n", False),
        ("import torch.nn.functional as F\ndef forward(scaled):\n    n = 5\n", False),
        ("from elsewhere import F\n", True),
        ("def scaled(x):\n    return x\n", True),
        ("try:\n    n = 5\nfinally:\n    n = 6\n", True),
        ("for n in range(3):\n    ...\n", True),
        ("F.relu, (other, n) = 1, (2, 3)\n", True),
    ],
)
def test_inputs_stand_once_where_the_module_holds_the_file_and_names_nothing_anew(
    behind, is_again
):
    text = f"import torch\n\n{USERS}\n{behind}"
    again = _inputs(USERS, {"batch": 8}, text)
    assert bool(again) == is_again and ("class Model" in again) is False
    assert "n = 9" in _inputs(USERS, {"n": 9}, text)  # a size that the file sets
    assert "n = 4" in _inputs(USERS, {}, "class ModelNew:\n    ...\n")
    anything = f"from math import *\n{USERS}"
    assert _inputs(anything, {}, f"{anything}\n{behind}")


@pytest.mark.parametrize(
    "text",
    [
        "from __future__ import annotations\nn = 4\n",
        '"""Doc, é."""; from __future__ import annotations; n = 4\n',
        "from __future__ import (\n    annotations,\n    division,\n)  # why\nn = 4\n",
        "from __future__ import annotations; from __future__ import division; n = 4\n",
    ],
)
def test_what_a_file_takes_from_the_future_begins_the_exported_one(text):
    begin, rest = futures_apart(text)
    names = {"annotations", "division"} & {*re.findall(r"\w+", text)}
    assert {*begin.replace(",", " ").split()} == {"from", "__future__", "import", *names}
    space: dict = {}
    exec(f"{begin}\nimport torch\n{rest}\ndef f(x: nobody) -> None: ...", space)
    assert "__future__" not in rest and space["n"] == 4
    assert space["f"].__annotations__ == {"x": "nobody", "return": "None"}
    assert futures_apart("n = 4") == ("", "n = 4")


def test_the_references_model_stays_behind_and_its_helpers_come_along():
    reference = load_family(OP).reference.read_text() + "\n\ndef helper():\n    return 1\n"
    text = text_of(reference=reference)
    classes = [node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    assert classes == ["ModelNew"]
    assert "def helper" in text


def test_a_fallback_is_the_reference_itself_at_the_sizes_in_force(tmp_path):
    family = load_family(OP)
    reference = family.reference.read_text()
    text = fallback_text(family, reference=reference, sizes=SIZES, provenance=HOSTILE)
    path = tmp_path / "model_new.py"
    path.write_text(text, encoding="utf-8")
    module = imported(path, "fallback")
    (x,) = module.get_inputs()
    assert x.shape == (SIZES["batch"], SIZES["in_features"])
    model = module.ModelNew(*module.get_init_inputs())
    expected = load_problem(family.reference, SIZES).make_model(0, "cpu")
    model.load_state_dict(expected.state_dict(), strict=True)
    assert torch.equal(model(x), expected(x))
    assert not re.search(r"\bpass\b", text)


def test_a_fallback_of_a_derived_operator_takes_a_live_modules_weights(tmp_path):
    family = load_family(OP)
    reference = family.reference.read_text()
    text = fallback_text(
        family, reference=reference, sizes=SIZES, provenance=[], has_from_module=True
    )
    path = tmp_path / "model_new.py"
    path.write_text(text, encoding="utf-8")
    module = imported(path, "fallback_of_derived")
    live = load_problem(family.reference, SIZES).make_model(0, "cpu")
    mine = module.ModelNew.from_module(live)
    assert all(a is b for a, b in zip(mine.parameters(), live.parameters(), strict=True))
    (x,) = module.get_inputs()
    assert torch.equal(mine.eval()(x), live.eval()(x))


def test_two_exports_never_share_a_library():
    names = [
        re.search(r"TORCH_LIBRARY\((\w+),", text_of(**changes))[1]
        for changes in ({}, {"flags": ["-O1"]}, {"flags": ["-O2"]}, {"provenance": ["x"]})
    ]
    assert len(set(names)) == 3 and names[0] == names[3]  # a comment changes nothing compiled


def test_a_family_that_cannot_be_exported_is_refused(tmp_path):
    family = load_family(OP)
    (tmp_path / OP).mkdir()
    for broken, reason in (("class :\n", "not Python"), ("x = '\x00'\n", "not Python")):
        (tmp_path / OP / "model_new.py").write_text(broken)
        family = load_family(OP, [tmp_path])
        with pytest.raises(TemplateError, match=reason):
            export_text(
                family,
                family.render({"template": "cpu"}, CPU_FACTS),
                reference="",
                sizes={},
                flags=[],
                provenance=[],
            )


# ---- KernelBench's static rules -------------------------------------------------------------


def static_errors(text: str, language: str) -> list[str]:
    """KernelBench's static checker, as documented: regular expressions over the file."""
    code = "\n".join(re.sub(r"(#|//).*", "", line) for line in text.splitlines())
    rules = {
        "the word pass": re.search(r"\bpass\b", text),  # we keep it out of comments, too
        "try": re.search(r"\btry\s*:", code),
        "except": re.search(r"\bexcept\b", code),
    }
    if language == "cuda":
        rules["no __global__"] = not re.search(r"__global__\s+void\s+", code)
    if language == "triton":
        rules["no triton kernel"] = "@triton.jit" not in code and "@triton.autotune" not in code
        rules["no triton operation"] = not re.search(r"\btl\.\w+", code)
    else:
        rules["no load_inline"] = not re.search(r"\bload_inline\b", code)
    return [name for name, is_broken in rules.items() if is_broken]


TEMPLATES = [
    (name, template) for name in family_names() for template in load_family(name).templates
]


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_every_template_obeys_kernelbenchs_static_rules(name, template):
    family = load_family(name)
    candidate = family.render({"template": template}, {**CPU_FACTS, **FACTS})
    text = export_text(
        family,
        candidate,
        reference=family.reference.read_text(),
        sizes={},
        flags=["-O3"],
        provenance=[],
    )
    assert static_errors(text, candidate.language) == []


def test_the_static_rules_find_what_they_look_for():
    text = "# two-pass\ntry:\n    x\nexcept E:\n    y\n"
    assert static_errors(text, "cuda") == [
        "the word pass",
        "try",
        "except",
        "no __global__",
        "no load_inline",
    ]
