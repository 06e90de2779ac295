"""Expressions are a closed grammar; the same in Python, compiled and in C++."""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tuner.errors import ExpressionError
from tuner.space.constraints import Judge, Parameter
from tuner.space.cpp import to_cpp
from tuner.space.expression import Expression
from tuner.space.grammar import FUNCTIONS, Refused, compile_tree
from tuner.trial import Value

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
        ("a\0b", "column 2: a null character"),
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
    begun = time.process_time()
    texts = ["9**9**9**9", "'a'*10**9", "((((2**60)*2**60)*2**60))", "x" * 10**6, "(" * 10**5]
    for text in texts:
        with pytest.raises(ExpressionError):
            Expression.parse(text).evaluate({})
    assert time.process_time() - begun < 5


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


# ---- beside Python, and for many configurations ---------------------------------------------

NUMBERS = [0, 1, 2, 3, 7, 64, 2**40, -3, 0.5, 2.25, True, False]


def conditions() -> st.SearchStrategy[str]:
    leaf = st.sampled_from(
        ["a", "b", "c", "n", "word", "1", "0", "2", "64", "2.5", "'w'", "2**40"]
    )
    binary = ["+", "-", "*", "/", "//", "%", "**", "<", "<=", "==", "!=", ">", "and", "or"]

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.tuples(inner, st.sampled_from(binary), inner).map(lambda t: f"({' '.join(t)})"),
            st.tuples(inner, inner).map(lambda t: f"min({t[0]}, {t[1]})"),
            st.tuples(inner, inner).map(lambda t: f"cdiv({t[0]}, {t[1]})"),
            st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})"),
            st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} < {t[1]} <= {t[2]})"),
            inner.map(lambda t: f"(not {t})"),
            inner.map(lambda t: f"(-{t})"),
            inner.map(lambda t: f"log2({t})"),
            inner.map(lambda t: f"abs({t})"),
            inner.map(lambda t: f"({t} in [1, 2, 'w'])"),
        )

    return st.recursive(leaf, grow, max_leaves=10)


class AsConditions(ast.NodeTransformer):
    """`and` and `or` give a condition, where Python's own give one of their operands."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        return ast.Call(ast.Name("bool", ast.Load()), [node], [])


@settings(max_examples=400, deadline=None)
@given(
    text=conditions(),
    values=st.lists(
        st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4), min_size=3, max_size=3
    ),
)
def test_an_expression_is_what_python_makes_of_it_or_raises(text, values):
    facts: dict[str, Value] = {"n": 3}
    rule = Expression.parse(text)
    tables = {**dict(zip("abc", values, strict=True)), "word": ["w", "v"]}
    of_values = compile_tree(rule.tree, set(), list(tables))
    tree = ast.fix_missing_locations(AsConditions().visit(ast.parse(text, mode="eval")))
    functions = {name: entry[0] for name, entry in FUNCTIONS.items()}
    for point in itertools.product(*tables.values()):
        env = {**facts, **dict(zip(tables, point, strict=True))}
        try:
            found = rule.evaluate(env)
        except ExpressionError:
            with pytest.raises((Refused, ArithmeticError, ValueError)):
                of_values(facts, *point)
            continue
        assert of_values(facts, *point) == found
        assert found == eval(compile(tree, "text", "eval"), functions, env)


def test_constraints_as_they_are_written_are_judged_in_bulk():
    rows = [(64, 2.5, "mma"), (128, 8, "simt"), (0, 16, "mma")]
    tables = [
        Parameter(n, v) for n, v in zip(("m", "k", "t"), zip(*rows, strict=True), strict=True)
    ]
    at = np.arange(3)
    for text, expected in [
        ("m * 4 <= 2 ** 8 and k > 1", [True, False, True]),
        ("m == 0 or 256 % m == 0", [True, True, True]),  # never divides by zero
        ("t != 'simt' or m in [128, 0]", [True, True, True]),
        ("cdiv(m, 48) * (2 if t == 'mma' else 1)", [True, True, False]),
        ("log2(m + 64) == 7 and k / 2 < n", [True, False, False]),
        ("1 < k < m", [True, True, False]),
        ("m ** 0.5 == 8 or 2 ** -k < 0.1", [True, True, True]),
    ]:
        by_name = {p.name: p for p in tables}
        judge = Judge(Expression.parse(text), None, by_name, {"n": 3}, where_absent=True)
        columns = {name: at for name in judge.tuned}
        assert judge.verdicts(columns, 3).tolist() == expected
    conditional = {"m": Parameter("m", (64, 128, 0), Expression.parse("True")), "t": tables[2]}
    rule, guard = Expression.parse("m > 64"), Expression.parse("t == 'mma'")
    judge = Judge(rule, guard, conditional, {}, where_absent=True)
    columns = {"m": np.array([0, 1, 1, 3]), "t": np.array([0, 1, 2, 0])}  # 3: absent
    assert judge.verdicts(columns, 4).tolist() == [False, True, True, True]


# ---- C++ ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cpp"),
    [
        ("batch", "batch"),
        ("128 * 2", "int64_t{256}"),
        ("batch * 4 - 1", "((batch * int64_t{4}) - int64_t{1})"),
        ("batch // 128", "(batch / int64_t{128})"),
        ("cdiv(batch, 128)", "(((batch) + (int64_t{128}) - 1) / (int64_t{128}))"),
        ("min(batch, 2, k)", "std::min<int64_t>(std::min<int64_t>(batch, int64_t{2}), k)"),
        ("batch if 'two_pass' == 'two_pass' else 'word'", "batch"),
        ("1 if batch > 5 else 0", "((batch > int64_t{5}) ? int64_t{1} : int64_t{0})"),
        ("2 ** 3 + batch % 4.0", "(int64_t{8} + (batch % int64_t{4}))"),
        ("-batch", "(-batch)"),
        ("abs(batch)", "std::max<int64_t>(batch, -(batch))"),
        (
            "max(batch - 1, 0) // 2",
            "(std::max<int64_t>((batch - int64_t{1}), int64_t{0}) / int64_t{2})",
        ),
        ("batch in [1, 2] and not k", "((batch == int64_t{1} || batch == int64_t{2}) && (!k))"),
    ],
)
def test_shapes_become_cpp(text, cpp):
    assert to_cpp(Expression.parse(text)) == cpp


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("batch / 2", "the operator Div has no exact meaning in whole numbers"),
        ("batch ** 2", "the operator Pow has no exact meaning in whole numbers"),
        ("log2(batch)", "log2 has no exact meaning in whole numbers"),
        ("batch * 0.5", "0.5 is not a whole number"),
        ("'two_pass'", "the word 'two_pass' cannot be passed as a whole number"),
        ("batch == 'x'", "the word 'x' cannot be passed as a whole number"),
        ("device.num_sms * 2", "unknown name 'device.num_sms'"),
        ("batch + 1 // 0", "division by zero"),
    ],
)
def test_what_cpp_cannot_compute_exactly_is_refused(text, reason):
    with pytest.raises(ExpressionError) as error:
        to_cpp(Expression.parse(text))
    assert reason in str(error.value)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_compiled_cpp_computes_what_python_computes(tmp_path: Path):
    texts = [
        "cdiv(batch, 3) * min(k, 7, batch)",
        "(batch + 1) * k % 11 if batch >= k else k // 2",
        "1 if 2 < batch <= 40 and not k in [3, 5] else 0",
        "max(batch - k, 0) * 4096 * 4096 * 100",
        "abs(k - batch) + True",
        "(batch - k) // 3",  # Python rounds down, C++ towards zero
        "(batch - 7) % 4 + (k - 5) % -3",
        "cdiv(batch - 10, k)",
        "-batch // (k - 20)",
        "(k // (batch - 1007)) * 2",
    ]
    points = list(itertools.product([1, 5, 40, 1000], [1, 3, 8]))
    prints = "\n".join(
        f'printf("%lld\\n", (long long)({to_cpp(Expression.parse(text))}));' for text in texts
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
