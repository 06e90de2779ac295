from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from full_runs import (
    START,
    contrast,
    make_run,
    make_trials,
    outcome,
    page_of,
    probe,
)

from tuner.machine.ceilings import occupancy
from tuner.machine.datasheets import known_device
from tuner.review import figures, parameters, timeline
from tuner.review.charts import Chart, charts_of
from tuner.review.figures import (
    accuracy_figure,
    hover_words,
    starred,
    thinned,
    with_hovers,
)
from tuner.review.formatting import us_words
from tuner.review.parameters import (
    importance_figure,
    importances,
    parallel_figure,
    parameter_figure,
)
from tuner.review.progress import progress_figure
from tuner.review.roofline import roofline_figure, roofs_of
from tuner.review.run_data import UNITS, RunData
from tuner.review.tables import contest, pareto, resources_of, rms_of, trial_columns
from tuner.review.timeline import spans_of, stage_figure, stages_of, timeline_figure, workers_of
from tuner.run import Outlook
from tuner.trial import Finalist, Interval, Outcome, Status, Trial

# ---- figures --------------------------------------------------------------------------------


def drawn(trials: list[Trial], *args: Any, **options: Any) -> Any:
    return with_hovers(progress_figure(trials, *args, **options), trials)


def test_progress_shows_each_trial_once_and_only_improvements():
    trials = make_trials(60)
    figure = drawn(trials, 3000.0, floors={"floor": 400.0})
    points = [trace for trace in figure.data if trace.mode == "markers"]
    assert sorted(x for trace in points for x in trace.x) == list(range(60))
    best = next(trace for trace in figure.data if trace.name == "best so far")
    assert list(best.y) == sorted(best.y, reverse=True)
    assert best.y[-1] == min(t.outcome.latency_us for t in trials if t.outcome.latency_us)
    names = {trace.name for trace in figure.data}
    assert {"PyTorch (baseline)", "floor", *(status.value for status in Status)} <= names


def test_progress_by_time_uses_working_seconds():
    trials = make_trials(10)
    figure = drawn(trials, None, by="time")
    seen = [x for trace in figure.data if trace.mode == "markers" for x in trace.x]
    assert sorted(seen) == [trial.elapsed_s for trial in trials]


def test_importance_finds_what_decides():
    shares = importances(make_trials(400))
    assert sum(shares.values()) == pytest.approx(1.0)
    # `stages` and `precision` exist for the fastest template alone: the three share its merit.
    assert sum(shares[name] for name in ("template", "stages", "precision", "block_m")) > 0.9
    assert shares["swizzle"] < 0.05 and shares["stats"] < 0.05
    assert len(importance_figure(shares).data[0].y) == len(shares)


def test_importance_is_not_guessed_from_few_trials(tmp_path):
    """The fastest tenth of ten trials is one: what it chose would be said to matter."""
    trials = make_trials(80)
    correct = [trial for trial in trials if trial.outcome.latency_us is not None]
    assert importances(correct[:29]) == {} and importances(correct[:30])
    assert "Importance needs 30 correct trials" in page_of(make_run(tmp_path, correct[:29])).text


def test_importance_is_silent(capfd):
    importances(make_trials(100))
    assert capfd.readouterr() == ("", "")


def test_parameter_plot_orders_numbers_as_numbers():
    trials = make_trials(100)
    figure = parameter_figure(trials, ["block_m", "stages"])
    assert figure.layout.xaxis.ticktext == ("64", "128", "256")
    assert figure.layout.xaxis2.ticktext == ("2", "3", "absent")
    assert len(figure.data[0].x) == sum(t.outcome.latency_us is not None for t in trials)


def test_stages_add_up_to_the_working_time():
    trials = make_trials(100)
    stages = {stage.name: stage.seconds for stage in stages_of(trials)}
    assert stages["build"] == pytest.approx(150.0)
    assert stages["check"] == pytest.approx(1.0) and stages["around"] == pytest.approx(1.5)
    serial = sum(seconds for name, seconds in stages.items() if name not in ("build", "render"))
    assert serial == pytest.approx(trials[-1].elapsed_s)
    assert len(stage_figure(trials).data[0].x) == len(stages)


@pytest.mark.parametrize("page", ["#ffffff", "#14171c"])
def test_marks_can_be_seen_on_light_and_dark(page):
    marks = [*figures.STATUS_MARKS.values(), *figures.TEMPLATE_MARKS, *parameters._FAST_TO_SLOW]
    colours = [text for mark in marks for text in mark if str(text).startswith("#")]
    stages = timeline._STAGE_COLOURS.values()
    for colour in [*colours, *stages, figures.BEST, figures.BASELINE, figures.FLOOR]:
        assert contrast(colour, page) >= 3, colour


def test_torch_compile_has_its_line_where_it_was_measured():
    def names(figure):
        return {trace.name for trace in figure.data}

    assert "torch.compile" not in names(drawn(make_trials(10), 3000.0))
    figure = drawn(make_trials(10), 3000.0, compiled_us=2900.0)
    assert next(t for t in figure.data if t.name == "torch.compile").y == (2900.0, 2900.0)


def test_hover_names_the_trial_its_time_and_its_parameters():
    trial = make_trials(20)[0]
    words = hover_words(trial).replace("<br>", " ")
    assert words.startswith(f"trial 0: correct, {us_words(trial.outcome.latency_us)} ± 0.3 %")
    for name, value in trial.params.items():
        assert f"{name}={value}" in words


def test_every_trial_of_a_figure_bears_its_number():
    trials = make_trials(60)
    figure = drawn(trials, None)
    for trace in figure.data:
        if trace.meta == figures.HOVER:
            for number, text in zip(trace.customdata, trace.hovertext, strict=True):
                assert text == hover_words(trials[number])


def test_thinning_keeps_the_fastest_and_the_order():
    trials = [trial for trial in make_trials(400) if trial.outcome.latency_us]
    few = thinned(trials, 50)
    ranked = sorted(trials, key=lambda t: t.outcome.latency_us or 0)
    assert len(few) <= 50 and set(t.number for t in ranked[:25]) <= {t.number for t in few}
    assert [t.number for t in few] == sorted(t.number for t in few)
    assert max(t.number for t in few) > 350  # the rest is an even share
    assert thinned(trials, 1000) == trials


def test_parallel_coordinates_hold_each_value_and_the_latency():
    trials = make_trials(80)
    lines = parallel_figure(trials, ["template", "block_m", "stages"]).data[0]
    correct = [trial for trial in trials if trial.outcome.latency_us]
    assert list(lines.customdata) == [trial.number for trial in correct]
    for dimension in lines.dimensions[:-1]:
        for trial, value in zip(correct, dimension["values"], strict=True):
            shown = dimension["ticktext"][value]
            has = trial.params.get(dimension["label"], "absent")
            assert shown == str(has)
    times = [10**value for value in lines.dimensions[-1]["values"]]
    assert times == pytest.approx([trial.outcome.latency_us for trial in correct])


def at(number: int, latency_us: float, rms: float) -> Trial:
    trial = Trial(number, "mma", {"template": "mma"}, "", outcome(Status.CORRECT, 0, latency_us))
    found = trial.outcome.check
    assert found is not None
    errors = replace(found, probes=(probe("as given", rms),))
    return replace(trial, outcome=replace(trial.outcome, check=errors))


def test_an_error_of_0_is_said_and_not_drawn_on_a_logarithmic_axis(tmp_path):
    """Where the outputs are all zeros, every answer is exact."""
    made = [t for t in make_trials(30) if rms_of(t)]

    def exact(one: Trial) -> Trial:
        assert one.outcome.check is not None
        first, *others = one.outcome.check.probes
        probes = (replace(first, rms_rel=0.0), *others)
        check = replace(one.outcome.check, probes=probes)
        return replace(one, outcome=replace(one.outcome, check=check))

    def shown(name: str, trials: list[Trial]) -> Chart:
        return charts_of(RunData.of(make_run(tmp_path / name, trials)), ["accuracy"])[0]

    none = shown("none", list(map(exact, made)))
    assert none.figure is None and none.caption.startswith("Every correct trial was exact")
    some = shown("some", [exact(made[0]), *made[1:]])
    assert "1 trial without an error cannot stand on a logarithmic axis." in some.caption
    assert some.figure is not None
    assert all(y > 0 for trace in some.figure.data for y in trace.y)


def test_pareto_front_holds_what_nothing_beats():
    trials = [at(0, 100, 4e-7), at(1, 120, 3e-7), at(2, 110, 5e-7), at(3, 300, 1e-7)]
    trials += [at(4, 300, 2e-7), at(5, 90, math.nan)]
    assert [trial.number for trial in pareto(trials)] == [0, 1, 3]
    assert rms_of(trials[5]) is None
    lines = [t for t in accuracy_figure(trials, 150.0).data if t.mode == "lines"]
    assert [(x, y) for t in lines for x, y in zip(t.x, t.y, strict=True)] == [
        (100, 4e-7), (120, 3e-7), (300, 1e-7)
    ]  # fmt: skip


def test_how_sure_the_search_was_is_drawn_over_its_trials(tmp_path):
    said = [Outlook(20, 0.1, {"0.05": 0.3}), Outlook(30, 0.01, {"0.05": 0.8, "0.01": 0.5})]
    facts = replace(RunData.of(make_run(tmp_path, make_trials(3))), outlooks=said)
    (chart,) = charts_of(facts, ["outlook"])
    lines = {line.name.split()[1]: (line.x, line.y) for line in chart.figure.data}
    assert lines == {"1": ((30,), (0.5,)), "5": ((20, 30), (0.3, 0.8))}
    assert "expected to fall by 1 %" in chart.caption
    (chart,) = charts_of(replace(facts, outlooks=()), ["outlook"])
    assert chart.figure is None and "Not known" in chart.caption


# ---- the hardware ---------------------------------------------------------------------------


def test_roofs_are_bandwidth_and_then_arithmetic():
    device = known_device("H200")
    assert roofs_of(device, 1.0) == dict.fromkeys(UNITS, 4.8)
    far = roofs_of(device, 1e6)
    assert far["fp32"] == 67.0 and far["fp16x3"] == pytest.approx(far["fp16"] / 3)
    assert far["fp16x2"] == pytest.approx(far["fp16"] / 2) and far["tf32"] < far["fp16"]
    assert roofs_of(None, 1.0) == {}


def test_roofline_holds_every_correct_trial_at_its_throughput():
    trials, flops, num_bytes = make_trials(60), 2e12, 4e9
    device = known_device("H200")
    figure = roofline_figure(trials, device, flops=flops, num_bytes=num_bytes, baseline_us=3000.0)
    points = {
        number: (x, y)
        for trace in figure.data
        if trace.meta == figures.HOVER
        for number, x, y in zip(trace.customdata, trace.x, trace.y, strict=True)
    }
    correct = [trial for trial in trials if trial.outcome.latency_us]
    assert set(points) == {trial.number for trial in correct}
    for trial in correct:
        x, y = points[trial.number]
        assert x == pytest.approx(500, rel=0.041)
        assert y == pytest.approx(flops / (trial.outcome.latency_us * 1e-6) / 1e12)
    roof = next(t for t in figure.data if t.name == "roof of plain float32 cores")
    assert max(roof.y) == 67.0 and roof.y[0] == pytest.approx(min(67.0, roof.x[0] * 4.8))
    baseline = next(t for t in figure.data if t.name == "PyTorch (baseline)")
    assert baseline.y[0] == pytest.approx(2e12 / 3000e-6 / 1e12)


def test_resources_are_the_largest_over_a_candidates_kernels():
    trial = next(t for t in make_trials(20) if t.params["block_m"] == 256)
    device = known_device("H200")
    taken = resources_of(trial, device)
    assert taken is not None
    assert (taken.registers, taken.smem_bytes, taken.spilled_bytes) == (192, 65536, 16)
    # 65,536 registers hold 340 threads of 192: 10 warps of 64, allocated 4 and 4 and 2 a partition
    allowed = [occupancy(device, threads, 192, 65536) for threads in (64, 128, 256, 512, 1024)]
    assert taken.occupancy == max(allowed) > 0
    assert resources_of(trial, None) == replace(taken, occupancy=None)
    bare = replace(trial, outcome=replace(trial.outcome, build=None))
    assert resources_of(bare, device) is None


# ---- the tables -----------------------------------------------------------------------------


def test_a_parameter_that_bears_a_columns_name_is_distinguished(tmp_path):
    trials = [replace(t, params={**t.params, "status": t.number}) for t in make_trials(5)]
    columns = {c.name: c for c in trial_columns(RunData.of(make_run(tmp_path, trials)))}
    assert columns["param_status"].values == (0, 1, 2, 3, 4)
    assert columns["param_status"].label == "status" and columns["status"].kind == "word"
    assert columns["block_m"].kind == "number" and columns["stats"].kind == "word"


def test_contest_counts_and_ranks():
    trials = [at(0, 100, 1e-7), at(1, 300, 1e-7), at(2, 80, 1e-7)]
    trials[2] = replace(trials[2], template="simt")
    failed = replace(at(3, 1, 1), outcome=Outcome(Status.RUNTIME, "boom"))
    table = contest([*trials, failed], ["template"])
    assert table.rows == (
        ("simt", "1", "1", "80.0", "80.0", "1.000"),
        ("mma", "3", "2", "100", "200", "1.250"),
    )


# ---- the time -------------------------------------------------------------------------------


def stamp(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def timed(number: int, asked_s: float, elapsed_s: float, built: tuple[float, float]) -> Trial:
    seconds = {"render": 0.1, "build": 1.0, "wait": 0.5, "check": 1.0, "measure": 2.0}
    found = outcome(Status.CORRECT, number, 100.0)
    assert found.build is not None
    times = {"started_at": stamp(built[0]), "ended_at": stamp(built[1]), "builder": number % 2}
    build = replace(found.build, **times)
    found = replace(found, seconds={**seconds, "device": 4.0}, build=build)
    return Trial(number, "mma", {}, "", found, stamp(asked_s), elapsed_s)


def test_spans_lie_where_the_records_say():
    spans = spans_of([timed(0, 0.0, 10.0, (0.5, 2.5))])
    assert [dataclasses.astuple(span) for span in spans] == [
        ("builder 0", "build", 0.5, 2.5, 0, "builders"),
        ("device", "wait", 5.5, 6.0, 0, ""),
        ("device", "around", 6.0, 7.0, 0, ""),
        ("device", "check", 7.0, 8.0, 0, ""),
        ("device", "measure", 8.0, 10.0, 0, ""),
    ]


def test_spans_of_a_resumed_run_follow_its_working_time():
    # Asked for an hour after the first trial ended at 10 s: a second session, from 10 s on.
    trials = [timed(0, 0.0, 10.0, (0.5, 2.5)), timed(1, 3600.0, 18.0, (3601.0, 3603.0))]
    builds = [span for span in spans_of(trials) if span.stage == "build"]
    assert [(s.worker, s.start_s, s.end_s) for s in builds] == [
        ("builder 0", 0.5, 2.5),
        ("builder 1", 11.0, 13.0),
    ]


def test_what_was_held_for_an_earlier_trial_lies_where_the_device_did_it():
    late, early = timed(0, 0.0, 10.0, (0.5, 5.5)), timed(1, 0.0, 10.0, (0.5, 1.0))
    seconds = {**early.outcome.seconds, "held": 4.5}
    early = replace(early, outcome=replace(early.outcome, seconds=seconds))
    spans = [span for span in spans_of([late, early]) if span.worker == "device"]
    assert [(s.stage, s.start_s, s.end_s, s.trial) for s in spans] == [
        ("wait", 1.0, 1.5, 1),
        ("around", 1.5, 2.5, 1),
        ("check", 2.5, 3.5, 1),
        ("measure", 3.5, 5.5, 1),
        ("wait", 5.5, 6.0, 0),
        ("around", 6.0, 7.0, 0),
        ("check", 7.0, 8.0, 0),
        ("measure", 8.0, 10.0, 0),
    ]
    assert next(s.seconds for s in stages_of([late, early]) if s.name == "rest") == pytest.approx(
        1.0
    )


def test_device_spans_never_overlap():
    spans = [span for span in spans_of(make_trials(200)) if span.worker == "device"]
    assert spans
    for before, after in itertools.pairwise(spans):
        assert before.end_s <= after.start_s + 1e-9
    assert all(span.end_s > span.start_s >= 0 for span in spans)


def test_workers_are_busy_or_idle():
    trials = [timed(0, 0.0, 10.0, (0.5, 2.5)), timed(1, 0.0, 20.0, (1.0, 4.0))]
    reported = {worker.name: (worker.busy_s, worker.idle_s) for worker in workers_of(trials)}
    assert list(reported) == ["device", "builder 0", "builder 1"]
    assert reported == {
        "device": pytest.approx((8.0, 12.0)),
        "builder 0": pytest.approx((2.0, 18.0)),
        "builder 1": pytest.approx((3.0, 17.0)),
    }


def test_timeline_has_a_lane_for_each_worker_with_the_device_on_top():
    trials = make_trials(40)
    figure = with_hovers(timeline_figure(spans_of(trials)), trials)
    lanes = list(figure.layout.yaxis.ticktext)
    assert lanes == ["device", "builder 0", "builder 1", "builder 2", "builder 3"]
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1]  # the first on top
    build = next(trace for trace in figure.data if trace.name == "build")
    ends = list(zip(build.x[::4], build.x[2::4], build.customdata[::4], strict=True))
    assert len(ends) == 40
    assert all(end - start == pytest.approx(1.5, abs=2e-3) for start, end, _ in ends)
    assert build.hovertext[:5] == ("trial 0: build, 1.5 s",) * 3 + (None, "trial 1: build, 1.5 s")


def test_run_without_build_times_says_so(tmp_path):
    old = [
        replace(t, outcome=replace(t.outcome, build=replace(b, builder=None)))
        for t in make_trials(6)
        if (b := t.outcome.build)
    ]
    facts = RunData.of(make_run(tmp_path, old))
    (chart,) = charts_of(facts, ["timeline"])
    assert "did not record when its builds ran" in chart.caption
    assert {span.worker for span in spans_of(old)} == {"device"}


def test_many_builders_are_one_band_of_thin_lines():
    trials = [timed(n, 0.0, 10.0 + n, (0.5 + n, 2.5 + n)) for n in range(31)]
    for number, trial in enumerate(trials):
        build = replace(trial.outcome.build, builder=number)
        trials[number] = replace(trial, outcome=replace(trial.outcome, build=build))
    figure = with_hovers(timeline_figure(spans_of(trials)), trials)
    assert figure.layout.yaxis.ticktext == ("device", "31 builders")
    builds = next(trace for trace in figure.data if trace.name == "build")
    places = sorted({y for y in builds.y if y is not None})
    assert len(places) == 31 and places[0] > 0.4 and places[-1] < 2.1
    assert builds.line.width * 31 <= 90 < figure.layout.height < 300
    device = next(trace for trace in figure.data if trace.name == "measure")
    assert set(device.y) == {0, None} and device.line.width == 18
    (own, band) = workers_of(trials)
    assert (own.name, band.name) == ("device", "31 builders")
    assert band.busy_s == pytest.approx(62.0)
    assert band.busy_s / band.total_s == pytest.approx(62 / (31 * 40))


def test_several_devices_and_hosts_have_lanes_and_bands_of_their_own():
    trials = [timed(n, 0.0, 10.0 + n, (0.5, 2.5)) for n in range(12)]
    for number, trial in enumerate(trials):
        host = "cpu3" if number >= 4 else ""
        build = replace(trial.outcome.build, builder=17 * number, host=host)
        name = ("cuda:10", "cuda:2")[number % 2]
        trials[number] = replace(trial, outcome=replace(trial.outcome, build=build, device=name))
    spans = spans_of(trials)
    figure = with_hovers(timeline_figure(spans), trials)
    own = [f"builder {n}" for n in range(4)]  # as many as ran at once, not threads that waited
    assert list(figure.layout.yaxis.ticktext) == ["cuda:2", "cuda:10", *own, "8 builders of cpu3"]
    assert [worker.name for worker in workers_of(trials)] == list(figure.layout.yaxis.ticktext)
    assert workers_of(trials)[-1].busy_s == pytest.approx(16.0)
    assert {span.stage for span in spans} == {"build", "around", "check", "measure"}
    legend = [trace.name for trace in figure.data if trace.showlegend]
    assert sorted(legend) == sorted(set(legend)), "a stage is named once, however wide its lines"
    for name in ("cuda:2", "cuda:10"):
        lane = [span for span in spans if span.worker == name]
        assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(lane))


def test_the_winner_is_starred_once_a_panel_and_explained_by_its_own_point():
    trials = make_trials(60)
    drawn = starred(progress_figure(trials, 3000.0), 10)
    stars = [trace for trace in drawn["data"] if trace["name"] == "winner"]
    assert [(s["x"], s["y"]) for s in stars] == [([10], [trials[10].outcome.latency_us])]
    panels = starred(parameter_figure(trials, ["block_m", "stats"]), 10)
    stars = [trace for trace in panels.data if trace.name == "winner"]
    assert [s.xaxis for s in stars] == ["x", "x2"]
    assert [s.showlegend for s in stars] == [True, False]
    assert all(s.hoverinfo == "skip" for s in stars)


def test_the_race_is_drawn_at_its_trial_with_its_interval():
    trials = make_trials(60)
    raced = Finalist(10, None, Interval(2.0, 1.6, 2.5, 0.95, 5), 1500.0, 3000.0)  # type: ignore[arg-type]
    (point,) = [
        trace
        for trace in progress_figure(trials, 3000.0, raced=raced)["data"]
        if trace["name"] == "the winner's file, raced"
    ]
    assert (point["x"], point["y"]) == ([10], [1500.0])
    error = point["error_y"]
    assert 1500.0 + error["array"][0] == pytest.approx(3000 / 1.6)
    assert 1500.0 - error["arrayminus"][0] == pytest.approx(3000 / 2.5)
