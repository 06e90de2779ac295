"""The shipped search spaces: each can be searched, and each of its rules keeps something out."""

from __future__ import annotations

import random
from pathlib import Path

import gemm_cases as gemm
import pytest

from tuner.config.run_config import RunConfig, load_config
from tuner.kernel.family import load_family
from tuner.machine.datasheets import known_device
from tuner.space.search_space import SearchSpace

FOLDER = Path(__file__).parent.parent / "search_spaces"
CLASSES = {"": "float32", "_1e-4": "rtol=1e-4,atol=1e-4", "_tf32": "tf32"}
SIZES = {
    "33": {"batch": 1024, "in_features": 8192, "out_features": 8192},
    "39": {"batch": 16384, "in_features": 4096, "out_features": 4096},
}


def config_of(problem: str, ending: str) -> RunConfig:
    return load_config(FOLDER / f"gemm_scale_batchnorm_{problem}{ending}.yaml")


def search_space(config: RunConfig) -> tuple[list[str], SearchSpace]:
    """Return the templates that a config names and its space, on an H200."""
    family = load_family(config.problem.op, config.problem.templates)
    varied = {p.name: p.values for p in config.space}
    names = [str(name) for name in varied.pop("template")]
    facts = {**known_device("NVIDIA H200").facts(), **family.sizes, **config.problem.sizes}
    whens = {p.name: p.when for p in config.space if p.when}
    rules = [*family.constraints(names, varied), *config.constraints]
    return names, SearchSpace.build(family.parameters(names, varied, whens), rules, facts)


@pytest.mark.parametrize("ending", ["_1e-4", "_tf32"])  # seconds each; float32 is like the first
def test_each_template_can_be_searched_and_each_rule_rejects_something(ending):
    config = config_of("33", ending)
    names, space = search_space(config)
    assert {params["template"] for params in space.feasible} == set(names)
    idle = [rule.why for rule in config.constraints if not space.rejections[rule.why]]
    assert idle == []


@pytest.mark.parametrize("ending", CLASSES)
def test_what_is_let_through_is_let_through_with_what_it_lacks_at_its_default(ending):
    """A rule that asks for a parameter which is absent is not judged: it must not matter there."""
    config = config_of("33", ending)
    _, space = search_space(config)
    for position in random.Random(0).sample(range(space.num_feasible), 40):
        params = dict(space.feasible[position])
        template = str(params.pop("template"))
        alone = gemm.search_space(template, params, config.problem.sizes)
        assert alone.num_feasible == 1, params


@pytest.mark.parametrize("ending", CLASSES)
def test_both_shapes_have_every_class_and_differ_in_sizes_alone(ending):
    configs = {problem: config_of(problem, ending) for problem in SIZES}
    for problem, config in configs.items():
        assert config.accuracy.label == CLASSES[ending]
        assert config.problem.sizes == SIZES[problem]
    texts = [config.text.split("device:", 1)[1] for config in configs.values()]
    assert texts[0] == texts[1]
