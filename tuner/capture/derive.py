"""An operator's folder, written from a module's graph: op.yaml, reference, module, templates.

    <cache>/modules/<name>-<key>/<name>/   op.yaml  reference.py  model_new.py  graph.json
                                           nest.cpp.j2  nest_triton.triton.py.j2
                                           others that make its products, convolutions or long rows
                                           in kernels of their own (`PRODUCTS`, `clusters`)
                                           as many for each further way to cut it (`partitions`)

What is tuned from then on is an operator like any that was written by hand. The module around it
is the reference's own class: it takes the loops where shapes, types, modes and settings are those
that were captured, and `super().forward` everywhere else.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from types import MappingProxyType

from tuner.capture.any_batch import any_batch, lacks_batch, with_batch_numbers
from tuner.capture.derived_calls import VARIED, identifier, names_of, parts_of
from tuner.capture.graph.graph import GRAPH_FILE, Graph
from tuner.capture.modules.module_text import given_of, has_batch, model_new
from tuner.capture.modules.rows_text import why_no_steps
from tuner.capture.nests.index_space import NotOneNest
from tuner.capture.nests.ranges import have_same_ranges
from tuner.capture.nests.scalars import with_numbers_as_tensors
from tuner.capture.op_yaml import op_yaml
from tuner.capture.steps.eval_calls import changes_in_eval, eval_call, eval_text
from tuner.capture.steps.step_plans import StepPlan, planned, why_not_planned
from tuner.capture.steps.step_text import step_text, stepped
from tuner.capture.tasks.biases import with_biases_apart
from tuner.capture.tasks.half_products import PRODUCTS, makers_of
from tuner.capture.tasks.partitions import partitions_of, worth_a_search
from tuner.capture.tasks.stages import Stages, stages_of
from tuner.capture.tasks.step_records import Captured
from tuner.capture.writers.clusters import CLUSTER_TEMPLATE, cluster_template, refusal_of_clusters
from tuner.capture.writers.templates import Part, cpp_template
from tuner.capture.writers.triton_template import triton_template
from tuner.errors import InputError
from tuner.storage import write_whole
from tuner.trial import content_key, to_json

__all__ = ["Derived", "derived", "space_of_templates"]

# Files of every operator that has them; a template of another partition may be missing.
_NEEDED = {
    "op.yaml", "model_new.py", "nest.cpp.j2", "nest_triton.triton.py.j2",
    *(f"{name}.triton.py.j2" for name in PRODUCTS),
}  # fmt: skip
_NAMED = (ast.FunctionDef, ast.ClassDef)
_OURS = re.compile(r"^(?:def|class) (\w+)", re.MULTILINE)
FORMAT = 96  # of what is written; part of the key


@dataclass(frozen=True, slots=True)
class Derived:
    """A folder that holds an operator's, and the operator's name; `config` tunes it.

    `matched` is the title of the family that it is, where it is not generated; `without_step` is
    why a step of training takes PyTorch's own operations, where one does.
    """

    folder: Path
    name: str
    config: Path
    matched: str = ""
    without_step: str = ""


def derived(
    captured: Captured,
    reference: str,
    name: str,
    settings: Mapping[str, Mapping[str, object]],
    has_modes: bool,
    folder: Path,
    other: Captured | None = None,
    *,
    beside: Mapping[str, str] = MappingProxyType({}),
    settings_in_eval: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
) -> Derived:
    """Write the operator of a module.

    Args:
        captured: its forward, and a step of training where there is a record of one.
        reference: the text of its file.
        name: of the file; what is no identifier in it is left out.
        settings: of `settings_of`, as they were.
        has_modes: whether those name modes, in which the forward differs.
        folder: under which the operator's is made.
        other: the same with another batch; None where forward takes no other one.
        beside: modules that the file imports from its own folder, with their hashes.
        settings_in_eval: of `settings_of` in eval mode, where the forward there is captured.

    Raises:
        NotOneNest: no loops can be generated for the graph.
        InputError: the file gives a name that its exported file gives to something else.
    """
    if other is not None:
        captured, other = with_batch_numbers(captured, other)
    mine = _prepared(captured)
    stages = stages_of(mine.graph)
    changes = changes_in_eval(settings, settings_in_eval)
    file = _File(reference, name, settings, has_modes, beside, changes)
    why = captured.without_step or why_not_planned(mine.joint)
    operator = _Operator(file, mine, stages, partitions_of(mine.graph, stages), why)
    texts = None if other is None else operator.texts_for_any_batch(_prepared(other))
    texts = texts or operator.texts(mine, None)
    texts |= {"reference.py": reference, GRAPH_FILE: to_json(mine.graph) + "\n"}
    key = content_key(str(FORMAT), *(texts[path] for path in sorted(texts)))[:12]
    root = folder / f"{file.op}-{key}"
    family = root / file.op
    family.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_whole(family / path, text)
    # Eager as its user has it: on a GPU convolutions take TF32 unless the user says otherwise.
    content = {
        "accuracy": "pytorch",
        "problem": {"op": file.op, "templates": ["."], "mode": mine.graph.mode},
        "space": space_of_templates(family, operator.searched(texts)),
    }
    config = root / f"{file.op}.yaml"
    write_whole(config, json.dumps(content, indent=1) + "\n")
    return Derived(root, file.op, config, without_step=why_no_steps(texts["model_new.py"]))


def _prepared(captured: Captured) -> Captured:
    """Return a forward with its numbers as tensors, and its biases apart."""
    return captured.with_forwards(lambda g: with_biases_apart(with_numbers_as_tensors(g)))


@dataclass(frozen=True, slots=True)
class _File:
    """A module's file, with what `derived` is told of it."""

    reference: str
    name: str
    settings: Mapping[str, Mapping[str, object]]
    has_modes: bool
    beside: Mapping[str, str]
    changes_in_eval: Mapping[str, Mapping[str, object]] | None

    @property
    def op(self) -> str:
        """The operator's name, unlike that of any that comes with the tuner."""
        return f"{identifier(self.name)}_forward"


class _Steps(Enum):
    """How steps of training are written: with what they permute copied, or for one batch alone."""

    USUAL = auto()
    PERMUTED_APART = auto()
    OF_ONE_BATCH = auto()


@dataclass(frozen=True, slots=True)
class _Operator:
    """A module whose texts are written.

    Attributes:
        file: that it is of.
        captured: its forward, prepared, and its step.
        stages: the tasks of that forward.
        partitions: further ways to cut it.
        without_step: why it has no step of training, "" where it has one.
    """

    file: _File
    captured: Captured
    stages: Stages
    partitions: Mapping[str, Stages]
    without_step: str

    def texts(
        self, captured: Captured, batch: int | None, steps: _Steps = _Steps.USUAL
    ) -> dict[str, str]:
        """Return the texts, by file.

        Args:
            captured: this record or that with another batch.
            batch: as for `model_new`.
            steps: how steps of training are written.
        """
        graph, op = captured.graph, self.file.op
        is_mine = graph is self.captured.graph
        own = self.stages if is_mine else stages_of(graph)
        is_fixed = steps is _Steps.OF_ONE_BATCH
        is_permuted_apart = steps is _Steps.PERMUTED_APART
        plan = planned(captured.joint, is_permuted_apart=is_permuted_apart)
        has_eval = batch is not None and self.file.changes_in_eval is not None
        in_eval = eval_call(captured, own) if has_eval else None
        parts = parts_of(graph, own, plan, in_eval)
        module = self._module(graph, own, plan, in_eval, batch, is_fixed)
        batches = (batch, None if is_fixed else batch)
        made = {"op.yaml": op_yaml(graph, parts, op, batches), "model_new.py": module}
        for maker, products in makers_of(graph, own.calls).items():
            own_parts = parts if products.takes_steps else parts[:1]
            made[f"{maker}.triton.py.j2"] = triton_template(own_parts, op, products=products)
        if own.nests:
            is_ours = any(part.stages.nests for part in parts[1:])  # or PyTorch's products alone
            cuts = self.partitions if is_mine else partitions_of(graph, own)
            offered = parts if is_ours else parts[:1]
            made |= _templates(offered, cuts, op)
            if not refusal_of_clusters(own):
                made[f"{CLUSTER_TEMPLATE}.triton.py.j2"] = cluster_template(offered, op)
        return made

    def _module(
        self,
        graph: Graph,
        own: Stages,
        plan: StepPlan | None,
        in_eval: tuple[Graph, Stages] | None,
        batch: int | None,
        is_fixed: bool,
    ) -> str:
        file = self.file
        step, made_in_step = "", ("", list[str]())
        if plan is not None:
            step = step_text(graph, own, plan, batch, is_fixed=is_fixed)
            made_in_step = stepped(graph, own, plan)
        why = self.without_step or "its kernels would be for one number of rows alone"
        module = model_new(
            graph, own, file.reference, file.settings, file.has_modes, batch, step, made_in_step,
            file.beside, why,
            eval_text(*in_eval, batch, file.changes_in_eval or {}) if in_eval else "",
            has_calls=bool(own.calls or (in_eval and in_eval[1].calls)),
        )  # fmt: skip
        arguments = [a.name for a in graph.arguments]
        _refuse_names(file.reference, module, file.name, arguments)
        return module

    def texts_for_any_batch(self, other: Captured) -> dict[str, str] | None:
        """Return the texts for any batch; None where there are none.

        `other` is the record, prepared, with another batch.
        """
        mine = self.captured
        found = self._for_any_batch(mine, other)
        if found is None and planned(mine.joint) is not None:
            # Strides of what is permuted may know the batch.
            found = self._for_any_batch(mine, other, _Steps.PERMUTED_APART)
            if found is None:
                # A batch of rows that are no longer the first dimension of a result, say.
                own = replace(other, joint=mine.joint)
                found = self._for_any_batch(mine, own, _Steps.OF_ONE_BATCH)
        if found is None and mine.joint is not None:
            # Any batch matters more than a step of training.
            found = self._for_any_batch(replace(mine, joint=None), replace(other, joint=None))
        return found

    def _for_any_batch(
        self, mine: Captured, other: Captured, steps: _Steps = _Steps.USUAL
    ) -> dict[str, str] | None:
        found = self._both(mine, other, steps)
        if found is None and mine.in_eval is not None:
            found = self._both(replace(mine, in_eval=None), replace(other, in_eval=None), steps)
        return found

    def _both(self, mine: Captured, other: Captured, steps: _Steps) -> dict[str, str] | None:
        """Return what the texts of two records, at two batches, are for any batch."""
        one, two = mine.graph.batch, other.graph.batch
        if not all(map(have_same_ranges, _graphs_of(mine), _graphs_of(other))):
            return None
        given = [t for t in given_of(mine.graph, self.stages) if has_batch(mine.graph, t, one)]
        if one is None or two is None or not given:
            return None
        try:
            texts = self.texts(other, two, steps)
        except NotOneNest:
            return None
        called = {"model_new.py": f"len({given[0].name})"}
        found = {}
        for file, text in self.texts(mine, one, steps).items():
            name = called.get(file, "batch")
            both = any_batch(text, texts[file], (one, two), name=name) if file in texts else None
            if both is not None:
                found[file] = both
            elif file in _NEEDED:
                return None
        return None if lacks_batch(found["op.yaml"]) else found

    def searched(self, files: Collection[str]) -> list[str]:
        """Return the templates among files that a search tries.

        A short one tries few: products first. Last, what nvcc takes seconds for.
        """
        worth = worth_a_search(self.captured.graph, {"": self.stages, **self.partitions})
        searched = {f"nest_{name}".rstrip("_") for name in worth} | {*PRODUCTS, CLUSTER_TEMPLATE}
        templates = sorted(file[: file.index(".")] for file in files if file[-1] == "2")
        templates = [t for t in templates if t.removesuffix("_triton") in searched]
        return sorted(templates, key=lambda t: (t not in PRODUCTS, t == CLUSTER_TEMPLATE))


def space_of_templates(family: Path, templates: Sequence[str]) -> dict[str, object]:
    """Return what a search of some templates of a derived operator varies, with all values.

    Args:
        family: the operator's folder.
        templates: names; those that are no template there add nothing.
    """
    space: dict[str, object] = {"template": list(templates)}
    files = [file for file in sorted(family.glob("*.j2")) if file.name.split(".")[0] in templates]
    heads = "".join(file.read_text().split("\n---\n")[0] for file in files)
    for name in VARIED:
        listed = re.findall(rf"^  {name}: .*, values: (\[.*?\])", heads, re.MULTILINE)
        values = [value for each in listed for value in json.loads(each)]
        if values:
            space[name] = list(dict.fromkeys(values))
    return space


def _graphs_of(captured: Captured) -> list[Graph]:
    joint = captured.joint
    of_step = (joint.forward, *(b.graph for b in joint.backwards)) if joint else ()
    in_eval = [] if captured.in_eval is None else [captured.in_eval]
    return [captured.graph, *in_eval, *of_step]


def _templates(parts: Sequence[Part], partitions: Mapping[str, Stages], op: str) -> dict[str, str]:
    """Return the templates of an operator, by file: two of each partition."""
    found = {"nest.cpp.j2": cpp_template(parts, op)}
    found["nest_triton.triton.py.j2"] = triton_template(parts, op)
    for name, stages in partitions.items():
        first = replace(parts[0], stages=stages, names=names_of(stages, known=parts[0].names))
        found[f"nest_{name}.cpp.j2"] = cpp_template([first, *parts[1:]], op)
        found[f"nest_{name}_triton.triton.py.j2"] = triton_template([first, *parts[1:]], op)
    return found


def _refuse_names(reference: str, module: str, name: str, arguments: Sequence[str]) -> None:
    """Refuse a file of which the text around it, which comes behind, would replace a function.

    Or one of whose `arguments` of forward would hide a function of that text.
    """
    head, _, tail = module.partition(reference.rstrip())
    mine = {n.name: n.lineno for n in ast.parse(reference).body if isinstance(n, _NAMED)}
    ours = {*_OURS.findall(f"{head}\n{tail}")}  # to parse it takes 15 ms
    for taken in sorted(mine.keys() & ours - {"ModelNew"}):
        raise InputError(
            f"{name}.py, line {mine[taken]}: exported files use the name {taken!r} themselves\n"
            "  next: name it otherwise"
        )
    if hidden := ours.intersection(arguments):
        raise InputError(
            f"{name}.py: an argument of forward is called {min(hidden)!r}, as a function of "
            "exported files\n  next: name it otherwise"
        )
