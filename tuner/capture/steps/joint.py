"""A module's forward and gradients as two graphs: what a step of training computes.

Both come from one record of PyTorch's, of forward and of `torch.autograd.grad` behind it. What
lies between them is computed again in the backward, from what is kept: what is given, what
forward returns, and results of PyTorch's own operations, such as products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tuner.capture.graph.autograd_leaves import (
    NotGiven,
    Origins,
    between_of,
    gradients_of_each,
    origins_of,
)
from tuner.capture.graph.calls import is_assertion
from tuner.capture.graph.graph import Graph, Node, Ref, Tensor, behind, free_name, live
from tuner.capture.graph.lowering import Lowering, dtype_name
from tuner.capture.graph.operators import Operators
from tuner.capture.graph.recurrent import is_recurrent
from tuner.capture.graph.rules_of_steps import NOT_OPENED, OF_STEPS
from tuner.capture.graph.seen import seen_in
from tuner.capture.graph.tracing import decompositions, fake_module
from tuner.capture.nests.precision import with_products
from tuner.capture.nests.viewing import without_turns
from tuner.capture.steps.keeping import (
    Fewer,
    divided,
    reduced,
    steps_from_given,
    with_copies,
)
from tuner.capture.steps.result_views import made_as, result_views
from tuner.capture.tasks.step_records import Backward, Captured, Joint, part_of, why_shared
from tuner.problem.reference import Problem
from tuner.problem.returned import tensors_of

if TYPE_CHECKING:
    import torch

__all__ = ["captured_of"]


def captured_of(problem: Problem, graph: Graph) -> Captured:
    """Record a step of a module whose forward was captured.

    Where results would go back through the same products, they do that together, from where they
    part: what is there is a result, too, though none that is returned.
    """
    found = _captured(_Step(problem, graph))
    if found.joint is None or not why_shared(found.joint):
        return found
    together = _captured(_Step(problem, graph, parts=True))
    return found if together.joint is None or why_shared(together.joint) else together


def _captured(step: _Step) -> Captured:
    graph = step.graph
    why = _not_recorded(graph)
    if why:
        return Captured(graph, None, why)
    try:
        joint = step.joint()
    except NotGiven as error:
        return Captured(graph, None, str(error))
    except Exception as error:  # whatever a record of a backward has that is not read yet
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        return Captured(graph, None, f"the record of its backward is not read yet: {said}")
    args = [x for b in joint.backwards for n in b.graph.nodes for x in n.args]
    if any(isinstance(x, complex) for x in args):
        return Captured(graph, None, "its gradients are computed with complex numbers")
    return Captured(graph, joint)


def _not_recorded(graph: Graph) -> str:
    """Return why no step of a module is recorded; empty where that is tried."""
    if numbers := [a.name for a in graph.arguments if not a.is_tensor]:
        return f"forward is given numbers beside tensors ({', '.join(numbers)})"
    # Their gradients depend on which values are zero: to record these took PyTorch 2.11 minutes.
    many = next((node for node in graph.nodes if node.op in ("cumprod", "prod")), None)
    if many is not None:
        return f"gradients of a product of many (line {many.line}) are not generated yet"
    if is_recurrent(graph):
        return "gradients of recurrent networks are not generated yet"
    held = {c.name for c in graph.constants if c.shape}
    if lines := sorted({node.line for node in graph.nodes if held & {*node.refs}}):
        where = ", ".join(f"line {line}" for line in lines)
        return f"it uses a tensor that is neither a parameter nor a buffer ({where})"
    return ""


class Form(NamedTuple):
    """Shape and dtype of a result."""

    shape: tuple[int, ...]
    dtype: str


class _Step(Operators):
    """Reads forward and gradients from PyTorch's record."""

    rules = OF_STEPS

    def __init__(self, problem: Problem, graph: Graph, *, parts: bool = False) -> None:
        super().__init__(problem, is_training=graph.is_training)
        self.graph, self.parts = graph, parts
        self.between: list[int] = []
        self.given = {t.name: t for t in (*graph.inputs, *graph.parameters)}
        self.updated = [*graph.buffer_updates]
        self.wanted = [n for n, t in self.given.items() if "float" in t.dtype]
        self.frozen: list[str] = []
        self.outputs: list[Form] = []
        self.differentiable: list[bool] = []  # of each output, once forward was run
        self.origins: list[Origins] = []  # the same
        self.copied: set[str] = set()  # views that were copied, as by `contiguous()`

    def joint(self) -> Joint:
        with fake_module(self.problem, self.graph.mode, self.graph.batch) as (model, _, values, _):
            state = dict(model.named_parameters())
            self.frozen = [n for n in self.wanted if n in state and not state[n].requires_grad]
            self.wanted = [n for n in self.wanted if n not in self.frozen]
            recorded = self.recorded(model, values)
        taken = {t.name for t in self.graph.given}
        coming = [
            Tensor(free_name(f"grad_{i}", taken), y.shape, y.dtype) if "float" in y.dtype else None
            for i, y in enumerate(self.outputs)
        ]
        incoming = [t if d else None for t, d in zip(coming, self.differentiable, strict=True)]
        given = [*self.given.values(), *self.graph.buffers]
        low, names = self._lowered(recorded, [*given, *(t for t in coming if t is not None)])
        nodes, same = without_turns(low.nodes)
        _require_read(nodes)
        names = [same.get(name or "", name) for name in names]
        end, last = len(self.outputs), len(self.outputs) + len(self.updated)
        if any(name is None for name in names[:last]):
            raise NotGiven("one of its results is one of several of an operation")
        own = [str(name) for name in names[:end]]
        if len(set(own)) < len(own):
            raise NotGiven("two of its results are one tensor")
        dtypes = [low.forms[name][1] for name in own]
        if dtypes != [y.dtype for y in self.outputs]:  # places are floats here, PyTorch's are not
            raise NotGiven("one of its results has another dtype in the record of its backward")
        updates = dict(zip(self.updated, map(str, names[end:last]), strict=True))
        return self._split(nodes, own, updates, self._asked(own, names[last:]), incoming)

    def _lowered(
        self, recorded: Any, given: Sequence[Tensor]
    ) -> tuple[Lowering, list[str | None]]:
        """Return a record's nodes, and the name of each of its results that has one.

        `given` is what the record is given, in order.
        """
        import torch

        low = Lowering(given)
        values_of: dict[str, Any] = {}
        places = iter(given)
        results: Sequence[Any] = ()
        for node in recorded.graph.nodes:
            if node.op == "placeholder":
                values_of[node.name] = Ref(next(places).name)
            elif node.op == "call_function":
                self.refuse(node)
                if not is_assertion(node):
                    values_of[node.name] = self.lower(low, node, values_of)
            elif node.op == "output":
                results = node.args[0]
            else:
                constant = getattr(recorded, str(node.target))
                if type(constant) is not torch.Tensor or constant.dim():
                    raise NotGiven("it makes a tensor of several numbers that a step would keep")
                form: Any = {"shape": (), "dtype": dtype_name(constant.dtype)}
                values_of[node.name] = low.emit("full", constant.item(), **form)
        return low, [None if r is None else _first(values_of[r.name]) for r in results]

    def _asked(
        self, own: Sequence[str], gradients: Sequence[str | None]
    ) -> dict[int, dict[str, str]]:
        """Return of each result that has gradients, by its place, whose and which.

        `own` are the results, and `gradients` all of theirs, in order.
        """
        left = iter(gradients)
        asked: dict[int, dict[str, str]] = {}
        for place, origin in enumerate(self.origins):
            if self.differentiable[place]:
                by = [name for name in self.wanted if name in origin.leaves]
                sources = [own[other] for other in sorted(origin.results)]
                found = {of: next(left) for of in (*by, *sources)}
                if any(found[of] is None for of in sources):
                    raise NotGiven("a result has no gradient by one that it is computed from")
                asked[place] = {of: name or "" for of, name in found.items()}
        return asked

    def lower(self, low: Lowering, node: Any, values: dict[str, Any]) -> Any:
        """Write an operator's nodes; a convolution's gradients are a call each."""
        if getattr(node.target, "_opname", "") == "clone":
            self.copied.add(values[node.args[0].name].name)
        if getattr(node.target, "_opname", "") != "convolution_backward":
            return super().lower(low, node, values)
        names = [a.name for a in node.target._schema.arguments]
        given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        mask = given["output_mask"]
        given = {n: values[x.name] if hasattr(x, "target") else x for n, x in given.items()}
        made: list[Any] = []
        for place, (is_wanted, value) in enumerate(zip(mask, node.meta["val"], strict=True)):
            if not is_wanted:
                made.append(None)
                continue
            low.move_to(value.shape, dtype_name(value.dtype), 0)
            grad = given["grad_output"]
            if place == 2:  # of the bias
                axes: Any = [0, *range(2, len(low.shape_of(grad)))]
                made.append(low.emit("sum", grad, axes=axes, keepdim=False))
                continue
            one = {**given, "output_mask": [place == 0, place == 1, False]}
            made.append(low.call("convolution_backward", "default", one))
            low.nodes[-1] = replace(low.nodes[-1], attrs=low.nodes[-1].attrs | {"pick": place})
        return tuple(made)

    def recorded(self, model: torch.nn.Module, values: tuple[Any, ...]) -> Any:
        """Record forward and its gradients by inputs and parameters, buffers given beside them."""
        import torch
        from torch.fx.experimental.proxy_tensor import make_fx

        def leaf(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().requires_grad_(name in self.wanted)

        names = [t.name for t in self.graph.parameters]
        buffers = [t.name for t in self.graph.buffers]
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        num_inputs = len(values)

        def results_of(given: list[torch.Tensor], lent: dict[str, torch.Tensor]) -> Any:
            inputs, held = given[:num_inputs], given[num_inputs:]
            lent |= dict(zip([*names, *buffers], held, strict=True))
            lent |= {name: lent[name].clone() for name in self.updated}
            made, seen = seen_in(lambda: torch.func.functional_call(model, lent, tuple(inputs)))
            return tensors_of(made), seen

        def step(given: list[torch.Tensor], grads: list[torch.Tensor]) -> Any:
            lent: dict[str, torch.Tensor] = {}
            own, seen = results_of(given, lent)
            outputs = [*own, *(seen[place] for place in self.between)]
            if any(y._backward_hooks for y in outputs):  # a record would have them twice
                raise NotGiven("forward registers a hook on one of its results, or behind them")
            self.differentiable = [y.requires_grad for y in outputs]
            coming = iter(grads)
            grad_of = [next(coming) if y.is_floating_point() else None for y in outputs]
            updates = [lent[name] for name in self.updated]
            pairs = zip(self.given, given, strict=False)
            named = {name: x for name, x in pairs if name in self.wanted}
            if not any(self.differentiable):
                raise NotGiven("its results have no gradients")
            self.origins = origins_of(outputs, named, updates)
            gradients = gradients_of_each(outputs, grad_of, named, self.origins)
            return [*(y.detach() for y in outputs), *updates, *gradients]

        fake = next(x for x in values if isinstance(x, torch.Tensor)).fake_mode
        with fake:
            given = [*values, *(state[n] for n in names)]
            given = [leaf(n, x) for n, x in zip(self.given, given, strict=True)]
            given += [state[n].detach() for n in buffers]
            outputs = [Form(v.shape, v.dtype) for v in map(self.graph.value, self.graph.outputs)]
            if self.parts:
                own, seen = results_of(given, {})
                self.between = between_of(own, seen)
                outputs += [
                    Form((*x.shape,), dtype_name(x.dtype))
                    for x in map(seen.__getitem__, self.between)
                ]
            self.outputs = outputs
            grads = [
                torch.empty(y.shape, dtype=getattr(torch, y.dtype), device=given[0].device)
                for y in outputs
                if "float" in y.dtype
            ]
            table = decompositions().items()
            opened = {op: rule for op, rule in table if op._opname not in NOT_OPENED}
            recorded = make_fx(step, decomposition_table=opened)(given, grads)
            if any(_is_in_place(node.target) for node in _calls(recorded)):
                # What is written in place, by a formula of PyTorch's own or by forward.
                plain = torch.func.functionalize(recorded, remove="mutations")
                given = [x.detach() for x in given]
                recorded = make_fx(plain, decomposition_table=opened)(given, grads)
            return recorded

    def _split(
        self,
        nodes: list[Node],
        outputs: list[str],
        updates: dict[str, str],
        asked: Mapping[int, Mapping[str, str]],
        incoming: Sequence[Tensor | None],
    ) -> Joint:
        views = result_views(nodes, outputs, self.origins)
        made = [outputs[made_as(place, views)] for place in range(len(outputs))]
        asked = {place: found for place, found in asked.items() if place not in views}
        grads = [t for t in incoming if t is not None]
        every_one = (name for found in asked.values() for name in found.values())
        wanted = [name for name in dict.fromkeys(every_one) if name]
        # As in forward, though its extreme or mean may be kept and is no node of the backward.
        given = (*self.graph.inputs, *grads)
        whole = replace(self.graph, constants=(), inputs=given, nodes=tuple(nodes))
        nodes = [*with_products(whole).nodes]
        after = behind(nodes, {t.name for t in grads})
        if not {*wanted} <= after or after & {*outputs, *updates.values()}:
            raise NotGiven("one of its gradients does not depend on those that come in")
        results = {*made, *updates.values()}
        kept, needed = divided(nodes, wanted, results, self.copied)
        is_alone = not set(kept) - results
        if few := reduced(nodes, needed, after, self.given, is_alone=is_alone):
            fewer = Fewer(few, kept, self.given)
            kept, needed = divided(nodes, wanted, results, self.copied, fewer)
        if not needed:
            raise NotGiven("its gradients are those that come in")
        nodes, kept, again = with_copies(nodes, kept, needed, self.given)
        by_name = {n.name: n for n in nodes}
        saved = [Tensor(n, by_name[n].shape, by_name[n].dtype) for n in kept]
        graph = replace(self.graph, constants=(), nodes=tuple(nodes))
        copies = {name: steps for name in kept if (steps := steps_from_given(name, graph))}
        kept = [name for name in kept if name not in copies]

        inputs = (*graph.inputs, *saved, *grads)
        every = replace(graph, inputs=inputs, nodes=again, buffer_updates={}, outputs=())
        backwards = self._backwards(every, outputs, asked, incoming)
        forward = replace(
            graph,
            nodes=live(nodes, {*made, *kept, *updates.values()}),
            buffer_updates=updates,
            outputs=(*made, *(name for name in kept if name not in made)),
        )
        import torch

        num_results, version = len(self.graph.outputs), str(torch.__version__)
        frozen, between = tuple(self.frozen), tuple(self.between)
        return Joint(forward, num_results, backwards, views, copies, frozen, between, version)

    def _backwards(
        self,
        every: Graph,
        outputs: Sequence[str],
        asked: Mapping[int, Mapping[str, str]],
        incoming: Sequence[Tensor | None],
    ) -> tuple[Backward, ...]:
        """Return the gradients of each result, as parts of a graph of `every` one."""
        backwards = []
        for place, found in asked.items():
            coming = incoming[place]
            assert coming is not None
            graph = part_of(every, [*found.values()])
            gradient_of = {of: name for of, name in found.items() if of in self.given}
            sources = tuple(sorted(self.origins[place].results))
            of_sources = tuple(found[outputs[source]] for source in sources)
            backwards.append(Backward(place, coming.name, graph, gradient_of, sources, of_sources))
        return tuple(backwards)


def _require_read(nodes: Sequence[Node]) -> None:
    """Require that all nodes of a record are known to be what they compute alone."""
    made_by = {node.name: node.op.removeprefix("aten.").lstrip("_") for node in nodes}
    for node in nodes:
        if node.op == "result":
            raise NotGiven(f"gradients of {made_by[node.refs[0]]} are not generated yet")
        if node.op.endswith("_"):
            raise NotGiven(f"it is recorded with {made_by[node.name]}, which writes in place")


def _is_in_place(target: Any) -> bool:
    return getattr(target, "_opname", "").endswith("_")


def _calls(recorded: Any) -> Iterator[Any]:
    return (node for node in recorded.graph.nodes if node.op == "call_function")


def _first(value: Any) -> str | None:
    value = value[0] if isinstance(value, tuple) else value
    return value.name if isinstance(value, Ref) else None
