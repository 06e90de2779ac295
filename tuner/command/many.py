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
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.command import options
from tuner.command.terminal import Interrupted, err, out, print_json
from tuner.errors import InputError, input_errors

if TYPE_CHECKING:
    from tuner.fleet.agent import Service

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
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8786,
    certificates: Annotated[
        Path | None, typer.Option(help="Folder for new certificates; of the user's cache if none.")
    ] = None,
) -> None:
    """Run a cluster's scheduler, with new certificates, until Ctrl-C; its workers end with it."""
    from tuner.fleet.certificates import AGENTS, SCHEDULER, TUNER, cluster_folder, make
    from tuner.fleet.cluster import require_free, serve_scheduler

    folder = certificates or cluster_folder()
    require_free(host, port)  # who listens there needs the certificates that are there
    make(folder)

    def ready(address: str) -> None:
        lines = [
            f"a cluster at {address}",
            f"  on each host, with a copy of {folder / AGENTS} that only you can read:",
            f"    tune worker {address} --devices all --certificate {AGENTS}",
            "    (--builders 32 in place of --devices all lends compilers)",
            "  then:",
            f"    tune --config X.yaml --cluster {address} --certificate {folder / TUNER}",
            "Ctrl-C ends it, and all workers with it",
        ]
        out.print("\n".join(lines), markup=False)

    serve_scheduler(host, port, folder / SCHEDULER, ready)


def worker(
    address: Annotated[str, typer.Argument(help="tls://HOST:PORT, as `cluster start` prints it.")],
    devices: options.DevicesOption = None,
    builders: Annotated[
        int | None, typer.Option(help="Lend so many compilers; no devices, unless they are named.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    certificate: options.CertificateOption = None,
    name: Annotated[
        str | None, typer.Option(help="How the run names this device; by host if none.")
    ] = None,
) -> None:
    """Lend devices of this host to a cluster, or builders, until its scheduler is gone.

    All devices, a process each, if neither is named. Builders compile what the runs of others
    need; they want the compilers and, for C++, the processor that the run has.
    """
    from tuner.config.quantities import parse_device
    from tuner.fleet.certificates import AGENTS, checked_certificate
    from tuner.fleet.chosen import Chosen, chosen_devices

    file = checked_certificate(certificate, AGENTS)
    if builders is not None and builders < 1:
        raise InputError(f"--builders: got {builders}\n  expected: how many compile at a time")
    chosen = Chosen(())
    if devices is not None or builders is None:
        with input_errors():
            chosen = chosen_devices(devices or "all", parse_device(device), {})
    called = name or socket.gethostname()
    if len(chosen.names) + (builders is not None) > 1:
        commands: list[tuple[list[str], Sequence[int] | None]] = []
        for one in chosen.names:
            which = ["--device", "cpu"] if chosen.cores else ["--devices", one.partition(":")[2]]
            rest = ["--certificate", str(file), "--name", f"{called}/{one}"]
            commands.append((["worker", address, *which, *rest], chosen.cores.get(one)))
        if builders is not None:
            rest = ["--builders", str(builders), "--certificate", str(file), "--name", called]
            commands.append((["worker", address, *rest], None))
        raise typer.Exit(_side_by_side(commands))
    if builders is not None:
        _lend(address, file, called, builders, "")
    else:
        lent = chosen.names[0]
        _lend(address, file, name or f"{called}/{lent}", 0, chosen.torch_name(lent))


def _lend(address: str, file: Path, name: str, num_builders: int, device: str) -> None:
    """Be the agent of one device, or of builders."""
    from tuner.fleet.certificates import cluster_folder
    from tuner.fleet.cluster import serve_agent
    from tuner.fleet.compiling import Compiling
    from tuner.fleet.screener import Screener
    from tuner.fleet.wire import Blobs
    from tuner.kernel.cache import default_cache_dir

    full = f"{name}#{secrets.token_hex(2)}"  # unlike that of an earlier one
    folder = cluster_folder() / "blobs"
    env = {"TRITON_CACHE_DIR": str(folder / "triton")}

    def ready() -> None:
        out.print(f"{full}: joined {address}", markup=False)

    def serve(_: str) -> Service:
        if num_builders:
            return Compiling(default_cache_dir(), Blobs(folder), num_builders)
        return Screener(device, env=env)

    serve_agent(address, file, full, serve, folder, ready, num_builders)
    out.print(f"{full}: the scheduler is gone", markup=False)


def _side_by_side(commands: Sequence[tuple[list[str], Sequence[int] | None]]) -> int:
    """Run `tune` several times, each on cores of its own; return the worst exit code."""
    running, usable = [], os.sched_getaffinity(0)
    try:
        for command, cores in commands:
            env = dict(os.environ)
            os.sched_setaffinity(0, usable if cores is None else cores)  # which it takes over
            if cores is not None:
                env["OMP_NUM_THREADS"] = str(len(cores))
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
    workloads: options.WorkloadsOption = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Problems that share a GPU; needs --devices.")
    ] = 1,
    limit: Annotated[
        str | None, typer.Option(help="Of one problem, e.g. 10m, after which the next begins.")
    ] = None,
    runs_dir: options.RunsDirOption = Path("runs"),
    json: options.JsonOption = False,
) -> None:
    """Tune many modules or configs; the same command goes on where it was stopped or killed.

    Each begins on a device of its own; where fewer are left than devices, they share these out.
    With --jobs several share a GPU: one has it alone while it times, others compile meanwhile.
    The folder of the runs gets logs/, exports/, summary.txt and summary.json. Options are those
    of `tune`, for each problem. Exit code 1: some problem ended without a verified file.
    """
    from tuner.command.campaign import Campaign, format_table
    from tuner.command.problems import problems_of
    from tuner.config.quantities import absolute_workloads, parse_device, parse_duration
    from tuner.fleet.chosen import chosen_devices

    if devices is not None and cluster is not None:
        raise InputError("expected --devices of this host, or --cluster, not both")
    with input_errors("--workloads"):
        data = workloads and absolute_workloads(workloads)
    asked = {
        "--time": time, "--effort": effort, "--trials": trials, "--timeout": timeout,
        "--device": device, "--accuracy": accuracy,
        "--workloads": data,
        "--cluster": cluster,
        "--certificate": certificate and str(certificate),
    }  # fmt: skip
    given = [word for option, value in asked.items() if value for word in (option, value)]
    with input_errors():
        chosen = chosen_devices(devices, parse_device(device or "auto"), {}) if devices else None
    with input_errors("--limit"):
        limit_s = None if limit is None else parse_duration(limit)
    if jobs > 1 and (chosen is None or chosen.cores):
        got = f"--jobs {jobs} on a CPU" if chosen else f"--jobs {jobs} without --devices"
        raise InputError(
            f"{got}\n  expected: GPUs to share, such as --devices all; a CPU's times would "
            "disturb each other"
        )
    console = err if json else out
    work = Campaign(
        problems_of(problems),
        runs_dir.resolve(),
        given,
        chosen,
        jobs,
        limit_s,
        lambda words: console.print(words, markup=False),
    )
    try:
        states = work.work()
    except KeyboardInterrupt:
        raise Interrupted("interrupted\n  next: the same command goes on") from None
    if json:
        print_json(states)
    else:
        out.print(format_table(states), markup=False)
        out.print(f"exports: {runs_dir / 'exports'}", markup=False)
    if any(state.status not in ("done", "nothing to gain") for state in states.values()):
        raise typer.Exit(1)
