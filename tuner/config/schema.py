"""The sections and keys of a config."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
)

from tuner.config.document import shown, value_of
from tuner.config.quantities import (
    parse_accuracy,
    parse_device,
    parse_duration,
    parse_fraction,
    parse_mode,
    parse_workloads,
)
from tuner.errors import ExpressionError
from tuner.problem.accuracy import Accuracy
from tuner.problem.modes import TuneMode
from tuner.problem.timed_data import USUAL
from tuner.space.expression import Expression

__all__ = [
    "Effort",
    "File",
    "MeasureSection",
    "ProblemSection",
    "SearchSection",
    "Section",
    "StopSection",
]

# ---- what a value must be -------------------------------------------------------------------


def _sampler(value: object) -> str:
    if isinstance(value, str):  # which ones there are, the plan knows: they import Optuna
        return value
    raise ValueError(f"expected the name of a sampler, got {shown(value)}")


def _in_flight(value: object) -> int | None:
    if value is None or value == "auto":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1024:
        return value
    raise ValueError(f"expected auto or a whole number from 1 to 1024, got {shown(value)}")


def _params(value: object) -> dict[str, Any]:
    named = value
    if isinstance(value, str):  # as reports and tables print it
        with suppress(ValueError):
            texts = dict(word.split("=", 1) for word in value.split())
            named = {name: value_of(text) for name, text in texts.items()}
    one_value = (bool, int, float, str)
    if isinstance(named, dict) and all(isinstance(each, one_value) for each in named.values()):
        return named
    raise ValueError(
        "expected parameters, each with one value, as {block_m: 64} or as 'block_m=64', "
        f"got {shown(value)}"
    )


def _expression(value: object) -> Expression:
    if isinstance(value, Expression):
        return value
    if not isinstance(value, str):
        raise ValueError(f"expected an expression as text, got {shown(value)}")
    try:
        return Expression.parse(value)
    except ExpressionError as error:
        raise ValueError(str(error)) from None


def _reason(value: object) -> str:
    if isinstance(value, str) and (text := " ".join(value.split())) and text.isprintable():
        return text
    raise ValueError(f"expected the reason as text, got {shown(value)}")


def _op(value: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]+", value):
        return value
    raise ValueError(f"expected the name of a template family, got {shown(value)}")


def _short(limit_s: float) -> Callable[[float], float]:
    def check(seconds: float) -> float:
        if seconds > limit_s:
            raise ValueError(f"expected at most {limit_s:g} s (20ms is 20 ms), got {seconds:g} s")
        return seconds

    return check


# ---- sections -------------------------------------------------------------------------------


class Section(BaseModel):
    """A mapping of the file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class ProblemSection(Section):
    """What to compute; paths are absolute or relative to the working folder, ready to open.

    `mode` is that of the module: as its constructor leaves it, or training or eval mode; `steps`
    are whose a file's steps of training are, where the operator says nothing of gradients.
    """

    op: Annotated[StrictStr, AfterValidator(_op)] = Field(
        description="the name of an operator; or, in its place, module: FILE.py"
    )
    reference: Path | None = None
    sizes: dict[StrictStr, Annotated[StrictInt, Field(gt=0, lt=2**63)]] = {}
    templates: tuple[Path, ...] = ()
    mode: Annotated[TuneMode, BeforeValidator(parse_mode)] = "as_given"
    steps: Literal["derived", "pytorch"] = "derived"


class StopSection(Section):
    """Stop once the best is probably within a share of the optimum (0.02 for 2 %)."""

    within: Annotated[float, BeforeValidator(parse_fraction)] = 0.02
    confidence: Annotated[StrictFloat, Field(ge=0.5, lt=1.0)] = 0.9


class SearchSection(Section):
    """How to search, and for how long; `in_flight` None means that the machine decides.

    `warm_start` are runs and recordings to start from, paths as for the problem's; `first` are
    configurations to try before any other, by some of their parameters.
    """

    sampler: Annotated[str, BeforeValidator(_sampler)] = "surrogate"
    trials: Annotated[StrictInt, Field(ge=1, le=10_000_000)] = 200
    timeout_s: Annotated[float, BeforeValidator(parse_duration)] = Field(
        default=600.0, alias="timeout"
    )
    seed: Annotated[StrictInt, Field(ge=0, lt=2**31)] = 0
    in_flight: Annotated[int | None, BeforeValidator(_in_flight)] = None
    warm_start: tuple[Path, ...] = ()
    first: tuple[Annotated[dict[str, Any], BeforeValidator(_params)], ...] = ()
    stop: StopSection | None = None


Effort = Literal["quick", "normal", "thorough"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class MeasureSection(Section):
    """How long and how exactly to measure; `max_noise` is a share, 0.005 for 0.5 %.

    `stop_slow` ends the samples of a candidate that is clearly slower than the best. With
    `torch_compile`, a mode of PyTorch's compiler, the reference compiled by it is raced with
    the exported file.
    """

    screen_s: Annotated[float, BeforeValidator(parse_duration), AfterValidator(_short(10))] = (
        Field(default=0.02, alias="screen")
    )
    finalists_s: Annotated[float, BeforeValidator(parse_duration), AfterValidator(_short(100))] = (
        Field(default=0.2, alias="finalists")
    )
    max_noise: Annotated[float, BeforeValidator(parse_fraction)] = 0.005
    stop_slow: StrictBool = True
    num_finalists: Annotated[StrictInt, Field(ge=1, le=100)] = 3
    num_processes: Annotated[StrictInt, Field(ge=2, le=100)] = 5
    torch_compile: CompileMode | None = None


class _ConstraintEntry(Section):
    expr: Annotated[Expression, BeforeValidator(_expression)]
    why: Annotated[str, BeforeValidator(_reason)]


class File(Section):
    """The whole file; `space` is read by `space_section`, since its keys are the user's.

    `workloads` are the data that the file is for: its speed-up is the least over them. `time_s` is
    for everything, until the verified file; None is without a limit.
    """

    problem: ProblemSection
    device: Annotated[str, BeforeValidator(parse_device)] = "auto"
    accuracy: Annotated[Accuracy, BeforeValidator(parse_accuracy)] = Accuracy()
    workloads: Annotated[tuple[str, ...], BeforeValidator(parse_workloads)] = USUAL
    space: dict[str, Any] = {}
    constraints: tuple[_ConstraintEntry, ...] = ()
    time_s: Annotated[float | None, BeforeValidator(parse_duration)] = Field(
        default=None, alias="time"
    )
    effort: Effort = "normal"
    search: SearchSection = SearchSection()
    measure: MeasureSection = MeasureSection()
