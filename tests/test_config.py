"""A config is read whole or refused with every problem, each with line, path and suggestion."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tuner.config import document
from tuner.config.document import keys_of
from tuner.config.names import DEVICE_FACTS, check_names
from tuner.config.quantities import (
    absolute_workloads,
    parse_accuracy,
    parse_device,
    parse_duration,
    parse_fraction,
)
from tuner.config.run_config import RunConfig, load_config, parse_config
from tuner.config.schema import (
    File,
    MeasureSection,
    ProblemSection,
    SearchSection,
    StopSection,
)
from tuner.errors import ConfigError
from tuner.machine.device import Device
from tuner.problem.accuracy import Accuracy
from tuner.space.expression import Expression

LISTED = (
    "expected a list of given, ordinary, offset, heavy_tailed, sparse and {file: PATH}, such as "
    "[given]"
)
WHOLE = """\
problem:
  op: gemm_scale_batchnorm
  reference: reference.py
  sizes: {batch: 1024, in_features: 8192}
  templates: [mine]
device: cuda:1
accuracy: {rtol: 1e-4, atol: 1e-5}
space:
  template: [wgmma, library]
  block_m: [64, 128]
  stages: {range: [2, 6], step: 2, when: {template: [wgmma]}}
  chunk: {pow2: [8, 64], when: "block_m > 64"}
  scale: {values: [1e-3, 0.5, -2], when: {template: wgmma, block_m: 64}}
  vector: [true, false]
constraints:
  - {expr: "block_m * stages <= 512", why: "it fits"}
  - expr: "block_m % 64 == 0"
    why: |
      whole
      warps
search: {sampler: random, trials: 20, timeout: 1h30m, seed: 7, in_flight: 4}
measure: {screen: 10ms, finalists: 0.1, max_noise: 1%, num_finalists: 2, num_processes: 3,
  torch_compile: max-autotune, stop_slow: false}
"""


def read(text: str, **overrides) -> RunConfig:
    return parse_config(text, Path("x.yaml"), overrides)


def problems(text: str, **overrides) -> str:
    with pytest.raises(ConfigError) as error:
        read(text, **overrides)
    return str(error.value)


def space(text: str) -> str:
    """The problems of one line of the space."""
    return problems(f"problem: {{op: x}}\nspace:\n  {text}")


# ---- what is read ---------------------------------------------------------------------------


def test_every_key_is_read(tmp_path):
    (tmp_path / "x.yaml").write_text(WHOLE)
    (tmp_path / "reference.py").write_text("")
    (tmp_path / "mine").mkdir()
    config = load_config(tmp_path / "x.yaml")
    assert config.problem.op == "gemm_scale_batchnorm"
    assert config.problem.reference == tmp_path / "reference.py"
    assert config.problem.templates == (tmp_path / "mine",)
    assert config.problem.sizes == {"batch": 1024, "in_features": 8192}
    assert config.device == "cuda:1" and config.accuracy == Accuracy("tolerance", 1e-4, 1e-5)
    values = {parameter.name: parameter.values for parameter in config.space}
    assert values == {
        "template": ("wgmma", "library"),
        "block_m": (64, 128),
        "stages": (2, 4, 6),
        "chunk": (8, 16, 32, 64),
        "scale": (1e-3, 0.5, -2),
        "vector": (True, False),
    }
    whens = {parameter.name: parameter.when for parameter in config.space}
    assert whens["stages"] == Expression.parse("template in ['wgmma']")
    assert whens["chunk"] == Expression.parse("block_m > 64")
    assert whens["scale"] == Expression.parse("template == 'wgmma' and block_m == 64")
    first, second = config.constraints
    assert first.expression.text == "block_m * stages <= 512" and first.why == "it fits"
    assert first.origin == f"{tmp_path}/x.yaml:16" and second.why == "whole warps"
    search, measure = config.search, config.measure
    assert (search.sampler, search.trials, search.timeout_s) == ("random", 20, 5400.0)
    assert (search.seed, search.in_flight) == (7, 4)
    assert (measure.screen_s, measure.finalists_s, measure.max_noise) == (0.01, 0.1, 0.01)
    assert (measure.num_finalists, measure.num_processes) == (2, 3)
    assert measure.torch_compile == "max-autotune" and not measure.stop_slow
    assert config.text == WHOLE


def test_only_the_operator_is_needed():
    config = read("problem: {op: x}")
    assert config.device == "auto" and config.accuracy == Accuracy("float32")
    assert config.space == () and config.constraints == ()
    search, measure = config.search, config.measure
    assert (search.sampler, search.trials, search.timeout_s) == ("surrogate", 200, 600.0)
    assert (search.seed, search.in_flight) == (0, None)
    assert (measure.screen_s, measure.finalists_s, measure.max_noise) == (0.02, 0.2, 0.005)
    assert (measure.num_finalists, measure.num_processes) == (3, 5)
    assert measure.torch_compile is None and measure.stop_slow


def test_paths_may_be_relative_to_another_folder_than_the_files(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "reference.py").write_text("")
    (tmp_path / "x.yaml").write_text("problem: {op: x, reference: reference.py}")
    config = load_config(tmp_path / "x.yaml", base=tmp_path / "home")
    assert config.problem.reference == tmp_path / "home" / "reference.py"
    with pytest.raises(ConfigError, match=r"x.yaml:1: problem.reference: no such file: '"):
        load_config(tmp_path / "x.yaml")


def test_overrides_win_and_are_checked_like_the_file():
    config = read(
        "problem: {op: x}\nsearch: {trials: 5}",
        trials="9",
        timeout="90s",
        seed=3,
        sampler="grid",
        device="cpu",
        accuracy="1e-4,1e-4",
    )
    assert (config.search.trials, config.search.timeout_s, config.search.seed) == (9, 90.0, 3)
    assert config.search.sampler == "grid" and config.device == "cpu"
    assert config.accuracy == Accuracy("tolerance", 1e-4, 1e-4)
    assert read("problem: {op: x}\nsearch: {trials: 5}", trials=None).search.trials == 5
    with pytest.raises(ValueError, match="speed is not one of"):
        read("problem: {op: x}", speed=1)


def test_problems_on_the_command_line_name_the_option():
    text = problems("problem: {op: x}", trials="0", timeout="soon", device="tpu", seed="x")
    assert sorted(text.split("\n")) == [
        "--device: expected auto, cpu, cuda or cuda:N, got 'tpu'",
        "--seed: expected a whole number, got 'x'",
        "--timeout: expected a time such as 10m, 90s, 1h or 20ms, got 'soon'",
        "--trials: expected a number of at least 1, got 0",
    ]


def test_a_later_problem_gets_the_line_of_the_nearest_part():
    config = read("problem:\n  op: x\nspace:\n  block_m: [1]\n")
    message = config.problem_at("space.block_m[0]", "no", known=["a", "b"], hint="did you mean b?")
    assert message == "x.yaml:4: space.block_m[0]: no\n  known: a, b\n  hint: did you mean b?"
    assert config.problem_at("space.block_m.when.q", "no") == "x.yaml:4: space.block_m.when.q: no"
    assert config.problem_at("search.trials", "no") == "x.yaml:1: search.trials: no"


# ---- the printed text of every problem ------------------------------------------------------


def test_all_problems_are_reported_at_once_in_the_order_of_the_file():
    text = """\
problem: {op: x, sizes: {batch: 0}}
devise: cpu
space:
  for: [1]
  block_m: [64, 64]
constraints:
  - {expr: "a <", why: "w"}
  - {expr: "a < 1"}
search: {trails: 3}
"""
    assert problems(text) == (
        "x.yaml:1: problem.sizes.batch: expected a number above 0, got 0\n"
        "x.yaml:2: devise: unknown key 'devise'\n"
        "  known: problem, device, accuracy, workloads, space, constraints, time, effort, search,"
        " measure\n"
        "  hint: did you mean 'device'?\n"
        "x.yaml:4: space.for: 'for' means something else in a template; rename it\n"
        "x.yaml:5: space.block_m[1]: the value 64 is there twice\n"
        "x.yaml:7: constraints[0].expr: expression 'a <': invalid syntax\n"
        "x.yaml:8: constraints[1].why: missing\n"
        "x.yaml:9: search.trails: unknown key 'trails'\n"
        "  known: sampler, trials, timeout, seed, in_flight, warm_start, first, stop\n"
        "  hint: did you mean 'trials'?"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "x.yaml:1: nothing is written here\n  known: problem, device, accuracy, workloads,",
        ),
        (
            "# only a comment\n",
            "x.yaml:1: nothing is written here\n  known: problem, device, accuracy, workloads,",
        ),
        (
            "null",
            "x.yaml:1: nothing is written here\n"
            "  known: problem, device, accuracy, workloads, space, constraints, time, effort,"
            " search, measure",
        ),
        (
            "- 1\n- 2",
            "x.yaml:1: expected keys, got a list\n"
            "  known: problem, device, accuracy, workloads, space, constraints, time, effort,"
            " search, measure",
        ),
        ("just words", "x.yaml:1: expected keys, got 'just words'\n  known: problem, device, "),
        ("device: cpu", "x.yaml:1: problem: missing"),
        (
            "problem: {op: x}\nworkloads: [given, ordinry]",
            "x.yaml:2: workloads: unknown workload 'ordinry'\n"
            "  known: given, ordinary, offset, heavy_tailed, sparse, file:PATH\n"
            "  hint: did you mean 'ordinary'?",
        ),
        (
            "problem: {op: x}\nworkloads: []",
            f"x.yaml:2: workloads: {LISTED}, got none\n"
            "  hint: leave the key out for given, ordinary",
        ),
        (
            "problem: {op: x}\nworkloads: 3",
            f"x.yaml:2: workloads: {LISTED}, got 3",
        ),
        (
            "problem: {op: x}\nworkloads: [given, {path: a.pt}]",
            f"x.yaml:2: workloads: {LISTED}, got a mapping in it",
        ),
        (
            "problem: {op: x}\nworkloads: [given, {file: none.pt}]",
            f"x.yaml:2: workloads: no such file of tensors: '{Path('none.pt').absolute()}'",
        ),
        (
            "problem: {op: x}\nworkloads: [given, given]",
            "x.yaml:2: workloads: given is there twice\n  hint: write it once",
        ),
        (
            "problem: {op: x}\nworkloads: [ordinary]",
            "x.yaml:2: workloads: given is missing, got ordinary\n"
            "  hint: write [given, ordinary]; the least of them counts",
        ),
        ("problem:", "x.yaml:1: problem: expected a mapping, got nothing"),
        ("problem: {sizes: {}}", "x.yaml:1: problem.op: missing"),
        ("problem: {op: ../x}", "expected the name of a template family, got '../x'"),
        ("problem: {op: 3}", "x.yaml:1: problem.op: expected text, got 3"),
        ("problem: {op: x, sizes: [1]}", "problem.sizes: expected a mapping, got a list"),
        ("problem: {op: x, sizes: {a: 1.5}}", "problem.sizes.a: expected a whole number, got 1.5"),
        ("problem: {op: x, sizes: {a: true}}", "sizes.a: expected a whole number, got true"),
        ("problem: {op: x, templates: here}", "problem.templates: expected a list, got 'here'"),
        ("problem: {op: x, templates: [none]}", "problem.templates[0]: no such folder: 'none'"),
        ("problem: {op: x, reference: no.py}", "problem.reference: no such file: 'no.py'"),
        ("problem: {op: x}\ndevice: gpu", "x.yaml:2: device: expected auto, cpu, cuda or cuda:N"),
        (
            "problem: {op: x}\naccuracy: floot32",
            "x.yaml:2: accuracy: got 'floot32'; expected 'float32', 'tf32'",
        ),
        (
            "problem: {op: x}\naccuracy: 3",
            "accuracy: expected float32, tf32, pytorch or rtol and atol, got",
        ),
        ("problem: {op: x}\naccuracy: {rtol: 1}", "x.yaml:2: accuracy: 'atol' is missing"),
        ("problem: {op: x}\nspace: [1]", "x.yaml:2: space: expected a mapping, got a list"),
        ("problem: {op: x}\nconstraints: {}", "constraints: expected a list, got a mapping"),
        ("problem: {op: x}\nconstraints: [3]", "constraints[0]: expected a mapping, got 3"),
        (
            "problem: {op: x}\nconstraints: [{expr: 3, why: w}]",
            "x.yaml:2: constraints[0].expr: expected an expression as text, got 3",
        ),
        (
            "problem: {op: x}\nconstraints: [{expr: a, why: ''}]",
            "x.yaml:2: constraints[0].why: expected the reason as text, got ''",
        ),
        (
            "problem: {op: x}\nconstraints: [{expr: a, wy: b}]",
            "constraints[0].wy: unknown key 'wy'\n  known: expr, why\n  hint: did you mean 'why'?",
        ),
        (
            "problem: {op: x}\nsearch: {sampler: 3}",
            "search.sampler: expected the name of a sampler, got 3",
        ),
        (
            "problem: {op: x}\nsearch: {trials: 0}",
            "trials: expected a number of at least 1, got 0",
        ),
        ("problem: {op: x}\nsearch: {seed: -1}", "seed: expected a number of at least 0, got -1"),
        ("problem: {op: x}\nsearch: {in_flight: 0}", "in_flight: expected auto or a whole number"),
        ("problem: {op: x}\nsearch: {timeout: 10 min}", "timeout: expected a time such as 10m"),
        (
            "problem: {op: x}\nmeasure: {screen: 20}",
            "x.yaml:2: measure.screen: expected at most 10 s (20ms is 20 ms), got 20 s",
        ),
        (
            "problem: {op: x}\nmeasure: {max_noise: 5}",
            "measure.max_noise: expected a share above 0% and at most 50%, such as 0.5% "
            "(or 0.005), got 5",
        ),
        (
            "problem: {op: x}\nmeasure: {stop_slow: 1}",
            "x.yaml:2: measure.stop_slow: expected true or false, got 1",
        ),
        ("problem: {op: x}\na.b: 1", "x.yaml:2: a.b: unknown key 'a.b'"),
    ],
)
def test_a_wrong_section_is_refused_with_place_and_expectation(text, message):
    assert message in problems(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 4", "x.yaml:3: space.a: expected a list of values, or a mapping with values, range"),
        ("a: []", "x.yaml:3: space.a: a parameter needs at least one value"),
        ("a: [1, 2, 1]", "x.yaml:3: space.a[2]: the value 1 is there twice"),
        ("a: [1, true]", "x.yaml:3: space.a[1]: the value true is there twice"),
        (
            "a: [1, [2]]",
            "space.a[1]: expected a number, true, false, or a word of letters, digits",
        ),
        (
            "a: [1, null]",
            "space.a[1]: expected a number, true, false, or a word of letters, digits",
        ),
        ("a: ['x y']", "or a word of letters, digits and _ . -, got 'x y'"),
        ("a: ['x;y']", "or a word of letters, digits and _ . -, got 'x;y'"),
        ("a: [99999999999999999999]", "or a word of letters, digits and _ . -, got 9999"),
        ("a: {}", "space.a: expected one of values, range and pow2, got none"),
        ("a: {range: [1, 2], pow2: [1, 2]}", "range and pow2, got range and pow2"),
        ("a: {values: 3}", "space.a.values: expected a list, got 3"),
        ("a: {values: [3, 3]}", "space.a.values[1]: the value 3 is there twice"),
        ("a: {range: [1]}", "space.a.range: expected two whole numbers [first, last], got [1]"),
        ("a: {range: [1, 2.5]}", "expected two whole numbers [first, last], got [1, 2.5]"),
        ("a: {range: [5, 2]}", "space.a.range: the first, 5, is above the last, 2"),
        ("a: {range: [1, 5], step: 0}", "space.a.step: expected a whole number of at least 1"),
        ("a: {range: [1, 9999999]}", "space.a.range: more than 10000 values; give a larger step"),
        ("a: {pow2: [3, 8]}", "space.a.pow2: expected powers of two, got 3"),
        ("a: {pow2: [0, 8]}", "space.a.pow2: expected powers of two, got 0"),
        ("a: {pow2: [1, 8], step: 2}", "unknown key 'step'\n  known: values, range, pow2, when"),
        (
            "a: {values: [1], wen: x}",
            "unknown key 'wen'\n  known: values, range, pow2, when\n  hint",
        ),
        (
            "a: {values: [1], when: 3}",
            "space.a.when: expected a mapping from parameters to values",
        ),
        ("a: {values: [1], when: 'b <'}", "space.a.when: expression 'b <': invalid syntax"),
        ("a: {values: [1], when: {b: []}}", "space.a.when.b: expected a number, true, false, or"),
        ("a: {values: [1], when: {b: 'x y'}}", "space.a.when.b: expected a number, true, false,"),
        ("a: {values: [1], when: {}}", "space.a.when: expression '': nothing is written here"),
        ("1a: [1]", "space.1a: a parameter's name is made of letters, digits and _"),
        ("if: [1]", "space.if: 'if' means something else in a template; rename it"),
        ("int: [1]", "space.int: 'int' means something else in a template; rename it"),
        ("params: [1]", "space.params: 'params' means something else in a template; rename it"),
        ("__a: [1]", "space.__a: '__a' means something else in a template; rename it"),
        ("template: [3]", "space.template: expected names of templates, got 3"),
        ("template: {values: [a], when: b}", "every configuration has a template; it takes no"),
    ],
)
def test_a_wrong_parameter_is_refused_with_place_and_expectation(text, message):
    assert message in space(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: [on, off]",
            "x.yaml:3: space.a[0]: YAML takes on for a boolean\n"
            "  hint: write true or false, or 'on' in quotes for the word\n"
            "x.yaml:3: space.a[1]: YAML takes off for a boolean\n"
            "  hint: write true or false, or 'off' in quotes for the word",
        ),
        (
            "a: [1:30]",
            "x.yaml:3: space.a[0]: YAML takes 1:30 for a number in a notation of its own\n"
            "  hint: write a decimal number, or '1:30' in quotes for the word",
        ),
        ("a: [010]", "space.a[0]: YAML takes 010 for a number in a notation of its own"),
        ("a: [0x10]", "space.a[0]: YAML takes 0x10 for a number in a notation of its own"),
        ("a: [.inf]", "space.a[0]: YAML takes .inf for a number in a notation of its own"),
        ("a: [1_000]", "space.a[0]: YAML takes 1_000 for a number in a notation of its own"),
        ("a: [1]\n  a: [2]", "x.yaml:4: space.a: written twice, first in line 3"),
        ("a: &x [1]\n  b: *x", "x.yaml:4: aliases (*x) are refused; write the values out"),
        (
            "a: !!python/object/apply:os.system [1]",
            "space.a: the tag 'tag:yaml.org,2002:python/ob",
        ),
        ("a: !!int 3", "x.yaml:3: space.a: the tag 'tag:yaml.org,2002:int' is refused"),
        ("? [1]\n  : 2", "x.yaml:3: space: a key that is no word"),
        ("a: [1", "x.yaml:3: not YAML: expected ',' or ']'"),
        ("a: 'x", "not YAML: found unexpected end of stream"),
        ("\ta: 1", "x.yaml:3: not YAML: found character '\\t' that cannot start any token"),
        ('a: ["\\UFFFFFFFF"]', "x.yaml:1: not YAML"),
        ("a: [\0]", "x.yaml:3: not YAML: the character '\\x00'"),
        ("a: 1\n---\nb: 2", "x.yaml:4: a second document; one file holds one config"),
        ("a: " + "[" * 30 + "]" * 30, "x.yaml:3: nested deeper than 20 levels"),
        ('"\\uD800": [1]', "x.yaml:3: space: '\\ud800' as a key"),
    ],
)
def test_traps_and_attacks_of_yaml_are_explained(text, message):
    assert message in space(text)


def test_words_that_look_like_dates_and_exponents_are_what_they_look_like():
    config = read("problem: {op: x}\nspace: {a: [2020-01-01, v1.2, 1e-4, '1e-4', -3, +2, 'on']}")
    assert config.space[0].values == ("2020-01-01", "v1.2", 1e-4, "1e-4", -3, 2, "on")


def test_an_alias_bomb_is_refused_at_once():
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert (
        problems("\n".join(lines)) == "x.yaml:2: aliases (*a0) are refused; write the values out"
    )


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "1" * 10**6,
        "problem: {op: x}\nsearch: {timeout: " + "1" * 10**6 + "}",
        "problem: {op: x}\nmeasure: {max_noise: " + "1" * 10**6 + "}",
        "problem: {op: x}\naccuracy: " + "1" * 10**6,
        "problem: {op: x}\nsearch: {trials: " + "1" * 10**6 + "}",
        "problem: {op: x}\nspace: {a: {range: [0, " + "9" * 90 + "]}}",
        "problem: {op: x}\nspace: {a: [1e400]}",
        "[" * 10**6,
        "a: [" + "1," * 400_000 + "]",
        "a:\n" + " b: 1\n" * 10**5,
    ],
)
def test_hostile_text_is_refused_within_seconds(text):
    begun = time.process_time()
    assert problems(text)
    assert time.process_time() - begun < 5


def test_a_file_that_is_no_config_is_refused_with_its_name(tmp_path, monkeypatch):
    def problem(name: str) -> str:
        with pytest.raises(ConfigError) as error:
            load_config(tmp_path / name)
        return str(error.value).replace(f"{tmp_path}/", "")

    (tmp_path / "matmul.yaml").write_bytes(b"problem:\n  op: x\n  \xff\xfe")
    (tmp_path / "large.yaml").write_bytes(b"#" * (2**20 + 1))
    (tmp_path / "random.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "folder").mkdir()
    assert problem("matmul.yaml") == "matmul.yaml:3: not UTF-8 text (byte 0xff)"
    assert problem("matmull.yaml") == (
        "matmull.yaml: no such file\n  hint: did you mean 'matmul.yaml'?"
    )
    assert problem("none/x.yaml") == "none/x.yaml: no such file"
    assert problem("large.yaml") == "large.yaml: larger than 1 MiB, so no config"
    assert problem("random.yaml").endswith("not UTF-8 text (byte 0x80)")
    assert problem("folder") == "folder: a folder\n  expected: a YAML file in it"
    assert problem("x" * 300).endswith("cannot be read: File name too long")
    assert problem("a\0b").endswith("cannot be read: embedded null byte")
    monkeypatch.setattr(document, "MAX_NODES", 100)
    (tmp_path / "many.yaml").write_text("a: [" + "1, " * 200 + "]")
    assert problem("many.yaml") == "many.yaml:1: more than 100 values"


def test_a_byte_order_mark_is_no_problem(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xef\xbb\xbfproblem: {op: x}\n")
    assert load_config(tmp_path / "x.yaml").problem.op == "x"


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_random_text_is_a_config_or_a_config_error(text):
    try:
        read(text)
    except ConfigError as error:
        str(error).encode()  # can be printed
        assert all(problem.startswith("x.yaml:") for problem in error.problems)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, len(WHOLE)),
    st.integers(0, 12),
    st.text(alphabet="abc019.:,-[]{}'\"\n #&*!?|>%@\\\t~é\ud7ff", max_size=6),
)
def test_a_damaged_config_is_a_config_or_a_config_error(position, length, patch):
    text = WHOLE[:position] + patch + WHOLE[position + length :]
    try:
        read(text.replace("reference: reference.py", "").replace("templates: [mine]", ""))
    except ConfigError as error:
        str(error).encode()
        assert all(problem.startswith("x.yaml:") for problem in error.problems)


# ---- values as text -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10m", 600),
        ("90s", 90),
        ("1h", 3600),
        ("1h30m", 5400),
        ("1.5 h", 5400),
        ("20ms", 0.02),
        ("500us", 5e-4),
        ("90", 90),
        (90, 90),
        (0.5, 0.5),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "m", "10 minutes", "-5s", "1d", 0, -1, True, None, []])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="expected a time such as 10m, 90s, 1h or 20ms, got"):
        parse_duration(text)


def test_fractions():
    assert parse_fraction("0.5%") == parse_fraction(0.005) == pytest.approx(0.005)
    assert parse_fraction("2 %") == pytest.approx(0.02)
    for wrong in ("0%", "60%", "x", "-1%", 0, True, None, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected a share"):
            parse_fraction(wrong)


def test_accuracy_and_device_as_text():
    assert parse_accuracy("1e-4,1e-4") == Accuracy("tolerance", 1e-4, 1e-4)
    assert parse_accuracy("tf32").label == "tf32"
    assert [parse_device(text) for text in ("auto", "cpu", "cuda", "cuda:3")] == [
        "auto",
        "cpu",
        "cuda",
        "cuda:3",
    ]
    for wrong in ("gpu", "cuda:", "cuda:-1", "cuda:x", 3, None):
        with pytest.raises(ValueError, match="expected auto, cpu, cuda or cuda:N"):
            parse_device(wrong)


# ---- names ----------------------------------------------------------------------------------

NAMED = """\
problem: {op: x, sizes: {batch: 4, bach: 5}}
space:
  template: [a, b]
  block_m: [1, 2]
  blok_n: [1]
  stages: {values: [1], when: {tempalte: a}}
constraints:
  - {expr: "block_m * device.num_sms < batch", why: "w"}
  - {expr: "BLOCK_M + block_k < device.num_sm", why: "w"}
"""


def test_unknown_names_are_reported_at_once_with_lines():
    with pytest.raises(ConfigError) as error:
        check_names(
            read(NAMED),
            sizes=["batch"],
            facts=["device.kind"],
            parameters=["block_m", "block_n", "block_k", "stages"],
            renamed={},
        )
    known = "batch, block_m, blok_n, device.kind, stages, template"
    assert str(error.value) == (
        "x.yaml:1: problem.sizes.bach: unknown name 'bach'\n  known: batch\n"
        "  hint: did you mean 'batch'?\n"
        "x.yaml:5: space.blok_n: no template uses 'blok_n'\n"
        "  known: block_k, block_m, block_n, stages\n  hint: did you mean 'block_n'?\n"
        f"x.yaml:6: space.stages.when: unknown name 'tempalte'\n  known: {known}\n"
        "  hint: did you mean 'template'?\n"
        f"x.yaml:9: constraints[1].expr: unknown name 'BLOCK_M'\n  known: {known}\n"
        "  hint: did you mean 'block_m'?\n"
        "x.yaml:9: constraints[1].expr: 'block_k' is not among the parameters of space\n"
        "  hint: give block_k values under space\n"
        "x.yaml:9: constraints[1].expr: unknown name 'device.num_sm'\n"
        f"  known: {', '.join(sorted(DEVICE_FACTS))}\n"
        "  hint: did you mean 'device.num_sms'?"
    )


def test_known_names_are_no_problem():
    config = read("problem: {op: x}\nconstraints: [{expr: template == 'a' and n > 1, why: w}]")
    check_names(config, sizes=["n"], facts=[], parameters=[], renamed={})


def test_the_listed_facts_are_the_devices():
    names = {f"device.{item.name}" for item in dataclasses.fields(Device)}
    others = {"index", "name", "driver", "machine_simd_bits"}  # nothing that a shape depends on
    assert set(DEVICE_FACTS) == names - {f"device.{name}" for name in others}


def test_a_search_may_start_from_earlier_runs_and_stop_when_it_is_sure(tmp_path):
    (tmp_path / "earlier").mkdir()
    text = "problem: {op: x}\nsearch: {warm_start: [earlier], stop: {within: 2%}}\n"
    search = parse_config(text, tmp_path / "c.yaml").search
    assert search.warm_start == (tmp_path / "earlier",)
    assert search.stop is not None
    assert (search.stop.within, search.stop.confidence) == (0.02, 0.9)
    with pytest.raises(ConfigError) as error:
        parse_config(text.replace("[earlier]", "[later]"), tmp_path / "c.yaml")
    assert "search.warm_start[0]: no such run folder or file" in str(error.value)
    with pytest.raises(ConfigError) as error:
        parse_config(text.replace("2%", "2%, sure: 1"), tmp_path / "c.yaml")
    assert "unknown key 'sure'\n  known: within, confidence" in str(error.value)


def test_workloads_are_given_and_ordinary_unless_a_config_or_the_command_line_says_else():
    text = "problem: {op: x}\n"
    assert read(text).workloads == ("given", "ordinary") and read(text).others == {"ordinary": ""}
    assert read(f"{text}workloads: [ordinary, given]").workloads == ("given", "ordinary")
    assert read(f"{text}workloads: [given]").workloads == ("given",)
    assert read(text, workloads="given").others == {}
    all_of_them = ("given", "ordinary", "offset", "heavy_tailed", "sparse")
    found = read(
        f"{text}workloads: [given]", workloads="sparse,offset,ordinary,heavy_tailed,given"
    )
    assert found.workloads == all_of_them
    said = problems(text, workloads="given,mine")
    known = "given, ordinary, offset, heavy_tailed, sparse, file:PATH"
    assert said == f"--workloads: unknown workload 'mine'\n  known: {known}"


def test_a_file_of_tensors_is_a_workload_by_its_name(tmp_path):
    text = "problem: {op: x}\n"
    for folder in ("", "more"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "mine.pt").write_bytes(b"")
    at = tmp_path / "c.yaml"
    mine = str(tmp_path / "mine.pt")
    named = parse_config(f"{text}workloads: [{{file: mine.pt}}, sparse, given]", at)
    assert named.workloads == ("given", "sparse", "file:mine.pt")
    assert named.others == {"sparse": "", "file:mine.pt": mine}
    on_line = parse_config(text, at, {"workloads": f"given, file:{mine}"})
    assert on_line.others == {"file:mine.pt": mine}
    both = f"{text}workloads: [given, {{file: mine.pt}}, {{file: more/mine.pt}}]"
    with pytest.raises(ConfigError, match=r":2: workloads: two files are called mine\.pt"):
        parse_config(both, at)
    several = "problem: {op: x, sizes: {batch: [4, 8]}}\nworkloads: [given, {file: mine.pt}]"
    with pytest.raises(ConfigError, match=r"one number of rows, got batch = 4, 8\n  hint"):
        parse_config(several, at)


def test_workloads_of_a_command_line_are_recorded_with_whole_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = f"given,file:{tmp_path / 'a.pt'},sparse"
    assert absolute_workloads("given, file:a.pt,sparse") == whole
    assert absolute_workloads(["given", {"file": "a.pt"}, "sparse"]) == whole
    assert (
        absolute_workloads(whole) == whole and absolute_workloads("given,file:") == "given,file:"
    )


def test_the_documented_example_is_a_config_and_every_key_is_documented():
    text = (Path(__file__).parent.parent / "docs" / "config.md").read_text()
    example = text.split("```yaml\n")[1].split("```")[0]
    assert read(example).space
    keys = [*keys_of(File), "expr", "why"]
    sections = {"problem": ProblemSection, "search": SearchSection, "measure": MeasureSection}
    for name, section in {**sections, "search.stop": StopSection}.items():
        keys += [f"{name}.{key}" for key in keys_of(section)]
    undocumented = {key for key in keys if f"`{key}`" not in text}
    assert undocumented == {"problem", "search", "search.stop", "measure"}  # they are sections
    assert [name for name in DEVICE_FACTS if f"`{name}`" not in text] == []
