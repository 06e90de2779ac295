"""A user's file as an operator that is there already: a family whose reference is the same.

What is written is a folder like a derived one, of the family's name: the user's file as reference,
a module around the family's operator, and a config. The templates stay the family's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.capture.derive import Derived
from tuner.capture.families import Matched
from tuner.capture.graph.graph import Graph
from tuner.capture.match_text import has_clash, matched_text
from tuner.config.document import read_document
from tuner.errors import TunerError
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.worker import JobFailed, Worker
from tuner.kernel.family import Family, family_names, load_family
from tuner.problem.accuracy import Accuracy
from tuner.storage import write_whole
from tuner.trial import content_key, from_json, to_json

__all__ = ["family_of", "space_of_family"]

FORMAT = 1  # of what is written; part of the key
SPACE_FILE = "space.yaml"  # in a family's folder: what a search varies where nobody says
MATCH_S = 120.0  # recording a family's reference a few times
ACCURACY = "pytorch"  # eager as its user has it, as of any module


def family_of(
    path: Path, worker: Worker, found: Mapping[str, Any], graphs: Sequence[Graph], folder: Path
) -> Derived | None:
    """Write the folder of the first family whose reference is a module's forward.

    Args:
        path: the module's file.
        worker: one that has captured it.
        found: what that answered.
        graphs: the forward, as captured; and with another batch, where it takes one.
        folder: under which the operator's is made.

    Raises:
        StorageError: it cannot be written.
    """
    for name in family_names():
        try:
            family = load_family(name)
            matched = _matched(worker, family, graphs)
            if matched is None or has_clash(path.read_text(), family.model_new):
                continue
            made = _written(path, family, matched, graphs[0], found, folder)
            # Its module must call the operator at these inputs: in eval mode, say, it may not.
            fits = load_family(name, [made.folder])
            task = JobSpec.of(
                fits, fits.reference, {}, "cpu", Accuracy.parse(ACCURACY), mode=graphs[0].mode
            )
            worker.call("sizes", task.payload(), timeout_s=MATCH_S)
        except (JobFailed, TunerError):
            continue  # what is generated for the module does not need the family
        return made
    return None


def _matched(worker: Worker, family: Family, graphs: Sequence[Graph]) -> Matched | None:
    asked = {
        "reference": str(family.reference),
        "sizes": list(family.op.sizes),
        "graphs": [json.loads(to_json(graph)) for graph in graphs],
    }
    answer = worker.call("match", asked, timeout_s=MATCH_S).data["matched"]
    return None if answer is None else from_json(Matched, json.dumps(answer))


def _written(
    path: Path,
    family: Family,
    matched: Matched,
    graph: Graph,
    found: Mapping[str, Any],
    folder: Path,
) -> Derived:
    reference = path.read_text()
    op = (family.reference.parent / "op.yaml").read_text()
    title = f"{family.op.title}, which is the forward of {path.name}"
    texts = {
        "op.yaml": re.sub(r"^title: .*$", lambda _: f"title: {json.dumps(title)}", op, flags=re.M),
        "reference.py": reference,
        "model_new.py": matched_text(
            graph, matched, reference, found["settings"], found["has_modes"], family.model_new
        ),
    }
    key = content_key(str(FORMAT), *(texts[file] for file in sorted(texts)))[:12]
    root = folder / f"{path.stem}-as-{family.name}-{key}"
    home = root / family.name
    home.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        write_whole(home / file, text)
    content = {
        "accuracy": ACCURACY,
        "problem": {
            "op": family.name,
            "templates": ["."],
            "mode": graph.mode,
        },
        **space_of_family(family, list(family.templates)),
    }
    config = root / f"{family.name}.yaml"
    write_whole(config, json.dumps(content, indent=1) + "\n")
    return Derived(root, family.name, config, family.op.title)


def space_of_family(family: Family, templates: Sequence[str]) -> dict[str, Any]:
    """Return what a search of some of a family's templates varies: `space`, `constraints`.

    They are those of the family's own `space.yaml`, as far as these templates have the parameters;
    without such a file every parameter has all values that its templates list.
    """
    known = [family.templates[t] for t in templates if t in family.templates]
    used = {name: head for template in known for name, head in template.parameters.items()}
    file = family.reference.parent / SPACE_FILE
    if file.is_file():
        given = read_document(file, file.read_text()).data
        space = {name: v for name, v in given["space"].items() if name in used}
        rules = [
            r for r in given.get("constraints", []) if _names_in(r["expr"], given) <= {*space}
        ]
        return {"space": {"template": list(templates), **space}, "constraints": rules}
    space = {name: list(head.values) for name, head in used.items() if head.values}
    return {"space": {"template": list(templates), **space}, "constraints": []}


def _names_in(expression: str, given: Mapping[str, Any]) -> set[str]:
    """Return the parameters that a constraint names."""
    return {*re.findall(r"[A-Za-z_]\w*", expression)} & {*given["space"]} - {"template"}
