"""The compilers of a run: what they begin before the search, and for fewer rows than it has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_any_module import derive
from test_rounding import CONVOLVES, GIVEN, LAST

from tuner.by_batch import batches_of
from tuner.config.run_config import load_config
from tuner.planning.planning import plan
from tuner.session.building import NUM_FEWER, FewerRows, begin, builder_of
from tuner.trial import Outcome, Status, Trial


def planned_for(folder, device: str):
    _, made = derive(folder, "convolves", CONVOLVES)
    return plan(load_config(made.config, {"device": device}), may_assume=True)


@pytest.mark.gpu
def test_compilers_begin_while_pytorch_is_timed_and_make_nothing_twice(tmp_path):
    planned = planned_for(tmp_path, "cuda")
    toolchain = planned.find_toolchain()
    with builder_of(planned, toolchain) as builder:
        begin(builder, planned, planned.defaults)
        assert len(builder._futures) == len(planned.defaults)
        known = planned.knowing({GIVEN: True, LAST: True})
        builds = [
            builder.submit(known.family.render(params, known.facts)) for params in known.defaults
        ]
        assert len(builder._futures) == len(planned.defaults)
        assert all(build.result().status == Status.CORRECT for build in builds)


def test_on_a_cpu_that_is_timed_nothing_is_compiled_meanwhile(tmp_path):
    planned = planned_for(tmp_path, "cpu")
    with builder_of(planned, planned.find_toolchain()) as builder:
        begin(builder, planned, planned.defaults)
        assert builder.pending == 0 and not builder._futures


@pytest.mark.gpu
def test_what_a_finalist_needs_at_fewer_rows_is_compiled_ahead(tmp_path):
    planned = planned_for(tmp_path, "cuda")
    planned = replace(planned, sizes={**planned.sizes, "batch": 100})
    fewer = FewerRows(planned, planned.find_toolchain())
    params = planned.defaults[0]
    fewer.begin([Trial(0, str(params["template"]), params, "", Outcome(Status.CORRECT))] * 2)
    assert fewer._builder is not None
    sizes = [its["batch"] for its in fewer._builder._triton_sizes]
    timed = [number for number in batches_of(100) if number < 100]
    assert sizes == timed[: -1 - NUM_FEWER : -1] == [64, 32, 16, 8, 4, 2]
    (build,) = fewer._builder._futures.values()
    assert build.result().status == Status.CORRECT and build.result().kernels
    fewer.close()


def test_on_a_cpu_there_are_no_kernels_for_fewer_rows(tmp_path):
    planned = planned_for(tmp_path, "cpu")
    fewer = FewerRows(planned, planned.find_toolchain())
    fewer.begin([Trial(0, "nest", planned.defaults[0], "", Outcome(Status.CORRECT))])
    assert fewer._builder is None
    fewer.close()
