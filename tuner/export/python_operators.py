"""A plan as Python that registers the operator with PyTorch, for a file with Triton's kernels.

A call that PyTorch has to see goes through the operator, which checks its arguments; so does the
first of each form. Others call the kernels directly: PyTorch's dispatcher and the checks take the
host longer than two launches.
"""

from __future__ import annotations

import inspect

from tuner.capture.modules.known_text import WATCHED_TEXT
from tuner.export.registration import has_channels_last
from tuner.kernel.operands import as_no_view, channels_last
from tuner.kernel.python_calls import check_lines, work_lines
from tuner.plans import Argument, Plan
from tuner.trial import Language

__all__ = ["operator_of", "python_binding", "python_calls", "work_of"]


def python_calls(plan: Plan, namespace: str, replays: bool = False) -> str:
    """Write each call of the plan as a Python function, and one that the file's module calls.

    The text expects `torch` and the functions of the candidate's source around it, and what
    `python_binding` registers. With `replays` that source has `replayed`, and calls that are
    kernels alone repeat what an earlier one launched.
    """
    functions = [_python_call(call, namespace, replays) for call in plan.calls]
    used = [channels_last] if has_channels_last(plan) else []
    used += [as_no_view] if any(call.given_outputs for call in plan.calls) else []
    helpers = [inspect.getsource(helper).rstrip() for helper in used]
    return "\n\n\n".join([_PYTHON_CALLED, *helpers, *functions]) + "\n"


def python_binding(plan: Plan, namespace: str) -> str:
    """Write each call of the plan as the operator `namespace::f`, which checks its arguments.

    The text expects that of `python_calls` around it.
    """
    functions = [_python_operator(call, namespace) for call in plan.calls]
    return "\n\n\n".join([_PYTHON_PREPARED, *functions]) + "\n"


def operator_of(plan: Plan, language: Language, namespace: str, ending: str = "") -> str:
    """Return what a file's module calls for a call of the plan.

    Args:
        plan: of that call.
        language: of the functions that it calls.
        namespace: of the operators in `torch.ops`.
        ending: of the names that stand in the block of this kernel.
    """
    if language == "triton":
        return f"called_{plan.function}{ending}"
    return f"torch.ops.{namespace}.{plan.function}"


def work_of(plan: Plan, ending: str = "") -> str:
    """Return what calls the kernels of a file in Triton directly.

    Its arguments are of a form that the operator has taken, and lie as `_dense` makes them.
    """
    return f"_work_{plan.function}{ending}"


def _is_kernels_alone(plan: Plan) -> bool:
    return all(a.shape is not None for a in plan.arguments) and all(
        step.kind != "aten" and not step.gives for step in plan.steps
    )


def _python_call(plan: Plan, namespace: str, replays: bool) -> str:
    names = ", ".join(a.name for a in plan.arguments)
    head = "@replayed\n" if replays and _is_kernels_alone(plan) else ""
    first = next(a.name for a in plan.arguments if a.shape is not None)
    work = f"_work_{plan.function}"
    body = "\n".join(f"    {line}" for line in work_lines(plan))
    return f"""\
{head}def {work}({names}):
    if torch.cuda.current_device() != {first}.get_device():  # where kernels start
        with torch.cuda.device({first}.device):
            return {work}({names})
{body}


def called_{plan.function}(*args):
    return _called(torch.ops.{namespace}.{plan.function}, {work}, args)"""


def _python_operator(plan: Plan, namespace: str) -> str:
    names = ", ".join(a.name for a in plan.arguments)
    arguments = ", ".join(f"{a.name}: {_python_type(a)}" for a in plan.arguments)
    outputs = ", ".join("torch.Tensor" for _ in plan.outputs)
    result = f"tuple[{outputs}]" if len(plan.outputs) > 1 else outputs
    body = "\n".join(f"    {line}" for line in check_lines(plan))
    return (
        f'@torch.library.custom_op("{namespace}::{plan.function}", mutates_args=())\n'
        f"def _call_{plan.function}({arguments}) -> {result}:\n{body}\n"
        f"    return _work_{plan.function}({names})"
    )


_PYTHON_CALLED = """\
def cdiv(a, b):
    return -(-a // b)


def _dense(tensor):
    tensor = tensor.resolve_neg().contiguous()  # a view may be the negative
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


_TAKEN = {}  # by forms of arguments that an operator has checked and taken: what they launched
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _form_of(work, args):
    # All of the arguments that an operator checks, and where tensors are. None where PyTorch has
    # to see the call, or where arguments are first made as kernels expect them.
    if (
        torch._C._len_torch_function_stack()
        or {watched}    ):
        return None, None
    form, pointers, is_graded = [work], [], torch.is_grad_enabled()
    for x in args:
        if type(x) in _PLAIN:
            pointer = x.data_ptr()
            if pointer % 16 or not x.is_contiguous() or x.is_neg():
                return None, None
            if is_graded and x.requires_grad:
                return None, None
            pointers.append(pointer)
            form += x.shape, x.dtype, x.get_device()
        elif isinstance(x, torch.Tensor):
            return None, None
        else:
            form.append(type(x))
    return tuple(form), pointers


def _called(op, work, args):
    # Calls an operator past PyTorch's dispatcher and the operator's checks, which take the host
    # longer than two launches, where arguments of this form went through both before.
    if torch.compiler.is_compiling():
        return op(*args)
    form, pointers = _form_of(work, args)
    taken = _TAKEN.get(form)
    if taken is not None:  # all of them tensors where they are replayed
        if taken is not work:
            return taken.again(pointers, args)
        if not hasattr(work, "again"):
            return work(*args)
        made = work.again(form, pointers, args)
        _TAKEN[form] = work.replays.get(form) or work
        return made
    made = op(*args)
    if form is not None:
        if len(_TAKEN) >= 1024:  # as many numbers of rows, say
            _TAKEN.clear()
        _TAKEN[form] = work
    return made""".replace("{watched}", WATCHED_TEXT.lstrip())


_PYTHON_PREPARED = """\
def _prepared(tensor, name, num_dims, device, dtype):
    if tensor.dtype != dtype or tensor.device != device or device.type != "cuda":
        raise RuntimeError(
            f"{name} is {tensor.dtype} on {tensor.device}, expected {dtype} on "
            + (str(device) if device.type == "cuda" else "a GPU")
        )
    if tensor.dim() != num_dims:
        raise RuntimeError(
            f"{name} has shape {list(tensor.shape)}, expected {num_dims} dimensions"
        )
    if torch.autograd.forward_ad._current_level >= 0:
        raise RuntimeError("forward-mode derivatives are not implemented")
    return _dense(tensor)


def _expect(tensor, name, shape):
    if tuple(tensor.shape) != shape:
        raise RuntimeError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")"""


def _python_type(argument: Argument) -> str:
    return "torch.Tensor" if argument.shape is not None else argument.dtype
