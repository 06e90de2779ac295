r"""What several GPUs of one host bring: trials a second, times that compare, verdicts that agree.

    python -m benchmarks.several_devices --config search_spaces/layer_norm.yaml \
        [--timeout 40s] [--devices 0,1] [--races 20] [--json OUT]

Three searches that ask the same questions (random, one seed): one fills the cache of builds, then
one on the first device alone, then one on all. Times of a candidate that both have measured are
compared as the search of all devices has them, in terms of its leading device. The files of the
best candidates are raced on each device, on all at the same time, and their verdicts compared.
Nothing is verified: that does not depend on the number of devices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.repeatability import interval_of
from tuner.config.run_config import config_of
from tuner.evaluate.contender import Contender
from tuner.evaluate.racing import Racer
from tuner.planning.planning import plan
from tuner.run import Run, open_run
from tuner.trial import Interval, Trial
from tuner.verification.exporting import export_of
from tuner.verification.ranking import ranked_trials

TRIALS = 100_000  # never reached: the time is
FILES_A_RACE = 5
SETS, SECONDS = 3, 0.7  # of processes in a race; of samples of each file in one of them


def searched(config: str, devices: str, timeout: str, folder: Path) -> Run:
    """Search on these devices; nothing is verified."""
    command = [sys.executable, "-m", "tuner", "--config", config, "--devices", devices]
    command += ["--sampler", "random", "--seed", "0", "--trials", str(TRIALS), "--record"]
    command += ["--timeout", timeout, "--runs-dir", str(folder / devices)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"error: {' '.join(command)}: exit status {done.returncode}\n{done.stderr}"
        )
    return open_run(max((folder / devices).iterdir()))


def per_second(trials: Sequence[Trial]) -> float:
    """Return the trials a second, from the first that ended to the last."""
    ended = [trial.elapsed_s for trial in trials]
    return (len(ended) - 1) / (max(ended) - min(ended))


def times_us(trials: Sequence[Trial]) -> dict[str, tuple[str, float]]:
    """Return by candidate the device and the time, in terms of the leading device."""
    return {
        trial.candidate_key: (trial.outcome.device, trial.outcome.latency_us)
        for trial in trials
        if trial.outcome.latency_us is not None and trial.outcome.same_as is None
    }


def compared(alone: Sequence[Trial], together: Sequence[Trial]) -> dict[str, Any]:
    """Return by device how its times compare with those that one device measured alone."""
    own, ratios = times_us(alone), dict[str, list[float]]()
    for key, (device, latency_us) in times_us(together).items():
        if key in own:
            ratios.setdefault(device, []).append(latency_us / own[key][1])
    return {
        device: {
            "candidates": len(found), "median": statistics.median(found),
            "within_1_percent": sum(abs(ratio - 1) <= 0.01 for ratio in found) / len(found),
        }
        for device, found in sorted(ratios.items())
    }  # fmt: skip


def raced(run: Run, device: str, trials: Sequence[Trial], folder: Path) -> list[Interval]:
    """Race the files of these trials on one device, a few at a time."""
    planned = plan(config_of(run).model_copy(update={"device": device}))
    toolchain, found = planned.find_toolchain(), list[Interval]()
    racer = Racer(planned.spec)
    for first in range(0, len(trials), FILES_A_RACE):
        files = []
        for trial in trials[first : first + FILES_A_RACE]:
            path = folder / f"{device.replace(':', '_')}_trial_{trial.number}.py"
            export = export_of(planned, toolchain, trial, path, run.path)
            path.write_text(export.text_of("unverified: timed alone", None, ()))
            files.append(Contender.of_file(path, is_deterministic=export.is_deterministic))
        race = racer.race(files, num_processes=SETS, seconds=SECONDS)
        found += [interval_of(race, 0, lane) for lane in range(1, len(files) + 1)]
    return found


def main() -> int:
    """Parse the command line, search and race, print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--timeout", default="40s", help="of each search")
    parser.add_argument("--races", type=int, default=20, help="files that are raced")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    devices = options.devices.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        searched(options.config, options.devices, options.timeout, folder / "cache")
        alone = searched(options.config, devices[0], options.timeout, folder).trials()
        run = searched(options.config, options.devices, options.timeout, folder)
        together = run.trials()
        rates = [per_second(alone), per_second(together)]
        print(
            f"trials a second: {rates[0]:.2f} on one device, {rates[1]:.2f} on {len(devices)}: "
            f"{rates[1] / rates[0]:.2f} times",
            flush=True,
        )
        times = compared(alone, together)
        for device, each in times.items():
            print(
                f"{device}: {each['candidates']} candidates that {devices[0]} had alone: "
                f"{each['median']:.4f} of the time (median), "
                f"{100 * each['within_1_percent']:.0f} % within 1 %",
                flush=True,
            )
        best = ranked_trials(together)[: options.races]
        with ThreadPoolExecutor(len(devices)) as pool:
            every = [pool.submit(raced, run, f"cuda:{each}", best, folder) for each in devices]
            races = [each.result() for each in every]
    first, *others = races
    verdicts = [[interval.verdict for interval in race] for race in races]
    agree = sum(len(set(each)) == 1 for each in zip(*verdicts, strict=True))
    off = [
        abs(mine.speedup / theirs.speedup - 1)
        for race in others
        for mine, theirs in zip(race, first, strict=True)
    ]
    print(
        f"races of {len(best)} files on each device: {agree} with the same verdict on all; "
        f"speed-ups differ by {100 * statistics.median(off):.2f} % (median), "
        f"{100 * max(off):.2f} % at most"
    )
    if options.json:
        record = {
            "trials_per_s": rates, "times": times, "verdicts": verdicts,
            "speedups": [[interval.speedup for interval in race] for race in races],
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
