"""Say what runs of the KernelBench suite come to, by group of problems.

    python -m benchmarks.kernelbench_summary benchmarks/kernelbench_results.json [OUT.json ...]
        [--write MERGED.json] [--table]

Takes what `benchmarks.kernelbench_suite` wrote, over machines and days: of a problem that is in
several files the last one counts; where torch.compile was not in its race, the last race that had
it is kept beside it (`with_compile`). Prints, for each group, how many problems are known, the
geometric mean of the exported files' speed-ups over PyTorch eager (1 where nothing was to be
gained), the least of them, both on normal random inputs and of a step of training as well where
these were raced, and beside torch.compile, in races that had both, how many files are at least
0.95 and 0.97 times as fast as the better of it and eager. Problems that are not measured, not
counted by algebra, or without a file are named. `--table` prints each group's files as a table in
Markdown besides.

`kernelbench_results.json` holds the last known entry of each problem, with its device and day, and
that race.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Of level 1, what is neither a product of matrices nor a convolution.
SMALL = {4, 5, 12, *range(19, 54), *range(88, 101)} - {50, 97}
RACE = ("kind", "device", "date", "interval", "torch_compile")  # what is kept of an earlier one
NO_KERNELS = "nothing to generate"
NO_FILE = ("refused", "failed", "no file in time")
# Of level 2: less work by algebra, or a constant result.
APART = {13, 14, 18, 42, 44, 50, 51, 80, 83, 98}
NO_CONVOLUTION = {  # of level 2
    *(9, 12, 22, 28, 29, 30, 33, 37, 39, 40, 41, 45, 53, 55, 56, 59, 62, 63, 64),
    *(66, 68, 70, 75, 76, 81, 84, 86, 88, 94, 95, 97, 99),
}
GROUPS = {
    "level 1, neither product nor convolution": ("level1", SMALL),
    "level 1, products and convolutions": ("level1", set(range(1, 101)) - SMALL),
    "level 2 with convolutions": ("level2", set(range(1, 101)) - NO_CONVOLUTION - APART),
    "level 2 without": ("level2", NO_CONVOLUTION),
    "level 2, apart": ("level2", APART),
}


def place_of(name: str) -> tuple[str, int]:
    """Return level and number of an entry's name, `level1/23_Softmax.py` say."""
    level, _, rest = name.partition("/")
    found = re.match(r"\d+", rest)
    assert found, name
    return level, int(found.group())


def speedup_of(entry: Mapping[str, Any]) -> float | None:
    """Return the exported file's speed-up; 1 where it is PyTorch's own, None without a file."""
    if entry["kind"] in NO_FILE:
        return None
    return float((entry.get("interval") or {}).get("speedup") or 1.0)


def merged(
    old: Mapping[str, dict[str, Any]], new: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return all entries: a problem's new one, with the old one's race with torch.compile."""
    entries = dict(old)
    for name, entry in new.items():
        known = with_compile(entries.get(name, {}))
        entries[name] = entry
        if known and not entry.get("torch_compile"):
            race = {key: known[key] for key in RACE if key in known}
            entries[name] = {**entry, "with_compile": race}
    return entries


def with_compile(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the last race with torch.compile, the entry's own or an earlier one; {} for none."""
    return entry if entry.get("torch_compile") else entry.get("with_compile", {})


def compiled_of(entry: Mapping[str, Any]) -> float | None:
    """Return torch.compile's speed-up over eager, where it was raced."""
    interval = (entry.get("torch_compile") or {}).get("interval") or {}
    return interval.get("speedup")


def is_refused(entry: Mapping[str, Any]) -> bool:
    """Whether a file that answered as torch.compile did would be rejected."""
    answer = (entry.get("torch_compile") or {}).get("answer") or {}
    return answer.get("is_accepted") is False


def share_of(entry: Mapping[str, Any]) -> float:
    """Return how fast the file is beside the better of eager and torch.compile, in its rounds."""
    ours = (entry["torch_compile"].get("ours") or {}).get("speedup")
    compiled, speedup = compiled_of(entry) or 1.0, speedup_of(entry) or 1.0
    return ours if ours is not None and compiled >= 1.0 else speedup / max(compiled, 1.0)


def geometric_mean(values: Sequence[float]) -> float:
    """Return it; NaN of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def lines_of(group: str, entries: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[str]:
    """Return a group's lines."""
    level, numbers = GROUPS[group]
    own = {n: entries[level, n] for n in sorted(numbers) if (level, n) in entries}
    speedups = {n: s for n, entry in own.items() if (s := speedup_of(entry)) is not None}
    lines = [f"{group}: {len(speedups)} of {len(numbers)} have a file or nothing to gain"]
    if bare := sum(entry["kind"] == NO_KERNELS for entry in own.values()):
        lines[0] += f", {bare} of them PyTorch's own call that has no generator"
    if speedups:
        least = min(speedups, key=lambda n: speedups[n])
        lines.append(
            f"  over eager: geometric mean {geometric_mean([*speedups.values()]):.2f}x,"
            f" least {speedups[least]:.2f}x (#{least})"
        )
    for what, words in (("normal_inputs", "on normal inputs"), ("step", "a step of training")):
        more = {n: e[what]["speedup"] for n, e in own.items() if e.get(what)}
        if more:
            worst = min(more, key=lambda n: more[n])
            lines.append(
                f"  {words}, {len(more)} of them: {geometric_mean([*more.values()]):.2f}x,"
                f" least {more[worst]:.2f}x (#{worst})"
            )
    races = {n: with_compile(own[n]) for n in speedups}
    raced = {n: c for n, race in races.items() if (c := compiled_of(race))}
    if raced:
        shares = [share_of(races[n]) for n in raced]
        ours = [speedup_of(races[n]) or 1.0 for n in raced]
        counts = [sum(share >= least for share in shares) for least in (0.95, 0.97)]
        lines.append(
            f"  raced with torch.compile: {len(raced)}, ours"
            f" {geometric_mean(ours):.2f}x, torch.compile"
            f" {geometric_mean([*raced.values()]):.2f}x; {counts[0]} at 0.95 or more of the better"
            f" of it and eager, {counts[1]} at 0.97"
        )
        if refused := [f"#{n}" for n in raced if is_refused(races[n])]:
            lines.append(f"  torch.compile's answer would be rejected: {', '.join(refused)}")
    for what, which in (
        ("without a file", [n for n in own if n not in speedups]),
        ("not measured", [n for n in sorted(numbers) if n not in own]),
    ):
        if which:
            lines.append(f"  {what}: {', '.join(f'#{n}' for n in which)}")
    return lines


def table_of(group: str, entries: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[str]:
    """Return a group's files as a table in Markdown, a line each."""
    level, numbers = GROUPS[group]
    heads = ("problem", "speed-up", "normal inputs", "a step", "torch.compile", "device, day")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    equal: dict[str, list[str]] = {}
    for n in sorted(numbers):
        entry = entries.get((level, n), {"kind": "refused"})
        interval = entry.get("interval") or {}
        if speedup_of(entry) is None:
            continue
        if not interval:
            equal.setdefault(entry["kind"], []).append(f"#{n}")
            continue
        bounds = ""
        if "low" in interval:
            bounds = f" [{interval['low']:.2f}, {interval['high']:.2f}]"
        race = with_compile(entry)
        others = [(entry.get(what) or {}).get("speedup") for what in ("normal_inputs", "step")]
        reported = ["" if s is None else f"{s:.2f}x" for s in (*others, compiled_of(race))]
        if race and race is not entry:
            reported[-1] += f" (ours {speedup_of(race) or 1.0:.2f}x)"
        reported[-1] += " (rejected)" if is_refused(race) else ""
        device = entry["device"].removeprefix("NVIDIA ").split()[0]
        cells = [f"#{n}", f"{interval['speedup']:.2f}x{bounds}", *reported]
        lines.append(f"| {' | '.join([*cells, f'{device}, ' + entry['date']])} |")
    ends = [f"{kind.capitalize()}: {', '.join(which)}." for kind, which in equal.items()]
    return [*lines, "", " ".join(ends)]


def main() -> int:
    """Parse the command line, merge, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("files", type=Path, nargs="+", help="what the suite wrote, oldest first")
    parser.add_argument("--write", type=Path, help="where the merged entries go")
    parser.add_argument("--table", action="store_true", help="print tables in Markdown, too")
    options = parser.parse_args()
    entries: dict[str, dict[str, Any]] = {}
    for file in options.files:
        entries = merged(entries, json.loads(file.read_text()))
    by_place = {place_of(name): entry for name, entry in entries.items()}
    for group in GROUPS:
        tables = ["", *table_of(group, by_place)] if options.table else []
        print("\n".join([*lines_of(group, by_place), *tables]))
    if options.write:
        kept = ("kind", "verdict", "device", "date", "latency_us", "baseline_us", "bound_us",
                "interval", "normal_inputs", "step", "torch_compile", "with_compile",
                "seconds", "source")  # fmt: skip
        short = {
            name: {key: entry[key] for key in kept if entry.get(key) is not None}
            for name, entry in sorted(entries.items(), key=lambda item: place_of(item[0]))
        }
        options.write.write_text(json.dumps(short, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
