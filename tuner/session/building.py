"""What compiles the candidates of a run, begun while it is not known yet whether there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tuner.by_batch import batches_of
from tuner.capture.modules.rows_text import has_rows
from tuner.fleet.builders import FleetBuilders
from tuner.fleet.fleet import Fleet
from tuner.kernel.builder import BUILD_TIMEOUT_S, Builder
from tuner.kernel.cache import default_cache_dir
from tuner.kernel.toolchain import Toolchain
from tuner.machine.host import has_many_cores
from tuner.machine.platforms import is_gpu
from tuner.planning.planning import Planned
from tuner.problem.reference import ROWS
from tuner.trial import Params, Trial

__all__ = ["FewerRows", "begin", "builder_of"]

NUM_FEWER = 6  # numbers of rows below the tuned one: few kernels win at a hundredth of it
BESIDE = 2  # compilers for that
FEWER_S = 20.0  # for a file, which is timed there a second later, and raced after its check


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
    """Begin to compile what a search starts from, on a GPU's host with many cores.

    For a module a first candidate takes some ten seconds to compile, and what could be gained is
    measured before the search. PyTorch's calls there, which only say whether it is worth one,
    share the host with compilers of lower priority; what is not feasible by that was compiled for
    nothing.
    """
    if is_gpu(planned.device.kind) and has_many_cores():
        for params in starts:
            builder.submit(planned.family.render(params, planned.facts))


class FewerRows:
    """What compiles kernels for fewer rows than a problem has; nothing without cores for it.

    A file is timed there while it has the GPU alone, where others wait for what is compiled.
    """

    def __init__(self, planned: Planned, toolchain: Toolchain) -> None:
        self._planned, self._builder = planned, None
        rows = planned.sizes.get(ROWS, 1)
        fewer = [number for number in batches_of(rows) if number < rows][: -1 - NUM_FEWER : -1]
        is_timed = bool(fewer) and has_rows(planned.family.model_new)
        if is_timed and is_gpu(planned.device.kind) and has_many_cores():
            sizes = [{**planned.family.op.extra_sizes, **planned.sizes, ROWS: n} for n in fewer]
            self._builder = Builder(
                toolchain, default_cache_dir(), num_workers=BESIDE, timeout_s=FEWER_S,
                triton_sizes=sizes,
            )  # fmt: skip

    def begin(self, trials: Sequence[Trial]) -> None:
        """Begin to compile what these trials' files need; does not wait."""
        if self._builder is not None:
            family, facts = self._planned.family, self._planned.facts
            for trial in trials:
                self._builder.submit(family.render(trial.params, facts))

    def close(self) -> None:
        """End what compiles."""
        if self._builder is not None:
            self._builder.close()
