"""What a search tries first: what its config names, and what is refused or cannot be here."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_search_spaces import CPUS

from tuner.config.run_config import parse_config
from tuner.errors import ConfigError
from tuner.kernel.family import load_family
from tuner.planning.starting import Start, started_from
from tuner.space.search_space import SearchSpace

CONFIG = """problem: {op: layer_norm}
space: {template: [cpu], stats: [two_pass, per_thread], split: [1, 8], piece: [1024, 4096],
  width: [8, 16]}
search:
  first:
"""


def started(*first: str) -> tuple[Start, list[str]]:
    lines = "".join(f"  - {{{each}}}\n" for each in first)
    config = parse_config(CONFIG + lines, Path("x.yaml"))
    family, facts = load_family("layer_norm"), CPUS["AVX2"][0]
    varied = {p.name: p.values for p in config.space if p.name != "template"}
    rules = [*family.constraints(["cpu"], varied), *config.constraints]
    known = {**facts, **family.op.sizes}
    space = SearchSpace.build(family.parameters(["cpu"], varied, {}), rules, known)
    return started_from(config, space, family, known, rules)


def test_what_is_named_is_tried_before_the_defaults():
    start, impossible = started("stats: per_thread", "piece: 4096, split: 8", "stats: per_thread")
    one, other = start.named.values()
    assert list(start.named) == [0, 1] and impossible == []  # the third is the first one
    assert one["stats"] == "per_thread" and "split" not in one
    assert (other["stats"], other["piece"], other["split"]) == ("two_pass", 4096, 8)
    (default,) = start.defaults
    assert start.all == [one, other, default]
    assert started("stats: two_pass")[0].all[1:] == []  # a default that is named is tried once


def test_what_a_report_prints_is_a_configuration():
    text = CONFIG + "  - template=cpu stats=two_pass split=8 piece=4096 stream_output=False\n"
    (first,) = parse_config(text, Path("x.yaml")).search.first
    assert first == {
        "template": "cpu", "stats": "two_pass", "split": 8, "piece": 4096, "stream_output": False,
    }  # fmt: skip


def test_a_misspelt_name_is_refused_in_its_line():
    with pytest.raises(ConfigError) as refused:
        started("stats: per_thread", "peace: 1024", "piece: 1024, spit: 8")
    assert str(refused.value) == (
        "x.yaml:7: search.first[1].peace: no parameter of this space is called 'peace'\n"
        "  known: template, stats, split, piece, width\n"
        "  hint: did you mean 'piece'?\n"
        "x.yaml:8: search.first[2].spit: no parameter of this space is called 'spit'\n"
        "  known: template, stats, split, piece, width\n"
        "  hint: did you mean 'split'?"
    )


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ("width: 16", "a vector is no wider than this machine's registers"),
        ("stats: per_thread, split: 8", "beside the others there is no split"),
        ("piece: 512", "the space has piece = 1024, 4096, not 512"),
        ("template: cuda, vector: 4", "the space has template = cpu, not cuda"),
    ],
)
def test_what_cannot_be_here_is_left_out_with_the_reason(first, why):
    start, (said,) = started("stats: per_thread", first)
    assert list(start.named) == [0]
    assert said == f"x.yaml:7: search.first[1]: it is not tried: {why}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("per_thread", "search.first"),
        ("[stats=per_thread splits]", "search.first[0]: expected parameters, each with one value"),
        ("['stats={']", "search.first[0]: expected parameters, each with one value"),
        ("[{stats: [per_thread]}]", "search.first[0]: expected parameters, each with one value"),
    ],
)
def test_anything_but_configurations_is_refused(value, message):
    with pytest.raises(ConfigError) as refused:
        parse_config(f"problem: {{op: layer_norm}}\nsearch: {{first: {value}}}\n", Path("x.yaml"))
    assert message in str(refused.value)
