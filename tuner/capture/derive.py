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
import keyword
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from tuner.capture.any_batch import any_batch, lacks_batch, with_batch_numbers
from tuner.capture.graph.graph import GRAPH_FILE, Graph, num_bytes_of
from tuner.capture.modules.module_text import given_of, has_batch, model_new, results_of
from tuner.capture.modules.rows_text import why_no_steps
from tuner.capture.nests.index_space import NotOneNest
from tuner.capture.nests.own_parameters import NAMES, SECOND
from tuner.capture.nests.precision import stored_dtype
from tuner.capture.nests.ranges import have_same_ranges
from tuner.capture.nests.scalars import with_numbers_as_tensors
from tuner.capture.steps.step_plans import StepPlan, planned, why_not_planned
from tuner.capture.steps.step_text import step_text, stepped
from tuner.capture.tasks.biases import with_biases_apart
from tuner.capture.tasks.half_products import PRODUCTS, makers_of
from tuner.capture.tasks.partitions import partitions_of, worth_a_search
from tuner.capture.tasks.stages import Stages, stages_of
from tuner.capture.tasks.step_records import Captured, Joint
from tuner.capture.writers.clusters import CLUSTER_TEMPLATE, cluster_template, refusal_of_clusters
from tuner.capture.writers.templates import Part, cpp_template
from tuner.capture.writers.triton_loops import RESERVED
from tuner.capture.writers.triton_template import triton_template
from tuner.errors import InputError
from tuner.space.reserved import refusal_of
from tuner.storage import write_whole
from tuner.trial import content_key, to_json

__all__ = ["Derived", "derived", "identifier", "space_of_templates"]

# What a search varies, of the values that heads list. Not whether pointwise work behind a product
# has a kernel of its own: that stores and reads the product once more, and has so many blocks to
# choose from that a short search hardly tried another.
_VARIED = (
    *("unroll", "stream_output", "huge_pages", "keep", "num_warps", "stages", "piece", "split"),
    *("tile_rows", "tile_columns", "block_rows", "block_columns"),
    *("chunk", "product_n", "product_k", "product_cluster"),
    *("image_pixels", "image_channels", "image_depth", "image_warps", "image_stages"),
    *("plane_pixels", "plane_warps"),
    *("image_consumers", "image_groups", "image_part", "image_blocks"),
    *("cluster_blocks", "cluster_threads", "cluster_chunk"),
    *(name + SECOND for name in NAMES),
)
# Files of every operator that has them; a template of another partition may be missing.
_NEEDED = {
    "op.yaml", "model_new.py", "nest.cpp.j2", "nest_triton.triton.py.j2",
    *(f"{name}.triton.py.j2" for name in PRODUCTS),
}  # fmt: skip
_NAMED = (ast.FunctionDef, ast.ClassDef)
FORMAT = 93  # of what is written; part of the key
# Parameters of templates that a search leaves as they are.
_FIXED = (
    "max_threads", "product_epilogue", "product_raster", "product_weight", "programs", "width",
)  # fmt: skip
_RESERVED = {
    *_VARIED, *_FIXED,
    "i", "j", "k", "n", "s", "c", "t", "u", "w", "rows", "cols", "float", "double", "int", "step",
    "team", "tile", "tiles", "lanes", "first", "last", "from", "to", "begin", "end", "column",
    "batch", "chunk", *RESERVED,
}  # fmt: skip


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
    settings: Mapping[str, object],
    has_modes: bool,
    folder: Path,
    other: Captured | None = None,
    *,
    beside: Mapping[str, str] = MappingProxyType({}),
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

    Raises:
        NotOneNest: no loops can be generated for the graph.
        InputError: the file gives a name that its exported file gives to something else.
    """
    if other is not None:
        captured, other = with_batch_numbers(captured, other)
    graph = with_biases_apart(with_numbers_as_tensors(captured.graph))
    stages = stages_of(graph)
    partitions = partitions_of(graph, stages)
    op = f"{identifier(name)}_forward"  # unlike any operator that comes with the tuner

    def written(
        of: Graph, joint: Joint | None, batch: int | None, *, is_fixed: bool = False
    ) -> dict[str, str]:
        """Return the texts; `is_fixed`: steps are for their own batch alone, whatever `batch`."""
        is_mine = of is graph
        own, plan = stages if is_mine else stages_of(of), planned(joint)
        parts = _parts(of, own, plan)
        step = "" if plan is None else step_text(of, own, plan, batch, is_fixed=is_fixed)
        made_in_step = ("", []) if plan is None else stepped(of, own, plan)
        batches = (batch, None if is_fixed else batch)
        why = without_step or "its kernels would be for one number of rows alone"
        module = model_new(
            of, own, reference, settings, has_modes, batch, step, made_in_step, beside, why
        )
        _refuse_names(reference, module, name)
        made = {"op.yaml": _op_yaml(of, parts, op, batches), "model_new.py": module}
        for maker, products in makers_of(of, own.calls).items():
            own_parts = parts if products.takes_steps else parts[:1]
            made[f"{maker}.triton.py.j2"] = triton_template(own_parts, op, products=products)
        if own.nests:
            is_ours = any(part.stages.nests for part in parts[1:])  # or PyTorch's products alone
            cuts = partitions if is_mine else partitions_of(of, own)
            offered = parts if is_ours else parts[:1]
            made |= _templates(offered, cuts, op)
            if not refusal_of_clusters(own):
                text = cluster_template(offered, op)
                made[f"{CLUSTER_TEMPLATE}.triton.py.j2"] = text
        return made

    mine = replace(captured, graph=graph)
    without_step = captured.without_step or why_not_planned(mine.joint)
    texts = None if other is None else _for_any_batch(mine, other, written)
    if texts is None and other is not None and planned(mine.joint) is not None:
        # A batch of rows that are no longer the first dimension of a result, say.
        alike = replace(other, joint=mine.joint)
        texts = _for_any_batch(mine, alike, partial(written, is_fixed=True))
    if texts is None and other is not None and mine.joint is not None:
        # Any batch matters more than a step of training.
        forward, another = replace(mine, joint=None), replace(other, joint=None)
        texts = _for_any_batch(forward, another, written)
    texts = texts or written(graph, mine.joint, None)
    texts |= {"reference.py": reference, GRAPH_FILE: to_json(graph) + "\n"}
    key = content_key(str(FORMAT), *(texts[file] for file in sorted(texts)))[:12]
    root = folder / f"{op}-{key}"
    family = root / op
    family.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        write_whole(family / file, text)
    config = root / f"{op}.yaml"
    worth = worth_a_search(graph, {"": stages, **partitions})
    searched = {f"nest_{name}".rstrip("_") for name in worth}
    searched |= {*PRODUCTS, CLUSTER_TEMPLATE}
    templates = sorted(f[: f.index(".")] for f in texts if f[-1] == "2")
    templates = [t for t in templates if t.removesuffix("_triton") in searched]
    # A short search tries few: products first. Last, what nvcc takes seconds for.
    templates.sort(key=lambda t: (t not in PRODUCTS, t == CLUSTER_TEMPLATE))
    # Eager as its user has it: on a GPU convolutions take TF32 unless the user says otherwise.
    content = {
        "accuracy": "pytorch",
        "problem": {"op": op, "templates": ["."], "mode": graph.mode},
        "space": space_of_templates(family, templates),
    }
    write_whole(config, json.dumps(content, indent=1) + "\n")
    return Derived(root, op, config, without_step=why_no_steps(texts["model_new.py"]))


def space_of_templates(family: Path, templates: Sequence[str]) -> dict[str, object]:
    """Return what a search of some templates of a derived operator varies, with all values.

    Args:
        family: the operator's folder.
        templates: names; those that are no template there add nothing.
    """
    space: dict[str, object] = {"template": list(templates)}
    files = [file for file in sorted(family.glob("*.j2")) if file.name.split(".")[0] in templates]
    heads = "".join(file.read_text().split("\n---\n")[0] for file in files)
    for name in _VARIED:
        listed = re.findall(rf"^  {name}: .*, values: (\[.*?\])", heads, re.MULTILINE)
        values = [value for each in listed for value in json.loads(each)]
        if values:
            space[name] = list(dict.fromkeys(values))
    return space


def _for_any_batch(
    mine: Captured,
    other: Captured,
    written: Callable[[Graph, Joint | None, int], dict[str, str]],
) -> dict[str, str] | None:
    """Return the texts of an operator for any batch, None where there are none."""
    one, two = mine.graph.batch, other.graph.batch
    graphs = _graphs_of(mine), _graphs_of(other)
    if not all(map(have_same_ranges, *graphs)):
        return None
    stages = stages_of(mine.graph)
    given = [t for t in given_of(mine.graph, stages) if has_batch(mine.graph, t, one)]
    if one is None or two is None or not given:
        return None
    theirs = with_biases_apart(with_numbers_as_tensors(other.graph))
    try:
        texts = written(theirs, other.joint, two)
    except NotOneNest:
        return None
    called = {"model_new.py": f"len({given[0].name})"}
    found = {}
    for file, text in written(mine.graph, mine.joint, one).items():
        name = called.get(file, "batch")
        both = any_batch(text, texts[file], (one, two), name=name) if file in texts else None
        if both is not None:
            found[file] = both
        elif file in _NEEDED:
            return None
    return None if lacks_batch(found["op.yaml"]) else found


def _graphs_of(captured: Captured) -> list[Graph]:
    joint = captured.joint
    of_step = (joint.forward, *(b.graph for b in joint.backwards)) if joint else ()
    return [captured.graph, *of_step]


def _templates(parts: Sequence[Part], partitions: Mapping[str, Stages], op: str) -> dict[str, str]:
    """Return the templates of an operator, by file: two of each partition."""
    found = {"nest.cpp.j2": cpp_template(parts, op)}
    found["nest_triton.triton.py.j2"] = triton_template(parts, op)
    for name, stages in partitions.items():
        first = replace(parts[0], stages=stages, names=_names(stages, known=parts[0].names))
        found[f"nest_{name}.cpp.j2"] = cpp_template([first, *parts[1:]], op)
        found[f"nest_{name}_triton.triton.py.j2"] = triton_template([first, *parts[1:]], op)
    return found


def _parts(graph: Graph, own: Stages, plan: StepPlan | None) -> list[Part]:
    """Return the operator's calls; what the extra ones compute has names of its own."""
    parts = [Part("", graph, own, _names(own))]
    if plan is not None:
        given = {t.name for t in graph.given}
        if plan.forward is not None:
            names = _names(plan.forward, given, "_kept")
            parts.append(Part("kept", plan.joint.forward, plan.forward, names))
        for name, backward in plan.calls:
            assert backward.stages is not None
            names = _names(backward.stages, given, f"_{name}")
            parts.append(Part(name, backward.of.graph, backward.stages, names))
    return parts


def _refuse_names(reference: str, module: str, name: str) -> None:
    """Refuse a file of which the text around it, which comes behind, would replace a function."""
    head, _, tail = module.partition(reference.rstrip())
    mine = {n.name: n.lineno for n in ast.parse(reference).body if isinstance(n, _NAMED)}
    ours = {n.name for n in ast.parse(f"{head}\n{tail}").body if isinstance(n, _NAMED)}
    for taken in sorted(mine.keys() & ours - {"ModelNew"}):
        raise InputError(
            f"{name}.py, line {mine[taken]}: exported files use the name {taken!r} themselves\n"
            "  next: name it otherwise"
        )


def identifier(name: str) -> str:
    """Return a name in lower case that Python and C++ take."""
    found = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "module"
    return f"m_{found}" if found[0].isdigit() or keyword.iskeyword(found) else found


def _names(
    stages: Stages,
    given: Container[str] = (),
    more: str = "",
    known: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return a name of every value for the texts: short, and no two alike.

    Those that are not `given` end in `more`; those that are `known` keep theirs.
    """
    values = []
    for nest in stages.nests:
        values += [*(t.name for t in nest.arguments), *nest.taps, *nest.indices]
        for each in nest.passes:
            values += [s.name for s in (*each.statements, *each.after)]
            values += [r.name for r in each.reductions]
        values += [s.name for s in nest.before]
    for call in stages.calls:
        values += [*call.reads, call.name]
    names = dict(known or {})
    for value in [value for value in dict.fromkeys(values) if value not in names]:
        base = identifier(value)
        if base in _RESERVED or refusal_of(base, {}):
            base += "_v"
        base += "" if value in given else more
        names[value] = base if base not in names.values() else f"{base}_{len(names)}"
    return names


# ---- op.yaml --------------------------------------------------------------------------------


def _op_yaml(
    graph: Graph, parts: Sequence[Part], op: str, batches: tuple[int | None, int | None]
) -> str:
    """Return the text; `batches` are those of the operator, and of its extra operators."""
    own = parts[0].stages
    call, sizes = _declared(parts[0], batches[0])
    # What lies between tasks is not counted: some template may have it in registers.
    num_bytes = sum(tensor.num_bytes for tensor in given_of(graph, own))
    num_bytes += sum(o.count * num_bytes_of(o.dtype) for o in results_of(own))
    flops = sum(task.flops for task in own.tasks)
    lines = [
        f"name: {op}",
        f"title: {op}",
        f"function: fused_{op}",
        "replaces: [the whole forward]",
        f"sizes: {json.dumps(sizes)}",
        f"arguments: {json.dumps(call['arguments'])}",
        f"outputs: {json.dumps(call['outputs'])}",
        f"flops: {json.dumps(str(max(1, flops)))}",
        f"bytes: {json.dumps(str(num_bytes))}",
    ]
    if len(parts) > 1:
        further = {p.name: _declared(p, batches[1]) for p in parts[1:]}
        lines.append(f"extra: {json.dumps({name: call for name, (call, _) in further.items()})}")
        more = {name: size for _, found in further.values() for name, size in found.items()}
        more = {name: size for name, size in more.items() if name not in sizes}
        lines.append(f"extra_sizes: {json.dumps(more)}")
    return "\n".join([*lines, ""])


def _declared(
    part: Part, batch: int | None
) -> tuple[dict[str, list[dict[str, object]]], dict[str, int]]:
    """Return a call's arguments and outputs as `op.yaml` lists them, and the sizes."""
    graph, stages, names = part.graph, part.stages, part.names
    sizes: dict[str, int] = {}
    arguments: list[dict[str, object]] = []
    outputs: list[dict[str, object]] = []
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
            argument["dtype"] = stored_dtype(tensor.dtype)
        arguments.append(argument)
    for output in results_of(stages):
        shape = [str(output.count)]
        if stages.calls:
            shape = [str(size) for size in graph.value(output.name).shape] or ["1"]
        dtype = stored_dtype(output.dtype)
        outputs.append({"name": f"{names[output.name]}_out", "shape": shape, "dtype": dtype})
    return {"arguments": arguments, "outputs": outputs}, sizes
