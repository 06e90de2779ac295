"""Run a file's forward on fake tensors and record PyTorch's operators, or say why it cannot be.

Nothing is allocated: weights and inputs are made under a FakeTensorMode, whatever their size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.capture.graph.constructing import constructed, conversions_of_fakes
from tuner.capture.graph.counted import (
    changed_by_calls,
    refusal_of,
    require_none_set,
    tensors_held,
    versions_of,
)
from tuner.capture.graph.explaining import CONSTRUCTOR, explained
from tuner.capture.graph.plain import require_list, require_plain
from tuner.capture.graph.recurrent import recurrent_by_shape
from tuner.capture.graph.returning import Returns, with_bare_tensors
from tuner.errors import CaptureError
from tuner.problem.modes import TuneMode, others_in_mode, put_into
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["Traced", "decompositions", "fake_module", "resized", "traced"]

# Operators that stay whole; all other composite ones are opened into their parts.
_KEPT = """linear matmul silu mish hardswish hardsigmoid softplus log_sigmoid selu square
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d max_pool1d max_pool2d
max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
adaptive_avg_pool3d scaled_dot_product_attention lstm gru rnn_tanh rnn_relu flip roll
im2col col2im reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
replication_pad2d replication_pad3d"""
# Operators of the core set that are opened all the same, by how their names end.
_OPENED_ENDS = (
    *("_norm", "_norm_legit", "_norm_legit_functional", "_norm_legit_no_training"),
    *("softmax", "nll_loss_forward", "nll_loss2d_forward"),
)


@dataclass(frozen=True, slots=True)
class Traced:
    """What was recorded: PyTorch's program, and what only the module knows.

    `names` are forward's arguments in order, `values` what `get_inputs` gave for them (tensors
    are fake), `state` the module's parameters and buffers by all of their names, `held` the other
    tensors that it has as attributes, `returns` the containers of what it returned, `unmarked` the
    buffers whose versions a call leaves as they are.
    """

    program: torch.export.ExportedProgram
    names: tuple[str, ...]
    values: tuple[Any, ...]
    state: Mapping[str, torch.Tensor]
    held: Mapping[str, torch.Tensor]
    is_training: bool
    returns: Returns
    unmarked: frozenset[str] = frozenset()


def traced(problem: Problem, mode: TuneMode, *, batch: int | None = None) -> Traced:
    """Record one call of `Model(*get_init_inputs())` on `get_inputs()`, without allocating.

    With `batch` every input whose dim 0 is the batch has that many rows instead. What
    the file prints goes to stderr.

    Raises:
        CaptureError: it fails, or what it does depends on the values of tensors.
    """
    import torch

    with fake_module(problem, mode, batch) as (model, names, values, known):
        is_training, before = model.training, tensors_held(model)
        with (
            explained(problem, "Model.forward"),
            torch.no_grad(),
            with_bare_tensors(model, problem) as returns,
        ):
            program = first = _recorded(model, values)
            if any(type(x) is float for x in values):
                program = _with_free_numbers(model, values, program)
            versions = versions_of(model)
            changed = changed_by_calls(model, lambda: _faked(model, values))
            unmarked = frozenset(dict(versions_of(model).items() & versions.items()))
            require_none_set(problem, model, before)
            if changed and _recorded(model, values).graph_module.code != first.graph_module.code:
                raise refusal_of(problem, changed)
        state = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        held = {
            f"{prefix}.{name}" if prefix else name: known.get(id(value), value)
            for prefix, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }
    return Traced(program, names, values, state, held, is_training, returns, unmarked)


@contextlib.contextmanager
def fake_module(
    problem: Problem, mode: TuneMode, batch: int | None = None
) -> Iterator[tuple[torch.nn.Module, tuple[str, ...], tuple[Any, ...], dict[int, torch.Tensor]]]:
    """Make the module and the inputs of one call on fake tensors, which are no memory.

    Give the module in its mode, the names and values of forward's arguments, and the numbers of
    tensors that were made of given ones, by the tensors' ids.

    Raises:
        CaptureError: the file fails, or gives what cannot be recorded.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(0)
        shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
        stack.enter_context(recurrent_by_shape())
        with fake, conversions_of_fakes():
            with explained(problem, "get_init_inputs()"):
                init = problem.module.get_init_inputs()
            require_list(problem, "get_init_inputs", init, "the constructor")
            with explained(problem, CONSTRUCTOR):
                model, known = constructed(problem, init, fake)
            with explained(problem, "get_inputs()"):
                given = problem.module.get_inputs()
            require_list(problem, "get_inputs", given, "forward")
        if not isinstance(model, torch.nn.Module):
            raise CaptureError(
                f"{problem.source}: Model is no torch.nn.Module; got {type(model).__name__}\n"
                "  next: derive class Model from torch.nn.Module"
            )
        require_plain(problem, model, given)
        if mode == "as_given":
            _require_one_mode(problem, model)
        with explained(problem, "Model.train"):
            put_into(model, mode)
        names = _argument_names(problem, model, given)
        values = tuple(
            fake.from_tensor(x, static_shapes=True)
            if isinstance(x, torch.Tensor) and not hasattr(x, "fake_mode")
            else x
            for x in given
        )
        with_rows = problem.with_rows()
        with fake:
            values = resized(values, with_rows, batch)
        yield model, names, values, known


def resized(
    values: tuple[Any, ...], with_rows: tuple[bool, ...], batch: int | None
) -> tuple[Any, ...]:
    """Return the inputs with `batch` rows, where dim 0 is the batch."""
    if batch is None:
        return values
    return tuple(
        x.new_empty((batch, *x.shape[1:])) if has_rows else x
        for x, has_rows in zip(values, with_rows, strict=True)
    )


def _require_one_mode(problem: Problem, model: torch.nn.Module) -> None:
    others = others_in_mode(model)
    if others:
        modes = ["eval", "training"]
        raise CaptureError(
            f"{problem.source}: Model's constructor leaves it in {modes[model.training]} mode, "
            f"but {', '.join(others[:3])} in {modes[not model.training]} mode; expected one mode "
            "for all of it\n  next: choose one, --mode train or --mode eval"
        )


def _recorded(model: torch.nn.Module, values: tuple[Any, ...]) -> torch.export.ExportedProgram:
    import torch

    program = torch.export.export(model, values, strict=False)
    known = _known_operators()
    with _few_overridden(known):
        return program.run_decompositions(dict(_opened_of(known)))


def _faked(model: torch.nn.Module, values: tuple[Any, ...]) -> None:
    """Call a module on fake tensors, so that what it makes besides is no memory either."""
    held = (*values, *model.parameters(), *model.buffers())
    modes = (value.fake_mode for value in held if hasattr(value, "fake_mode"))
    with next(modes, contextlib.nullcontext()):
        model(*values)


@contextlib.contextmanager
def _few_overridden(known: tuple[str, ...]) -> Iterator[None]:
    """Let PyTorch override only those composite operators that it would not open by itself.

    For each program it looks through all operators and overrides 525 composite ones, most of them
    by what they do anyway: more than half of the time of a small module's capture. Where its
    function has another name, it does so here, too.
    """
    from torch.export import exported_program as room

    name = "_split_decomp_table_to_cia_and_python_decomp"
    whole = getattr(room, name, None)
    if whole is None:
        yield
        return

    def few(_: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
        composite, others = _split_of(whole, known)
        return composite, dict(others)

    setattr(room, name, few)
    try:
        yield
    finally:
        setattr(room, name, whole)


@functools.lru_cache(1)
def _split_of(
    whole: Callable[[dict[Any, Any]], tuple[dict[Any, Any], dict[Any, Any]]],
    known: tuple[str, ...],
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return the rules of composite operators that are not PyTorch's own, and all other rules."""
    composite, others = whole(dict(_opened_of(known)))

    def is_own(rule: Any) -> bool:
        return (
            isinstance(rule, functools.partial) and rule.func.__module__ == "torch._export.utils"
        )

    return {op: rule for op, rule in composite.items() if not is_own(rule)}, others


def _with_free_numbers(
    model: torch.nn.Module, values: tuple[Any, ...], fixed: torch.export.ExportedProgram
) -> torch.export.ExportedProgram:
    """Record once more with floats as tensors of shape (), so that they stay arguments.

    Return `fixed` where that is not the same computation: an operator wants a number, forward
    branches on it, or the dtypes differ.
    """
    import torch

    def steps(program: Any) -> list[Any]:
        nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        return [
            (getattr(node.target, "_opname", str(node.target)), value.shape, value.dtype)
            if isinstance(value := node.meta.get("val"), torch.Tensor)
            else str(node.target)
            for node in nodes
        ]

    free = tuple(torch.tensor(x, dtype=torch.float64) if type(x) is float else x for x in values)
    try:
        program = _recorded(model, free)
    except Exception:
        return fixed
    return program if steps(program) == steps(fixed) else fixed


def decompositions() -> dict[Any, Any]:
    """Return what to open: all that PyTorch's core set opens, and norms, softmax and losses."""
    # Collected once, for 0.1 s, unless operators were registered since: a file is traced up to
    # three times.
    return dict(_opened_of(_known_operators()))


def _known_operators() -> tuple[str, ...]:
    import torch

    # Those that exported files register are opened by no rule.
    names = torch._C._dispatch_get_all_op_names()
    return tuple(name for name in names if not name.startswith("tuner_"))


@functools.lru_cache(1)
def _opened_of(_known: tuple[str, ...]) -> dict[Any, Any]:
    import torch
    from torch._decomp import decomposition_table

    opened: dict[Any, Any] = dict(torch.export.default_decompositions())
    for operator, function in decomposition_table.items():
        name = str(operator).split("::")[-1].removeprefix("aten.").split(".")[0]
        if name.endswith(_OPENED_ENDS) and isinstance(operator, torch._ops.OpOverload):
            opened.setdefault(operator, function)
    opened[torch.ops.aten._native_batch_norm_legit_no_training.default] = _normalized
    opened[torch.ops.aten._weight_norm_interface_backward.default] = _weight_norm_gradients
    for operator in [each for each in opened if _gives_statistics(each)]:
        opened[operator] = _with_exact_statistics(opened[operator])
    for name in _KEPT.split():
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            opened.pop(getattr(packet, overload), None)
    return opened


def _weight_norm_gradients(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of v and g for `v * g / norm(v)`, the weight of PyTorch's weight_norm."""
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    along = (grad * v).sum(axes, keepdim=True) / norms
    return g / norms * (grad - v * (along / norms)), along


def _gives_statistics(operator: torch._ops.OpOverload) -> bool:
    """Whether it normalises, and returns the statistics that its backward reads as well."""
    name, _, overload = str(operator).removeprefix("aten.").partition(".")
    is_norm = name.endswith(("_norm", "_norm_legit", "_norm_legit_functional"))
    return is_norm and overload != "out" and len(operator._schema.returns) >= 3


def _with_exact_statistics(opened: Callable[..., Any]) -> Callable[..., Any]:
    """Let a normalisation of halves keep its mean and 1 / standard deviation in float32.

    PyTorch keeps them as halves on a CPU, which is where files are traced, and not on a GPU. Its
    own gradients stand that: what they subtract the mean from are halves as well, so that equal
    numbers still leave zero. Kernels of ours have not rounded them.
    """
    import torch

    @functools.wraps(opened)
    def run(x: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
        if x.dtype not in (torch.bfloat16, torch.float16):
            return tuple(opened(x, *rest))
        y, *statistics = opened(x.float(), *rest)
        return (y.to(x.dtype), *statistics)

    return run


def _normalized(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write BatchNorm by stored statistics so that a large value overflows only where it must.

    PyTorch's own parts multiply by the deviation and then by the weight; its kernels on a CPU by
    the product of both, which may be small.
    """
    scale = (var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shape = [1, -1] + [1] * (x.dim() - 2)
    y = (x - mean.view(shape)) * scale.view(shape)
    return y if bias is None else y + bias.view(shape), x.new_empty(0), x.new_empty(0)


def _argument_names(problem: Problem, model: torch.nn.Module, given: Any) -> tuple[str, ...]:
    """Return the names of forward's arguments that `given` stands for; refuse other kinds."""
    import torch

    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*given).arguments
    except TypeError as error:
        raise CaptureError(
            f"{problem.source}: get_inputs() does not fit Model.forward{signature}: {error}; got "
            f"{len(given)} arguments\n  next: return one value for each argument of forward"
        ) from None
    names: list[str] = []
    for name, value in bound.items():
        is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}_{i}" for i in range(len(value))] if is_rest else [name]
    for name, value in zip(names, given, strict=True):
        if not isinstance(value, (torch.Tensor, bool, int, float, str, type(None))):
            raise CaptureError(
                f"{problem.source}: the argument {name!r} of Model.forward is of type "
                f"{type(value).__name__}; expected a tensor or a number\n"
                "  next: give each tensor as an argument of its own"
            )
    return tuple(names)
