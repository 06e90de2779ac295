"""Runs with every kind of record, and a page as a browser would read it."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tuner.by_batch import MOST, AtBatch, ByBatch
from tuner.environment import Environment
from tuner.machine.datasheets import known_device
from tuner.review.report import write_report
from tuner.run import Outlook, Run, create_run
from tuner.trial import (
    Build,
    Check,
    Finalist,
    Interval,
    KernelResources,
    Measurement,
    Outcome,
    ProbeResult,
    Result,
    Status,
    Trial,
    to_json,
)

HOSTILE = (
    '</script><script>window.hacked=1</script><!--<img src=x onerror="window.hacked=1">'
    "{{ 7*7 }}{% raw %}'\"&\u2028\x1b[31m<b>bold</b>"
)
CONFIG = "problem: {op: gemm}\nmeasure: {max_noise: 0.5%}\n"
SOURCE = (
    "#include <cuda_runtime.h>\n// the winner\n"
    + "__global__ void fused_gemm_kernel(float* y) { y[threadIdx.x] = 1.0f; }\n" * 40
)


def environment(**changes: object) -> dict[str, object]:
    device = json.loads(to_json(known_device("H200")))
    return {
        "tuner": "0.1.0",
        "device": device,
        "torch_name": "cuda:0",
        "facts": {"device.num_sms": 132},
        "machine": {"driver": "580.1", "torch": "2.11", "os": "Linux"},
        "op": "gemm_scale_batchnorm",
        "title": "Gemm + Scale + BatchNorm1d (training mode)",
        "accuracy": "float32",
        "flops": 2 * 1024 * 8192 * 8192,
        "bytes": 4 * (2 * 1024 * 8192 + 8192 * 8192),
        "num_feasible": 5120,
        "num_cartesian": 40000,
        "baseline_us": 3000.0,
        "baseline_noise": 0.002,
        "command": "tune --config search_spaces/gemm.yaml --seed 0",
        "started_at": "2026-01-02T03:04:05+00:00",
        **changes,
    }


def probe(name: str, rms: float = 2e-7, baseline: float = 1e-7, **changes: object) -> ProbeResult:
    fields = {"max_abs": 1e-5, "baseline_max_abs": 1e-5, "is_accepted": True, **changes}
    return ProbeResult(name, rms, baseline_rms_rel=baseline, **fields)  # type: ignore[arg-type]


def check(reason: str = "") -> Check:
    probes = (probe("as given"), probe("x + 100", 3e-7), probe("NaN row", float("nan")))
    return Check(not reason, "float32", reason, probes, is_thorough=True)


REASONS = {
    Status.CONSTRAINTS: "shared memory: 300000 bytes, there are 232448",
    Status.COMPILE: 'source.cu(12): error: identifier "foo" is undefined',
    Status.RUNTIME: "an illegal memory access was encountered",
    Status.TIMEOUT: "no answer within 60 s",
    Status.CORRECTNESS: "as given: rms error 3.2e-3, allowed 2.0e-7",
}


RMS = {"fp16x3": 2e-7, "tf32x3": 1.2e-7, None: 1.5e-7}
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def outcome(
    status: Status, number: int, latency_us: float, params: dict[str, Any] | None = None
) -> Outcome:
    params = params or {}
    block_m = int(params.get("block_m", 128))
    kernels = (
        KernelResources("fused_gemm_kernel", 64 + block_m // 2, 256 * block_m, 8, 8),
        KernelResources("fused_normalise_kernel", 32, 0, 0, 0),
    )
    asked = START + timedelta(seconds=0.4 * number)
    build = Build(
        f"{number:016x}",
        status,
        "x.so",
        "log.txt",
        kernels=kernels,
        seconds=1.5,
        started_at=asked.isoformat(timespec="milliseconds"),
        ended_at=(asked + timedelta(seconds=1.5)).isoformat(timespec="milliseconds"),
        builder=number % 4,
    )
    seconds = {"render": 0.001, "build": 1.5, "wait": 0.2}
    if status is Status.COMPILE:
        return Outcome(status, REASONS[status], replace(build, kernels=()), seconds=seconds)
    if status is not Status.CORRECT:
        return Outcome(status, REASONS[status], build, seconds=seconds)
    samples = (latency_us,) * 200
    measurement = Measurement(latency_us, 0.003, samples, True, anchor_us=3010.0)
    seconds |= {"check": 0.02, "measure": 0.05, "device": 0.1}
    screened = replace(check(), is_thorough=False)
    first = probe("as given", RMS[params.get("precision")])
    screened = replace(screened, probes=(first, *screened.probes[1:]))
    return Outcome(status, "", build, screened, measurement, seconds)


def make_trials(num_trials: int, seed: int = 0) -> list[Trial]:
    """Latency depends on the template and block_m, and not on swizzle."""
    draw = random.Random(seed)
    statuses = itertools.cycle([Status.CORRECT] * 5 + list(REASONS))
    trials = []
    for number in range(num_trials):
        template = draw.choice(["mma", "simt", "library"])
        params = {"template": template, "stats": draw.choice(["atomics", "two_pass"])}
        params |= {"block_m": draw.choice([64, 128, 256]), "swizzle": draw.choice([1, 2, 4, 8])}
        if template == "mma":
            params |= {
                "precision": draw.choice(["fp16x3", "tf32x3"]),
                "stages": draw.choice([2, 3]),
            }
        base_us = {"mma": 1200.0, "simt": 3500.0, "library": 2500.0}[template]
        latency_us = base_us * (1 + 64 / params["block_m"]) * draw.uniform(0.99, 1.01)
        found = outcome(next(statuses), number, latency_us, params)
        asked = (START + timedelta(seconds=0.4 * number)).isoformat(timespec="milliseconds")
        key = f"{number:016x}"
        trials.append(Trial(number, template, params, key, found, asked, 0.4 * number + 2))
    return trials


def by_batch() -> ByBatch:
    """Kernels that pay from 64 rows on in calls, from 1,024 on in steps."""
    speeds = {1: 0.2, 16: 0.4, 64: 1.1, 256: 2.0, 1024: 3.0, 4096: 4.0}
    measured = [
        AtBatch(rows, way, False, speed * share, 0.9 * speed * share, 1.1 * speed * share, 90, 60)
        for rows, speed in speeds.items()
        for way, share in (("call", 1.0), ("step", 0.4))
    ]
    rows = {"call": (64, MOST), "step": (1024, MOST)}
    return ByBatch(1024, tuple(measured), rows, key="k")  # type: ignore[arg-type]


def make_result(trials: list[Trial], interval: Interval | None = None) -> Result:
    ranked = sorted(
        (t for t in trials if t.outcome.latency_us), key=lambda t: t.outcome.latency_us or 0
    )
    interval = interval or Interval(1.62, 1.58, 1.66, 0.95, 5)
    finalists = tuple(
        Finalist(t.number, check(), interval, t.outcome.latency_us, 3005.0, 0.002)
        for t in ranked[:4]
    )
    winner = ranked[0].number
    return Result(
        winner,
        finalists,
        (winner, ranked[1].number),
        replace(finalists[0], latency_us=1850.5, by_batch=by_batch()),
        "export/model_new.py",
    )


def outlooks(num_trials: int) -> list[Outlook]:
    """Ever surer, twenty times in all."""
    return [
        Outlook(number, 0.5 / number, {"0.01": 1 - 10 / number, "0.05": 1 - 5 / number})
        for number in range(20, num_trials + 1, max(10, num_trials // 20))
    ]


def make_run(
    folder: Path,
    trials: list[Trial],
    result: Result | None = None,
    config: str = CONFIG,
    source: str = SOURCE,
    **changes: object,
) -> Run:
    run = create_run(folder, "gemm", "NVIDIA H200", config, Environment.of(environment(**changes)))
    # One write: 1,000 appends with their fsync are the run's business, tested there.
    with run.locked() as writer:
        for trial in trials[:3]:
            writer.append(trial)
    with (run.path / "trials.jsonl").open("a") as file:
        file.writelines(to_json(trial) + "\n" for trial in trials[3:])
    with run.locked() as writer:
        for outlook in outlooks(len(trials)):
            writer.append_outlook(outlook)
        if result is not None:
            writer.write_result(result)
    for trial in trials:
        keep = run.path / "candidates" / trial.candidate_key
        keep.mkdir(exist_ok=True)
        (keep / "source.cu").write_text(source + f"// trial {trial.number}\n")
        (keep / "log.txt").write_text(f"source.cu(12): error of {trial.number}\n")
    return run


def make_hostile(folder: Path) -> Run:
    trials = make_trials(40)
    for number, trial in enumerate(trials):
        params = {HOSTILE: HOSTILE if number % 2 else "word", **trial.params}
        bad = replace(trial.outcome, reason=HOSTILE + "\n" + HOSTILE)
        trials[number] = replace(trial, outcome=bad, params=params, template=HOSTILE)
    result = make_result(trials)
    result = replace(
        result,
        notes=(HOSTILE,),
        export_path=HOSTILE,
        finalists=tuple(replace(f, error=HOSTILE) for f in result.finalists),
        exported=replace(
            result.finalists[0], check=replace(check(HOSTILE), probes=(probe(HOSTILE),))
        ),
    )
    words = ("op", "title", "accuracy", "command", "started_at", HOSTILE)
    run = make_run(folder, trials, result, config=HOSTILE, **dict.fromkeys(words, HOSTILE))
    for trial in trials:
        for name in ("source.cu", "log.txt"):
            (run.path / "candidates" / trial.candidate_key / name).write_text(HOSTILE * 3)
    path = run.path / "environment.json"
    data = json.loads(path.read_text())
    data["device"]["name"] = HOSTILE
    path.write_text(json.dumps(data))
    return run


class Page(HTMLParser):
    """What a browser would make of a page: elements, attributes, texts, tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.tables: dict[str, list[list[str]]] = {}
        self._inside: list[str] = []
        self._caption = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "img", "br"):
            self._inside.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "caption":
            self._caption = ""
        if tag == "tr":
            self.tables.setdefault(self._caption, []).append([])
        if tag in ("td", "th"):
            self.tables[self._caption][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "script" in self._inside:
            self.scripts[-1] += data
            return
        if "style" not in self._inside:
            self.text += data
        if "caption" in self._inside:
            self._caption += data
        if "td" in self._inside or "th" in self._inside:
            self.tables[self._caption][-1][-1] += data

    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}

    def script(self, name: str) -> str:
        ids = [attrs.get("id") for tag, attrs in self.elements if tag == "script"]
        return self.scripts[ids.index(name)]

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.script("page-data"))
        return found

    def columns(self) -> dict[str, list[Any]]:
        return {column["name"]: column["values"] for column in self.data["columns"]}

    def sources(self) -> dict[str, list[str]]:
        packed = json.loads(gzip.decompress(base64.b64decode(self.script("page-sources"))))
        texts = [[packed["lines"][n] for n in numbers] for numbers in packed["sources"]]
        return {trial: texts[place] for trial, place in packed["trials"].items()}

    def table(self, start: str) -> list[list[str]]:
        return next(rows for caption, rows in self.tables.items() if caption.startswith(start))


def page_of(run: Run) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def assert_fits_a_terminal(text: str) -> None:
    lines = text.splitlines()
    has_rows = any(line.startswith("kernels") for line in lines)
    assert len(lines) <= 24 + 2 * has_rows  # three more say where file, report and run are
    assert max(map(len, lines)) <= 80
