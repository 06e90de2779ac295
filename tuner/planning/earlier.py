"""What earlier runs tell a search: which configurations to try first, and where to start from.

A task of a module may have been tuned in another one: `task_index` knows by its key. What is
fastest there is written in terms of this module's parameters, and tried first; times, checks and
verdicts are never taken over. Where several nests share their parameters, the one with the most
bytes decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tuner.capture.nests.own_parameters import canonical
from tuner.capture.outline import KernelTask
from tuner.config.run_config import RunConfig
from tuner.errors import TunerError
from tuner.kernel.family import Family
from tuner.planning.planning import Planned
from tuner.run import open_run
from tuner.search.recorded import read_recording
from tuner.search.task_index import KnownRun, known_runs, operator_task
from tuner.search.transfer import MAX_SOURCES, Source
from tuner.trial import Outcome, Params

__all__ = ["Earlier", "Suggestion", "earlier_of", "sources_from", "starts_of", "warm_starts"]

MAX_FIRST = 3  # configurations of earlier runs that a search tries first
MAX_RANKS = 50  # claims on a task that are looked at: many have the same configuration
LEAST_SHARE = 0.1  # of the bytes of the largest task of its kind: below it, a task has no say


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A configuration to try, and whose it is, in words.

    `is_same`: each task that has parameters was tuned in its sizes on such a device.
    """

    params: Params
    words: str
    is_same: bool


@dataclass(frozen=True, slots=True)
class Earlier:
    """What to try first, the most promising first; `runs` are those that the model starts from."""

    first: tuple[Suggestion, ...] = ()
    runs: tuple[str, ...] = ()

    @property
    def same(self) -> tuple[Suggestion, ...]:
        """Those of the same tasks in the same sizes, on such a device."""
        return tuple(s for s in self.first if s.is_same)

    def ahead_of(self, planned: Planned, *, is_known: bool) -> list[Suggestion]:
        """Return what is tried before templates' defaults: what the config names, then these.

        `is_known`: of these only what is the same, since nothing else is searched.
        """
        named = [
            Suggestion(params, f"search.first[{place}] of the config", False)
            for place, params in planned.start.named.items()
        ]
        known = [suggestion.params for suggestion in named]
        more = self.same if is_known else self.first
        return [*named, *(each for each in more if each.params not in known)]


def earlier_of(planned: Planned, versions: str, runs_dir: Path) -> Earlier:
    """Return what the runs of a folder tell a search.

    Args:
        planned: what is to be searched.
        versions: of PyTorch and the compilers here, as `versions_of` gives them.
        runs_dir: the folder; where it is missing or holds nothing of use, nothing is reported.
    """
    match = _Match(planned, versions, known_runs(runs_dir))
    is_module = planned.outline is not None
    return Earlier(tuple(match.suggestions()), tuple(match.names()) if is_module else ())


def starts_of(planned: Planned, earlier: Earlier) -> list[Params]:
    """Return what a search starts from: all that it tries, where a quick one has earlier runs."""
    same = [found.params for found in earlier.same] if planned.config.effort == "quick" else []
    if not same:
        return planned.start.all
    return [*planned.start.named.values(), *same]


def warm_starts(config: RunConfig, family: Family) -> list[Source]:
    """Read the runs and recordings that the config starts from, under the family's own names."""
    recordings = [read_recording(path, family.renamed) for path in config.search.warm_start]
    return [Source(r.name, r.space, r.latency_us, r.is_bound) for r in recordings]


def sources_from(planned: Planned, runs: Sequence[str], runs_dir: Path) -> list[Source]:
    """Read the runs that the model starts from, in terms of this search's parameters.

    One that has gone since, or has too few configurations that mean something here, is left out.
    """
    if not runs:
        return []
    known = [run for run in known_runs(runs_dir) if run.name in runs]
    match = _Match(planned, "", known)
    found = []
    for run in sorted(known, key=lambda run: runs.index(run.name)):
        source = match.source(run, runs_dir / run.name)
        found += [source] if source is not None else []
    return found


@dataclass(frozen=True, slots=True)
class _Claim:
    """A task of another run that is one of this search's; what is known by less has a lower tier.

    Tiers: 0 the same task, device and versions; 1 other versions; 2 another device; 3 other
    sizes; 4 other sizes and another device.
    """

    tier: int
    share: float  # of the bytes that have the same parameters there
    run: KnownRun
    task: KernelTask = field(repr=False)

    @property
    def words(self) -> str:
        """What the other task is, in words."""
        same = "is the same" if self.tier < 3 else "is the same in other sizes"
        more = ", with other versions of PyTorch or a compiler" if self.tier == 1 else ""
        more = f", on {self.run.device}" if self.tier in (2, 4) else more
        return f"whose task {self.task.label} {same}{more}"


class _Match:
    """The tasks of a search, beside those that runs had."""

    def __init__(self, planned: Planned, versions: str, known: Sequence[KnownRun]) -> None:
        self._space, self._now = planned.space, planned.family.renamed
        known = [replace(run, params=self._now(run.params)) for run in known]
        self._device, self._versions = planned.device.name, versions
        config = planned.config
        own: Sequence[KernelTask] = (
            [operator_task(
                planned.family.name, planned.sizes, config.accuracy.label, config.problem.mode
            )]
            if planned.outline is None
            else planned.outline.tasks
        )  # fmt: skip
        self._values = self._space.values
        self._defaults = {params["template"]: params for params in planned.defaults}
        # Of what can run here: a GPU's search has the parameters of C++ as well.
        self._varied = {
            name for params in planned.defaults for name in params if name != "template"
        }
        self._tasks = self._with_say(own)
        self._claims = {task.name: self._claims_on(task, known) for task in self._tasks}

    def _with_say(self, tasks: Sequence[KernelTask]) -> list[KernelTask]:
        """Return the tasks that have parameters and are not small, the largest first."""
        names = self._varied
        shaped = [t for t in tasks if t.kind != "library" or names & {*t.parameters}]
        shaped.sort(key=lambda task: -task.num_bytes)
        most: dict[tuple[object, ...], int] = {}
        for task in shaped:
            most.setdefault(_same(task), task.num_bytes)
        return [t for t in shaped if t.num_bytes >= LEAST_SHARE * most[_same(t)]]

    def _claims_on(self, task: KernelTask, known: Sequence[KnownRun]) -> list[_Claim]:
        """Return the claims on a task, one of each run at most, the strongest first."""
        found = []
        for run in known:
            alike = [t for t in run.tasks if t.kind == task.kind and t.form_key == task.form_key]
            if not alike:
                continue
            there = max(alike, key=lambda t: (t.key == task.key, t.num_bytes))
            own = self._here(task, _own(there, run)).keys() & self._varied
            if run.params.get("template") not in self._defaults and (
                task.kind == "operator" or not own
            ):
                continue  # it tells nothing of what can run here
            tier = 0 if run.versions == self._versions else 1
            if run.device != self._device:
                tier = 2
            if there.key != task.key:
                tier = 3 if run.device == self._device else 4
            found.append(_Claim(tier, round(_share(there, run.tasks), 2), run, there))
        # Times of other sizes say nothing of each other; `known` has the latest first.
        found.sort(key=lambda c: (c.tier, -c.share, c.run.ranked_us if c.tier < 3 else 0.0))
        return found

    # ---- configurations to try --------------------------------------------------------------

    def suggestions(self) -> list[Suggestion]:
        """Return what to try first: each task as where it was fastest, then as where next."""
        found: dict[int, Suggestion] = {}
        most = max((len(claims) for claims in self._claims.values()), default=0)
        for rank in range(min(most, MAX_RANKS)):
            chosen = {
                name: claims[min(rank, len(claims) - 1)]
                for name, claims in self._claims.items()
                if claims
            }
            template, wanted, used = self._composed(chosen)
            params = self._feasible(template, wanted)
            config_id = None if params is None else self._space.index(params)
            if params is None or config_id is None or config_id in found:
                continue
            is_same = all(n in chosen and chosen[n].tier < 2 for n in self._claims)
            is_same &= all(c.run.params.get("template") in self._defaults for c in chosen.values())
            is_same &= all(params.get(n, value) == value for n, value in wanted.items())
            found[config_id] = Suggestion(params, _words(used), is_same)
            if len(found) == MAX_FIRST:
                break
        return list(found.values())

    def _composed(self, chosen: Mapping[str, _Claim]) -> tuple[str, Params, list[_Claim]]:
        """Return a template, what each task has as it was chosen, and whose choices those are."""
        tasks = [task for task in self._tasks if task.name in chosen]
        # A product's own kernel is a template; loops have the same parameters in any.
        by_call = sorted(tasks, key=lambda task: task.kind != "library")
        template = self._template(*(chosen[task.name].run.params for task in by_call))
        wanted: Params = {}
        used = []
        for task in tasks:
            claim = chosen[task.name]
            claimed = self._here(task, _own(claim.task, claim.run))
            fresh = {n: v for n, v in claimed.items() if n not in wanted}
            wanted |= fresh
            decides = task.kind == "library" and claim.run.params.get("template") == template
            used += [claim] if fresh or decides else []
        return template, wanted, used

    def _template(self, *theirs: Params) -> str:
        """Return the first template that can run here, of those that other runs had."""
        names = [params.get("template") for params in theirs]
        return str(next((n for n in names if n in self._defaults), next(iter(self._defaults))))

    def _here(self, task: KernelTask, params: Params) -> Params:
        """Return a task's parameters, by their plain names, as this search calls them."""
        if not task.suffix:
            return params
        own = {name + task.suffix: value for name, value in params.items()}
        return {name: value for name, value in own.items() if name in self._values}

    def _feasible(self, template: str, wanted: Params) -> Params | None:
        """Return the defaults with other values, as far as this space has them."""
        allowed = {n: v for n, v in wanted.items() if v in self._values.get(n, ())}
        params = {**self._defaults[template], **allowed}
        if self._space.index(params) is not None:
            return params
        return self._space.complete(params)

    # ---- what the model starts from -----------------------------------------------------------

    def names(self) -> Iterator[str]:
        """Give the runs that tell most of the task that decides most."""
        claims = next((c for t in self._tasks if (c := self._claims[t.name])), [])
        yield from [claim.run.name for claim in claims][:MAX_SOURCES]

    def source(self, run: KnownRun, path: Path) -> Source | None:
        """Return all that a run tried, in terms of this search's parameters."""
        pairs = [
            (task, claim.task)
            for task in self._tasks
            for claim in self._claims[task.name]
            if claim.run.name == run.name
        ]
        try:
            trials = open_run(path).trials()
        except TunerError:
            return None
        known: dict[int, Outcome] = {}
        for trial in trials:
            wanted: Params = {}
            for task, there in pairs:
                wanted = {**self._here(task, _own(there, run, self._now(trial.params))), **wanted}
            is_known = all(v in self._values[n] for n, v in wanted.items() if n in self._values)
            template = self._template(trial.params)
            params = self._feasible(template, wanted) if is_known else None
            config_id = None if params is None else self._space.index(params)
            if config_id is not None:
                known.setdefault(config_id, trial.outcome)
        return Source.of_outcomes(run.name, self._space, known)


def _share(task: KernelTask, among: Sequence[KernelTask]) -> float:
    """Return a task's share of the bytes of those that have the same parameters."""
    total = sum(t.num_bytes for t in among if _same(t) == _same(task))
    return task.num_bytes / total if total else 1.0


def _same(task: KernelTask) -> tuple[object, ...]:
    """Return what is equal for tasks of a module that share their parameters."""
    return task.kind, task.suffix, task.parameters


def _own(task: KernelTask, run: KnownRun, params: Params | None = None) -> Params:
    """Return the parameters of a run's task, by their plain names: of its best, or of `params`."""
    params = run.params if params is None else params
    if task.kind == "library":
        return {name: value for name, value in params.items() if name in task.parameters}
    if task.kind == "operator":
        return {name: value for name, value in params.items() if name != "template"}
    of_calls = {name for t in run.tasks if t.kind == "library" for name in t.parameters}
    own = canonical(params, task.suffix)
    return {name: value for name, value in own.items() if name not in {"template", *of_calls}}


def _words(claims: Sequence[_Claim]) -> str:
    by_run: dict[str, list[str]] = {}
    for claim in claims:
        by_run.setdefault(claim.run.name, []).append(claim.words)
    runs = [f"from run {name}, {' and '.join(words)}" for name, words in by_run.items()]
    return "; ".join(runs)
