"""Tune KernelBench's own files, one after the other, and say what each ended with.

    git clone https://github.com/ScalingIntelligence/KernelBench
    python -m benchmarks.kernelbench_suite --kernelbench KernelBench --level 1 \
        [--problems 23,36,40-49] [--shuffle 17] [--most 20] [--effort quick] [--compile] \
        [--devices all] [--jobs 3] --json OUT

A campaign (`tuner.command.campaign`) tunes each file by a `tune` of its own, whole forward, in the
mode that the file leaves the module in, on all GPUs or those of `--devices`. OUT holds one entry a
problem and is written after each: what it holds is not tuned again, but for files that were not
over in time, so that a run that was cut off goes on, and machines share the work by `--problems`.
With `--shuffle` problems begin in a random order, the same for the same number: what ended before
a run was cut off is a sample of all. With `--jobs` several files share a GPU: while one times on
it, which it has alone for that (`tuner.machine.turns`), others are captured, built and compiled.

Prints a line a problem as it ends, then counts by verdict and the geometric mean of the exported
files' speed-ups over PyTorch eager (1 where the file holds PyTorch's own modules, or nothing was
to be gained); with `--compile`, torch.compile's as well, raced in the same rounds as the file.
Problems whose product collapses by an exact rewrite, and those whose result is the same for all
finite inputs, are listed apart and not counted. `benchmarks.kernelbench_summary` puts the files of
several runs together, by groups of problems.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.kernelbench_summary import compiled_of, geometric_mean, speedup_of
from tuner.command.campaign import Campaign
from tuner.command.problems import Problem, State
from tuner.fleet.chosen import chosen_devices
from tuner.review.summary import summary
from tuner.run import open_run
from tuner.trial import to_json

LIMIT_S = 120.0  # of a problem, for each that shares its GPU; of one alone twice that
END_LINES = 40  # of what a failure said; a frame of a traceback takes three
FRAME_LINES = 3
MOST_CHARS = 5000


def problems_of(root: Path, level: int, wanted: str) -> list[Path]:
    """Return the files of a level, in the order of their numbers; `wanted` as `1,5-7` or empty."""
    folder = next(iter(root.rglob(f"level{level}")), None)
    if folder is None:
        raise SystemExit(f"no folder level{level} below {root}; --kernelbench: a clone of it")
    files = sorted(folder.glob("*_*.py"), key=number_of)
    chosen: set[int] = set()
    for part in filter(None, wanted.split(",")):
        first, _, last = part.partition("-")
        chosen |= set(range(int(first), int(last or first) + 1))
    return [file for file in files if not chosen or number_of(file) in chosen]


def number_of(path: Path) -> int:
    """Return the number that a problem's file begins with."""
    return int(path.name.partition("_")[0])


def config_of(path: Path, folder: Path, has_compiled: bool) -> Path:
    """Write the config of a file, unless it is there: a newer one would be another problem."""
    settings: dict[str, Any] = {"problem": {"module": str(path.resolve())}}
    if has_compiled:
        settings["measure"] = {"torch_compile": "default"}
    text = json.dumps(settings)  # JSON is YAML
    config = folder / f"{path.parent.name}_{path.stem}.yaml"
    if not config.is_file() or config.read_text() != text:
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(text)
    return config


def entry_of(state: State, seconds: float, log: Path) -> dict[str, Any]:
    """Return what a problem ended with, in short, or how it failed."""
    entry: dict[str, Any] = {"seconds": seconds, "date": time.strftime("%Y-%m-%d")}
    if state.status == "done" and state.run is not None:
        return {**entry, **in_short(json.loads(to_json(summary(open_run(state.run)))))}
    kind = {"nothing correct": "failed", "begun": "failed"}.get(state.status, state.status)
    if kind == "nothing to gain":  # so is what no kernels can be generated for to who tunes it
        generates = "nothing to generate" not in state.reason
        kind = kind if generates else "nothing to generate"
        return {**entry, "kind": kind, "reason": state.reason}
    said = log.read_text(errors="replace") if log.is_file() else ""
    reason = state.reason if kind == "no file in time" else reason_of(said)
    return {**entry, "kind": kind, "reason": reason or state.reason}


def reason_of(said: str) -> str:
    """Return why `tune` failed: its error, what repeats in a traceback, the end of that."""
    lines = [line for line in said.splitlines() if line.strip()]
    if not lines:
        return ""
    starts = [i for i, line in enumerate(lines) if line.startswith("error:")]
    first = starts[-1] if starts else 0
    rest = lines[first + 1 :]
    kept = {*range(max(0, len(rest) - END_LINES), len(rest))}
    for i, line in enumerate(rest):
        if "[Previous line repeated" in line:
            kept |= {*range(max(0, i - FRAME_LINES), i + 1)}
    reported = "\n".join(rest[i] for i in sorted(kept))
    return f"{lines[first]}\n{reported[-MOST_CHARS:]}".rstrip()


def in_short(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a summary that the table needs, ratios as they were measured."""
    names = ("kind", "verdict", "device", "latency_us", "baseline_us", "bound", "num_trials")
    found = {name: summary.get(name) for name in names}
    found["kind"] = found["kind"] or "failed"
    found["interval"] = summary.get("interval")
    found["compiled"] = summary.get("compiled")
    result = Path(summary.get("path") or ".") / "result.json"
    if result.exists():
        stored = json.loads(result.read_text())
        found["bound_us"] = stored.get("bound_us")
        found["torch_compile"] = stored.get("compiled")
        exported = stored.get("exported") or {}
        # As KernelBench runs it; the summary's is the least over the run's workloads.
        found["interval"] = exported.get("interval") or found["interval"]
        others = {each["name"]: each["interval"] for each in exported.get("others", ())}
        found["normal_inputs"] = others.get("ordinary", exported.get("elsewhere"))
        found["step"] = exported.get("step")
    module = Path(summary.get("path") or ".") / "module.json"
    if module.exists():
        outline = json.loads(module.read_text())["outline"]
        found["rewrites"] = [step["name"] for step in outline.get("rewrites", [])]
        found["collapsed"] = any(step["collapses"] for step in outline.get("rewrites", []))
        found["constant"] = outline.get("constants") == outline["outputs"]
    return found


def is_apart(entry: dict[str, Any]) -> bool:
    """Whether a problem says little of kernels: less work by algebra, or a constant result."""
    return bool(entry.get("collapsed") or entry.get("constant"))


def line_of(name: str, entry: dict[str, Any]) -> str:
    """Return a problem's line."""
    speedup, compiled = speedup_of(entry), compiled_of(entry)
    return "  ".join([
        f"{name:58.58}", "     -" if speedup is None else f"{speedup:5.2f}x",
        "     -" if compiled is None else f"{compiled:5.2f}x",
        f"{entry['seconds']:5.0f} s", entry["kind"],
        "collapsed" if entry.get("collapsed") else "constant" if entry.get("constant") else "",
        (entry.get("reason") or "").partition("\n")[0][:80],
    ]).replace("\n", " ").rstrip()  # fmt: skip


def main() -> int:
    """Parse the command line, tune what is left, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--kernelbench", type=Path, required=True, help="a clone of KernelBench")
    parser.add_argument("--level", type=int, action="append", choices=(1, 2))
    parser.add_argument("--problems", default="", help="numbers of each level, as 1,5-7")
    parser.add_argument("--shuffle", type=int, help="begin in a random order, by this number")
    parser.add_argument("--most", type=int, help="tune so many problems at most")
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--compile", action="store_true", help="race torch.compile as well")
    parser.add_argument(
        "--limit-s",
        type=float,
        help="of one problem, in seconds; 120 for each job, and two at least",
    )
    parser.add_argument("--devices", default="all", help="as 0,1, of this host")
    parser.add_argument("--jobs", type=int, default=1, help="files that share a GPU")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--json", type=Path, required=True, help="where the entries are kept")
    options = parser.parse_args()
    entries: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    entries = {name: e for name, e in entries.items() if e["kind"] != "no file in time"}
    paths = {
        f"level{level}/{path.name}": path
        for level in options.level or (1, 2)
        for path in problems_of(options.kernelbench, level, options.problems)
    }
    for name in filter(entries.__contains__, paths):
        print(line_of(name, entries[name]))
    begun_s = time.monotonic()
    configs = options.runs_dir.resolve() / "configs"
    order = [*paths]
    if options.shuffle is not None:
        random.Random(options.shuffle).shuffle(order)
    left = [name for name in order if name not in entries][: options.most]
    names = {config_of(paths[name], configs, options.compile): name for name in left}

    def ended(problem: Problem, state: State, seconds: float) -> None:
        name = names[problem.path]
        log = options.runs_dir / "logs" / f"{problem.name}.txt"
        entries[name] = entry_of(state, seconds, log)
        unfinished = options.json.with_suffix(".tmp")
        unfinished.write_text(json.dumps(entries, indent=1))
        unfinished.replace(options.json)
        print(line_of(name, entries[name]), flush=True)

    problems = [Problem(config.stem, config) for config in names]
    campaign = Campaign(
        problems, options.runs_dir.resolve(), ["--effort", options.effort],
        chosen_devices(options.devices, "auto", {}), options.jobs,
        options.limit_s or LIMIT_S * max(2, options.jobs),
        on_end=ended,
    )  # fmt: skip
    states = campaign.work()
    for problem in problems:  # that were over before, of whose entries none was kept
        if names[problem.path] not in entries:
            ended(problem, states[problem.name], 0.0)
    spent_s = time.monotonic() - begun_s
    counted = [e for e in entries.values() if not is_apart(e)]
    speedups = [s for e in counted if (s := speedup_of(e)) is not None]
    both = [(speedup_of(e) or 1.0, c) for e in counted if (c := compiled_of(e))]
    seconds = sorted(e["seconds"] for e in entries.values())
    print(f"\n{len(entries)} problems: {dict(Counter(e['kind'] for e in entries.values()))}")
    if speedups:
        print(f"geometric mean over eager: {geometric_mean(speedups):.2f}x of {len(speedups)}")
    for name, entry in entries.items():
        if is_apart(entry):
            print(f"not counted: {line_of(name, entry)}")
    if both:
        ours, theirs = (geometric_mean([pair[i] for pair in both]) for i in (0, 1))
        print(f"of {len(both)} raced with torch.compile: {ours:.2f}x, torch.compile {theirs:.2f}x")
    if seconds:
        print(
            f"seconds a problem: median {seconds[len(seconds) // 2]:.0f}, most {seconds[-1]:.0f};"
            f" {len(names)} now, in {spent_s:.0f} s, {options.jobs} at a time"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
