"""Score samplers on recorded spaces, without a device.

    python -m benchmarks.search --spaces DIR --samplers surrogate,tpe,random --seeds 15 \
        --budget 300 [--warm leave-one-device-out] --json OUT

DIR holds recordings in which every configuration has a time (Kernel Tuner caches, `*.json.gz`).
Prints a line a sampler: the score X300 of `tuner.search.score` (0 is random search, 1 the optimum
at once), the share of searches that came within 1 % of the optimum, the median over spaces of the
median evaluations to 5 % and to 1 %, and the milliseconds of CPU time that a suggestion took. With
`--warm` every search by `surrogate` starts from the complete recordings of the same kernel on the
other devices, and is named `surrogate+warm`; `--wrong` shuffles or negates their times. With
`--until-optimum` a search ends when it has found the optimum, since no figure but the time of a
suggestion depends on what comes after. With `--stop` the sampler is asked every 10 evaluations how
probable it is that the best is within 1 % and 5 % of the optimum, and a line says when it was
first sure (0.9), and how often it was right then.

OUT is `{"runs": {sampler: {space: [search, ...]}}}`, a search being
`{"seed": 0, "order": [key, ...], "ms_per_suggestion": 2.1}` with the configurations' keys in their
file.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from tuner.search.bayesian import JUDGE_EVERY
from tuner.search.optuna_codec import distributions, params_of
from tuner.search.recorded import Recording, read_recording
from tuner.search.samplers import make_sampler
from tuner.search.score import Yardstick
from tuner.search.transfer import Source

SHARES = (0.05, 0.01)  # of the optimum
CONFIDENCE = 0.9


def _search(
    recording: Recording,
    sampler: str,
    seed: int,
    budget: int,
    sources: Sequence[Source],
    judges: bool,
    until_us: float = 0.0,
) -> tuple[list[int], float, list[tuple[int, float, float]]]:
    """Return the config ids that were evaluated, in order, and ms of CPU time per suggestion.

    With `judges` also (evaluations, probability to be within 5 %, within 1 %), every 10. A search
    ends early with a time of at most `until_us`.
    """
    space = recording.space
    study = optuna.create_study(sampler=make_sampler(sampler, space, seed, sources))
    named = distributions(space)
    order, asking_s, sure = [], 0.0, []
    for _ in range(min(budget, space.num_feasible)):
        start_s = time.process_time()
        trial = study.ask(fixed_distributions=named)
        config_id = space.index(params_of(trial, space))
        asking_s += time.process_time() - start_s
        assert config_id is not None
        order.append(config_id)
        latency_us = float(recording.latency_us[config_id])
        if math.isnan(latency_us):
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, latency_us)
        if judges and len(order) % JUDGE_EVERY == 0:
            remaining = study.sampler.remaining(study, SHARES)
            if remaining is not None:
                chances = [round(remaining.within[share], 4) for share in SHARES]
                sure.append((len(order), chances[0], chances[1]))
        if latency_us <= until_us:
            break
    return order, 1000 * asking_s / max(len(order), 1), sure


def _judged(
    recordings: Mapping[str, Recording],
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    budget: int,
) -> str:
    """Say for each share when a search was first sure, and how often it was right."""
    lines = []
    for i, share in enumerate(SHARES, 1):
        when, right = [], []
        for name, recording in recordings.items():
            at = {key: config_id for config_id, key in enumerate(recording.keys)}
            yardstick = Yardstick.of(recording.latency_us, budget)
            for run in runs[name]:
                first = next((row[0] for row in run["sure"] if row[i] >= CONFIDENCE), None)
                when.append(first or budget + 1)
                if first is not None:
                    found = yardstick.evaluations_within(share, [at[key] for key in run["order"]])
                    right.append(found is not None and found <= first)
        lines.append(
            f"    within {share:.0%} with {CONFIDENCE:.0%}: said in {len(right)} of {len(when)} "
            f"searches, after {np.median(when):.0f} evaluations (median), right in "
            f"{np.mean(right) if right else math.nan:.0%}"
        )
    return "\n".join(lines)


def _sources(
    recording: Recording, all_: Sequence[Recording], wrong: str, seed: int
) -> list[Source]:
    """Return the recordings of the same kernel on other devices."""
    rng = np.random.default_rng(seed)
    sources = []
    for other in all_:
        if other.kernel != recording.kernel or other.device == recording.device:
            continue
        latency_us = other.latency_us
        if wrong == "shuffled":
            latency_us = rng.permutation(latency_us)
        elif wrong == "negated":
            latency_us = np.nanmin(latency_us) * np.nanmax(latency_us) / latency_us
        sources.append(Source(other.name, other.space, latency_us))
    return sources


def _summary(
    recordings: Mapping[str, Recording],
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    budget: int,
) -> str:
    scores, solved = [], []
    medians: dict[float, list[float]] = {share: [] for share in SHARES}
    for name, recording in recordings.items():
        at = {key: i for i, key in enumerate(recording.keys)}
        orders = [[at[key] for key in run["order"]] for run in runs[name]]
        yardstick = Yardstick.of(recording.latency_us, budget)
        scores.append(np.mean([yardstick.score(order) for order in orders]))
        for share in SHARES:
            found = [yardstick.evaluations_within(share, order) for order in orders]
            medians[share].append(float(np.median([f or budget + 1 for f in found])))
            if share == SHARES[-1]:
                solved.append(np.mean([f is not None for f in found]))
    ms = [run["ms_per_suggestion"] for by_space in runs.values() for run in by_space]
    e5, e1 = (float(np.median(medians[share])) for share in SHARES)
    return (
        f"X{budget} {np.mean(scores):+.3f}  within 1 % {np.mean(solved):.3f}  "
        f"evaluations to 5 % {e5:.0f}, to 1 % {e1:.0f}  {np.mean(ms):.1f} ms of CPU a suggestion"
    )


def main() -> None:
    """Search all spaces by all samplers; print and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--spaces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--samplers", default="surrogate")
    parser.add_argument("--seeds", type=int, default=15)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--budget", type=int, default=300)
    parser.add_argument("--warm", choices=["leave-one-device-out"])
    parser.add_argument("--wrong", choices=["shuffled", "negated"], default="")
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--until-optimum", action="store_true")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore")  # Optuna's, of its experimental options
    loaded = [read_recording(path) for path in sorted(options.spaces.glob("*.json.gz"))]
    recordings = {recording.name: recording for recording in loaded}
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for sampler in options.samplers.split(","):
        is_warm = options.warm is not None and sampler == "surrogate"
        label = f"{sampler}+warm" if is_warm else sampler
        runs[label] = {name: [] for name in recordings}
        for name, recording in recordings.items():
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                sources = _sources(recording, loaded, options.wrong, seed) if is_warm else []
                until_us = float(np.nanmin(recording.latency_us)) if options.until_optimum else 0.0
                order, ms, sure = _search(
                    recording, sampler, seed, options.budget, sources, options.stop, until_us
                )
                keys = [recording.keys[config_id] for config_id in order]
                entry = {"seed": seed, "order": keys, "ms_per_suggestion": round(ms, 3)}
                entry |= {"sure": sure} if options.stop else {}
                runs[label][name].append(entry)
        print(f"{label:16s} {_summary(recordings, runs[label], options.budget)}", flush=True)
        if options.stop:
            print(_judged(recordings, runs[label], options.budget), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"runs": runs}))


if __name__ == "__main__":
    main()
