"""The options of `tune`, as its commands share them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="What to tune: a YAML file.")
]
ModuleOption = Annotated[
    Path | None,
    typer.Option("--module", help="A file with a Model; `tune my_module.py` is short for it."),
]
ResumeOption = Annotated[
    Path | None, typer.Option("--resume", help="Go on with this run where it stopped.")
]
TrialsOption = Annotated[str | None, typer.Option(help="At most this many trials.")]
TimeoutOption = Annotated[str | None, typer.Option(help="Search for at most this long, e.g. 10m.")]
SeedOption = Annotated[str | None, typer.Option(help="Seed of the sampler and the probes.")]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", help="Devices of a cluster: tls://HOST:PORT.")
]
CertificateOption = Annotated[
    Path | None,
    typer.Option("--certificate", help="Of the cluster; in the user's cache if none."),
]
DevicesOption = Annotated[
    str | None,
    typer.Option("--devices", help="Several of this host side by side: all, or 0,1."),
]
AccuracyOption = Annotated[
    str | None, typer.Option(help="float32, tf32, pytorch or RTOL,ATOL, e.g. 1e-4,1e-4.")
]
WorkloadsOption = Annotated[
    str | None,
    typer.Option(
        "--workloads",
        help="The data that the file is for: given, ordinary (both if none given), offset, "
        "heavy_tailed, sparse, file:PATH of tensors. Its speed-up is the least over them.",
    ),
]
ClaimedOption = Annotated[
    str | None,
    typer.Option(
        "--workloads",
        help="Of the certificate's, those to race again, with file:PATH where tensors are; all if "
        "none, with files of tensors beside FILE.",
    ),
]
SamplerOption = Annotated[str | None, typer.Option(help="surrogate, tpe, random or grid.")]
SamplersOption = Annotated[
    list[str] | None, typer.Option("--sampler", help="Repeat it to compare several; tpe if none.")
]
SourceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_OR_CACHE",
        help="A run folder, a Kernel Tuner cache or a T4 file (.json, .json.gz).",
    ),
]
TaskOption = Annotated[str | None, typer.Option("--task", help="Its name, as --dry-run shows it.")]
FolderOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="A new folder; FILE_by_hand if none."),
]
ModeOption = Annotated[
    str | None,
    typer.Option("--mode", help="train or eval; as the constructor leaves the module if none."),
]
BatchOption = Annotated[
    str | None,
    typer.Option(
        "--batch", help="Rows of the inputs; several, as 64,1024, are tuned for one file."
    ),
]
MatchOption = Annotated[
    str | None,
    typer.Option(
        "--match", help="Operators written by hand that a module is tuned by: any, none."
    ),
]
RewritesOption = Annotated[
    str | None,
    typer.Option("--rewrites", help="Of a module's graph: exact (if none given), none."),
]
TimeOption = Annotated[
    str | None, typer.Option(help="For everything, until the verified file, e.g. 5m.")
]
EffortOption = Annotated[str | None, typer.Option(help="quick, normal or thorough.")]
RunsDirOption = Annotated[
    Path,
    typer.Option("--runs-dir", file_okay=False, help="Where run folders are made."),
]
ExportOption = Annotated[
    Path | None,
    typer.Option("--export", help="Also write trials (.csv, .parquet) or the timeline (.json)."),
]
CountersOption = Annotated[
    bool,
    typer.Option("--counters", help="Count one call with Nsight Compute first (an NVIDIA GPU)."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Validate, count, render; search nothing.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Search also where nothing is to be gained.")
]
RecordOption = Annotated[
    bool,
    typer.Option(
        "--record",
        help="For `tune replay`: measure slow candidates to the end, too; verify nothing.",
    ),
]
AnyMachineOption = Annotated[
    bool, typer.Option(help="With --resume: on another device or toolchain, too.")
]
RunArgument = Annotated[Path, typer.Argument(help="A run folder, such as runs/20260101-...")]


def place_of_file(words: Sequence[str], app: typer.Typer) -> int:
    """Return where the first word stands that is no option, nor the value of one; 0 if nowhere."""
    valued: set[str] = set()
    if words[1:2] and words[1].startswith("-"):
        parameters = typer.main.get_command(app).params
        valued = {name for p in parameters if not getattr(p, "is_flag", False) for name in p.opts}
    places = (at for at, word in enumerate(words) if at and not word.startswith("-"))
    return next((at for at in places if words[at - 1] not in valued), 0)


__all__ = [
    *sorted(name for name in dir() if name.endswith(("Option", "Argument"))),
    "place_of_file",
]
