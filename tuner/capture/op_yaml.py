"""The text of a derived operator's `op.yaml`: its calls, with their sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from tuner.capture.graph.graph import Graph, num_bytes_of
from tuner.capture.modules.module_text import given_of, has_batch, results_of
from tuner.capture.nests.precision import stored_dtype
from tuner.capture.writers.templates import IN_EVAL, Part

__all__ = ["op_yaml"]


def op_yaml(
    graph: Graph, parts: Sequence[Part], op: str, batches: tuple[int | None, int | None]
) -> str:
    """Return the text.

    Args:
        graph: of the module's forward.
        parts: the operator's call, and those of its extra operators.
        op: its name.
        batches: of the operator in either mode, and of its further calls; None where it is a fixed
            number.
    """
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
        further = {p.name: _declared(p, batches[p.name != IN_EVAL]) for p in parts[1:]}
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
        shape = [str(size) for size in graph.value(output.name).shape] or ["1"]
        dtype = stored_dtype(output.dtype)
        outputs.append({"name": f"{names[output.name]}_out", "shape": shape, "dtype": dtype})
    return {"arguments": arguments, "outputs": outputs}, sizes
