"""What is exported in place of the winner's own file, each verified like any.

PyTorch's own modules where the winner is slower, the winner with PyTorch's steps of training where
its own are slower, and one file of several tuned sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tuner.by_batch import NO_ROWS, WORST, without_steps_in
from tuner.evaluate.job_spec import JobSpec
from tuner.kernel.toolchain import Toolchain
from tuner.planning.observing import Observer
from tuner.planning.planning import Planned
from tuner.run import Run
from tuner.trial import Finalist, Trial
from tuner.verification.exporting import ExportFile, export_of, fallback_of
from tuner.verification.ranking import are_of_gradients, is_behind, remarks_on
from tuner.verification.together import Tuned, file_of
from tuner.wording import one_line

__all__ = ["Instead"]

NEARLY = 1.15  # times as long: a step's kernel may make up for that


class Export(Protocol):
    """Verifies a file and puts it under its name, or beside it as rejected.

    With problems by name the file is raced `at` these as well.
    """

    def __call__(
        self, file: ExportFile, at: Mapping[str, JobSpec], *, is_of_pytorch: bool = False
    ) -> Finalist: ...


@dataclass(frozen=True, slots=True)
class Instead:
    """Exports something else than the winner's own file."""

    planned: Planned
    toolchain: Toolchain
    run: Run
    observer: Observer
    export: Export

    def settled(
        self, trial: Trial, winner: Finalist, accept: Callable[[int | None], None]
    ) -> tuple[Finalist, bool, list[str]]:
        """Export the winner, or what is faster: with PyTorch's steps, or PyTorch's own modules.

        `accept` puts the files that were raced under their names, that of a trial, if one is
        named, under the usual one. Also returns whether it is PyTorch's own modules, and notes.
        """
        notes: list[str] = []
        if not self.is_wanted(winner):
            accept(trial.number)
            winner, notes = self.without_slow_steps(trial, winner)
        if not self.is_wanted(winner):  # raced once more where its steps are others now
            return winner, False, [*notes, *remarks_on(winner, self.planned.family.model_new)]
        accept(None)
        exported, more = self.pytorch(winner)
        if notes and not exported.check.is_accepted:  # the winner has the usual name by now
            return winner, False, [*notes, *more]
        return exported, True, [*notes, *more]

    @staticmethod
    def is_wanted(winner: Finalist) -> bool:
        """Whether a winner is slower than PyTorch, or seems to be, as steps of training may.

        Also where the race, of few processes, leaves it open, and turns in one process did not.
        """
        known, least = winner.by_batch, winner.least
        if is_behind(least):
            return True
        if known is None or least is None or least.speedup >= WORST:
            return False
        at_tuned = [at for at in known.measured if at.num_rows == known.tuned_rows]
        return any(
            at.is_lost for at in at_tuned if at.way == "call" and not (at.is_idle or at.data)
        )

    def pytorch(self, slower: Finalist) -> tuple[Finalist, list[str]]:
        """Export the reference's own modules in place of a winner that is slower, or seems so.

        The winner was the best of all raced, a template around PyTorch's own product included
        where the space has one.
        """
        assert slower.least is not None
        self.observer.on_stage("slower than PyTorch: exporting PyTorch's own modules instead")
        note = (
            f"no kernel is as fast as PyTorch, the best one is at {slower.least_words}; it is "
            f"in trial_{slower.trial}.py"
        )
        file = fallback_of(self.planned, slower, self.run.export_path, self.run.path)
        exported = self.export(file, {}, is_of_pytorch=True)
        if not exported.check.is_accepted:  # the reference's calls differ from each other, say
            note = f"{note}; PyTorch's own modules were rejected: {exported.check.reason}"
        return exported, [note]

    def with_pytorchs_steps(self, rejected: Sequence[Finalist]) -> Planned | None:
        """Return the plan whose files leave steps of training to the reference.

        None where they do already, or where none was rejected for its gradients.
        """
        planned, said = self.planned.with_pytorchs_steps, self.words_of(rejected)
        if planned is None or not said:
            return None
        self.observer.on_stage(f"{said[0]}: files with PyTorch's own are next")
        return planned

    def worth_a_check(self, left: list[Trial], trial: Trial, rejected: Finalist) -> list[Trial]:
        """Return whose files are checked behind a rejected one: not much slower ones for a step.

        Where a gradient alone was wrong, its forward with PyTorch's steps is worth more.
        """
        has_choice = self.planned.with_pytorchs_steps is not None
        if not has_choice or not are_of_gradients([rejected.check]):
            return left
        most_us = NEARLY * (trial.outcome.ranked_us or 0.0)
        return [other for other in left if (other.outcome.ranked_us or 0.0) <= most_us]

    @staticmethod
    def of_forward(entries: Mapping[int, Finalist]) -> dict[int, Finalist]:
        """Return the entries whose files are rejected with PyTorch's steps as well."""
        return {n: e for n, e in entries.items() if not are_of_gradients([e.check])}

    @staticmethod
    def words_of(rejected: Sequence[Finalist]) -> list[str]:
        """Say why steps of training are PyTorch's; nothing where no gradient was wrong."""
        reasons = [e.check.reason for e in rejected if are_of_gradients([e.check])]
        return [
            f"steps of training of our own were rejected ({one_line(reason, 200)})"
            for reason in reasons[:1]
        ]

    def without_slow_steps(self, trial: Trial, raced: Finalist) -> tuple[Finalist, list[str]]:
        """Export the winner with steps of training that are the reference's, where its are slower.

        It stays as it is where they are not, and where it has no such choice.
        """
        planned, known = self.planned.with_pytorchs_steps, raced.by_batch
        has_choice = planned is not None or known is not None
        are_pytorchs = known is not None and known.rows.get("step") == NO_ROWS
        if raced.step is None or not is_behind(raced.step) or are_pytorchs or not has_choice:
            return raced, []
        by_batch = known and without_steps_in(known)
        path, run_path = self.run.export_path, self.run.path
        file = export_of(planned or self.planned, self.toolchain, trial, path, run_path, by_batch)
        what = f"its steps of training were slower than PyTorch's, {raced.step.speedup:.2f}x"
        self.observer.on_stage(f"{what}: exporting it with PyTorch's own")
        exported = self.export(file, {})
        if not exported.check.is_accepted:
            return raced, [f"{what}; with PyTorch's own it is rejected: {exported.check.reason}"]
        return exported, [f"{what}; it takes PyTorch's own"]

    def together(self, tuned: Sequence[Tuned]) -> tuple[Finalist | None, list[str]]:
        """Export one file of several sizes; None where none has a kernel, or it is rejected.

        Sizes at which the file is slower than PyTorch in the race are PyTorch's in the next one,
        and so are steps of training.
        """
        path, run_path = self.run.export_path, self.run.path
        specs = {one.words: one.planned.spec for one in tuned}
        has_steps, notes = True, list[str]()
        while any(one.trial for one in tuned):
            file = file_of(tuned, self.toolchain, path, run_path, has_steps=has_steps)
            assert file.kernels is not None
            num = file.kernels.num_kernels
            what = f"one file of {len(tuned)} sizes, with {num} kernel{'s' if num > 1 else ''}"
            self.observer.on_stage(f"{what}: exporting it")
            exported = self.export(file, specs)
            if not exported.check.is_accepted:
                return None, [*notes, f"{what}, is rejected: {exported.check.reason}"]
            races = exported.at_sizes.items()
            slower = {words for words, race in races if race.verdict == "slower"}
            lost = [one.words for one in tuned if one.words in slower and one.trial]
            steps = [words for words, race in races if is_behind(race.step)]
            takes_steps = has_steps and "step" in file.ways
            if lost:
                why = f"slower than PyTorch at {', '.join(lost)}, which are PyTorch's then"
                tuned = [replace(o, trial=None) if o.words in lost else o for o in tuned]
            elif steps and takes_steps and tuned[-1].planned.with_pytorchs_steps:
                why = f"steps of training are slower at {', '.join(steps)}, all are PyTorch's then"
                has_steps = False
            else:
                return exported, [*notes, f"{what}: {_speeds(exported)}"]
            self.observer.on_stage(why)
            notes.append(why)
        return None, notes


def _speeds(exported: Finalist) -> str:
    races = exported.at_sizes.items()
    return ", ".join(
        f"{race.least.speedup:.2f}x at {words}" for words, race in races if race.least
    )
