"""An operator's folder, written from a module's graph: op.yaml, reference, module, templates.

    <cache>/modules/<name>-<key>/<name>/   op.yaml  reference.py  model_new.py  graph.json
                                           nest.cpp.j2  nest_triton.triton.py.j2

What is tuned from then on is an operator like any that was written by hand. The module around it
is the reference's own class: it takes the loops where shapes, types, modes and settings are those
that were captured, and `super().forward` everywhere else.
"""

from __future__ import annotations

import json
import keyword
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tuner.capture.any_batch import any_batch
from tuner.capture.biases import with_biases_apart
from tuner.capture.graph import GRAPH_FILE, Graph
from tuner.capture.index_space import NotOneNest
from tuner.capture.module_text import given_of, has_batch, model_new, results_of
from tuner.capture.precision import num_bytes_of
from tuner.capture.scalars import with_numbers_as_tensors
from tuner.capture.stages import Stages, stages_of
from tuner.capture.templates import blocks_of, cpp_template, main_of, triton_template
from tuner.capture.triton_loops import RESERVED
from tuner.storage import write_whole
from tuner.trial import content_key, to_json

__all__ = ["Derived", "derived", "identifier"]

# What a search varies, where the template has it.
_VALUES: dict[str, list[int | bool | str]] = {
    "unroll": [1, 2, 4],
    "stream_output": [False, True],
    "huge_pages": [True, False],
    "keep": [True, False],
    "num_warps": [1, 2, 4, 8, 16, 32],
    "stages": [1, 2, 3, 4],
    "piece": [16384, 65536, 262144],
    "split": [1, 2, 4, 8, 16, 32, 64], "layout": ["as_given", "channels_last"],
}  # fmt: skip
FORMAT = 10  # of what is written; part of the key
_RESERVED = {
    "i", "j", "k", "n", "s", "c", "t", "u", "w", "rows", "cols", "float", "double", "int", "step",
    "team", "tile", "tiles", "lanes", "first", "last", "from", "to", "begin", "end", "column",
    "batch", *RESERVED,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Derived:
    """A folder that holds an operator's, and the operator's name; `config` tunes it."""

    folder: Path
    name: str
    config: Path


def derived(
    graph: Graph,
    reference: str,
    name: str,
    settings: Mapping[str, object],
    has_modes: bool,
    folder: Path,
    other: Graph | None = None,
) -> Derived:
    """Write the operator of a module.

    Args:
        graph: of its forward, as it was captured.
        reference: the text of its file.
        name: of the file; what is no identifier in it is left out.
        settings: of `settings_of`, as they were.
        has_modes: whether those name modes, in which the forward differs.
        folder: under which the operator's is made.
        other: of its forward with another batch; None where it takes no other one.

    Raises:
        NotOneNest: no loops can be generated for the graph.
    """
    graph = with_biases_apart(with_numbers_as_tensors(graph))
    stages = stages_of(graph)
    op = f"{identifier(name)}_forward"  # unlike any operator that comes with the tuner

    def written(graph: Graph, stages: Stages, batch: int | None) -> dict[str, str]:
        names = _names(stages)
        return {
            "op.yaml": _op_yaml(graph, stages, op, names, batch),
            "model_new.py": model_new(graph, stages, reference, settings, has_modes, batch),
            "nest_triton.triton.py.j2": triton_template(stages, op, names),
            "nest.cpp.j2": cpp_template(stages, op, names),
        }

    texts = None if other is None else _for_any_batch(graph, stages, other, written)
    texts = texts or written(graph, stages, None)
    texts |= {"reference.py": reference, GRAPH_FILE: to_json(graph) + "\n"}
    key = content_key(str(FORMAT), *(texts[file] for file in sorted(texts)))[:12]
    root = folder / f"{op}-{key}"
    family = root / op
    family.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        write_whole(family / file, text)
    config = root / f"{op}.yaml"
    heads = "".join(text for file, text in texts.items() if file.endswith(".j2"))
    space: dict[str, object] = {
        "template": sorted(f[: f.index(".")] for f in texts if f[-1] == "2")
    }
    varied = {**_VALUES, **blocks_of(main_of(stages))}
    space |= {name: values for name, values in varied.items() if f"  {name}:" in heads}
    mode = "train" if graph.is_training else "eval"
    # Eager as its user has it: on a GPU convolutions take TF32 unless told otherwise.
    content = {
        "accuracy": "pytorch",
        "problem": {"op": op, "templates": ["."], "mode": mode},
        "space": space,
    }
    write_whole(config, json.dumps(content, indent=1) + "\n")
    return Derived(root, op, config)


def _for_any_batch(
    graph: Graph,
    stages: Stages,
    other: Graph,
    written: Callable[[Graph, Stages, int], dict[str, str]],
) -> dict[str, str] | None:
    """Return the texts of an operator for any batch, None where there are none."""
    one, two = graph.batch, other.batch
    given = [t for t in given_of(graph, stages) if has_batch(graph, t, one)]
    if one is None or two is None or not given:
        return None
    other = with_biases_apart(with_numbers_as_tensors(other))
    try:
        theirs = written(other, stages_of(other), two)
    except NotOneNest:
        return None
    called = {"model_new.py": f"len({given[0].name})"}
    found = {}
    for file, text in written(graph, stages, one).items():
        both = any_batch(text, theirs[file], (one, two), name=called.get(file, "batch"))
        if both is None:
            return None
        found[file] = both
    return found


def identifier(name: str) -> str:
    """Return a name in lower case that Python and C++ take."""
    found = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "module"
    return f"m_{found}" if found[0].isdigit() or keyword.iskeyword(found) else found


def _names(stages: Stages) -> dict[str, str]:
    """Return a name of every value for the texts: short, and no two alike."""
    values = []
    for nest in stages.nests:
        values += [*(t.name for t in nest.arguments), *nest.taps]
        for each in nest.passes:
            values += [s.name for s in (*each.statements, *each.after)]
            values += [r.name for r in each.reductions]
        values += [s.name for s in nest.before]
    for call in stages.calls:
        values += [*call.reads, call.name]
    names: dict[str, str] = {}
    for value in dict.fromkeys(values):
        base = identifier(value) + ("_v" if identifier(value) in _RESERVED else "")
        names[value] = base if base not in names.values() else f"{base}_{len(names)}"
    return names


# ---- op.yaml --------------------------------------------------------------------------------


def _op_yaml(
    graph: Graph,
    stages: Stages,
    op: str,
    names: Mapping[str, str],
    batch: int | None,
) -> str:
    sizes: dict[str, int] = {}
    arguments, num_bytes = [], 0
    for tensor in given_of(graph, stages):
        name, with_rows = names[tensor.name], has_batch(graph, tensor, batch)
        rest = math.prod(tensor.shape[1:])
        if stages.calls and tensor.shape:
            shape = [f"{name}_size_{axis}" for axis in range(len(tensor.shape))]
            shape[:with_rows] = ["batch"] * with_rows
            sizes |= dict(zip(shape, tensor.shape, strict=True))
        elif with_rows:
            shape = ["batch", f"{name}_rest"]
            sizes |= dict(zip(shape, (tensor.shape[0], rest), strict=True))
        else:
            sizes[f"{name}_size"], shape = math.prod(tensor.shape), [f"{name}_size"]
        argument: dict[str, object] = {"name": name, "shape": shape}
        if tensor.dtype != "float32":
            argument["dtype"] = _stored(tensor.dtype)
        arguments.append(argument)
        num_bytes += tensor.num_bytes
    outputs = []
    for output in results_of(stages):
        shape = [str(output.count)]
        if stages.calls:
            shape = [str(size) for size in graph.value(output.name).shape] or ["1"]
        outputs.append(
            {"name": f"{names[output.name]}_out", "shape": shape, "dtype": _stored(output.dtype)}
        )
        num_bytes += output.count * num_bytes_of(output.dtype)
    between = [graph.value(n) for n in (*stages.between, *(c.name for c in stages.calls))]
    num_bytes += sum(2 * v.num_bytes for v in between)  # written, and read
    flops = sum(task.flops for task in stages.tasks)
    return "\n".join(
        [
            f"name: {op}",
            f"title: {op}",
            f"function: fused_{op}",
            "replaces: [the whole forward]",
            f"sizes: {json.dumps(sizes)}",
            f"arguments: {json.dumps(arguments)}",
            f"outputs: {json.dumps(outputs)}",
            f"flops: {json.dumps(str(max(1, flops)))}",
            f"bytes: {json.dumps(str(num_bytes))}",
            "",
        ]
    )


def _stored(dtype: str) -> str:
    return "uint8" if dtype == "bool" else dtype  # a truth is a byte
