"""An operator's folder in a place of the user's, with a template of one task to write by hand.

    <folder>/<op>.yaml     tunes the templates below
    <folder>/<op>/         what was derived, and <task>.cpp.j2, <task>_triton.triton.py.j2

A stub is what was generated for the whole forward, with a comment before the task's functions that
says what they compute, so that it is right, and as fast, before anybody edits it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.capture.derive import Derived, space_of_templates
from tuner.capture.derived_calls import identifier
from tuner.capture.graph.graph import GRAPH_FILE, Graph, Node
from tuner.capture.nests.nest import Nest
from tuner.capture.nests.scalars import with_numbers_as_tensors
from tuner.capture.outline import Step, outline_of
from tuner.capture.tasks.biases import with_biases_apart
from tuner.capture.tasks.stages import Stages, stages_of
from tuner.capture.writers.templates import function_of
from tuner.errors import InputError, did_you_mean
from tuner.storage import storage_errors, write_whole
from tuner.trial import from_json
from tuner.wording import shape_words

__all__ = ["ByHand", "written_by_hand"]

# What was derived, and the stub that it becomes: its ending, and how its comments begin.
_STUBS = {
    "nest.cpp.j2": ("{task}.cpp.j2", "//"),
    "nest_triton.triton.py.j2": ("{task}_triton.triton.py.j2", "#"),
}


@dataclass(frozen=True, slots=True)
class ByHand:
    """What was written: the config, and the stub in each language."""

    task: str
    config: Path
    stubs: tuple[Path, ...]


def written_by_hand(made: Derived, module: Path, task: str | None, folder: Path) -> ByHand:
    """Write the folder of an operator of which one task is to be written by hand.

    Args:
        made: the operator that was derived from the module.
        module: the file it was derived from, for the comments.
        task: a nest's name, as `tune my_module.py --dry-run` shows it; None says which there are.
        folder: to write to; it must not exist, or be empty.

    Raises:
        InputError: there is no such task, no kernel is generated for it, or the folder has files.
        StorageError: the folder cannot be written.
    """
    family = made.folder / made.name
    graph = from_json(Graph, (family / GRAPH_FILE).read_bytes())
    stages = stages_of(with_biases_apart(with_numbers_as_tensors(graph)))
    number, nest = _chosen(stages, task, module)
    with storage_errors(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(
                f"{folder}: exists already; expected a new folder, or an empty one\n"
                "  next: name another one with --output"
            )
        for file in sorted(family.iterdir()):
            write_whole(folder / made.name / file.name, file.read_text())
    stem = identifier(nest.name)
    stem = f"{stem}_by_hand" if f"{stem}.cpp.j2" in _STUBS else stem
    stubs = []
    for file_name, (stub, mark) in _STUBS.items():
        text = (family / file_name).read_text()
        comment = "".join(f"{mark} {line}".rstrip() + "\n" for line in _about(graph, nest, module))
        at = _begin(text, function_of(made.name, number))
        text = f"{text[:at]}{comment}{text[at:]}"
        old = next(line for line in text.splitlines() if line.startswith("title: "))
        title = json.dumps(f"Task {nest.name} of {module.name}, by hand")
        text = text.replace(old, f"title: {title}", 1)
        stubs.append(folder / made.name / stub.format(task=stem))
        write_whole(stubs[-1], text)
    config = folder / made.config.name
    space = space_of_templates(family, [file.split(".")[0] for file in _STUBS])
    write_whole(config, _config(json.loads(made.config.read_text()), space, stem, module))
    return ByHand(nest.name, config, tuple(stubs))


def _chosen(stages: Stages, task: str | None, module: Path) -> tuple[int, Nest]:
    """Return a nest by its name, and which of the nests it is."""
    for number, nest in enumerate(stages.nests):
        if nest.name == task:
            return number, nest
    known = [nest.name for nest in stages.nests]
    if not known:
        raise InputError(
            f"{module}: its forward is PyTorch's own products alone, and a stub stands beside a "
            "loop nest\n  next: write an operator's folder (CONTRIBUTING.md)"
        )
    listed = f"expected one of {', '.join(known)}"
    if task is None:
        raise InputError(f"{module}: no task is named; {listed}\n  next: --task {known[-1]}")
    if any(call.name == task for call in stages.calls):
        raise InputError(
            f"{module}: task {task} is a call of PyTorch's own, which no kernel is generated for; "
            f"{listed}\n  next: name one of these, then put a function of yours in place of the "
            "call among the steps in the template's head"
        )
    raise InputError(
        f"{module}: no task {task!r}; {listed}\n"
        f"  {did_you_mean(task, known) or f'next: tune {module} --dry-run shows the tasks'}"
    )


def _begin(text: str, function: str) -> int:
    """Return where a task's own text begins; functions stand in the order of their numbers."""
    if (at := text.find(f'extern "C" const char* {function}(')) >= 0:
        return at
    at = text.rfind("@triton.jit", 0, text.index(f"def {function}_"))
    launched = re.search(r"@launched\w*\n\Z", text[:at])
    return at if launched is None else launched.start()


def _about(graph: Graph, nest: Nest, module: Path) -> Iterator[str]:
    """Say what a task computes: its steps, what it reads and gives, and its loops."""
    outline = outline_of(graph)
    task = next((t for t in outline.tasks if t.name == nest.name), None)
    steps: Sequence[Step] = [s for s in outline.steps if task is None or s.name in task.steps]
    yield f"---- task {nest.name}: yours to write " + "-" * 40
    yield f"It computes, by the lines of {module.name}:"
    width = max((len(f"{step.name} = {step.text}") for step in steps), default=0)
    for step in steps:
        line = f"line {step.line}" if step.line else ""
        yield f"    {f'{step.name} = {step.text}':<{width}}  {shape_words(step.shape)}  {line}"
    for tensor in nest.arguments:
        yield f"reads {tensor.name}: {tensor.dtype}, {shape_words(tensor.shape)}"
    for output in nest.outputs:
        value = graph.value(output.name)
        made = value.shape if isinstance(value, Node) else (output.count,)
        yield f"gives {output.name}: {output.dtype}, {shape_words(made)}"
    space = nest.space
    yield f"Tensors are contiguous; as captured, {space.rows} rows of {space.cols} columns."
    yield "Columns are what is reduced or scanned, rows the rest. What was generated follows:"
    yield "change any of it. Its steps, what it is called with, and parameters are in the head."


def _config(
    derived: Mapping[str, dict[str, object]], space: Mapping[str, object], stem: str, module: Path
) -> str:
    """Write the config that tunes the stubs; YAML for people, with the derived values."""
    problem = derived["problem"]
    lines = [
        f"# Tunes what you write by hand for a task of {module.name}.",
        "problem:",
        f"  op: {problem['op']}",
        "  templates: [.]  # beside this file",
        f"  mode: {problem['mode']}",
        f"accuracy: {derived['accuracy']}",
        "space:",
        f"  template: [{stem}, {stem}_triton]  # nest, nest_triton: what was generated",
    ]
    lines += [f"  {n}: {json.dumps(v)}" for n, v in space.items() if n != "template"]
    return "\n".join(lines) + "\n"
