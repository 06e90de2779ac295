"""Why the winner is faster: each of its choices against the best trial that chose otherwise.

Nothing is measured for this. The trials of a search hold for each choice the best one with it and
the best one without it, every other parameter free in both: what the choice is worth where the
rest may make up for it. It is no more than changing it alone would cost if the search looked as
well on both sides, which is seldom so: the counts stand beside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.capture.tasks.half_products import PRODUCTS
from tuner.review.formatting import count_words, ratio_words
from tuner.review.run_data import RunData, correct_trials
from tuner.review.tables import noise_of, parameter_names, speedup_of, value_of, value_words
from tuner.trial import Trial

__all__ = ["Choice", "choices_brief", "choices_of", "choices_words", "unvaried"]

_ABOUT = re.compile(r'about: "([^"]*)"')
NUM_SHOWN = 3  # of the choices, in the sentence
FEW_TRIALS = 20  # of a search, below which all of them say little
FEW = 3  # trials without a choice, below which they say little of it


@dataclass(frozen=True, slots=True)
class Choice:
    """A parameter's value of the winner, and what it is worth.

    `gain` is the speed of the best trial with it over that of the best without it, `other`, which
    has the value `instead`; speeds are over PyTorch as timed just before each. `about` says what
    the choice is, where a captured module's templates say so. `is_noise` says
    that the two differ by less than both scatter. `num_without` correct trials chose otherwise;
    `num_changed` choices of the winner are otherwise in `other`, this one among them.
    """

    name: str
    value: str
    instead: str
    gain: float
    is_noise: bool
    other: int
    num_with: int
    num_without: int
    num_changed: int
    about: str = ""

    @property
    def remark(self) -> str:
        """What makes it less sure; empty where nothing does."""
        if self.is_noise:
            return "within the noise of both"
        if self.num_without < FEW:
            return f"{count_words(self.num_without, 'trial')} without it: little to go by"
        return ""


def choices_of(run_data: RunData) -> list[Choice]:
    """Return what each of the winner's choices is worth, the most first.

    Trials whose template does not have a parameter say nothing of it.
    """
    best = run_data.best
    correct = {t.number: t for t in correct_trials(run_data.trials)}
    speeds = {number: speedup_of(trial, run_data) for number, trial in correct.items()}
    known = [trial for number, trial in correct.items() if speeds[number]]
    if best is None or best.number not in speeds:
        return []

    def speed(trial: Trial) -> float:
        return speeds[trial.number] or 0.0

    found = []
    names = parameter_names([best])
    for name in names:
        value = value_of(best, name)
        having = [trial for trial in known if value_of(trial, name) is not None]
        with_it = [trial for trial in having if value_of(trial, name) == value]
        without = [trial for trial in having if value_of(trial, name) != value]
        if not with_it or not without:
            continue
        one, other = max(with_it, key=speed), max(without, key=speed)
        gain = speed(one) / speed(other)
        found.append(
            Choice(
                name,
                str(value),
                value_words(other, name),
                gain,
                abs(math.log(gain)) <= (noise_of(one) or 0.0) + (noise_of(other) or 0.0),
                other.number,
                len(with_it),
                len(without),
                sum(value_words(best, n) != value_words(other, n) for n in names),
                _about(best, name),
            )
        )
    return sorted(found, key=lambda choice: -choice.gain)


def choices_words(choices: Sequence[Choice]) -> str:
    """Return in one sentence which choices made the winner fast; why not, where none did."""
    if not choices:
        return "The trials do not say: no correct trial chose otherwise in anything."
    sure = _sure(choices)
    if not sure:
        return "No single choice explains it: the trials without each are as fast, or too few."
    parts = [
        f"{c.name}={c.value} is worth {ratio_words(c.gain)} (against {c.instead}, trial {c.other})"
        for c in sure
    ]
    return f"{'; '.join(parts)}.{_unsure_words(choices, sure)}"


def choices_brief(choices: Sequence[Choice], run_data: RunData) -> str:
    """Return the same for the verdict; where no choice explains it, that the trials do not say."""
    sure = _sure(choices)
    number = len(correct_trials(run_data.trials))
    few = _first_words(run_data)
    if number < FEW_TRIALS:
        few += f" Only {count_words(number, 'correct trial')}: little to go by."
    if not sure:
        return f"the trials do not say which choice made it so.{few}"
    parts = [
        f"{c.name}={c.value}{f' ({c.about})' if c.name == 'template' and c.about else ''} "
        f"{'is ' if c is sure[0] else ''}{ratio_words(c.gain)} as fast as with {c.instead}"
        for c in sure
    ]
    more = _unsure_words(choices, sure)
    return f"of this search's trials the best with {', with '.join(parts)}.{more}{few}"


def _first_words(run_data: RunData) -> str:
    """Say that the search found nothing faster than what it tried first, where that is so."""
    best, trials = run_data.best, correct_trials(run_data.trials)
    if best is None or best.number != 0 or len(trials) < 2:
        return ""
    mine = speedup_of(best, run_data) or 0.0
    slower = sum((speedup_of(trial, run_data) or mine) < mine for trial in trials)
    others = len(trials) - 1
    which = f"{others:,} others" if slower == others else f"{slower:,} of {others:,} others"
    return f" The first configuration tried won; {which} were slower."


def _sure(choices: Sequence[Choice]) -> list[Choice]:
    return [choice for choice in choices if choice.gain > 1 and not choice.remark][:NUM_SHOWN]


def _unsure_words(choices: Sequence[Choice], sure: Sequence[Choice]) -> str:
    """Name the choice that seems to matter more than those shown, but that few trials tried."""
    least = min(choice.gain for choice in sure)
    unsure = [c for c in choices if c.gain > least and c.num_without < FEW and not c.is_noise]
    if not unsure:
        return ""
    most = max(unsure, key=lambda choice: choice.gain)
    count = count_words(most.num_without, "trial")
    return (
        f" {most.name}={most.value} may be worth {ratio_words(most.gain)} (against "
        f"{most.instead}), but only {count} chose otherwise."
    )


def unvaried(run_data: RunData, choices: Sequence[Choice]) -> str:
    """Return which of the winner's choices no correct trial made otherwise; empty if all were."""
    if run_data.best is None:
        return ""
    names = {choice.name for choice in choices}
    left = [name for name in parameter_names([run_data.best]) if name not in names]
    number = count_words(len(left), "choice")
    return f"{number} that no correct trial made otherwise: {', '.join(left)}." if left else ""


def _about(trial: Trial, name: str) -> str:
    """Return what a choice is, as the templates of captured modules say that make products."""
    maker = PRODUCTS.get(trial.template)
    if maker is None:
        return ""
    if name == "template":
        return maker.title.removeprefix(", ")
    found = _ABOUT.search(maker.parameters.get(name, ""))
    return found[1] if found else ""
