"""A KernelBench-format file's forward as a Graph: `capture(load_problem(path))`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tuner.capture.any_batch import another_batch, numbers_of_columns
from tuner.capture.graph.calls import is_assertion
from tuner.capture.graph.graph import MAX_CONSTANT, Argument, Graph, Operand, Ref, Tensor, live
from tuner.capture.graph.lowering import Lowering, dtype_name, plain
from tuner.capture.graph.operators import Operators
from tuner.capture.graph.tracing import Traced, traced
from tuner.capture.rows_tried import rows_tried
from tuner.errors import CaptureError
from tuner.problem.modes import TuneMode
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["capture", "in_eval_mode", "with_another_batch"]


def capture(
    problem: Problem,
    *,
    mode: TuneMode | None = None,
    batch: int | None = None,
) -> Graph:
    """Record what `Model.forward` computes on the shapes of `get_inputs()`.

    Nothing of the file's tensors is allocated. The module is in the problem's mode, or in `mode`
    if it is given. `batch` is how many rows the inputs have, where it is not as many as the
    problem's. This imports torch, and calls the file's code in this process.

    Raises:
        CaptureError: what the file computes depends on values or chance, is no tensor, or needs
            operators that are not PyTorch's; or the file fails.
    """
    rows = problem.rows if batch is None else batch
    return _Reader(problem, traced(problem, mode or problem.mode, batch=rows)).graph()


def with_another_batch(problem: Problem, graph: Graph) -> Graph | None:
    """Record it for another number of rows (dim 0); None where forward takes no other one.

    The graph has from and up to how many rows both hold.
    """
    if graph.batch is None:
        return None
    sizes = {size for t in graph.given for size in t.shape}
    sizes |= {size for node in graph.nodes for size in node.shape}
    other = another_batch(graph.batch, sizes, numbers_of_columns(graph))
    return _at_another(problem, graph.mode, (graph.batch, other))


def _at_another(problem: Problem, mode: TuneMode, batches: tuple[int, int]) -> Graph | None:
    """Record it at the second of two batches, with the rows between which both hold, if any."""
    try:
        found = capture(problem, mode=mode, batch=batches[1])
        rows = rows_tried(problem, mode, batches)
    except CaptureError:
        return None
    return None if rows is None else replace(found, fewest_rows=rows[0], most_rows=rows[1])


def in_eval_mode(
    problem: Problem, graphs: tuple[Graph, Graph], in_eval: Graph
) -> tuple[Graph, Graph] | None:
    """Record a module in eval mode that was recorded in training, at two batches.

    `graphs` are those of training mode, `in_eval` is of the first batch. None where forward in
    eval mode is given something else, edits buffers, or takes fewer numbers of rows. It may return
    something else, as without auxiliary heads.
    """
    first, second = graphs
    names = ("arguments", "inputs", "parameters", "buffers", "apart")
    is_alike = all(getattr(first, n) == getattr(in_eval, n) for n in names)
    is_alike &= in_eval.containers in ((), first.containers)  # the text holds those of training
    if not is_alike or in_eval.buffer_updates or first.batch is None or second.batch is None:
        return None
    other = _at_another(problem, "eval", (first.batch, second.batch))
    if other is None or other.fewest_rows > second.fewest_rows:
        return None
    most, most_in_eval = second.most_rows, other.most_rows
    if most_in_eval is not None and (most is None or most > most_in_eval):
        return None
    return in_eval, other


@dataclass(slots=True)
class _State:
    """Names of what the graph is given, by the names of PyTorch's placeholders."""

    tensors: dict[str, list[Tensor]]
    names: dict[str, Operand | None]
    arguments: list[Argument]


class _Reader(Operators):
    """PyTorch's program, read into a graph."""

    def __init__(self, problem: Problem, found: Traced) -> None:
        super().__init__(problem, is_training=found.is_training)
        self.found = found
        self.program: Any = found.program
        self.signature: Any = found.program.graph_signature

    def graph(self) -> Graph:
        outputs, updates = self.results()
        state = self.state()
        low = Lowering([t for tensors in state.tensors.values() for t in tensors])
        values: dict[str, Any] = dict(state.names)
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self.refuse(node)
                if is_assertion(node):
                    continue
                values[node.name] = self.lower(low, node, values)
            elif node.op not in ("placeholder", "output"):
                raise self.error(
                    node,
                    f"Model.forward uses {node.target}; expected PyTorch's operators only",
                    "write it without control flow of torch.cond, torch.while_loop and their like",
                )
        names = tuple(self.result_name(low, values, name) for name in outputs)
        written = {buffer: self.result_name(low, values, name) for buffer, name in updates.items()}
        nodes = live(low.nodes, {*names, *written.values()})
        kinds = state.tensors
        used = {name for node in nodes for name in node.refs} | {*names, *written.values()}
        return Graph(
            arguments=tuple(state.arguments),
            inputs=tuple(kinds["inputs"]),
            parameters=tuple(kinds["parameters"]),
            buffers=tuple(kinds["buffers"]),
            constants=tuple(t for t in kinds["constants"] if t.name in used),
            nodes=nodes,
            outputs=names,
            buffer_updates=written,
            is_training=self.found.is_training,
            apart=tuple(
                argument.name
                for argument, has_rows in zip(
                    state.arguments, self.problem.with_rows(), strict=True
                )
                if not has_rows
            ),
            returns=self.found.returns.text,
            containers=self.found.returns.containers,
            unmarked=tuple(sorted(self.found.unmarked & written.keys())),
        )

    # ---- what the graph is given ---------------------------------------------------------

    def state(self) -> _State:
        vals = {
            node.name: node.meta.get("val")
            for node in self.program.graph.nodes
            if node.op == "placeholder"
        }
        lists: dict[str, list[Tensor]] = {
            kind: [] for kind in ("inputs", "parameters", "buffers", "constants")
        }
        state = _State(lists, {}, [])
        by_tensor: dict[int, str] = {}
        user = iter(zip(self.found.names, self.found.values, strict=True))
        taken = set(self.found.state)
        for spec in self.signature.input_specs:
            kind, placeholder = spec.kind.name, spec.arg.name
            if kind == "USER_INPUT":
                name, value = next(user)
                form = vals[placeholder]
                self.add_argument(state, placeholder, name, value, form, taken)
                continue
            where = {"PARAMETER": "parameters", "BUFFER": "buffers"}.get(kind, "constants")
            if kind not in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
                raise self.error(
                    None,
                    f"Model holds {spec.target!r}, which is no tensor",
                    "compute with parameters and buffers only",
                )
            name = spec.target
            held = self.found.state.get(name)
            if held is not None:
                name = by_tensor.setdefault(id(held), name)
            if name == spec.target:
                tensor = _tensor(name, vals[placeholder])
                if where == "constants":
                    tensor = self.constant(tensor)
                state.tensors[where].append(tensor)
            state.names[placeholder] = Ref(name)
        return state

    def add_argument(
        self,
        state: _State,
        placeholder: str,
        name: str,
        value: Any,
        form: Any,
        taken: set[str],
    ) -> None:
        import torch

        if not isinstance(form, torch.Tensor):
            state.arguments.append(Argument(name, False, value, is_fixed=True))
            state.names[placeholder] = value
            return
        while name in taken:  # a parameter of the module has the name already
            name += "_"
        is_tensor = isinstance(value, torch.Tensor)
        state.arguments.append(Argument(name, is_tensor, None if is_tensor else value))
        state.tensors["inputs"].append(_tensor(name, form))
        state.names[placeholder] = Ref(name)

    def constant(self, tensor: Tensor) -> Tensor:
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

        value = self.found.held.get(tensor.name, self.program.constants.get(tensor.name))
        if isinstance(value, FakeTensor):
            value = value.constant
        if value is None or math.prod(tensor.shape) > MAX_CONSTANT:
            raise self.error(
                None,
                f"Model uses the tensor {tensor.name!r} of shape {tensor.shape}, which is neither "
                f"a parameter nor a buffer; expected one of at most {MAX_CONSTANT} given numbers",
                f"register it: self.register_buffer({tensor.name.split('.')[-1]!r}, ...)",
            )
        with unset_fake_temporarily():
            return Tensor(tensor.name, tensor.shape, tensor.dtype, plain(value.tolist()))

    # ---- what comes out ------------------------------------------------------------------

    def results(self) -> tuple[list[str], dict[str, str]]:
        """Return outputs and new values of buffers, by the names of PyTorch's nodes."""
        outputs: list[str] = []
        updates: dict[str, str] = {}
        for spec in self.signature.output_specs:
            kind = spec.kind.name
            if kind == "USER_OUTPUT":
                outputs.append(self.output(spec.arg))
            elif kind == "BUFFER_MUTATION":
                updates[spec.target] = spec.arg.name
            else:
                what = "input" if kind == "USER_INPUT_MUTATION" else "parameter"
                node = next((n for n in self.program.graph.nodes if n.name == spec.arg.name), None)
                raise self.error(
                    node,
                    f"Model.forward writes to its {what} {spec.target!r}; expected one that "
                    "leaves it as it is",
                    f"write to a copy: {spec.target} = {spec.target}.clone()",
                )
        if not outputs:
            raise self.error(None, "Model.forward returns nothing; expected a tensor", "return it")
        return outputs, updates

    def output(self, argument: Any) -> str:
        import torch

        name = getattr(argument, "name", "")
        node = next((n for n in self.program.graph.nodes if n.name == name), None)
        value = node.meta.get("val") if node is not None else getattr(argument, "value", None)
        if not isinstance(value, torch.Tensor):
            raise self.error(node, "Model.forward returns no tensor", "return tensors only")
        if value.is_complex():
            raise self.error(
                node,
                "Model.forward returns complex numbers, which cannot be judged; expected real "
                "ones",
                "return torch.view_as_real of it",
            )
        return str(name)

    def result_name(self, low: Lowering, values: dict[str, Any], name: str) -> str:
        value = values[name]
        if isinstance(value, tuple):
            value = value[0]
        return str(value.name if isinstance(value, Ref) else low.emit("full", value).name)


def _tensor(name: str, value: torch.Tensor) -> Tensor:
    return Tensor(name, tuple(int(n) for n in value.shape), dtype_name(value.dtype))
