"""The exported file beside torch.compile, where the config asks for that."""

from __future__ import annotations

from pathlib import Path

from tuner.errors import WorkerError
from tuner.evaluate.contender import Contender
from tuner.evaluate.race import compared_with_compiled
from tuner.evaluate.racing import Racer
from tuner.observing import Observer
from tuner.planning import Planned
from tuner.schedule import Schedule
from tuner.trial import Compiled
from tuner.wording import one_line

__all__ = ["beside_compiled"]


def beside_compiled(
    planned: Planned, path: Path, schedule: Schedule, observer: Observer
) -> Compiled | None:
    """Race a verified file with the reference as torch.compile makes it; None if nobody asked."""
    mode = planned.config.measure.torch_compile
    if mode is None:
        return None
    observer.on_stage(f"racing the exported file and torch.compile ({mode})")
    file = Contender.of_file(path, is_deterministic=False)
    rival = Contender.of_compiled(planned.spec, mode)
    try:
        race = Racer(planned.spec).race(
            [file, rival], num_processes=schedule.num_processes, seconds=schedule.samples_s
        )
    except WorkerError as error:  # the file was verified already, and stays so
        return Compiled(mode, error=one_line(str(error)))
    return compared_with_compiled(mode, race)
