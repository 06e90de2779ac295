"""What a text declares is compared with the steps that call it, before anything is compiled."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command_line import tune
from tiny_operator import NAME, TEMPLATE, config_text, write_family

from tuner.kernel.family import family_names, load_family
from tuner.kernel.signatures import Mismatches, mismatches
from tuner.plans import Argument, Plan, Step, Tensor
from tuner.trial import Candidate

ARGS = ("x", "y", "work", "null", "rows * 2", "num_threads", "eps")
PLAN = Plan(
    "op",
    (Argument("x", shape=("rows",)), Argument("eps", "float"), Argument("count", "int")),
    (Tensor("y", ("rows",)),),
    (Tensor("work", ("rows",), "int32"),),
    (Step("call", "op_go", ARGS), Step("aten", "mm", ("x", "x"), "y")),
)
GOOD = "const float* x, float* y, int* work, float* none, int64_t n, int64_t threads, double eps"


def compared(text: str, language: str = "cpp", plan: Plan = PLAN) -> Mismatches:
    candidate = Candidate("op", "t", {}, language, text, plan)  # type: ignore[arg-type]
    lines = text.count("\n") + 1
    return mismatches(candidate, lambda: [f"t.j2:{n + 100}" for n in range(1, lines + 1)])


def c(parameters: str, head: str = 'extern "C" const char* ', tail: str = "") -> str:
    return f"#include <cstdint>\n{head}op_go({parameters}) {{ return nullptr; }}\n{tail}"


TOLERATED = {
    "as it should be": c(GOOD),
    "without names": c("const float*, float*, int*, void*, int64_t, long, double"),
    "qualified": c(
        "const float* __restrict__ x, float* const y, unsigned* work, void* none, std::int64_t n, "
        "long long threads, const double eps = 1e-5"
    ),
    "over lines with comments": c(
        "const float* x,  // the input, of 7 arguments (\n float* y, /* int64_t a, */ int* work,\n"
        "float* none, int64_t n, int64_t threads, double eps"
    ),
    "in a block": c(GOOD, 'extern "C" {\nconst char* ') + "}\n",
    "declared first": f'extern "C" const char* op_go({GOOD});\n' + c(GOOD),
    "declared first without names": 'extern "C" const char* op_go(const float*, float*, int*, '
    "float*, int64_t, int64_t, double);\n" + c(GOOD),
    "with an attribute": c(GOOD, 'extern "C" __attribute__((visibility("default"))) const char* '),
    "called as well": c(
        GOOD, tail="static const char* f() { return op_go(0, 0, 0, 0, 0, 0, 0); }"
    ),
    "types by other names": "using Size = int64_t;\n" + c(GOOD.replace("int64_t n", "Size n")),
    "parameters in a macro": f"#define PARAMETERS {GOOD}\n" + c("PARAMETERS"),
    "made by a macro": f'#define STEP(name) extern "C" const char* name({GOOD})\nSTEP(op_go);\n',
    "pasted by a macro": '#define STEP(name) extern "C" const char* op_##name(int a)\nSTEP(go);\n',
    "in a header of theirs": '#include "/opt/mine.h"\n',
    "bytes": c(GOOD.replace("const float* x", "const unsigned char* x")),
    "a macro in place of extern": '#define API extern "C"\n'
    + c(GOOD, "API const char* ", "").replace("API", 'extern "C"'),
    "two of a kind under conditions": f"#ifdef A\n{c('int a')}#else\n{c('int b, int c')}#endif\n",
    "a name in a string": 'const char* f() { return "op_go(int"; }\n' + c(GOOD),
}


@pytest.mark.parametrize("name", TOLERATED)
def test_what_may_be_right_is_not_refused(name):
    assert compared(TOLERATED[name]) == Mismatches()


WRONG = {
    "no such function": (
        c(GOOD).replace("op_go", "op_goes"),
        "t.j2: no function op_go, which a step calls\n  known: op_goes\n",
        "hint: did you mean 'op_goes'?",
    ),
    "named in a comment alone": ("// op_go(int)\n", "no function op_go", "known: none"),
    "too few arguments": (
        c(GOOD.replace("int64_t n, ", "")),
        "t.j2:102: op_go: it takes 6 arguments; the step passes 7\n  got: const char* op_go(const",
        "expected: op_go(float32* x, float32* y, int32* work, pointer null, int64_t rows * 2, ",
    ),
    "too many arguments": (c(GOOD + ", int64_t more"), "it takes 8 arguments; the step pass", ""),
    "none": (c("void"), "it takes 0 arguments", ""),
    "another element type": (
        c(GOOD.replace("int* work", "double* work")),
        "'double* work' is given the tensor work of int32", "make the step and the function agree",
    ),
    "a number for a tensor": (
        c(GOOD.replace("float* y", "int64_t y")), "'int64_t y' is given the tensor y, a point", "",
    ),
    "a tensor for a number": (
        c(GOOD.replace("int64_t n", "float* n")), "'float* n' is given rows * 2, a number", "",
    ),
    "a float for a double": (
        c(GOOD.replace("double eps", "float eps")), "'float eps' is given eps, which is a dou", "",
    ),
    "an integer for a double": (
        c(GOOD.replace("double eps", "int64_t eps")), "'int64_t eps' is given eps, which is a", "",
    ),
    "a double for an integer": (
        c(GOOD.replace("int64_t n", "double n")), "'double n' is given rows * 2, which is a i", "",
    ),
    "numbers exchanged": (
        c(GOOD.replace("int64_t threads, double eps", "double eps, int64_t threads")),
        "'double eps' is given num_threads", "",
    ),
    'not extern "C"': (c(GOOD, "const char* "), 't.j2:102: op_go: it is not extern "C"', ""),
    "void": (c(GOOD, 'extern "C" void '), "it returns void, not const char*", ""),
    "int": (c(GOOD, 'extern "C" int '), "it returns int, not const char*", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_refused_with_place_got_expected_and_next_step(name):
    text, *words = WRONG[name]
    found = compared(text)
    assert len(found.errors) == 1 and not found.warnings
    for part in words:
        assert part in found.errors[0], found.errors[0]


def test_the_stream_comes_last_for_cuda():
    assert compared(c(GOOD + ", void* stream"), "cuda") == Mismatches()
    assert compared(c(GOOD + ", cudaStream_t s"), "cuda") == Mismatches()
    (error,) = compared(c(GOOD), "cuda").errors
    assert "it takes 7 arguments; the step passes 8, the stream included" in error
    assert "double eps, void* stream), as the step passes them" in error
    (error,) = compared(c(GOOD + ", int64_t n2"), "cuda").errors
    assert "'int64_t n2' is last, where the stream comes (void*)" in error


def test_an_int_for_an_int64_t_is_a_warning():
    found = compared(c(GOOD.replace("int64_t n", "int n")))
    assert not found.errors
    assert found.warnings == (
        "t.j2:102: op_go: 'int n' keeps 32 bits or fewer of rows * 2, which is an int64_t",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def op_go(a, b, c, d, e, f, g):\n    return 1\n", ""),
        ("def op_go(a, b, c, d, *rest):\n    return 1\n", ""),
        ("def op_go(a, b, c, d, e, f, g, h=1, *, i=2):\n    return 1\n", ""),
        ("from mine import op_go\n", ""),
        ("from mine import *\n", ""),
        ("op_go = other = 1\n", ""),
        ("if 1:\n    def op_go(a): return 1\n", ""),
        ("@wrapped\ndef op_go(a): return 1\n", ""),
        (
            "def op_goes(a): return 1\n",
            "t.j2: no function op_go, which a step calls\n  known: op_",
        ),
        ("\ndef op_go(a, b): return 1\n", "t.j2:102: op_go: it does not take 7 arguments by pos"),
        (
            "def op_go(a, b, c, d, e, f, g, h): return 1\n",
            "got: def op_go(a, b, c, d, e, f, g, h)",
        ),
        ("def op_go(a, b, c, d, e, f, g, *, h): return 1\n", "does not take 7 arguments"),
        (
            "@triton.jit\ndef op_go(a, b, c, d, e, f, g): return 1\n",
            "it is a kernel; a step calls",
        ),
        ("x = 1\ndef op_go(:\n", "t.j2:102: not valid Python: invalid syntax: def op_go(:"),
    ],
)
def test_functions_of_python_are_compared_by_name_and_number(text, words):
    errors = compared(text, "triton").errors
    assert (len(errors) == 1 and words in errors[0]) if words else not errors, errors


@pytest.mark.parametrize("name", family_names())
def test_the_families_that_come_with_the_tuner_are_read_and_fit(name):
    family = load_family(name)
    facts = {"device.kind": "cuda", "device.num_sms": 132, "device.num_cores": 8}
    facts |= {"device.simd_bits": 256, "device.simd_registers": 16}
    for template in family.templates:
        candidate = family.render({"template": template}, facts)
        assert mismatches(candidate, list) == Mismatches(), template
        called = [s.function for p in candidate.plan.calls for s in p.steps if s.kind == "call"]
        for function in called:  # it was read: under another name it is missed
            renamed = Candidate(
                candidate.op, template, {}, candidate.language,
                candidate.source.replace(function, "other_name"), candidate.plan,
            )  # fmt: skip
            assert any(f"no function {function}" in e for e in mismatches(renamed, list).errors)


def dry_run(tmp_path: Path, template: str, **settings: object):
    folder = write_family(tmp_path / "mine", template)
    (tmp_path / "c.yaml").write_text(config_text(folder, **settings))  # type: ignore[arg-type]
    return tune("--config", "c.yaml", "--dry-run", cwd=tmp_path)


def test_a_dry_run_refuses_a_step_that_cannot_call_its_function(tmp_path):
    said = dry_run(tmp_path, TEMPLATE.replace("args: [x, y, rows, cols]", "args: [x, y, cols]"))
    assert said.code == 2, said
    line = TEMPLATE.split("\n").index(
        'extern "C" const char* fused_doubled_values_sweep(const float* x, float* y, int64_t rows,'
    )
    place = f"{tmp_path}/mine/{NAME}/sweep.cpp.j2:{line + 1}"
    assert said.err.startswith(f"error: {place}: fused_doubled_values_sweep: it takes 4"), said.err
    assert "the step passes 3" in said.err and "next: make the step and the function" in said.err


def test_a_dry_run_warns_of_values_that_no_template_knows(tmp_path):
    head = 'mode: {about: "how it behaves", default: ok'
    template = TEMPLATE.replace(head, f"{head}, values: [ok, slow]")
    said = dry_run(tmp_path, template, space={"mode": ["ok", "slwo"], "step": [1, 2]})
    assert said.code == 0, said
    assert "space.mode: no template in use knows mode = 'slwo'" in said.out
    assert "known: ok, slow" in said.out and "did you mean 'slow'?" in said.out
    said = dry_run(tmp_path, template, space={"mode": ["ok", "slow"], "step": [1, 2]})
    assert said.code == 0 and "warning" not in said.out


def test_what_is_refused_would_indeed_have_gone_wrong(tmp_path):
    """The compiler accepts it: nobody else would have said so."""
    source = tmp_path / "a.cpp"
    source.write_text(c(GOOD.replace("double eps", "float eps")))
    command = ["g++", "-shared", "-fPIC", "-o", str(tmp_path / "a.so"), str(source)]
    assert subprocess.run(command).returncode == 0
    assert compared(source.read_text()).errors
