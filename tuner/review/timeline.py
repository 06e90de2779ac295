"""Where a run's time went: seconds a stage, busy and idle seconds a worker, a timeline.

Trials are recorded when they end, in order; builds with the times that their builder saw. All
of it is laid on one axis: seconds of the run's working time, as `Trial.elapsed_s` counts it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from tuner.review.figures import ACCENT, BEST, FLOOR, HOVER_SPANS, LEGEND, bars
from tuner.review.formatting import seconds_words
from tuner.trial import Trial

__all__ = [
    "Span",
    "Stage",
    "WorkerTime",
    "spans_of",
    "stage_figure",
    "stages_of",
    "timeline_figure",
    "workers_of",
]

DEVICE = "device"  # the one of a run whose trials name none
MOST_LANES = 6  # of a host's builders; more of them share one band
MOST_DEVICES = 16  # the same of devices
BUILDERS = "builders"
LANE_PX = 18.0  # width of a line
BAND, BAND_PX = 1.5, 90  # its height, in lanes and on the screen
NEW_SESSION_S = 1.0  # a trial asked for later than this after the last one ended: it was resumed

# Colours have a contrast of 3:1 on white and on the dark page, and differ in lightness.
_STAGE_COLOURS = {
    "build": FLOOR,
    "wait": "#7f7f7f",
    "around": "#b0519c",
    "check": ACCENT,
    "measure": BEST,
}
_STAGE_WORDS = {
    "build": "build",
    "wait": "idle: waits for a build",
    "around": "load, re-time the baseline",
    "check": "check",
    "measure": "measure",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a candidate's way, and its seconds over all trials."""

    name: str
    seconds: float
    about: str


def stages_of(trials: Sequence[Trial]) -> list[Stage]:
    """Return the seconds of each stage; all but the first two are one after another."""
    total: dict[str, float] = defaultdict(float)
    for trial in trials:
        for stage, seconds in trial.outcome.seconds.items():
            total[stage] += seconds
    elapsed_s = max((trial.elapsed_s for trial in trials), default=0.0)
    known = {"build", "render", "wait", "check", "measure", "device", "held"}
    others = {name: seconds for name, seconds in total.items() if name not in known}
    around = max(0.0, total["device"] - total["check"] - total["measure"])
    device_s = total["check"] + total["measure"] + around
    serial = total["wait"] + device_s + sum(others.values())
    return [
        Stage("build", total["build"], "in the builders, in parallel with all that follows"),
        Stage("render", total["render"], "from template to source text, before a build"),
        Stage("wait", total["wait"], "the device idle, waiting for a build"),
        Stage("check", total["check"], "asking for answers and judging them"),
        Stage("measure", total["measure"], "timing"),
        Stage("around", around, "on the device: loading code, timing the baseline again"),
        *(Stage(name, seconds, "") for name, seconds in sorted(others.items())),
        Stage(
            "rest",
            max(0.0, elapsed_s - serial),
            "the device idle: choosing what to try, writing it down",
        ),
    ]


# ---- who did what, when ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """What one worker did for one trial, from second to second of the run's working time.

    `group` is whose worker it is: "" of a device, else of a host's builders.
    """

    worker: str
    stage: str
    start_s: float
    end_s: float
    trial: int
    group: str = ""


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """The seconds that a worker was at work, of those that the search took."""

    name: str
    busy_s: float
    total_s: float

    @property
    def idle_s(self) -> float:
        """The seconds in which it had nothing to do."""
        return max(0.0, self.total_s - self.busy_s)


def spans_of(trials: Sequence[Trial]) -> list[Span]:
    """Return what builders did, in the order of the trials, and each device, in its own.

    A run recorded before builds said when they ran has spans of the device alone.
    """
    spans: list[Span] = []
    origin, last_s = None, 0.0
    for trial in trials:
        asked = _seconds_of(trial.started_at)
        is_session = origin is not None and asked is not None
        if asked is not None and not (is_session and asked - origin <= last_s + NEW_SESSION_S):  # type: ignore[operator]
            origin = asked - last_s
        spans += _build_span(trial, origin)
        last_s = trial.elapsed_s
    spans = _in_lanes(spans)
    ends_s: dict[str, float] = defaultdict(float)
    for trial in sorted(trials, key=_device_end_s):
        name = trial.outcome.device or DEVICE
        found = _device_spans(trial, name, ends_s[name])
        spans += found
        ends_s[name] = _device_end_s(trial) if found or name == DEVICE else ends_s[name]
    return spans


def _in_lanes(builds: Sequence[Span]) -> list[Span]:
    """Return builds with a name for each that ran beside others, where hosts are recorded.

    One who waits for another host is none of its compilers, whatever its number here.
    """
    if all(span.group == BUILDERS for span in builds):
        return list(builds)
    lanes: dict[str, list[float]] = defaultdict(list)  # of each host: when each is free
    names: dict[int, str] = {}
    for place, span in sorted(enumerate(builds), key=lambda pair: pair[1].start_s):
        ends_s = lanes[span.group]
        lane = next((n for n, end_s in enumerate(ends_s) if end_s <= span.start_s), len(ends_s))
        ends_s[lane : lane + 1] = [span.end_s]
        own = span.group.removesuffix(BUILDERS).rstrip()
        names[place] = f"{own} builder {lane}".lstrip()
    return [replace(span, worker=names[place]) for place, span in enumerate(builds)]


def _device_end_s(trial: Trial) -> float:
    """Return when the device was done with a trial; an earlier one may have held it."""
    return trial.elapsed_s - trial.outcome.seconds.get("held", 0.0)


def _seconds_of(stamp: str) -> float | None:
    try:
        return datetime.fromisoformat(stamp).timestamp() if stamp else None
    except ValueError:
        return None


def _build_span(trial: Trial, origin: float | None) -> list[Span]:
    build = trial.outcome.build
    if build is None or build.builder is None or origin is None:
        return []
    start, end = _seconds_of(build.started_at), _seconds_of(build.ended_at)
    if start is None or end is None or start < origin:  # reused from an earlier session
        return []
    name = f"builder {build.builder}"
    group = f"{build.host} {BUILDERS}" if build.host else BUILDERS
    return [Span(name, "build", start - origin, end - origin, trial.number, group)]


def _device_spans(trial: Trial, name: str, last_s: float) -> list[Span]:
    """Return a trial's spans on its device."""
    seconds = trial.outcome.seconds
    check_s, measure_s = seconds.get("check", 0.0), seconds.get("measure", 0.0)
    around_s = max(0.0, seconds.get("device", 0.0) - check_s - measure_s)
    spans: list[Span] = []
    end_s = _device_end_s(trial)
    backwards = {
        "measure": measure_s,
        "check": check_s,
        "around": around_s,
        "wait": seconds.get("wait", 0.0) if name == DEVICE else 0.0,  # the others know of none
    }
    for stage, length_s in backwards.items():
        start_s = max(last_s, end_s - length_s)
        if end_s > start_s:
            spans.append(Span(name, stage, start_s, end_s, trial.number))
        end_s = start_s
    return spans[::-1]


def workers_of(trials: Sequence[Trial]) -> list[WorkerTime]:
    """Return how busy each worker was, devices first; of many builders all together."""
    spans = spans_of(trials)
    busy: dict[str, float] = defaultdict(float)
    for span in spans:
        busy[span.worker] += 0.0 if span.stage == "wait" else span.end_s - span.start_s
    total_s = max((trial.elapsed_s for trial in trials), default=0.0)
    found = []
    for words, names in _bands(spans):
        together_s = sum(busy[name] for name in names)
        found.append(WorkerTime(words, together_s, total_s * len(names)))
    return found


def _bands(spans: Sequence[Span]) -> list[tuple[str, list[str]]]:
    """Return the workers from top to bottom: each by itself, or many of a kind in one band."""
    groups: dict[str, set[str]] = defaultdict(set)
    for span in spans:
        groups[span.group].add(span.worker)
    found: list[tuple[str, list[str]]] = []
    for group in sorted(groups, key=lambda name: (name != "", name != BUILDERS, name)):
        names = sorted(groups[group], key=_natural)
        if len(names) <= (MOST_LANES if group else MOST_DEVICES):
            found += [(name, [name]) for name in names]
        else:
            kind = group.removesuffix(BUILDERS).rstrip()
            words = f"{len(names)} {BUILDERS if group else 'devices'}"
            found.append((f"{words} of {kind}" if kind else words, names))
    return found


def _natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts cuda:2 before cuda:10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


# ---- the figures ----------------------------------------------------------------------------


def stage_figure(trials: Sequence[Trial]) -> Any:
    """Draw the seconds that each stage took, over all trials."""
    stages = stages_of(trials)[::-1]
    seconds = [stage.seconds for stage in stages]
    names = [stage.name for stage in stages]
    words = [seconds_words(stage.seconds) for stage in stages]
    colours = [_STAGE_COLOURS.get(name, "#7f7f7f") for name in names]
    return bars(seconds, names, words, colours, title_text="seconds, all trials together")


def timeline_figure(spans: Sequence[Span]) -> dict[str, Any]:
    """Draw what each worker did, when; gaps on a lane are idle time.

    Each stage is one line with gaps, not a bar a span: 10,000 trials have 40,000 spans. For the
    same reason the figure is plain data, as Plotly has it: Plotly's own looks at every number.
    """
    places: dict[str, float] = {}
    widths: dict[str, float] = {}
    marks, labels, at, height = list[float](), list[str](), 0.0, 130.0
    for words, names in _bands(spans):
        marks.append(at)
        labels.append(words)
        if len(names) == 1:
            places[names[0]], widths[names[0]] = at, LANE_PX
            at, height = at + 1.0, height + 34
            continue
        share = BAND / len(names)  # thin lines, side by side in one band
        for n, name in enumerate(names):
            places[name] = at - BAND / 3 + share * n
            widths[name] = max(1.0, 0.8 * BAND_PX / len(names))
        at, height = at + BAND + 0.3, height + BAND_PX
    traces: list[dict[str, Any]] = []
    for stage, words in _STAGE_WORDS.items():
        for width in sorted(set(widths.values()), reverse=True):
            group = [s for s in spans if s.stage == stage and widths[s.worker] == width]
            if group:
                # A stage is one entry of the legend, however wide its lines are.
                is_first = all(trace["name"] != words for trace in traces)
                lane = _lane(group, places, words, _STAGE_COLOURS[stage], width)
                traces.append({**lane, "legendgroup": words, "showlegend": is_first})
    layout = {
        "xaxis": {"title": {"text": "seconds of working time"}, "rangemode": "tozero"},
        "yaxis": {
            "tickvals": marks,
            "ticktext": labels,
            "range": [max(places.values(), default=0.0) + 0.6, -0.6],  # the device on top
            "zeroline": False,
            "automargin": True,
        },
        "height": height,
        "legend": LEGEND,
        "hovermode": "closest",
    }
    return {"data": traces, "layout": layout}


def _lane(
    spans: Sequence[Span], places: Mapping[str, float], name: str, colour: str, width: float
) -> Mapping[str, Any]:
    xs: list[float | None] = []
    ys: list[float | None] = []
    numbers: list[int | None] = []
    for span in spans:
        middle_s = (span.start_s + span.end_s) / 2  # hovering finds points, not lines
        xs += [round(span.start_s, 4), round(middle_s, 4), round(span.end_s, 4), None]
        ys += [round(places[span.worker], 3)] * 3 + [None]
        numbers += [span.trial] * 3 + [None]
    return {
        "type": "scatter",
        "x": xs,
        "y": ys,
        "mode": "lines",
        "name": name,
        "line": {"color": colour, "width": width, "simplify": False},
        "hoverinfo": "text",
        "customdata": numbers,
        "meta": HOVER_SPANS,
        "connectgaps": False,
    }
