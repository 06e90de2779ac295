"""The shipped search spaces: each can be searched, and each of its rules keeps something out."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import gemm_cases as gemm
import pytest
from spaces import feasible

from tuner.config.run_config import RunConfig, load_config, parse_config
from tuner.errors import ConfigError, InputError
from tuner.kernel.family import load_family
from tuner.machine.datasheets import known_device
from tuner.planning.planning import plan
from tuner.space.search_space import SearchSpace
from tuner.trial import Value

FOLDER = Path(__file__).parent.parent / "search_spaces"
CLASSES = {"": "float32", "_1e-4": "rtol=1e-4,atol=1e-4", "_tf32": "tf32"}
SIZES = {
    "33": {"batch": 1024, "in_features": 8192, "out_features": 8192},
    "39": {"batch": 16384, "in_features": 4096, "out_features": 4096},
}


def config_of(problem: str, ending: str) -> RunConfig:
    return load_config(FOLDER / f"gemm_scale_batchnorm_{problem}{ending}.yaml")


def search_space(
    config: RunConfig, device: Mapping[str, Value] | None = None
) -> tuple[list[str], SearchSpace]:
    """Return the templates that a config names and its space, by default on an H200."""
    family = load_family(config.problem.op, config.problem.templates)
    varied = {p.name: p.values for p in config.space}
    names = [str(name) for name in varied.pop("template")]
    device = known_device("NVIDIA H200").facts() if device is None else device
    facts = {**device, **family.op.sizes, **config.problem.sizes}
    whens = {p.name: p.when for p in config.space if p.when}
    rules = [*family.constraints(names, varied), *config.constraints]
    return names, SearchSpace.build(family.parameters(names, varied, whens), rules, facts)


@pytest.mark.parametrize("ending", ["_1e-4", "_tf32"])  # seconds each; float32 is like the first
def test_each_template_can_be_searched_and_each_rule_rejects_something(ending):
    config = config_of("33", ending)
    names, space = search_space(config)
    assert {params["template"] for params in feasible(space)} == set(names)
    idle = [rule.why for rule in config.constraints if not space.rejections[rule.why]]
    assert idle == []


@pytest.mark.parametrize("ending", CLASSES)
def test_what_is_let_through_is_let_through_with_what_it_lacks_at_its_default(ending):
    """A rule that asks for a parameter which is absent is not judged: it must not matter there."""
    config = config_of("33", ending)
    _, space = search_space(config)
    for config_id in random.Random(0).sample(range(space.num_feasible), 40):
        params = dict(space.at(config_id))
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


# ---- on a CPU -------------------------------------------------------------------------------


def cpu_with(simd_bits: int, simd_registers: int) -> dict[str, Value]:
    return {
        "device.kind": "cpu",
        "device.num_cores": 4,
        "device.simd_bits": simd_bits,
        "device.simd_registers": simd_registers,
    }


CPUS = {
    "SSE": (cpu_with(128, 16), {4}),
    "NEON": (cpu_with(128, 32), {4}),
    "AVX2": (cpu_with(256, 16), {8}),
    "AVX-512": (cpu_with(512, 32), {8, 16}),
}


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("name", ["quickstart", "layer_norm"])
def test_vectors_are_those_that_the_cpu_has(name, cpu):
    facts, widths = CPUS[cpu]
    _, space = search_space(load_config(FOLDER / f"{name}.yaml"), facts)
    assert {params["width"] for params in feasible(space)} == widths
    assert {params["template"] for params in feasible(space)} == {"cpu"}
    stats = {"two_pass", "atomics", "per_thread"} | ({"gram"} if name == "quickstart" else set())
    assert {params["stats"] for params in feasible(space)} == stats
    # The tile of our own GEMM, two more registers that feed it, and no more.
    tiles = [p for p in feasible(space) if p.get("gemm") == "own"]
    assert bool(tiles) == (name == "quickstart")
    for tile in tiles:
        used = int(tile["tile_vectors"]) * (int(tile["tile_rows"]) + 1) + 2
        assert used <= facts["device.simd_registers"]


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("op", ["gemm_scale_batchnorm", "layer_norm"])
def test_a_config_that_lists_no_widths_gets_the_machines_own(op, cpu):
    facts, widths = CPUS[cpu]
    family = load_family(op)
    template = family.template("cpu")
    # Neither is anything else listed: all defaults together are a configuration that is allowed.
    space = SearchSpace.build(
        family.parameters(["cpu"], {}),
        family.constraints(["cpu"], {}),
        {**facts, **family.op.sizes},
    )
    assert space.num_feasible == 1
    assert template.filled({}, facts)["width"] == max(widths)
    width = max(widths)
    assert f"kWidth = {width};" in family.render({"template": "cpu"}, facts).source


def test_a_config_that_lists_only_wider_vectors_is_refused_with_why_nothing_is_feasible():
    text = "problem: {op: layer_norm}\ndevice: cpu\nspace: {template: [cpu], width: [16]}\n"
    with pytest.raises(InputError, match=r"(?s)wider than this machine's registers.*width"):
        search_space(parse_config(text, Path("x.yaml")), CPUS["AVX2"][0])


OLD_NAMES = """
problem: {op: gemm_scale_batchnorm, sizes: {batch: 64, in_features: 32, out_features: 64}}
device: cpu
space:
  template: [cpu]
  stats: [two_pass, shared_memory]
  col_tile: [32, 64]
constraints:
  - {expr: "col_tile <= rows_per_block", why: "strips are not wider than blocks are high"}
"""


def test_a_config_with_names_of_an_earlier_release_is_answered_with_todays():
    with pytest.raises(ConfigError) as refused:
        plan(parse_config(OLD_NAMES, Path("old.yaml")))
    said = str(refused.value)
    first = "old.yaml:7: space.col_tile: no template uses 'col_tile'"
    assert f"{first}\n  hint: it is called stats_columns now" in said
    assert "unknown name 'rows_per_block'\n  hint: it is called block_rows now" in said
    text = OLD_NAMES.replace("col_tile", "stats_columns").replace("rows_per_block", "64")
    (warning,) = plan(parse_config(text, Path("old.yaml"))).warnings
    assert "no template in use knows stats = 'shared_memory'" in warning
    assert "it is called per_thread now" in warning


def test_a_configuration_of_an_earlier_release_has_todays_names():
    family = load_family("gemm_scale_batchnorm")
    old = {"template": "triton", "accumulate": "corrections_first", "num_stages": 3, "stats": "x"}
    assert family.renamed(old) == {
        "template": "triton", "order": "sweeps", "stages": 3, "stats": "x",
    }  # fmt: skip
    # What one template called raster_rows another has always called group_m.
    assert family.renamed({"template": "wgmma", "raster_rows": 4}) == {
        "template": "wgmma", "group_m": 4,
    }  # fmt: skip
    simt = {"template": "simt", "group_m": 4}
    assert family.renamed(simt) == simt
    assert family.renamed({"template": "gone", "raster_rows": 4}) == {
        "template": "gone", "raster_rows": 4,
    }  # fmt: skip
