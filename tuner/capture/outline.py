"""A graph in short, for people and as data: its steps with shapes, its tasks, its traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from tuner.capture.graph.graph import Graph, Node, Operand, Ref, Rewrite, Tensor, num_bytes_of
from tuner.capture.nests.index_space import ALIASES, NothingToGenerate, NotOneNest, viewed
from tuner.capture.nests.nest import Nest
from tuner.capture.nests.own_parameters import suffixes_of
from tuner.capture.rewrites.merging import constant_outputs
from tuner.capture.tasks.half_products import makers_of
from tuner.capture.tasks.identity import keys_of
from tuner.capture.tasks.library import MATRIX_PRODUCTS, Call, flops_of
from tuner.capture.tasks.stages import stages_of

__all__ = ["MODULE_FILE", "Given", "KernelTask", "Outline", "Step", "outline_of"]

MODULE_FILE = "module.json"  # in a run's folder: an outline, and what could be gained


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor that no step computes: `kind` is input, parameter, buffer or constant."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a graph; `line` is that of the user's file, 0 where it is not known."""

    name: str
    text: str
    shape: tuple[int, ...]
    dtype: str
    line: int


@dataclass(frozen=True, slots=True)
class KernelTask:
    """Steps that become one kernel; `kind` says which: a nest is one loop over rows.

    Its `name` is that of the last value that it gives. `key` is equal for the same work in any
    module, `form_key` also where sizes and numbers differ (`identity`); `num_bytes` are those that
    it reads and writes, `flops` its operations, two for a product and its sum. All of these are
    empty in records of older runs. `parameters` are those that a call is made by; a nest has all
    the others, and their names end in its `suffix`, which is empty where they are plain
    (`own_parameters`).
    """

    kind: str
    steps: tuple[str, ...]
    name: str = ""
    key: str = ""
    form_key: str = ""
    num_bytes: int = 0
    parameters: tuple[str, ...] = ()
    suffix: str = ""
    flops: int = 0

    @property
    def label(self) -> str:
        """Its kind and the beginning of its key, for people: nest-3fa2c1."""
        return f"{self.kind}-{self.key[:6]}"


@dataclass(frozen=True, slots=True)
class Outline:
    """What a module's forward computes, in order, and what that costs at the least.

    `read_bytes` counts each tensor that is given once, `written_bytes` each output and each buffer
    that the call updates: traffic that no kernel avoids. `flops` counts one operation for each
    element of each step, and two for a product and its sum, so it is a lower bound as well; of
    these `matrix_flops` are products of matrices, `convolution_flops` convolutions. `rewrites` are
    the exact steps that led to this graph from what was captured; `constants` the outputs that are
    the same for all finite inputs and weights. All of these are empty in records of older runs.
    """

    given: tuple[Given, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    tasks: tuple[KernelTask, ...]
    read_bytes: int
    written_bytes: int
    flops: int
    is_training: bool
    rewrites: tuple[Rewrite, ...] = ()
    constants: tuple[str, ...] = ()
    matrix_flops: int = 0
    convolution_flops: int = 0

    @property
    def num_bytes(self) -> int:
        """Compulsory traffic in bytes."""
        return self.read_bytes + self.written_bytes


def outline_of(graph: Graph) -> Outline:
    """Describe a graph; where no loops are generated for it, it has no tasks."""
    steps = tuple(_step(node) for node in graph.nodes)
    used = {name for node in graph.nodes for name in node.refs}
    kinds = {
        **{t.name: "input" for t in graph.inputs},
        **{t.name: "parameter" for t in graph.parameters},
        **{t.name: "buffer" for t in graph.buffers},
        **{t.name: "constant" for t in graph.constants},
    }
    products = _product_flops(graph)
    return Outline(
        given=tuple(
            Given(t.name, kinds[t.name], t.shape, t.dtype) for t in graph.given if t.name in used
        ),
        steps=steps,
        outputs=graph.outputs,
        tasks=_tasks(graph),
        read_bytes=_read_bytes(graph),
        written_bytes=_written_bytes(graph),
        flops=_flops(graph) + sum(products),
        is_training=graph.is_training,
        rewrites=graph.rewrites,
        constants=constant_outputs(graph),
        matrix_flops=products[0],
        convolution_flops=products[1],
    )


def _tasks(graph: Graph) -> tuple[KernelTask, ...]:
    """Return a task for each nest; a step of several nests is computed again in each."""
    try:
        tasks = stages_of(graph).tasks
    except (NotOneNest, NothingToGenerate):
        return ()
    names = [node.name for node in graph.nodes]
    steps = [
        names
        if len(tasks) == 1 and not isinstance(task, Call)
        else [task.name]
        if isinstance(task, Call)
        else [n for n in names if n in task.computed]
        for task in tasks
    ]
    suffixes = suffixes_of([task for task in tasks if isinstance(task, Nest)])
    return tuple(
        _task(graph, task, own, suffixes.get(task.name, ""))
        for task, own in zip(tasks, steps, strict=True)
    )


def _task(graph: Graph, task: Nest | Call, steps: Sequence[str], suffix: str) -> KernelTask:
    parameters: list[str] = []
    if isinstance(task, Call):
        for made in makers_of(graph, [task]).values():
            parameters += made.parameters
        kind, forms = "library", [*task.forms, (task.shape, task.dtype)]
        num_bytes = sum(math.prod(shape) * num_bytes_of(dtype) for shape, dtype in forms)
    else:
        kind, num_bytes = "nest", sum(tensor.num_bytes for tensor in task.arguments)
        num_bytes += sum(o.count * num_bytes_of(o.dtype) for o in task.outputs)
    keys = keys_of(task)
    return KernelTask(
        kind,
        tuple(steps),
        task.name,
        keys.whole,
        keys.form,
        num_bytes,
        tuple(dict.fromkeys(parameters)),
        suffix,
        task.flops,
    )


def _step(node: Node) -> Step:
    def operand(value: Operand | JsonValue) -> str:
        return value.name if isinstance(value, Ref) else str(value)

    attrs = [f"{name}={value}" for name, value in node.attrs.items()]
    text = f"{node.op}({', '.join([*map(operand, node.args), *attrs])})"
    return Step(node.name, text, node.shape, node.dtype, node.line)


def _read_bytes(graph: Graph) -> int:
    """Return the bytes that must be read of what is given."""
    read = _bytes_read(graph)
    return sum(read[tensor.name] for tensor in graph.given)


def _bytes_read(graph: Graph) -> dict[str, int]:
    """Return what must be read of each value: of what is sliced the slices, of a view nothing."""
    users = graph.users
    values: list[Tensor | Node] = [*graph.given, *graph.nodes]
    read: dict[str, int] = {}
    for value in reversed(values):
        total = 0
        for user in users[value.name]:
            if user.op in ALIASES:
                total += read[user.name]
            elif user.op == "gather" and user.refs[1:] != user.refs[:1]:
                total += user.num_bytes if user.refs[0] == value.name else value.num_bytes
            else:
                total += value.num_bytes
        read[value.name] = min(value.num_bytes, total)
    return read


def _written_bytes(graph: Graph) -> int:
    """Return the bytes that must be written; what is a view of an argument is not copied."""
    made = [n for n in dict.fromkeys(graph.outputs) if isinstance(viewed(graph, n), Node)]
    return sum(graph.value(name).num_bytes for name in [*made, *graph.buffer_updates.values()])


def _product_flops(graph: Graph) -> tuple[int, int]:
    """Count the operations of products of matrices, and of convolutions.

    Of what is sliced, and of what a mask may leave out half of, no more need be made.
    """
    found, read, users = [0, 0], _bytes_read(graph), graph.users
    for node in graph.nodes:
        is_convolution = node.op.startswith(("conv", "aten.conv"))
        if not (is_convolution or node.op in MATRIX_PRODUCTS):
            continue
        flops = flops_of(node, [graph.value(name) for name in node.refs])
        if node.name not in graph.outputs and node.num_bytes:
            is_masked = {user.op for user in users[node.name]} == {"where"}
            flops = flops * read[node.name] // node.num_bytes // (1 + is_masked)
        found[is_convolution] += flops
    return found[0], found[1]


def _flops(graph: Graph) -> int:
    """Count one operation for each element of pointwise work, and for each that is folded."""
    values: list[Tensor | Node] = [*graph.given, *graph.nodes]
    shapes = {value.name: value.shape for value in values}
    return sum(
        math.prod(node.shape if node.kind == "pointwise" else shapes[node.refs[0]])
        for node in graph.nodes
        if node.kind == "pointwise" or (node.kind in ("reduction", "scan") and node.refs)
    )
