"""The reference as torch.compile makes it, in the races of a session's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock, Thread

from tuner.errors import TunerError, WorkerError
from tuner.evaluate.contender import Contender
from tuner.evaluate.race import Race, compared_with_compiled
from tuner.evaluate.race_sets import RaceSets, Ready
from tuner.evaluate.racing import Racer
from tuner.planning.observing import Observer
from tuner.planning.planning import Planned
from tuner.planning.schedule import Schedule
from tuner.trial import Compiled, Finalist
from tuner.verification.ranking import blamed
from tuner.wording import one_line

__all__ = ["Rival"]


class Rival:
    """The reference as torch.compile makes it, in the races of a session's files.

    Where nobody asked for it, files race alone.
    """

    def __init__(self, planned: Planned, observer: Observer) -> None:
        self._spec, self._observer = planned.spec, observer
        self._mode = planned.config.measure.torch_compile
        self._error = ""
        self._found: dict[tuple[str, int], Compiled] = {}
        self._compiling: Thread | None = None
        self._kept, self._is_closed, self._lock = ExitStack(), False, Lock()
        self.ready = Ready()  # for a `Racer`: those that compiled it, and sets of files

    def get_ready(self, num_processes: int) -> None:
        """Compile it for so many sets of processes while files are checked; does not wait."""
        if self._mode is None:
            return
        contender, sets = Contender.of_compiled(self._spec, self._mode), RaceSets(self._spec)

        def compile_it() -> None:
            with suppress(TunerError), ExitStack() as stack:  # it fails in the race, which says so
                workers = sets.kept_ready(stack, contender, num_processes)
                with self._lock:
                    if not self._is_closed:
                        self.ready.loaded[contender.name] = workers
                        self._kept = stack.pop_all()

        self._compiling = Thread(target=compile_it, name=contender.name, daemon=True)
        self._compiling.start()

    def open_sets(self, schedule: Schedule) -> None:
        """Let the processes of a race of files, and those of the profile behind it, open a GPU.

        It is done once, while files are checked, which disturbs nothing that is timed.
        """
        self.ready.open_sets(self._spec, schedule.num_finalists, schedule.num_processes + 1)

    def close(self) -> None:
        """End what was kept ready, now or once it is compiled."""
        with self._lock:
            self._is_closed = True
        self._kept.close()
        self.ready.close()

    def beside(self, files: Sequence[Contender], race: Callable[[list[Contender]], Race]) -> Race:
        """Race files, with it behind them where it is wanted and can be had."""
        found = self._joined(files, race)
        return race([*files]) if found is None else found

    def _joined(
        self, files: Sequence[Contender], race: Callable[[list[Contender]], Race]
    ) -> Race | None:
        if self._mode is None or self._error:
            return None
        if self._compiling is not None:
            self._compiling.join()
        contender = Contender.of_compiled(self._spec, self._mode)
        try:
            found = race([*files, contender])
        except WorkerError as error:
            _, reason = blamed(error, [contender.name])
            self._error = one_line(reason)
            self._observer.on_stage(f"{contender.name} can't be raced: {self._error}")
            return None
        found.compiled = len(files) + 1
        return found

    def keep(self, entry: Finalist, race: Race, lane: int) -> None:
        """Note how it did in the race of an entry, in whose lane that is."""
        if self._mode is not None and race.compiled:
            found = compared_with_compiled(self._mode, race, lane)
            self._found[entry.race_key, entry.trial] = found

    def result(self, entry: Finalist, path: Path, schedule: Schedule) -> Compiled | None:
        """Return how it does beside a verified file; None if nobody asked.

        A file that did not race with it, as one that an earlier session raced, does so now.
        """
        if self._mode is None:
            return None
        if not self._error and (entry.race_key, entry.trial) not in self._found:
            self._observer.on_stage(f"racing the exported file and torch.compile ({self._mode})")
            file = Contender.of_file(path, is_deterministic=False)

            def race(contenders: list[Contender]) -> Race:
                return Racer(self._spec).race(
                    contenders, num_processes=schedule.num_processes, seconds=schedule.samples_s
                )

            try:
                found = self._joined([file], race)
            except WorkerError as error:  # the file was verified already, and stays so
                found, self._error = None, one_line(str(error))
            if found is not None:
                self.keep(entry, found, 1)
        none = Compiled(self._mode, error=self._error)
        return self._found.get((entry.race_key, entry.trial), none)
