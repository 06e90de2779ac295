"""Expressions are a closed grammar; the feasible list is exactly the product, filtered."""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner import space
from tuner.errors import ExpressionError, InputError
from tuner.space import Constraint, Expression, Parameter, SearchSpace
from tuner.trial import Params, Value

ENV: dict[str, Value] = {
    "a": 7,
    "b": 2,
    "zero": 0,
    "half": 0.5,
    "yes": True,
    "stats": "two_pass",
    "device.num_sms": 132,
}

# ---- expressions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a + b * 3 - 1", 12),
        ("-a // b", -4),
        ("a / b", 3.5),
        ("a % b ** 2", 3),
        ("cdiv(a, b) + log2(8) + abs(-2) + min(a, b, 1) + max(a, b)", 17),
        ("log2(6) > 2", True),
        ("1 < b < a == 7", True),
        ("1 < b < a == 8", False),
        ("not yes or a > 3 and b > 3", False),
        ("stats == 'two_pass'", True),
        ("stats in ['atomics', 'two_pass']", True),
        ("stats not in ('atomics', 'two_pass')", False),
        ("b in [-1, 2]", True),
        ("'wide' if a > 3 else 'narrow'", "wide"),
        ("device.num_sms * 2", 264),
        ("  a  ", 7),
        ("a == '7'", False),
        ("zero != 0 and a % zero == 0", False),
    ],
)
def test_the_grammar_computes(text, value):
    result = Expression.parse(text).evaluate(ENV)
    assert result == value and isinstance(result, type(value))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "nothing is written here"),
        ("a <", "invalid syntax"),
        ("a; b", "invalid syntax"),
        ("a = 1", "invalid syntax"),
        ("(a := 1)", "column 2: a NamedExpr is not part of the grammar"),
        ("lambda: 1", "column 1: a Lambda is not part of the grammar"),
        ("[x for x in a]", "a ListComp is not part of the grammar"),
        ("a[0]", "a Subscript is not part of the grammar"),
        ("f'{a}'", "a JoinedStr is not part of the grammar"),
        ("{1: 2}", "a Dict is not part of the grammar"),
        ("[1, 2]", "a list (other than after `in`) is not part of the grammar"),
        ("a in b", "`in` needs a list of values"),
        ("1 < a in [1]", "`in` cannot be chained"),
        ("a in [b]", "a list after `in` holds numbers, booleans and words only"),
        ("a is b", "`is` is not part of the grammar; use =="),
        ("a << 70", "the operator LShift is not part of the grammar"),
        ("~a", "the operator Invert is not part of the grammar"),
        ("__import__('os')", "__import__ cannot be called; only min, max, abs, cdiv, log2 can"),
        ("a.real()", "this cannot be called"),
        ("(1).real", "only names have dots in them"),
        ("min(a)", "min takes 2 to 8 arguments, got 1"),
        ("cdiv(a, b, 1)", "cdiv takes 2 arguments, got 3"),
        ("min(*a, b)", "min takes plain arguments only"),
        ("max(a, b, key=abs)", "max takes plain arguments only"),
        ("'a b'", "a word is made of letters, digits and _ . - only"),
        ("b'x'", "a bytes is not a number, boolean or word"),
        ("1j", "a complex is not a number, boolean or word"),
        ("None", "a NoneType is not a number, boolean or word"),
        ("...", "a ellipsis is not a number, boolean or word"),
        ("é", "is not an ASCII character"),
        ("1or 2", "invalid decimal literal"),
        ("1e999", "a number beyond 64 bits"),
        ("9" * 900, "a number beyond 64 bits"),
        ("1" * 1001, "longer than 1000 characters"),
        ("(" * 300 + "1" + ")" * 300, "too many nested parentheses"),
        ("-" * 900 + "1", "nested deeper than 60 levels"),
        ("not " * 200 + "1", "nested deeper than 60 levels"),
        ("+".join(["1"] * 400), "nested deeper than 60 levels"),
        ("a\0b", "null"),
    ],
)
def test_what_is_outside_the_grammar_is_refused_with_the_reason(text, reason):
    with pytest.raises(ExpressionError) as error:
        Expression.parse(text)
    assert reason in str(error.value)
    assert str(error.value).startswith("expression ")
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a / zero", "division by zero"),
        ("a // zero", "division by zero"),
        ("a % zero", "division by zero"),
        ("cdiv(a, zero)", "division by zero"),
        ("zero ** -1", "division by zero"),
        ("9**9**9**9", "an exponent beyond 64"),
        ("(9**60)**60", "beyond 64 bits"),
        ("2 ** 63", "beyond 64 bits"),
        ("2.5 ** 64 * 2.5 ** 64", "beyond 64 bits"),
        ("(-a) ** half", "a root of a negative number"),
        ("log2(zero)", "log2 of 0"),
        ("'a' * 10**9", "arithmetic on the word 'a'"),
        ("-stats", "arithmetic on the word 'two_pass'"),
        ("max(stats, a)", "arithmetic on the word 'two_pass'"),
        ("stats < 'z'", "words have no order"),
        ("not stats", "the word 'two_pass' is neither true nor false; compare it"),
        ("stats and a", "the word 'two_pass' is neither true nor false; compare it"),
        ("1 if stats else 2", "the word 'two_pass' is neither true nor false; compare it"),
    ],
)
def test_what_cannot_be_computed_names_the_expression_and_the_reason(text, reason):
    expression = Expression.parse(text)
    with pytest.raises(ExpressionError) as error:
        expression.evaluate(ENV)
    assert str(error.value).startswith(f"expression {text!r}: ") and reason in str(error.value)


def test_hostile_expressions_are_refused_at_once():
    begun = time.perf_counter()
    texts = ["9**9**9**9", "'a'*10**9", "((((2**60)*2**60)*2**60))", "x" * 10**6, "(" * 10**5]
    for text in texts:
        with pytest.raises(ExpressionError):
            Expression.parse(text).evaluate({})
    assert time.perf_counter() - begun < 0.5


def test_an_unknown_name_lists_the_known_ones_and_the_closest():
    with pytest.raises(ExpressionError) as error:
        Expression.parse("blok_m * 2 > 1").evaluate({"block_m": 1, "stages": 2})
    assert str(error.value) == (
        "expression 'blok_m * 2 > 1': unknown name 'blok_m'\n"
        "  known: block_m, stages\n  hint: did you mean 'block_m'?"
    )


def test_a_word_is_no_condition():
    with pytest.raises(ExpressionError, match="a condition is needed, got the word 'two_pass'"):
        Expression.parse("stats").holds(ENV)
    assert Expression.parse("a").holds(ENV) and not Expression.parse("zero").holds(ENV)


def test_names_are_collected_and_a_dotted_one_is_one_name():
    expression = Expression.parse("min(a, b) if device.kind == 'cuda' else a")
    assert expression.names == {"a", "b", "device.kind"}
    assert expression == Expression.parse(expression.text + " ")


@given(st.text(max_size=60))
def test_random_text_is_an_expression_or_an_expression_error(text):
    with contextlib.suppress(ExpressionError):
        Expression.parse(text).evaluate(ENV)


PIECES = (
    "a b zero half stats 1 0 2.5 'w' ( ) [ ] , + - * / // % ** < == in not and or if else ."
    + (" min max abs cdiv log2 device.num_sms True is lambda : \\ # '''")
)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES.split(" ")), max_size=25))
def test_random_pieces_of_the_grammar_are_an_expression_or_an_expression_error(pieces):
    with contextlib.suppress(ExpressionError):
        Expression.parse(" ".join(pieces)).evaluate(ENV)


def arithmetic() -> st.SearchStrategy[str]:
    leaf = st.sampled_from(["a", "b", "c", "1", "3", "64"])

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        pair = st.tuples(inner, inner)
        return st.one_of(
            pair.map(lambda p: f"({p[0]} + {p[1]})"),
            pair.map(lambda p: f"({p[0]} * {p[1]})"),
            pair.map(lambda p: f"({p[0]} // max({p[1]}, 1))"),
            pair.map(lambda p: f"({p[0]} % max({p[1]}, 1))"),
            pair.map(lambda p: f"min({p[0]}, {p[1]})"),
            pair.map(lambda p: f"cdiv({p[0]}, max(1, {p[1]}))"),
            pair.map(lambda p: f"({p[0]} if {p[0]} <= {p[1]} else abs({p[1]}))"),
        )

    return st.recursive(leaf, grow, max_leaves=8)


@given(arithmetic(), *[st.integers(0, 100)] * 3)
def test_whole_number_arithmetic_is_pythons(text, a, b, c):
    functions = {"min": min, "max": max, "abs": abs, "cdiv": lambda x, y: math.ceil(x / y)}
    expected = eval(text, functions, {"a": a, "b": b, "c": c})
    if expected < 2**40:  # cdiv by floats is exact below
        assert Expression.parse(text).evaluate({"a": a, "b": b, "c": c}) == expected


# ---- C++ ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cpp"),
    [
        ("batch", "batch"),
        ("block_m * 2", "int64_t{256}"),
        ("batch * 4 - 1", "((batch * int64_t{4}) - int64_t{1})"),
        ("batch // block_m", "(batch / int64_t{128})"),
        ("cdiv(batch, block_m)", "(((batch) + (int64_t{128}) - 1) / (int64_t{128}))"),
        ("min(batch, 2, k)", "std::min<int64_t>(std::min<int64_t>(batch, int64_t{2}), k)"),
        ("batch if stats == 'two_pass' else 'word'", "batch"),
        ("1 if batch > 5 else 0", "((batch > int64_t{5}) ? int64_t{1} : int64_t{0})"),
        ("2 ** 3 + batch % 4.0", "(int64_t{8} + (batch % int64_t{4}))"),
        ("-batch", "(-batch)"),
        ("abs(batch)", "std::max<int64_t>(batch, -(batch))"),
        ("batch in [1, 2] and not k", "((batch == int64_t{1} || batch == int64_t{2}) && (!k))"),
    ],
)
def test_shapes_become_cpp(text, cpp):
    assert Expression.parse(text).to_cpp({"block_m": 128, "stats": "two_pass"}) == cpp


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("batch / 2", "the operator Div has no exact meaning in whole numbers"),
        ("batch ** 2", "the operator Pow has no exact meaning in whole numbers"),
        ("log2(batch)", "log2 has no exact meaning in whole numbers"),
        ("batch * 0.5", "0.5 is not a whole number"),
        ("stats", "the word 'two_pass' cannot be passed as a whole number"),
        ("batch == 'x'", "the word 'x' cannot be passed as a whole number"),
        ("device.num_sms * 2", "unknown name 'device.num_sms'"),
        ("batch + 1 // 0", "division by zero"),
    ],
)
def test_what_cpp_cannot_compute_exactly_is_refused(text, reason):
    with pytest.raises(ExpressionError) as error:
        Expression.parse(text).to_cpp({"stats": "two_pass"})
    assert reason in str(error.value)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_compiled_cpp_computes_what_python_computes(tmp_path: Path):
    texts = [
        "cdiv(batch, 3) * min(k, 7, batch)",
        "(batch + 1) * k % 11 if batch >= k else k // 2",
        "1 if 2 < batch <= 40 and not k in [3, 5] else 0",
        "max(batch - k, 0) * 4096 * 4096 * 100",
        "abs(k - batch) + True",
    ]
    points = list(itertools.product([1, 5, 40, 1000], [1, 3, 8]))
    prints = "\n".join(
        f'printf("%lld\\n", (long long)({Expression.parse(text).to_cpp({})}));' for text in texts
    )
    points_text = ", ".join(f"{{{batch}, {k}}}" for batch, k in points)
    source = (
        "#include <algorithm>\n#include <cstdint>\n#include <cstdio>\nint main() {\n"
        f"const int64_t points[][2] = {{{points_text}}};\n"
        f"for (auto& p : points) {{ int64_t batch = p[0], k = p[1];\n{prints}\n}}\n}}\n"
    )
    (tmp_path / "x.cpp").write_text(source)
    subprocess.run(["g++", "-std=c++17", "-o", "x", "x.cpp"], cwd=tmp_path, check=True)
    output = subprocess.run(["./x"], cwd=tmp_path, check=True, capture_output=True, text=True)
    expected = [
        int(Expression.parse(text).evaluate({"batch": batch, "k": k}))
        for batch, k in points
        for text in texts
    ]
    assert [int(line) for line in output.stdout.split()] == expected


# ---- the space ------------------------------------------------------------------------------


def rule(text: str, why: str = "a reason", when: str | None = None) -> Constraint:
    return Constraint(Expression.parse(text), why, "", Expression.parse(when) if when else None)


def exists(parameter: Parameter, params: Mapping[str, Value], facts: Mapping[str, Value]) -> bool:
    env = {**facts, **params}
    when = parameter.when
    return when is None or (when.names <= env.keys() and when.holds(env))


def brute_force(
    parameters: list[Parameter], constraints: list[Constraint], facts: Mapping[str, Value]
) -> Iterator[Params]:
    """The product of all values, filtered; conditions only refer to parameters before."""
    seen = set()
    for values in itertools.product(*[parameter.values for parameter in parameters]):
        params: Params = {}
        for parameter, value in zip(parameters, values, strict=True):
            if exists(parameter, params, facts):
                params[parameter.name] = value
        env = {**facts, **params}
        judged = [c for c in constraints if c.names <= env.keys()]
        judged = [c for c in judged if c.when is None or c.when.holds(env)]
        key = tuple(params.items())
        if key not in seen and all(c.expression.holds(env) for c in judged):
            seen.add(key)
            yield params


RULES = [
    "p0 + p1 <= 4",
    "p1 * p2 != 4",
    "p2 % p0 == 0",
    "p0 < p3 or p1 < 2",
    "p3 in [1, 3]",
    "p0 + p1 + p2 + p3 >= limit",
    "p1 >= missing if p1 > 1 else True",
    "device.num_sms > p0",
]
WHENS = [None, None, "p0 > 1", "p0 == 2 or p0 == 3"]


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    whens=st.lists(st.sampled_from(WHENS), min_size=3, max_size=3),
    chained=st.booleans(),
    rules=st.lists(st.sampled_from(RULES), max_size=4),
    limit=st.integers(0, 9),
    guard=st.sampled_from([None, "p0 == 1"]),
)
def test_the_feasible_list_is_the_filtered_product(counts, whens, chained, rules, limit, guard):
    conditions = [None, *whens]
    if chained and conditions[1]:
        conditions[2] = "p1 > 1"
    parameters = [
        Parameter(f"p{i}", tuple(range(1, n + 1)), Expression.parse(when) if when else None)
        for i, (n, when) in enumerate(zip(counts, conditions, strict=True))
    ]
    constraints = [rule(text, text, guard if i == 0 else None) for i, text in enumerate(rules)]
    facts: dict[str, Value] = {"limit": limit, "missing": 2}
    expected = list(brute_force(parameters, constraints, facts))
    if not expected:
        with pytest.raises(InputError, match="no configuration is feasible"):
            SearchSpace.build(parameters, constraints, facts)
        return
    built = SearchSpace.build(parameters, constraints, facts)
    assert sorted(map(str, built.feasible)) == sorted(map(str, expected))
    assert [built.index(params) for params in built.feasible] == list(range(len(expected)))
    assert built.num_cartesian == math.prod(counts)
    if not any(conditions):
        assert list(built.feasible) == expected  # in the order of declaration
        assert built.num_feasible + sum(built.rejections.values()) == built.num_cartesian
    for values in itertools.product(*[(*p.values, None) for p in parameters]):
        point = {p.name: v for p, v in zip(parameters, values, strict=True) if v is not None}
        assert (built.index(point) is not None) == (built.reject(point) is None)
        assert (point in expected) == (built.reject(point) is None)


def tile_space() -> SearchSpace:
    return SearchSpace.build(
        [
            Parameter("template", ("wgmma", "library")),
            Parameter("block_m", (64, 128, 256)),
            Parameter("stages", (2, 3, 4), Expression.parse("template == 'wgmma'")),
        ],
        [rule("block_m * stages <= 512", "it fits"), rule("block_m < 256", "no", "stages == 2")],
        {"batch": 1024, "device.kind": "cpu"},
    )


def test_feasible_is_a_sequence_in_the_order_of_declaration():
    built = tile_space()
    assert built.feasible[0] == {"template": "wgmma", "block_m": 64, "stages": 2}
    assert built.feasible[-1] == {"template": "library", "block_m": 256}
    assert built.feasible[-3:-1] == [
        {"template": "library", "block_m": 64},
        {"template": "library", "block_m": 128},
    ]
    assert len(built.feasible) == built.num_feasible == 9 and built.num_cartesian == 18
    with pytest.raises(IndexError):
        built.feasible[9]


def test_reject_says_why_a_configuration_is_none():
    reject = tile_space().reject
    wide: Params = {"template": "wgmma", "block_m": 256}
    assert reject({**wide, "stages": 4}) == "it fits"
    assert reject({**wide, "stages": 2}) == "no"
    assert reject(wide) == "stages has no value"
    assert reject({**wide, "template": "library"}) is None
    assert reject({**wide, "template": "library", "stages": 2}) == (
        "stages exists only when template == 'wgmma'"
    )
    assert (
        reject({**wide, "block_m": 96, "stages": 2}) == "block_m = 96 is not one of 64, 128, 256"
    )
    assert reject({**wide, "stage": 2}) == (
        "unknown name 'stage'\n  known: block_m, stages, template\n  hint: did you mean 'stages'?"
    )
    assert tile_space().index({**wide, "stages": 3, "more": 1}) is None


def test_neighbours_differ_in_one_parameter_and_what_depends_on_it():
    built = tile_space()
    assert built.neighbours({"template": "wgmma", "block_m": 64, "stages": 2}) == [
        {"template": "library", "block_m": 64},
        {"template": "wgmma", "block_m": 128, "stages": 2},
        {"template": "wgmma", "block_m": 64, "stages": 3},
        {"template": "wgmma", "block_m": 64, "stages": 4},
    ]
    assert built.neighbours({"template": "library", "block_m": 128}) == [
        {"template": "wgmma", "block_m": 128, "stages": 2},
        {"template": "library", "block_m": 64},
        {"template": "library", "block_m": 256},
    ]
    for params in built.feasible:
        assert all(built.index(other) is not None for other in built.neighbours(params))


def test_a_fact_that_this_device_lacks_leaves_a_constraint_unjudged():
    parameters = [Parameter("a", (1, 2))]
    built = SearchSpace.build(parameters, [rule("a > device.num_sms")], {"device.kind": "cpu"})
    assert built.num_feasible == 2
    with pytest.raises(InputError):
        SearchSpace.build(parameters, [rule("a > device.num_sms")], {"device.num_sms": 132})


def test_an_unknown_name_in_a_constraint_or_condition_is_refused():
    parameters = [Parameter("block_m", (1, 2))]
    with pytest.raises(ExpressionError) as error:
        SearchSpace.build(
            parameters, [Constraint(Expression.parse("blok_m > 1"), "why", "x.yaml:3")], {"n": 1}
        )
    assert str(error.value) == (
        "x.yaml:3: 'blok_m > 1': unknown name 'blok_m'\n  known: block_m, n\n"
        "  hint: did you mean 'block_m'?"
    )
    conditional = Parameter("b", (1,), Expression.parse("q == 1"))
    with pytest.raises(ExpressionError, match="b: when: 'q == 1': unknown name 'q'"):
        SearchSpace.build([*parameters, conditional], [], {})


def test_a_constraint_that_cannot_be_computed_says_where():
    parameters = [Parameter("a", (4, 6)), Parameter("b", (1, 0))]
    with pytest.raises(ExpressionError) as error:
        SearchSpace.build(parameters, [rule("a % b == 0")], {})
    assert str(error.value).startswith("expression 'a % b == 0': division by zero\n  where: ")
    assert "b = 0" in str(error.value)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([Parameter("a", (1,)), Parameter("a", (2,))], "the name 'a' is declared twice"),
        ([Parameter("batch", (1,))], "the name 'batch' is declared twice"),
        ([Parameter("a", ())], "a needs values, each of them once"),
        ([Parameter("a", (1, True))], "a needs values, each of them once"),
        (
            [
                Parameter("a", (1, 2), Expression.parse("c == 1")),
                Parameter("b", (1, 2), Expression.parse("a == 1")),
                Parameter("c", (1, 2), Expression.parse("b == 1")),
            ],
            "the conditions of parameters go round in a circle: a -> c -> b -> a",
        ),
    ],
)
def test_declarations_that_contradict_themselves_are_refused(parameters, message):
    with pytest.raises(InputError) as error:
        SearchSpace.build(parameters, [], {"batch": 4})
    assert str(error.value) == message


def test_an_empty_space_says_what_rejects_how_many_and_what_to_loosen():
    parameters = [Parameter("a", tuple(range(1, 11))), Parameter("b", (1, 2))]
    constraints = [
        Constraint(Expression.parse("a > 5"), "tall enough", "x.yaml:7"),
        Constraint(Expression.parse("a < cdiv(batch, 4)"), "small enough", "template t"),
    ]
    with pytest.raises(InputError) as error:
        SearchSpace.build(parameters, constraints, {"batch": 8})
    assert str(error.value) == (
        "no configuration is feasible: all 20 are rejected\n"
        "  10 by: tall enough (a > 5, x.yaml:7)\n"
        "  10 by: small enough (a < cdiv(batch, 4), template t)\n"
        "    with batch = 8\n"
        "  hint: loosen 'tall enough' or 'small enough', or give other values to its parameters"
    )
    with pytest.raises(InputError, match="20 by: never"):
        SearchSpace.build(parameters, [rule("1 > 2", "never")], {})
    both = [rule("a > 10", "first"), rule("a > 11", "second")]
    with pytest.raises(InputError, match="no single constraint is the cause"):
        SearchSpace.build(parameters, both, {})


def test_too_many_feasible_configurations_say_which_constraint_to_add():
    parameters = [Parameter(name, tuple(range(10))) for name in ("a", "b", "c")]
    with pytest.raises(InputError) as error:
        SearchSpace.build(parameters, [rule("a + b < 15")], {}, max_feasible=100)
    assert str(error.value) == (
        "more than 100 configurations are feasible, of 1,000 combinations\n"
        "  hint: add a constraint over c (10 values), which no constraint mentions, "
        "or give fewer values"
    )
    assert SearchSpace.build(parameters, [], {}, max_feasible=1000).num_feasible == 1000


def test_a_walk_that_takes_too_long_gives_up(monkeypatch):
    monkeypatch.setattr(space, "MAX_VISITED", 1000)
    parameters = [Parameter(f"p{i}", tuple(range(10))) for i in range(12)]
    late = " + ".join(parameter.name for parameter in parameters)
    with pytest.raises(InputError, match="gave up after looking at 1,000 partial") as error:
        SearchSpace.build(parameters, [rule(f"{late} > 1000")], {})
    assert "hint: add constraints over fewer parameters" in str(error.value)


def test_ten_million_combinations_are_enumerated_in_seconds():
    parameters = [Parameter(f"p{i}", tuple(range(1, 11))) for i in range(7)]
    constraints = [
        rule("p0 * p1 <= 30"),
        rule("p2 * p3 * p4 <= 90"),
        rule("p5 % p6 == 0 and p0 != p5"),
        rule("p1 + p3 + p6 <= 12"),
    ]
    begun = time.process_time()
    built = SearchSpace.build(parameters, constraints, {})
    assert built.num_cartesian == 10**7 and 10**5 < built.num_feasible < 10**6
    assert time.process_time() - begun < 10
