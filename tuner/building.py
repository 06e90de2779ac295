"""What compiles the candidates of a run, begun while it is not known yet whether there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tuner.fleet.builders import FleetBuilders
from tuner.fleet.fleet import Fleet
from tuner.kernel.builder import BUILD_TIMEOUT_S, Builder
from tuner.kernel.cache import default_cache_dir
from tuner.kernel.toolchain import Toolchain
from tuner.machine.host import has_many_cores
from tuner.machine.platforms import is_gpu
from tuner.planning import Planned
from tuner.trial import Params

__all__ = ["begin", "builder_of"]


def builder_of(
    planned: Planned,
    toolchain: Toolchain,
    fleet: Fleet | None = None,
    run_name: str = "",
    on_change: Callable[[str, str], None] = lambda device, words: None,
) -> Builder:
    """Return the compilers of a run, whom the caller closes.

    Args:
        planned: for whose device and sizes they compile.
        toolchain: of this host.
        fleet: other hosts that compile as well, for the run of that name.
        run_name: of the run's folder.
        on_change: what becomes of these is reported to it, from a thread.
    """
    further = planned.family.op.extra_sizes
    sizes = [{**further, **s} for s in planned.screening_sizes]
    elsewhere = None if fleet is None else FleetBuilders(
        fleet, run_name, toolchain, planned.languages,
        triton_sizes=sizes, timeout_s=BUILD_TIMEOUT_S, on_change=on_change,
    )  # fmt: skip
    return Builder(
        toolchain,
        default_cache_dir(),
        num_workers=planned.num_workers,
        elsewhere=elsewhere,
        triton_sizes=sizes,
    )


def begin(builder: Builder, planned: Planned, starts: Sequence[Params]) -> None:
    """Begin to compile what a search starts from, where that disturbs nothing that is timed.

    For a module a first candidate takes some ten seconds to compile, and what could be gained is
    measured before the search. Of what is not feasible by that, a few builds are for nothing.
    """
    if is_gpu(planned.device.kind) and has_many_cores():
        for params in starts:
            builder.submit(planned.family.render(params, planned.facts))
