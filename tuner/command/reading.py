"""The commands of `tune` that read what runs found: report, runs, compare, replay."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tuner.command import options
from tuner.command.terminal import out, print_either, print_json, print_runs, print_summary
from tuner.errors import InputError

__all__ = ["compare", "replay", "report", "runs"]

DEFAULT_RUNS = Path("runs")


def report(
    run: options.RunArgument,
    export: options.ExportOption = None,
    counters: options.CountersOption = False,
    json: options.JsonOption = False,
) -> None:
    """Write a run's HTML report and print its summary."""
    from tuner.review.exports import write_export
    from tuner.review.report import write_report_of
    from tuner.review.run_data import RunData
    from tuner.review.summary import summary_of
    from tuner.run import open_run

    opened = open_run(run)
    if counters:
        from tuner.session.call_counters import count_calls

        count_calls(opened)
    run_data = RunData.of(opened)
    write_report_of(run_data)
    if export is not None:
        write_export(opened, export)
    print_summary(opened, summary_of(run_data), is_json=json)


def runs(
    folder: Annotated[Path, typer.Argument(help="A folder of runs.")] = DEFAULT_RUNS,
    json: options.JsonOption = False,
) -> None:
    """List the runs of a folder, the latest first."""
    from tuner.review.run_index import RunIndex

    if folder != DEFAULT_RUNS and not folder.is_dir():
        got = "a file" if folder.exists() else "no such folder"
        raise InputError(f"{folder}: {got}\n  next: name a folder of runs, as {DEFAULT_RUNS}")
    found = RunIndex(folder).runs()
    print_either(found, print_runs, folder, is_json=json)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="A B", help="Two or more run folders.")],
    json: options.JsonOption = False,
) -> None:
    """Say which of two or more runs is better, with what confidence, and what differs."""
    from tuner.review.comparing import compare_runs, format_comparison
    from tuner.review.run_data import RunData
    from tuner.run import open_run

    found = compare_runs([RunData.of(open_run(path)) for path in runs])
    if json:
        print_json(found)
    else:
        out.print(format_comparison(found), markup=False)


def replay(
    source: options.SourceArgument,
    sampler: options.SamplersOption = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many searches, a seed each.")] = 5,
    budget: Annotated[int, typer.Option(min=1, help="Evaluations of each search.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="The first search's seed.")] = 0,
    in_flight: Annotated[
        int, typer.Option(min=1, help="Questions asked ahead, as of several devices.")
    ] = 1,
    output: Annotated[
        Path | None, typer.Option("--out", help="Write what was evaluated, in order, here.")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Search a recorded space again, without a device: best found against evaluations."""
    from tuner.search.recorded import read_recording
    from tuner.search.replay import format_replays, replay, replays_to_json
    from tuner.storage import write_whole

    recording = read_recording(source)
    found = [
        replay(recording, name, num_seeds=seeds, seed=seed, budget=budget, in_flight=in_flight)
        for name in dict.fromkeys(sampler or ["tpe"])
    ]
    if output is not None:
        write_whole(output, replays_to_json(found))
    if json:
        sys.stdout.write(replays_to_json(found) + "\n")
    else:
        out.print(format_replays(found), markup=False)
