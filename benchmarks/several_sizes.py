"""What a file of several tuned sizes costs and misses: its choice of a kernel, sizes never tuned.

    python -m benchmarks.several_sizes dispatch FILE --reference REF [--rows 1,64]
    python -m benchmarks.several_sizes unseen RUN [--rows 3,48,...] [--timeout 30s] [--trials 60]

`dispatch` times calls of the module by the host's clock, as it is and with the operator of the
kernel in place of the choice, in turns: the difference is what the choice takes.

`unseen` searches each further number of rows anew, and times the run's file, the file of that
search and PyTorch in turns, on cold caches. The regret is how much longer the run's file takes
than the faster one of the other two. RUN is the last run of several sizes; numbers of rows are
twelve from half its smallest to twice its largest size, none of them tuned. What was searched
lies in a folder beside RUN and is not verified.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.in_use import LEAST_ROUNDS, ROUNDS, SLOW_S, cold_timer, made
from tuner.capture.modules.rows_text import ROWS_NAME
from tuner.config.quantities import parse_duration, parse_rows
from tuner.config.run_config import RunConfig, config_of
from tuner.evaluate.exposed import ExposedTimer
from tuner.evaluate.measure import interleave
from tuner.evaluate.modules import imported
from tuner.evaluate.timers import Call
from tuner.planning.planning import Planned, plan
from tuner.problem.accuracy import math_mode
from tuner.problem.draws import seed_of_inputs
from tuner.problem.reference import load_problem
from tuner.run import Run, open_run
from tuner.session import tuning
from tuner.verification.exporting import export_of

NUM_UNSEEN = 12
CALLS, TURNS = 50, 200  # of a module in a row, and how often each has its turn
SEED = 3
MORE_ROUNDS = 3  # times those of `in_use`: a few per cent are looked for


def dispatched(file: Path, reference: Path, rows: list[int], device: str) -> list[dict[str, Any]]:
    """Return what the choice of a kernel takes at each number of rows, in us."""
    module: Any = imported(file)
    problem = load_problem(reference)
    model = made(module, problem.init_inputs(SEED), device)
    setattr(module, ROWS_NAME, None)  # kernels at any number of rows
    chosen, found = module.fused_op, []
    for number in rows:
        inputs = problem.make_inputs(seed_of_inputs(SEED), batch=number, device=device)
        kernel = module.kernel_for(number, "call")
        plain = _as_in_a_file_of_one(module._OP_BY_KERNEL[kernel])

        def call(operator: Callable[..., Any], _: int, inputs: list[Any] = inputs) -> None:
            module.fused_op = operator
            model(*inputs)

        timer = ExposedTimer(device, CALLS)
        calls = [partial(call, chosen), partial(call, plain)]
        with torch.no_grad():
            with_it, without = interleave(calls, timer, TURNS)
        choice_us = [a - b for a, b in zip(with_it, without, strict=True)]
        found.append(
            {
                "num_rows": number, "kernel": kernel + 1,
                "call_us": statistics.median(with_it), "without_us": statistics.median(without),
                "choice_us": statistics.median(choice_us),
            }
        )  # fmt: skip
    return found


def _as_in_a_file_of_one(operator: Any) -> Callable[..., Any]:
    """Return an operator as a file of one kernel calls it: it gives a tuple."""
    if len(operator.default._schema.returns) > 1:
        return operator  # type: ignore[no-any-return]
    return lambda *args: (operator(*args),)


def unseen_rows(tuned: tuple[int, ...]) -> list[int]:
    """Return twelve numbers of rows that were not tuned, evenly spread by the logarithm."""
    low, high = max(1.0, tuned[0] / 2), 2.0 * tuned[-1]
    steps = (low * (high / low) ** (i / (NUM_UNSEEN - 1)) for i in range(NUM_UNSEEN))
    found: list[int] = []
    for step in steps:
        rows = round(step)
        while rows in (*tuned, *found):
            rows += 1
        found.append(rows)
    return found


def searched(config: RunConfig, rows: int, folder: Path) -> tuple[Planned, Run]:
    """Search one further size; nothing is verified."""
    assert config.listed is not None
    single = config.at(rows).model_copy(update={"listed": None})
    run = tuning.tune(single, runs_dir=folder, verifies=False, overrides={"batch": rows})
    return plan(single), run


def regret_at(planned: Planned, run: Run, file: Path) -> dict[str, Any]:
    """Time PyTorch, the file of several sizes and that of a search of this size, in turns."""
    best = run.best()
    assert best is not None
    path = run.path / "export" / "best.py"
    export = export_of(planned, planned.find_toolchain(), best, path, run.path)
    path.write_text(export.text_of("unverified: timed alone", None, ()))
    spec, device = planned.spec, planned.spec.device
    problem = load_problem(Path(spec.reference), dict(spec.sizes), spec.mode)
    models = [problem.make_model(SEED, device)]
    models += [made(imported(each), problem.init_inputs(SEED), device) for each in (file, path)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
        model.train(models[0].training)
    inputs = problem.make_inputs(seed_of_inputs(SEED), device=device)
    timer = cold_timer(device)
    calls: list[Call] = [partial(_called, model, inputs) for model in models]
    with torch.no_grad(), math_mode(planned.config.accuracy):
        for call in calls:
            call(0)
        is_slow = statistics.median(timer.samples(calls[0], 1)) > SLOW_S * 1e6
        rounds = LEAST_ROUNDS if is_slow else MORE_ROUNDS * ROUNDS[device.partition(":")[0]]
        turns = interleave(calls, timer, rounds)
    pytorch_us, file_us, tuned_us = map(statistics.median, turns)
    # Of each round, so that what disturbs one round counts once.
    ratios = [mine / tuned for _, mine, tuned in zip(*turns, strict=True)]
    best_us = tuned_us if tuned_us <= pytorch_us else pytorch_us
    ratio = statistics.median(ratios) if tuned_us <= pytorch_us else file_us / pytorch_us
    return {
        "num_rows": planned.num_rows, "pytorch_us": pytorch_us, "file_us": file_us,
        "tuned_us": tuned_us, "best_us": best_us, "regret": ratio - 1.0,
    }  # fmt: skip


def _called(model: Any, inputs: list[Any], _: int) -> None:
    model(*inputs)


def unseen(path: Path, rows: list[int], limits: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the regret at each number of rows."""
    run = open_run(path)
    config = config_of(run)
    listed = config.listed
    if listed is None:
        raise SystemExit(f"error: {path}: tuned for one size; expected the last run of several")
    search = config.search.model_copy(update=limits)
    config = config.model_copy(update={"search": search, "time_s": None})
    folder = path.parent / f"{path.name}-unseen"
    found = []
    for number in rows or unseen_rows(listed.values):
        record = regret_at(*searched(config, number, folder), run.export_path)
        found.append(record)
        print(
            f"{number:>8} rows: PyTorch {record['pytorch_us']:.1f} us, file of several "
            f"{record['file_us']:.1f} us, tuned {record['tuned_us']:.1f} us: regret "
            f"{100 * record['regret']:+.1f} %",
            flush=True,
        )
    ratios = [1.0 + record["regret"] for record in found]
    geomean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"worst {100 * (max(ratios) - 1):+.1f} %, geomean {100 * (geomean - 1):+.1f} %")
    return found


def main() -> int:
    """Parse the command line; time, print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    choice = commands.add_parser("dispatch")
    choice.add_argument("file", type=Path)
    choice.add_argument("--reference", type=Path, required=True)
    choice.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    missed = commands.add_parser("unseen")
    missed.add_argument("run", type=Path)
    missed.add_argument("--timeout", default="30s", help="of each search")
    missed.add_argument("--trials", type=int, default=60, help="of each search")
    for command in (choice, missed):
        command.add_argument("--rows", help="as 1,64,1024")
        command.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = parse_rows(options.rows) if options.rows else []
    if options.command == "dispatch":
        found = dispatched(options.file, options.reference, rows or [1, 64], options.device)
        for record in found:
            print(
                f"{record['num_rows']:>8} rows, kernel {record['kernel']}: a call takes "
                f"{record['call_us']:.2f} us, {record['without_us']:.2f} us without the choice: "
                f"{record['choice_us']:+.2f} us"
            )
    else:
        limits = {"trials": options.trials, "timeout_s": parse_duration(options.timeout)}
        found = unseen(options.run, rows, limits)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
