"""The commands of `tune` for many devices and many modules: cluster, worker, campaign."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tuner import options
from tuner.errors import InputError
from tuner.terminal import Interrupted, err, out, print_json

__all__ = ["campaign", "cluster", "worker"]

cluster = typer.Typer(help="Devices of several hosts for one search.", no_args_is_help=True)


@cluster.callback()
def _cluster() -> None:
    """Devices of several hosts for one search."""


@cluster.command()
def start(
    host: Annotated[
        str, typer.Option(help="Address to listen at; all of this host's if none.")
    ] = "",
    port: Annotated[int, typer.Option(help="0 takes any that is free.")] = 8786,
    certificates: Annotated[
        Path | None, typer.Option(help="Folder for new certificates; of the user's cache if none.")
    ] = None,
) -> None:
    """Run a cluster's scheduler, with new certificates, until Ctrl-C; its workers end with it."""
    from tuner.fleet.certificates import AGENTS, SCHEDULER, TUNER, cluster_folder, make
    from tuner.fleet.cluster import serve_scheduler

    folder = certificates or cluster_folder()
    make(folder)

    def ready(address: str) -> None:
        lines = [
            f"a cluster at {address}",
            f"  on each host, with a copy of {folder / AGENTS} that only you can read:",
            f"    tune worker {address} --devices all --certificate {AGENTS}",
            "  then:",
            f"    tune --config X.yaml --cluster {address} --certificate {folder / TUNER}",
            "Ctrl-C ends it, and all workers with it",
        ]
        out.print("\n".join(lines), markup=False, soft_wrap=True)

    serve_scheduler(host, port, folder / SCHEDULER, ready)


def worker(
    address: Annotated[str, typer.Argument(help="tls://HOST:PORT, as `cluster start` prints it.")],
    devices: options.DevicesOption = "all",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    certificate: options.CertificateOption = None,
    name: Annotated[
        str | None, typer.Option(help="How the run names this device; by host if none.")
    ] = None,
) -> None:
    """Lend devices of this host to a cluster, a process each, until its scheduler is gone."""
    from tuner.config.quantities import parse_device
    from tuner.fleet.certificates import AGENTS, checked_certificate, cluster_folder
    from tuner.fleet.chosen import chosen_devices
    from tuner.fleet.cluster import serve_agent
    from tuner.fleet.screener import Screener

    file = checked_certificate(certificate, AGENTS)
    try:
        chosen = chosen_devices(devices or "all", parse_device(device), {})
    except ValueError as error:
        raise InputError(str(error)) from error
    called = name or socket.gethostname()
    if len(chosen.names) > 1:
        commands = []
        for one in chosen.names:
            which = ["--device", "cpu"] if chosen.cores else ["--devices", one.partition(":")[2]]
            rest = ["--certificate", str(file), "--name", f"{called}/{one}"]
            commands.append((["worker", address, *which, *rest], chosen.cores.get(one)))
        raise typer.Exit(_side_by_side(commands))
    lent = chosen.names[0]
    full = f"{name or f'{called}/{lent}'}#{secrets.token_hex(2)}"  # unlike that of an earlier one
    blobs = cluster_folder() / "blobs"
    env = {"TRITON_CACHE_DIR": str(blobs / "triton")}

    def ready() -> None:
        out.print(f"{full}: joined {address}", markup=False, soft_wrap=True)

    serve_agent(
        address,
        file,
        full,
        lambda _: Screener(chosen.torch_name(lent), env=env),
        blobs,
        ready,
    )
    out.print(f"{full}: the scheduler is gone", markup=False, soft_wrap=True)


def _side_by_side(commands: Sequence[tuple[list[str], Sequence[int] | None]]) -> int:
    """Run `tune` several times, each on cores of its own; return the worst exit code."""
    running = []
    try:
        for command, cores in commands:
            env = dict(os.environ)
            if cores is not None:
                env["OMP_NUM_THREADS"] = str(len(cores))
                os.sched_setaffinity(0, cores)  # which the process takes over
            running.append(subprocess.Popen([sys.executable, "-m", "tuner", *command], env=env))
        return max(process.wait() for process in running)
    finally:
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait()


def campaign(
    problems: Annotated[
        Path,
        typer.Argument(help="A YAML file with a list `problems`, or a folder of modules."),
    ],
    devices: options.DevicesOption = None,
    cluster: options.ClusterOption = None,
    certificate: options.CertificateOption = None,
    time: options.TimeOption = None,
    effort: options.EffortOption = None,
    trials: options.TrialsOption = None,
    timeout: options.TimeoutOption = None,
    device: options.DeviceOption = None,
    accuracy: options.AccuracyOption = None,
    runs_dir: options.RunsDirOption = Path("runs"),
    json: options.JsonOption = False,
) -> None:
    """Tune many modules or configs; the same command goes on where it was stopped or killed.

    Each begins on a device of its own; where fewer are left than devices, they share these out.
    The folder of the runs gets logs/, exports/, summary.txt and summary.json. Options are those
    of `tune`, for each problem. Exit code 1: some problem ended without a verified file.
    """
    from tuner.campaign import Campaign, format_table
    from tuner.config.quantities import parse_device
    from tuner.fleet.chosen import chosen_devices
    from tuner.problems import problems_of

    if devices is not None and cluster is not None:
        raise InputError("expected --devices of this host, or --cluster, not both")
    asked = {
        "--time": time, "--effort": effort, "--trials": trials, "--timeout": timeout,
        "--device": device, "--accuracy": accuracy, "--cluster": cluster,
        "--certificate": certificate and str(certificate),
    }  # fmt: skip
    given = [word for option, value in asked.items() if value for word in (option, value)]
    try:
        chosen = chosen_devices(devices, parse_device(device or "auto"), {}) if devices else None
    except ValueError as error:
        raise InputError(str(error)) from error
    told = err if json else out
    work = Campaign(
        problems_of(problems),
        runs_dir.resolve(),
        given,
        chosen,
        lambda words: told.print(words, markup=False, soft_wrap=True),
    )
    try:
        states = work.work()
    except KeyboardInterrupt:
        raise Interrupted("interrupted\n  next: the same command goes on") from None
    if json:
        print_json(states)
    else:
        out.print(format_table(states), markup=False, soft_wrap=True)
        out.print(f"exports: {runs_dir / 'exports'}", markup=False, soft_wrap=True)
    if any(state.status not in ("done", "nothing to gain") for state in states.values()):
        raise typer.Exit(1)
