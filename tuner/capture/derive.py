"""An operator's folder, written from a module's graph: op.yaml, reference, module, templates.

    <cache>/modules/<name>-<key>/<name>/   op.yaml  reference.py  model_new.py
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

from tuner.capture.graph import Graph
from tuner.capture.index_space import NotOneNest
from tuner.capture.loops import kept_values, loops_text
from tuner.capture.nest import Nest, nest_of
from tuner.capture.settings import settings_of
from tuner.capture.triton_loops import RESERVED, blocks_of, triton_template
from tuner.storage import write_whole
from tuner.trial import content_key

__all__ = ["Derived", "derived"]

# What a search varies, where the template has it.
_VALUES: dict[str, list[int | bool]] = {
    "unroll": [1, 2, 4],
    "stream_output": [False, True],
    "huge_pages": [True, False],
    "keep": [True, False],
    "num_warps": [1, 2, 4, 8, 16, 32],
    "stages": [1, 2, 3, 4],
}
FORMAT = 3  # of what is written; part of the key
_RESERVED = {
    "i", "j", "n", "u", "rows", "cols", "float", "double", "int", "step", "team", *RESERVED,
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
    if any(not argument.is_tensor for argument in graph.arguments):
        raise NotOneNest("an argument of forward is no tensor\n  expected: tensors alone")
    nest = nest_of(graph)
    op = f"{identifier(name)}_forward"  # unlike any operator that comes with the tuner
    names = _names(nest)
    texts = {
        "op.yaml": _op_yaml(nest, op, names),
        "reference.py": reference,
        "model_new.py": _model_new(graph, nest, reference, settings, has_modes),
        "nest_triton.triton.py.j2": triton_template(nest, f"fused_{op}_rows", names),
    }
    if nest.inner == 1:  # in C++ a row lies in one piece
        texts["nest.cpp.j2"] = _template(nest, op, names)
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
    varied = {**_VALUES, **blocks_of(nest)}
    space |= {name: values for name, values in varied.items() if f"  {name}:" in heads}
    content = {"problem": {"op": op, "templates": ["."]}, "space": space}
    write_whole(config, json.dumps(content, indent=1) + "\n")
    return Derived(root, op, config)


def identifier(name: str) -> str:
    """Return a name in lower case that Python and C++ take."""
    found = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "module"
    return f"m_{found}" if found[0].isdigit() or keyword.iskeyword(found) else found


def _names(nest: Nest) -> dict[str, str]:
    """Return a name of every value for the texts: short, and no two alike."""
    values = [t.name for t, _ in nest.arguments]
    for each in nest.passes:
        values += [s.name for s in (*each.statements, *each.after)]
        values += [r.name for r in each.reductions]
    values += [s.name for s in nest.before]
    names: dict[str, str] = {}
    for value in dict.fromkeys(values):
        base = identifier(value) + ("_v" if identifier(value) in _RESERVED else "")
        names[value] = base if base not in names.values() else f"{base}_{len(names)}"
    return names


# ---- op.yaml --------------------------------------------------------------------------------


def _op_yaml(nest: Nest, op: str, names: Mapping[str, str]) -> str:
    sizes = {"rows": nest.rows, "cols": nest.cols}
    arguments = []
    for tensor, place in nest.arguments:
        name = names[tensor.name]
        shape = {"whole": ["rows", "cols"], "column": ["cols"]}.get(place, [f"{name}_size"])
        if place in ("row", "one"):
            sizes[f"{name}_size"] = math.prod(tensor.shape)
        arguments.append({"name": name, "shape": shape})
    outputs = [
        {"name": f"{names[n]}_out", "shape": ["rows", "cols"] if place == "whole" else ["rows"]}
        for n, place in dict.fromkeys(nest.outputs)
    ]
    num_whole = sum(p == "whole" for _, p in nest.arguments)
    num_whole += sum(p == "whole" for _, p in nest.outputs)
    others = sum(math.prod(t.shape) for t, place in nest.arguments if place != "whole")
    return "\n".join(
        [
            f"name: {op}",
            f"title: {op}",
            f"function: fused_{op}",
            "replaces: [the whole forward]",
            f"sizes: {json.dumps(sizes)}",
            f"arguments: {json.dumps(arguments)}",
            f"outputs: {json.dumps(outputs)}",
            f"flops: {max(1, round(nest.flops / (nest.rows * nest.cols)))} * rows * cols",
            f"bytes: 4 * ({num_whole} * rows * cols + {others})",
            "",
        ]
    )


# ---- the template ---------------------------------------------------------------------------


def _template(nest: Nest, op: str, names: Mapping[str, str]) -> str:
    kept = kept_values(nest)
    outputs = dict.fromkeys(nest.outputs)
    whole = [f"{names[n]}_out" for n, place in outputs if place == "whole"]
    args = [names[t.name] for t, _ in nest.arguments] + [f"{names[n]}_out" for n, _ in outputs]
    steps = [f"  - {{call: fused_{op}_huge_pages, args: [{', '.join(whole)}, rows, cols], "
             'when: "huge_pages"}'] if whole else []  # fmt: skip
    steps.append(f"  - {{call: fused_{op}_rows, args: [{', '.join([*args, 'rows'])}, cols, "
                 "num_threads]}")  # fmt: skip
    parameters = [
        '  width: {about: "floats in a vector", default: {expr: "device.simd_bits // 32"}, '
        "values: [4, 8, 16]}",
        '  unroll: {about: "vectors at a time", default: 2, values: [1, 2, 4]}',
        '  max_threads: {about: "threads at most; 0 is as many as PyTorch uses", default: 0, '
        "values: [0]}",
        '  stream_output: {about: "write outputs past the caches, where the machine can", '
        "default: false, values: [false, true]}",
    ]
    if whole:
        parameters.append(
            '  huge_pages: {about: "ask Linux for 2 MB pages under outputs, which are fresh at '
            'every call", default: true, values: [true, false]}'
        )
    if kept:
        parameters.append(
            '  keep: {about: "keep what is costly from one sweep over a row to the next", '
            "default: true, values: [true, false]}"
        )
    passes = len(nest.passes)
    head = [
        "---",
        f"title: Sweeps over each row while it is in cache ({passes}), in C++",
        "language: cpp",
        "requires:",
        '  - {expr: "device.kind == \'cpu\'", why: "it is C++ for the CPU"}',
        '  - {expr: "32 * width <= device.simd_bits", why: "a vector is no wider than this '
        "machine's registers\"}",
        "parameters:",
        *parameters,
        "steps:",
        *steps,
        "optimisations:",
        '  - {text: "all of the forward in one loop over rows: nothing in between is stored"}',
        '  - {text: "outputs are written past the caches", when: "stream_output"}',
        "---",
        "#include <algorithm>",
        "#include <cmath>",
        "#include <cstdint>",
        "#include <cstring>",
        "#include <type_traits>",
        "#include <vector>",
        "",
        '{% include "_lib/cpu_simd.hpp" %}',
        "",
        '{% include "_lib/cpu_math.hpp" %}',
        "",
        "{% if stream_output %}",
        '{% include "_lib/cpu_stream.hpp" %}',
        "{% endif %}",
        '{% include "_lib/cpu_rows.hpp" %}',
    ]
    if whole:
        pointers = ", ".join(f"float* {name}" for name in whole)
        head += [
            "{% if huge_pages %}",
            '{% include "_lib/cpu_huge_pages.hpp" %}',
            f'extern "C" const char* fused_{op}_huge_pages({pointers}, int64_t rows, '
            "int64_t cols) {",
            *(f"  pages::prefer_huge({name}, rows * cols * 4);" for name in whole),
            "  return nullptr;",
            "}",
            "{% endif %}",
        ]
    head += [
        "constexpr int64_t kThreads = {{ max_threads }};",
        "constexpr int kUnroll = {{ unroll }};",
        "constexpr int64_t kPiece = 4096;  // columns that are summed in float32",
        "",
        "",
    ]
    return "\n".join(head) + loops_text(nest, f"fused_{op}_rows", names)


# ---- the module -----------------------------------------------------------------------------


def _model_new(
    graph: Graph, nest: Nest, reference: str, settings: Mapping[str, object], has_modes: bool
) -> str:
    inputs = [t.name for t in graph.inputs]
    state = {t.name for t in (*graph.parameters, *graph.buffers)}
    arguments = []
    for tensor, place in nest.arguments:
        source = f"self.{tensor.name}" if tensor.name in state else tensor.name
        flat = "-1, _COLS" if place == "whole" else "-1"
        arguments.append(f"{source}.detach().reshape({flat})")
    first = graph.inputs[0].shape[0] if graph.inputs and graph.inputs[0].shape else 0
    results = []
    distinct = list(dict.fromkeys(n for n, _ in nest.outputs))
    for (name, _), given in zip(nest.outputs, graph.outputs, strict=True):
        shape = graph.value(given).shape
        is_free = bool(shape) and bool(first) and shape[0] == first
        sizes = ["-1" if is_free else str(shape[0]), *map(str, shape[1:])] if shape else []
        results.append(f"made[{distinct.index(name)}].view({', '.join(sizes)})")
    return _MODULE.format(
        reference=reference.rstrip(),
        cols=nest.cols,
        inputs=[list(t.shape) for t in graph.inputs],
        state=_shapes((*graph.parameters, *graph.buffers)),
        settings=dict(settings),
        has_modes=has_modes,
        has_free_rows=_has_free_rows(graph, nest),
        settings_of=inspect.getsource(settings_of).rstrip(),
        names=", ".join(inputs),
        arguments=", ".join(arguments),
        result=results[0] if len(results) == 1 else f"({', '.join(results)},)",
    )


_MODULE = """\
{reference}


from typing import Any

_COLS = {cols}
_HAS_FREE_ROWS = {has_free_rows}
_INPUTS = {inputs!r}
_STATE = {state!r}
_SETTINGS = {settings!r}


{settings_of}


def is_usual(module, inputs):
    # Whether a call is one that the loops were written for.
    device = torch.device(fused_device).type
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
    if any(x.dtype != torch.float32 or x.device.type != device for x in tensors):
        return False
    for x, shape in zip(inputs, _INPUTS):
        if list(x.shape[1:]) != shape[1:] or x.dim() != len(shape) or not x.numel():
            return False
        if shape and x.shape[0] != shape[0] and not _HAS_FREE_ROWS:
            return False
        if shape and shape[0] == _INPUTS[0][0] and len(x) != len(inputs[0]):
            return False
    if {{name: list(t.shape) for name, t in state.items()}} != _STATE:
        return False
    return settings_of(module, {has_modes}) == _SETTINGS


class ModelNew(Model):
    # The reference itself, with its forward in one loop where a call is as usual.
    def forward(self, {names}):
        if not is_usual(self, ({names},)):
            return super().forward({names})
        made = fused_op({arguments})
        return {result}


def setup_context(ctx, inputs, output):
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))


def backward(ctx, *grads):
    raise RuntimeError("calls that want gradients take the reference")
"""


def _shapes(tensors: Iterable[object]) -> dict[str, list[int]]:
    return {t.name: list(t.shape) for t in tensors}  # type: ignore[attr-defined]


def _has_free_rows(graph: Graph, nest: Nest) -> bool:
    """Whether the first dimension may have another size: it is that of the rows alone."""
    if not graph.inputs or not graph.inputs[0].shape or not nest.row_shape:
        return False
    first = graph.inputs[0].shape[0]
    if nest.row_shape[0] != first or not nest.num_outer:
        return False
    of_inputs = all(
        place == "whole"
        or (t.name not in {i.name for i in graph.inputs} and place != "row")
        or nest.row_strides.get(t.name, (0,))[0] == 0
        for t, place in nest.arguments
    )
    return of_inputs and all(graph.value(o).shape[:1] == (first,) for o in graph.outputs)
