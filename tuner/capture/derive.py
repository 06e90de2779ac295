"""An operator's folder, written from a module's graph: op.yaml, reference, module, templates.

    <cache>/modules/<name>-<key>/<name>/   op.yaml  reference.py  model_new.py  graph.json
                                           nest.cpp.j2  nest_triton.triton.py.j2

What is tuned from then on is an operator like any that was written by hand. The module around it
is the reference's own class: it takes the loops where shapes, types, modes and settings are those
that were captured, and `super().forward` everywhere else.
"""

from __future__ import annotations

import inspect
import json
import keyword
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tuner.capture.biases import with_biases_apart
from tuner.capture.from_module import made_from
from tuner.capture.graph import GRAPH_FILE, Graph, Tensor
from tuner.capture.nest import Output
from tuner.capture.precision import num_bytes_of
from tuner.capture.scalars import numbers_of, with_numbers_as_tensors
from tuner.capture.settings import settings_of
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
FORMAT = 9  # of what is written; part of the key
_RESERVED = {
    "i", "j", "k", "n", "s", "c", "t", "u", "w", "rows", "cols", "float", "double", "int", "step",
    "team", "tile", "tiles", "lanes", "first", "last", "from", "to", "begin", "end", "column",
    *RESERVED,
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
) -> Derived:
    """Write the operator of a module.

    Args:
        graph: of its forward, as it was captured.
        reference: the text of its file.
        name: of the file; what is no identifier in it is left out.
        settings: of `settings_of`, as they were.
        has_modes: whether those name modes, in which the forward differs.
        folder: under which the operator's is made.

    Raises:
        NotOneNest: no loops can be generated for the graph.
    """
    graph = with_biases_apart(with_numbers_as_tensors(graph))
    stages = stages_of(graph)
    op = f"{identifier(name)}_forward"  # unlike any operator that comes with the tuner
    names = _names(stages)
    is_free = _has_free_rows(graph, stages)
    texts = {
        "op.yaml": _op_yaml(graph, stages, op, names, is_free),
        "reference.py": reference,
        "model_new.py": _model_new(graph, stages, reference, settings, has_modes, is_free),
        GRAPH_FILE: to_json(graph) + "\n",
        "nest_triton.triton.py.j2": triton_template(stages, op, names, is_free),
        "nest.cpp.j2": cpp_template(stages, op, names, is_free),
    }
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


def _given(graph: Graph, stages: Stages) -> list[tuple[Tensor, bool]]:
    """Return what the call gets, in order, and whether it has a value for each place."""
    found: dict[str, tuple[Tensor, bool]] = {}
    called = {name for call in stages.calls for name in call.reads}
    found |= {t.name: (t, False) for t in graph.given if t.name in called}
    made = {call.name for call in stages.calls} | stages.between.keys() | {*stages.outputs}
    for nest in stages.nests:
        every = len(nest.space.sizes)
        for tensor in nest.arguments:
            if tensor.name not in made:
                is_whole = len(nest.space.varies[tensor.name]) == every
                found.setdefault(tensor.name, (tensor, is_whole))
    return list(found.values())


def _results(stages: Stages) -> list[Output]:
    """Return what the call gives, once each: results, then new values of buffers."""
    written = {o.name: o for nest in stages.nests for o in nest.outputs}
    written |= {c.name: Output(c.name, c.dtype, math.prod(c.shape)) for c in stages.calls}
    return [written[n] for n in dict.fromkeys([*stages.outputs, *stages.updates.values()])]


def _op_yaml(
    graph: Graph, stages: Stages, op: str, names: Mapping[str, str], is_free: bool
) -> str:
    space = stages.nests[0].space
    total = space.rows * space.cols
    sizes = {"rows": space.rows, "cols": space.cols} if is_free else {}
    arguments, num_bytes = [], 0
    for tensor, is_whole in _given(graph, stages):
        name, shape = names[tensor.name], ["rows", "cols"]
        if stages.calls and tensor.shape:
            shape = [f"{name}_size_{axis}" for axis in range(len(tensor.shape))]
            sizes |= dict(zip(shape, tensor.shape, strict=True))
        elif not is_free or not is_whole:
            sizes[f"{name}_size"], shape = math.prod(tensor.shape), [f"{name}_size"]
        argument: dict[str, object] = {"name": name, "shape": shape}
        if tensor.dtype != "float32":
            argument["dtype"] = _stored(tensor.dtype)
        arguments.append(argument)
        num_bytes += tensor.num_bytes
    outputs = []
    for output in _results(stages):
        shape = [str(output.count)]
        if stages.calls:
            shape = [str(size) for size in graph.value(output.name).shape] or ["1"]
        if is_free and 0 in space.varies[output.name]:
            shape = [f"rows * cols // {total // output.count}"]
            if output.count == total:
                shape = ["rows", "cols"]
        outputs.append(
            {"name": f"{names[output.name]}_out", "shape": shape, "dtype": _stored(output.dtype)}
        )
        num_bytes += output.count * num_bytes_of(output.dtype)
    between = [graph.value(n) for n in (*stages.between, *(c.name for c in stages.calls))]
    num_bytes += sum(2 * v.num_bytes for v in between)  # written, and read
    flops = sum(task.flops for task in stages.tasks)
    moved = f"{max(1, num_bytes // total)} * rows * cols"
    each = f"{max(1, round(flops / total))} * rows * cols"
    return "\n".join(
        [
            f"name: {op}",
            f"title: {op}",
            f"function: fused_{op}",
            "replaces: [the whole forward]",
            f"sizes: {json.dumps(sizes)}",
            f"arguments: {json.dumps(arguments)}",
            f"outputs: {json.dumps(outputs)}",
            f"flops: {json.dumps(each if is_free else str(max(1, flops)))}",
            f"bytes: {json.dumps(moved if is_free else str(num_bytes))}",
            "",
        ]
    )


def _stored(dtype: str) -> str:
    return "uint8" if dtype == "bool" else dtype  # a truth is a byte


# ---- the module -----------------------------------------------------------------------------


def _model_new(
    graph: Graph,
    stages: Stages,
    reference: str,
    settings: Mapping[str, object],
    has_modes: bool,
    is_free: bool,
) -> str:
    numbers = numbers_of(graph)
    place = next((f"{a.name}.device" for a in graph.arguments if a.is_tensor), "fused_device")
    state = {t.name for t in (*graph.parameters, *graph.buffers)}
    arguments = []
    for tensor, is_whole in _given(graph, stages):
        source = _path(tensor.name) if tensor.name in state else tensor.name
        if tensor.name in numbers:
            source = f"torch.full((), {tensor.name}, device={place}, dtype=torch.{tensor.dtype})"
        flat = f"-1, {stages.nests[0].space.cols}" if is_free and is_whole else "-1"
        as_bytes = ".view(torch.uint8)" if tensor.dtype == "bool" else ""
        reshaped = "" if stages.calls and tensor.shape else f".reshape({flat})"
        arguments.append(f"{source}.detach(){as_bytes}{reshaped}")
    written = [o.name for o in _results(stages)]
    results = []
    for name, given in zip(stages.outputs, graph.outputs, strict=True):
        value = graph.value(given)
        sizes = [str(size) for size in value.shape]
        if is_free and sizes:
            sizes[0] = "-1"
        as_bool = ".view(torch.bool)" if value.dtype == "bool" else ""
        shape = f"({', '.join(sizes)},)" if sizes else "()"
        results.append(f"made[{written.index(name)}]{as_bool}.view({shape})")
    updates = [f"{_path(b)}.add_({number})" for b, number in stages.counters.items()]
    for buffer, name in stages.updates.items():
        source = f"made[{written.index(name)}].view_as({_path(buffer)})"
        updates.append(f"{_path(buffer)}.copy_({source})")
    return _MODULE.format(
        reference=reference.rstrip(),
        inputs=[(t.dtype, list(t.shape)) for t in graph.inputs if t.name not in numbers],
        is_number=[not a.is_tensor for a in graph.arguments],
        state=_forms((*graph.parameters, *graph.buffers)),
        settings=dict(settings),
        has_modes=has_modes,
        has_free_rows=is_free,
        has_calls=bool(stages.calls),
        settings_of=inspect.getsource(settings_of).rstrip(),
        made_from=inspect.getsource(made_from).rstrip(),
        names=", ".join(a.name for a in graph.arguments),
        arguments=", ".join(arguments),
        updates="".join(f"        {line}\n" for line in updates),
        result=results[0] if len(results) == 1 else f"({', '.join(results)},)",
    )


def _path(name: str) -> str:
    """Return how a parameter or buffer is reached: parts of an nn.Sequential are numbers."""
    found = "self"
    for part in name.split("."):
        is_plain = part.isidentifier() and not keyword.iskeyword(part)
        found = f"{found}.{part}" if is_plain else f"getattr({found}, {part!r})"
    return found


_MODULE = """\
{reference}


from typing import Any

_HAS_FREE_ROWS = {has_free_rows}
_HAS_CALLS = {has_calls}  # of PyTorch's own operations, which look at how their operands lie
_INPUTS = {inputs!r}
_IS_NUMBER = {is_number!r}  # of each argument
_STATE = {state!r}
_SETTINGS = {settings!r}


{settings_of}


{made_from}


def is_usual(module, inputs):
    # Whether a call is one that the loops were written for.
    device = torch.device(fused_device).type
    if any(is_number != (type(x) is float) for x, is_number in zip(inputs, _IS_NUMBER)):
        return False
    inputs = [x for x, is_number in zip(inputs, _IS_NUMBER) if not is_number]
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    tensors = (*inputs, *state.values())
    if not all(isinstance(x, torch.Tensor) for x in tensors):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    if torch.autograd.forward_ad._current_level >= 0:  # the tangents would be lost
        return False
    if torch.is_autocast_enabled(device) or torch.overrides.has_torch_function(tensors):
        return False
    if any(x.device.type != device for x in tensors):
        return False
    if _HAS_CALLS and not all(x.is_contiguous() for x in tensors):
        return False
    for x, (dtype, shape) in zip(inputs, _INPUTS):
        if x.dtype != getattr(torch, dtype):
            return False
        if list(x.shape[1:]) != shape[1:] or x.dim() != len(shape) or not x.numel():
            return False
        if shape and x.shape[0] != shape[0] and not _HAS_FREE_ROWS:
            return False
        if shape and shape[0] == _INPUTS[0][1][0] and len(x) != len(inputs[0]):
            return False
    forms = {{name: (str(t.dtype)[6:], list(t.shape)) for name, t in state.items()}}
    if forms != _STATE:
        return False
    return settings_of(module, {has_modes}) == _SETTINGS


class ModelNew(Model):
    # The reference itself, with its forward in one loop where a call is as usual.
    @classmethod
    def from_module(cls, module):
        # A ModelNew of a live Model's parameters and buffers, which both then share.
        return made_from(cls, module, _STATE)

    def forward(self, {names}):
        if not is_usual(self, ({names},)):
            return super().forward({names})
        made = fused_op({arguments})
{updates}        return {result}


def setup_context(ctx, inputs, output):
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))


def backward(ctx, *grads):
    raise RuntimeError("calls that want gradients take the reference")
"""


def _forms(tensors: Iterable[Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {t.name: (t.dtype, list(t.shape)) for t in tensors}


def _has_free_rows(graph: Graph, stages: Stages) -> bool:
    """Whether the first dimension may have another size: it is that of the rows alone."""
    if len(stages.tasks) > 1 or not graph.inputs or not graph.inputs[0].shape:
        return False
    if stages.nests[0].taps:  # they know the sizes of what they read
        return False
    space, first = stages.nests[0].space, graph.inputs[0].shape[0]
    if not space.sizes or space.sizes[0] != first or 0 in space.columns:
        return False
    every = len(space.sizes)
    given = {tensor.name: is_whole for tensor, is_whole in _given(graph, stages)}
    if not any(given.values()):  # then nothing says how many rows there are
        return False
    inputs = {t.name: t for t in graph.inputs}
    for name in given:
        has_first = 0 in space.varies[name]
        if name not in inputs and has_first:
            return False
        shape = inputs[name].shape if name in inputs else ()
        if has_first != (shape[:1] == (first,)) and len(shape) <= every:
            return False
    if stages.updates or stages.counters:
        return False
    return all(graph.value(o).shape[:1] == (first,) for o in graph.outputs) and all(
        0 in space.varies[o.name] for o in _results(stages)
    )
