"""The feasible list is exactly the product, filtered."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from spaces import feasible

from tuner.errors import ExpressionError, InputError
from tuner.space import constraints, enumeration, search_space as space
from tuner.space.constraints import Constraint, Parameter
from tuner.space.expression import Expression
from tuner.space.search_space import SearchSpace
from tuner.trial import Params, Value

# ---- the space ------------------------------------------------------------------------------


def rule(text: str, why: str = "a reason", when: str | None = None) -> Constraint:
    return Constraint(Expression.parse(text), why, "", Expression.parse(when) if when else None)


def verdict(expression: Expression, env: Mapping[str, Value]) -> bool | None:
    """What Python says of it; None where it asks for a name that is not there."""
    try:
        return bool(eval(expression.text, {}, dict(env)))
    except NameError:
        return None


def exists(parameter: Parameter, params: Mapping[str, Value], facts: Mapping[str, Value]) -> bool:
    return parameter.when is None or verdict(parameter.when, {**facts, **params}) is True


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
        judged = [c for c in constraints if c.when is None or verdict(c.when, env) is True]
        key = tuple(params.items())
        if key not in seen and not any(verdict(c.expression, env) is False for c in judged):
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
    "p0 < 3 and p1 <= p2",
    "p0 + (p1 if p0 > 2 else p2) * 2 < 9",
    "p0 > 1 and missing > 2",
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
    assert sorted(map(str, feasible(built))) == sorted(map(str, expected))
    assert [built.index(params) for params in feasible(built)] == list(range(len(expected)))
    assert built.num_cartesian == math.prod(counts)
    if not any(conditions):
        assert feasible(built) == expected  # in the order of declaration
        assert built.num_feasible + sum(built.rejections.values()) == built.num_cartesian
    for values in itertools.product(*[(*p.values, None) for p in parameters]):
        point = {p.name: v for p, v in zip(parameters, values, strict=True) if v is not None}
        assert (point in expected) == (built.index(point) is not None)


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
    assert built.at(0) == {"template": "wgmma", "block_m": 64, "stages": 2}
    assert feasible(built)[-1] == {"template": "library", "block_m": 256}
    assert feasible(built)[-3:-1] == [
        {"template": "library", "block_m": 64},
        {"template": "library", "block_m": 128},
    ]
    assert len(feasible(built)) == built.num_feasible == 9 and built.num_cartesian == 18
    with pytest.raises(IndexError):
        built.at(9)


def test_what_is_no_configuration_has_no_position():
    built = tile_space()
    wide: Params = {"template": "wgmma", "block_m": 256}
    assert built.index({**wide, "template": "library"}) is not None
    for wrong in ({"stages": 4}, {"stages": 2}, {}, {"block_m": 96, "stages": 2}, {"stage": 2}):
        assert built.index({**wide, **wrong}) is None
    assert built.index({**wide, "template": "library", "stages": 2}) is None
    assert built.index({**wide, "stages": 3, "more": 1}) is None


WHEN = Expression.parse("kind == 'b'")


def test_completing_stops_at_constraints_that_cannot_be_computed_yet():
    values = [Parameter("a", range(1, 9)), Parameter("b", (0, 1, 2)), Parameter("c", (1, 2))]
    built = SearchSpace.build(
        [Parameter(p.name, tuple(p.values)) for p in values],
        [rule("a % b == 0"), rule("b >= c")],  # the second one excludes a division by zero
        {},
    )
    assert built.complete({"a": 3, "b": 0}) is None
    assert built.complete({"a": 3}) == {"a": 3, "b": 1, "c": 1}


def test_completing_what_nothing_completes_ends_soon():
    """Free values come before the one that is impossible, 4^14 of them."""
    free = [Parameter(f"p{i}", (0, 1, 2, 3), WHEN) for i in range(14)]
    last = Parameter("stages", (2, 3, 4), WHEN)
    built = SearchSpace.build(
        [Parameter("kind", ("a", "b")), Parameter("tile", (64, 256)), *free, last],
        [rule("tile * stages <= 256")],
        {},
    )
    start_s = time.process_time()
    assert built.complete({"kind": "b", "tile": 256}) is None
    assert time.process_time() - start_s < 10.0  # 0.1 s; without an end, an hour
    assert built.complete({"kind": "b", "tile": 64})["stages"] == 2


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


def chain(length: int, *texts: str) -> SearchSpace:
    """`length` parameters of ten values each."""
    parameters = [Parameter(f"p{i}", tuple(range(1, 11))) for i in range(length)]
    return SearchSpace.build(parameters, [rule(text) for text in texts], {})


def test_more_than_positions_can_count_say_which_constraint_to_add():
    with pytest.raises(InputError) as error:
        chain(25, "p0 < p1")
    assert str(error.value) == (
        "more than 4.6e+18 configurations are feasible, of 1.0e+25 combinations\n"
        "  hint: add a constraint over p2 (10 values), p3 (10 values), p4 (10 values), which no "
        "constraint mentions, or give fewer values"
    )


def test_what_would_take_too_long_is_refused_with_the_constraint_that_is_judged_late(monkeypatch):
    monkeypatch.setattr(enumeration, "MAX_VISITED", 1000)
    late = " + ".join(f"p{i} % {i + 2}" for i in range(12))
    with pytest.raises(InputError, match="gave up after looking at 1,") as error:
        chain(12, f"{late} > 1000")
    assert f"the latest to judge: {late} > 1000" in str(error.value)
    assert "hint: add a constraint over fewer parameters, such as p0 (10" in str(error.value)


def test_how_often_one_rule_is_judged_is_bounded(monkeypatch):
    monkeypatch.setattr(constraints, "MAX_JUDGED", 1500)
    assert chain(3, "p0 * p1 * p2 > 10").num_cartesian == 1000
    with pytest.raises(InputError, match="judged for more than 1,500 configurations"):
        chain(4, "p0 * p1 * p2 * p3 > 10")


def test_a_trillion_combinations_are_counted_and_found_without_a_list():
    pairs = [f"p{i} * p{i + 1} <= 30" for i in range(0, 12, 2)]
    built = chain(12, *pairs)
    num_pairs = sum(a * b <= 30 for a in range(1, 11) for b in range(1, 11))
    assert built.num_cartesian == 10**12 and built.num_feasible == num_pairs**6
    assert not built.is_listed and built.num_feasible == num_pairs**6
    with pytest.raises(InputError, match="too many to list"):
        built.rows()
    drawn = built.sample(500, np.random.default_rng(0))
    assert len(set(drawn.tolist())) == 500 and drawn.max() > built.num_feasible // 2
    rows = built.rows(drawn)
    assert (built.config_ids(rows) == drawn).all()
    rows[:, 0], rows[:, 1] = 9, 9  # 10 * 10
    assert (built.config_ids(rows) == -1).all()
    for config_id in [0, built.num_feasible - 1, *drawn[:20].tolist()]:
        params = built.at(config_id)
        assert built.index(params) == config_id


def test_a_space_of_10_to_the_15_is_counted_exactly():
    assert chain(15).num_feasible == 10**15
    ends = chain(15, *[f"p{i} <= p{i + 1}" for i in range(14)])  # ascending sequences
    assert ends.num_feasible == math.comb(15 + 9, 9)


def test_the_list_and_the_diagram_hold_the_same_configurations(monkeypatch):
    listed = chain(4, "p0 * p1 <= 12", "p1 + p3 != 9")
    monkeypatch.setattr(space, "MAX_LISTED", 10)
    found = chain(4, "p0 * p1 <= 12", "p1 + p3 != 9")
    assert listed.is_listed and not found.is_listed
    config_ids = found.config_ids(listed.rows())
    assert sorted(config_ids.tolist()) == list(range(listed.num_feasible))
    assert (found.rows(config_ids) == listed.rows()).all()


def test_positions_have_an_order_where_digits_do_not_fit_into_64_bits():
    values = [Parameter(f"p{i}", (1, 2, 3)) for i in range(60)]
    fixed = [rule(f"p{i} == 2") for i in range(55)]
    built = SearchSpace.build(values, fixed, {})
    assert built.num_feasible == 3**5 and built.is_listed
    assert feasible(built) == sorted(feasible(built), key=lambda params: tuple(params.values()))
    assert [built.index(params) for params in feasible(built)] == list(range(3**5))
    assert built.index({**built.at(7), "p3": 1}) is None


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
    rows = built.rows()
    assert rows.shape == (built.num_feasible, 7) and rows.dtype.itemsize == 1
    assert (np.lexsort(rows.T[::-1]) == np.arange(len(rows))).all()  # in order of declaration


# ---- as arrays ------------------------------------------------------------------------------


def test_rows_and_positions_are_each_others_inverse():
    built = tile_space()
    rows = built.rows()
    assert rows.tolist() == [list(built.coordinates(i)) for i in range(9)]
    assert [built.params_of(row) for row in rows] == feasible(built)
    assert (built.config_ids(rows) == np.arange(9)).all()
    assert (built.rows(np.array([4, 2])) == rows[[4, 2]]).all()
    wrong = np.array([[0, 2, 2], [0, 0, 3], [1, 0, 0], [0, 7, 0], [0, -1, 0]])
    assert (built.config_ids(wrong) == -1).all()
    with pytest.raises(IndexError):
        built.coordinates(9)


def test_neighbours_differ_in_one_parameter_and_what_depends_on_it():
    built = tile_space()

    def neighbours(params: Params) -> list[Params]:
        found = built.neighbour_ids(built.index(params))
        return [built.at(config_id) for config_id in found.tolist()]

    assert neighbours({"template": "wgmma", "block_m": 64, "stages": 2}) == [
        {"template": "wgmma", "block_m": 64, "stages": 3},
        {"template": "wgmma", "block_m": 64, "stages": 4},
        {"template": "wgmma", "block_m": 128, "stages": 2},
        {"template": "library", "block_m": 64},
    ]
    assert neighbours({"template": "library", "block_m": 128}) == [
        {"template": "wgmma", "block_m": 128, "stages": 2},
        {"template": "library", "block_m": 64},
        {"template": "library", "block_m": 256},
    ]


def test_configurations_are_counted_by_value_with_a_list_and_without(monkeypatch):
    def count(name: str) -> list[dict[Value, int]]:
        built = [tile_space(), chain(4, "p0 * p1 <= 12", "p1 + p3 != 9", "p2 == 3 or p3 > 8")]
        names = (name, "p3") if name == "stages" else (name, "p1")
        return [space.count_by(n) for space, n in zip(built, names, strict=True)]

    listed = [count(name) for name in ("stages", "template")]
    assert listed[0][0] == {2: 2, 3: 2, 4: 2} and listed[1][0] == {"wgmma": 6, "library": 3}
    for params in feasible(tile_space()):
        listed[1][0][params["template"]] -= 1
    assert not any(listed.pop()[0].values())
    monkeypatch.setattr(space, "MAX_LISTED", 0)
    assert not tile_space().is_listed and count("stages") == listed[0]
    assert chain(15, "p0 < p1").count_by("p1")[10] == 9 * 10**13


def test_a_listed_space_holds_exactly_what_was_listed():
    parameters = [Parameter("a", (4, 2)), Parameter("b", (1, 2), Expression.parse("a == 4"))]
    built = SearchSpace.listed(parameters, np.array([[1, 2], [0, 1]]))
    assert feasible(built) == [{"a": 4, "b": 2}, {"a": 2}]
    assert built.index({"a": 4, "b": 1}) is None
    assert built.index({"a": 2}) == 1
    assert built.neighbour_ids(0).tolist() == [1]


def of_two_kinds(length: int) -> SearchSpace:
    """3 configurations of one template, and 10 ** length of the other."""
    many = Expression.parse("template == 'many'")
    return SearchSpace.build(
        [
            Parameter("template", ("few", "many")),
            Parameter("block", (1, 2, 3), Expression.parse("template == 'few'")),
            *(Parameter(f"p{i}", tuple(range(10)), many) for i in range(length)),
        ],
        [],
        {},
    )


@pytest.mark.parametrize("length", [3, 8])  # the second one is too large to list
def test_as_many_of_each_kind_are_drawn_as_there_are(length):
    built = of_two_kinds(length)
    drawn = built.sample(100, np.random.default_rng(0))
    assert len(drawn) == len(set(drawn.tolist())) == 100
    assert int((built.rows(drawn)[:, 0] == 0).sum()) == 3  # all there are
    if built.is_listed:
        assert built.kinds == [range(3), range(3, 3 + 10**length)]
    even = of_two_kinds(length).sample(4, np.random.default_rng(1))
    assert sorted(built.rows(even)[:, 0].tolist()) == [0, 0, 1, 1]


def test_what_decides_nothing_makes_no_kinds():
    assert chain(3).kinds == [range(1000)]
