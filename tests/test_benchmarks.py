"""The benchmarks' own parts that need no GPU: what they would run, and how they read answers."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from benchmarks import gpu_shapes, sanitize
from benchmarks.candidates import label
from benchmarks.shapes import table
from tuner.device import known_device
from tuner.errors import InputError
from tuner.space import SearchSpace
from tuner.template import Family, load_family

H200 = known_device("NVIDIA H200")


@functools.cache
def family_of(op: str) -> Family:
    return load_family(op)


def refusal(op: str, params: dict, sizes: dict) -> str:
    """Return why a configuration cannot run on an H200, or nothing."""
    family = family_of(op)
    varied = {name: (value,) for name, value in params.items() if name != "template"}
    names = [params["template"]]
    facts = {**H200.facts(), **family.sizes, **sizes}
    try:
        SearchSpace.build(
            family.parameters(names, varied), family.constraints(names, varied), facts
        )
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("op", sanitize.CONFIGURATIONS)
def test_every_gpu_template_is_sanitized_and_every_configuration_can_run(op):
    listed = [dict(params) for params in sanitize.CONFIGURATIONS[op]]
    assert {params["template"] for params in listed} == set(family_of(op).templates)
    for params in listed:
        for sizes in sanitize.SIZES[op]:
            if params["template"] != "cpu":
                assert refusal(op, params, dict(sizes)) == "", label(params)


MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at fused_kernel(float *)+0x90
=========     by thread (3,0,0) in block (0,0,0)
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write at k+0x1 and Read at k+0x2
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", (0, "")),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", (0, "")),
        (
            MEMCHECK,
            (2, "Invalid __global__ read of size 4 bytes at fused_kernel(float *)+0x90"),
        ),
        (RACECHECK, (1, "Error: Race reported between Write at k+0x1 and Read at k+0x2")),
        ("Traceback\nImportError: torch\n", (None, "")),
    ],
)
def test_what_a_tool_says_is_counted_and_quoted(text, found):
    assert sanitize.summed_up(text) == found


def test_the_gpu_table_has_what_it_promises():
    shapes = gpu_shapes.SHAPES
    assert len({shape.label for shape in shapes}) == len(shapes) >= 10
    assert {64, 65536} <= {shape.batch for shape in shapes}
    features = [f for shape in shapes for f in (shape.in_features, shape.out_features)]
    assert min(features) == 512 and max(features) == 16384
    assert any(shape.out_features == 8 * shape.in_features for shape in shapes)
    assert any(size % 8 for shape in shapes for size in shape.sizes.values())
    for ending in gpu_shapes.CLASSES.values():
        assert Path(gpu_shapes.SPACES / f"gemm_scale_batchnorm_33{ending}.yaml").is_file()


def test_a_bar_in_a_cell_does_not_end_it():
    assert table([("a|b", "c\nd")], ("one", "two")).splitlines()[2] == "| a/b | c d |"
