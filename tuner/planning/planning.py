"""What a config amounts to on a machine: the family, the device, the feasible set.

Nothing is compiled here, and the parent process imports no PyTorch: a child is asked for the
device and the sizes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tuner.capture.graph.graph import GRAPH_FILE, Graph
from tuner.capture.modules.rows_text import ways_in
from tuner.capture.outline import Outline, outline_of
from tuner.capture.steps.step_text import without_steps
from tuner.capture.tasks.half_products import PRODUCTS
from tuner.config.names import check_names, unknown_values
from tuner.config.run_config import RunConfig, parse_config
from tuner.errors import (
    ConfigError,
    DeviceError,
    InputError,
    NothingToGainError,
    TemplateError,
    did_you_mean,
)
from tuner.evaluate.contender import QUIET
from tuner.evaluate.job_spec import JobSpec, explained, new_worker
from tuner.evaluate.worker import JobFailed
from tuner.kernel.family import Family, load_family
from tuner.kernel.signatures import mismatches
from tuner.kernel.toolchain import Toolchain
from tuner.machine.ceilings import impossible_us
from tuner.machine.datasheets import known_device
from tuner.machine.device import Device
from tuner.machine.host import modules_folder
from tuner.machine.platforms import is_gpu
from tuner.machine.turns import ALL, LITTLE
from tuner.planning.starting import Start, started_from
from tuner.problem.reference import ROWS
from tuner.search.samplers import SAMPLERS
from tuner.space.constraints import Constraint
from tuner.space.search_space import SearchSpace
from tuner.trial import (
    Candidate,
    Language,
    Params,
    Value,
    from_json,
)

__all__ = [
    "DESCRIBE_S",
    "Planned",
    "plan",
    "require_overrides",
]

DESCRIBE_S = 300.0  # importing PyTorch and the reference, and one call of it on the CPU

FASTEST_ARITHMETIC = "fp16"  # that any kernel may use where `op.yaml` says nothing of it
LEAST_OF_GPU = 8  # trials that the search of a module waits for
RACE_BYTES = 5  # for each byte of a call, the processes of a race: inputs, outputs, copies
OPEN_BYTES = 3 * 2**30  # of a GPU that they have opened, whatever they do
CHECKS_BYTES = 20  # for each byte of a call, the judge and three checks: float64, copies


@dataclass(frozen=True, slots=True)
class Planned:
    """What a config amounts to on a device."""

    config: RunConfig
    family: Family
    device: Device
    is_assumed: bool  # no such device here: its published facts stand in for it
    sizes: Mapping[str, int]
    facts: Mapping[str, Value]
    environment: Mapping[str, str]
    space: SearchSpace
    start: Start  # what is tried first
    reference: Path
    screening_sizes: Sequence[Mapping[str, int]]  # of all that candidates are screened with
    warnings: Sequence[str] = ()  # what is likely not meant, and stops nothing
    outline: Outline | None = None  # of an operator that was derived from a module
    num_rows: int | None = None  # of the problem's inputs
    constraints: Sequence[Constraint] = ()  # that the space obeys

    @property
    def defaults(self) -> Sequence[Params]:
        """For each template the feasible configuration nearest to its defaults."""
        return self.start.defaults

    @property
    def is_small(self) -> bool:
        """Whether the device's memory holds what several checks take at once."""
        if self.outline is None:
            return True
        return CHECKS_BYTES * self.outline.num_bytes < self.device.memory_bytes

    @property
    def least_trials(self) -> int:
        """How many trials a search waits for: of a module one of each of two templates.

        For a GPU many are compiled at once, and where other tuners do the same none of them is
        done in the time of a quick search, and a moment later all of them are.
        """
        if self.outline is None:
            return 1
        return LEAST_OF_GPU if is_gpu(self.device.kind) else min(2, len(self.defaults))

    @property
    def languages(self) -> list[Language]:
        """What the templates that can run here are written in."""
        templates, steps = self.family.templates, self.family.steps
        found = {templates[str(p["template"])].language for p in self.defaults}
        return sorted(found | ({steps.candidate.language} if steps else set()))

    @property
    def num_workers(self) -> int:
        """One compiler a core; on a GPU one core stays free for the process that feeds it."""
        cores = len(os.sched_getaffinity(0))
        return max(1, cores - 1) if is_gpu(self.device.kind) else cores

    def knowing(self, facts: Mapping[str, Value]) -> Planned:
        """Return the plan where these facts are known, too; their names begin with `device.`.

        It stays as it is where they would leave nothing of what the config asks for.
        """
        if not facts:
            return self
        known = {**self.facts, **facts}
        try:
            space = SearchSpace.build(
                self.space.parameters, self.constraints, {**known, **self.sizes}
            )
        except InputError:
            return self
        how = (space, self.family, {**known, **self.sizes}, self.constraints)
        start, impossible = started_from(self.config, *how)
        warnings = (*self.warnings, *(said for said in impossible if said not in self.warnings))
        return replace(self, facts=known, space=space, start=start, warnings=warnings)

    @property
    def takes_steps(self) -> bool:
        """Whether its files have kernels for steps of training."""
        return "step" in ways_in(self.family.model_new)

    @property
    def with_pytorchs_steps(self) -> Planned | None:
        """The plan whose files leave steps of training to the reference; None where they do."""
        if self.family.steps is not None:
            return replace(self, family=replace(self.family, steps=None))
        text = without_steps(self.family.model_new)
        if text == self.family.model_new:
            return None
        return replace(self, family=replace(self.family, model_new=text))

    def find_toolchain(self) -> Toolchain:
        """Find the compilers that the templates need."""
        return Toolchain.find(self.device.kind, self.device.capability, self.languages)

    @property
    def spec(self) -> JobSpec:
        """The problem as every process of the run needs it."""
        sizes = {**self.facts, **self.sizes}
        flops = float(self.family.flops.evaluate(sizes))
        num_bytes = float(self.family.bytes.evaluate(sizes))
        precision = self.family.op.arithmetic.get(self.config.accuracy.kind, FASTEST_ARITHMETIC)
        spec = JobSpec.of(
            self.family,
            self.reference,
            self.config.problem.sizes,
            self.device.torch_name,
            self.config.accuracy,
            impossible_us(flops, num_bytes, self.device, precision),
            sizes,
            self.config.problem.mode,
        )
        share = (OPEN_BYTES + RACE_BYTES * num_bytes) / max(1, self.device.memory_bytes)
        num_parts = math.ceil(share / LITTLE)  # what holds all parts has all of the memory
        return replace(spec, memory_share=min(ALL, num_parts * LITTLE))

    def example(self) -> Candidate:
        """Render the first feasible configuration."""
        return self.family.render(self.space.at(0), self.facts)


def plan(config: RunConfig, *, may_assume: bool = False) -> Planned:
    """Work out what a config amounts to: sizes, device facts, the feasible configurations.

    Args:
        config: as `load_config` gives it.
        may_assume: on a machine without a GPU, let a known GPU's facts stand in for it.

    Raises:
        InputError: the config, a template or the reference is wrong, or nothing is feasible.
        NothingToGainError: a module's operator has no kernels for this kind of device.
        DeviceError: the device does not exist here.
    """
    _require_sampler(config)
    family = load_family(config.problem.op, config.problem.templates)
    names = _template_names(config, family)
    varied = {p.name: p.values for p in config.space if p.name != "template"}
    reference = config.problem.reference or family.reference
    described = _describe(config, family, reference, may_assume)
    device, is_assumed, machine, screening, num_rows = described
    _require_kernels(family, names, device)
    sizes = screening[0]
    facts: dict[str, Value] = dict(device.facts())
    heads = [item for t in names for item in family.templates[t].parameters.items()]
    used = {name for name, _ in heads}
    unused = {p for template in family.templates.values() for p in template.parameters} - used
    check_names(
        config,
        sizes=list(sizes),
        facts=list(facts),
        parameters=sorted(used),
        unused=unused,
        renamed={head.was: name for name, head in heads if head.was},
    )
    constraints = [*family.constraints(names, varied), *config.constraints]
    space = SearchSpace.build(
        family.parameters(names, varied, {p.name: p.when for p in config.space if p.when}),
        constraints,
        {**facts, **sizes},
    )
    lists = {p: [head.values for name, head in heads if name == p] for p in used}
    values_were = {(p, was): now for p, head in heads for was, now in head.values_were.items()}
    warnings = unknown_values(config, lists, values_were)
    start, impossible = started_from(config, space, family, {**facts, **sizes}, constraints)
    warnings += impossible
    # What we have written ourselves is as it says; to look takes half a second.
    if not family.model_file.is_relative_to(modules_folder()):
        warnings += _checked_texts(start.defaults, family, facts)
        own = [
            n for n in names if (family.templates[n].language == "cpp") is (device.kind == "cpu")
        ]
        empty = [name for name in own if name not in space.count_by("template")]
        warnings += [
            f"no configuration of template {n!r} is feasible; a search has none" for n in empty
        ]
    return Planned(
        config, family, device, is_assumed, sizes, facts, machine, space, start, reference,
        screening, warnings, _outline(config, family), num_rows, constraints,
    )  # fmt: skip


def require_overrides(overrides: Mapping[str, Value]) -> None:
    """Refuse wrong settings of a command line, before anything slow is done with a module.

    Raises:
        ConfigError: as `load_config` and `plan`, whatever the problem is.
    """
    _require_sampler(parse_config("problem: {op: any}", Path("tune"), overrides))


def _require_sampler(config: RunConfig) -> None:
    name, known = config.search.sampler, list(SAMPLERS)
    if name not in SAMPLERS:
        hint = did_you_mean(name, known)
        message = f"unknown sampler {name!r}"
        raise ConfigError([config.problem_at("search.sampler", message, known=known, hint=hint)])


def _require_kernels(family: Family, names: Sequence[str], device: Device) -> None:
    """Refuse a module of PyTorch's own products where these are not made on a GPU."""
    is_derived = (family.model_file.parent / GRAPH_FILE).is_file()
    if is_derived and set(names) <= set(PRODUCTS) and not is_gpu(device.kind):
        raise NothingToGainError(
            "nothing to generate: the forward is PyTorch's own operations; products have kernels "
            "of ours on a GPU alone",
            {},
        )


def _outline(config: RunConfig, family: Family) -> Outline | None:
    """Return the graph in short that a derived operator's folder holds, if it is of these sizes.

    It is of the batch for which it was derived, and has no size but that.

    Raises:
        TemplateError: the file there is no graph.
    """
    path = family.model_file.parent / GRAPH_FILE
    if config.problem.reference or not path.is_file():
        return None
    try:
        graph = from_json(Graph, path.read_text())
        is_own = config.problem.sizes in ({}, {ROWS: graph.batch})
        return outline_of(graph) if is_own else None
    except ValueError as error:
        raise TemplateError(
            f"{path}: not a graph as `tune my_module.py` writes it: {error}\n"
            "  next: remove it; what could be gained is then not shown"
        ) from error


def _checked_texts(
    defaults: Sequence[Params], family: Family, facts: Mapping[str, Value]
) -> list[str]:
    """Render each template once and compare its functions with its steps; return warnings.

    Raises:
        TemplateError: a text does not render, or cannot be called as its head says.
    """
    errors: list[str] = []
    warnings: list[str] = []
    for params in defaults:
        candidate = family.render(params, facts)
        found = mismatches(candidate, partial(family.places, candidate, facts))
        errors += found.errors
        warnings += found.warnings
    if errors:
        raise TemplateError("\n".join(errors))
    return warnings


def _template_names(config: RunConfig, family: Family) -> list[str]:
    """Return the templates to search: those that the config lists, else all."""
    listed = next((p.values for p in config.space if p.name == "template"), None)
    names = [str(v) for v in listed] if listed else list(family.templates)
    unknown = [name for name in names if name not in family.templates]
    if unknown:
        known = sorted(family.templates)
        raise ConfigError(
            [
                config.problem_at(
                    "space.template",
                    f"{family.name} has no template {name!r}",
                    known=known,
                    hint=did_you_mean(name, known),
                )
                for name in unknown
            ]
        )
    return names


def _describe(
    config: RunConfig, family: Family, reference: Path, may_assume: bool
) -> tuple[Device, bool, dict[str, str], list[dict[str, int]], int | None]:
    """Ask a child process for the device and the sizes; the parent imports no PyTorch.

    The sizes are the problem's own and then those of other batches that screening asks for; then
    there is how many rows its inputs have.
    """
    is_assumed = False
    with new_worker("cpu", name="describe", env=QUIET, is_ours=True) as worker:
        try:
            found = worker.call("describe", {"device": config.device}, timeout_s=DESCRIBE_S).data
            device = from_json(Device, json.dumps(found["device"]))
        except JobFailed as failure:
            error = explained(failure)
            if not (may_assume and isinstance(error, DeviceError)):
                raise error from failure
            device, is_assumed, found = known_device(), True, {"environment": {}}
        problem = config.problem
        task = JobSpec.of(
            family, reference, problem.sizes, device.torch_name, config.accuracy, mode=problem.mode
        )
        asks = {**task.payload(), "tensors": [path for path in config.others.values() if path]}
        try:
            sizes = worker.call("sizes", asks, timeout_s=DESCRIBE_S).data
        except JobFailed as failure:
            raise explained(failure) from failure
    return device, is_assumed, found["environment"], sizes["screening"], sizes["num_rows"]
