"""The text by which an exported module knows a call like the one that was captured."""

from __future__ import annotations

__all__ = ["BESIDE_TEXT", "USUAL_TEXT"]

# Of a file that imports others from its own folder.
BESIDE_TEXT = """\
_BESIDE = {beside!r}  # modules that it imports, as they were captured: SHA-256 of their files


def edited_beside():
    # Which of these modules are other files now.
    import hashlib
    import sys

    found = []
    for name, known in _BESIDE.items():
        try:
            with open(sys.modules[name].__file__, "rb") as file:
                is_known = hashlib.sha256(file.read()).hexdigest() == known
        except (AttributeError, KeyError, OSError, TypeError):
            is_known = False
        found += [] if is_known else [name]
    return found


_IS_EDITED = bool(edited_beside())
if _IS_EDITED:
    import warnings

    warnings.warn(
        f"{{', '.join(edited_beside())}}: another file than when this one was tuned, so that "
        "PyTorch's own operations are run; next: tune it again",
        stacklevel=2,
    )
"""

# To be formatted by `module_text.usual_text`; `usual_state` gives a module's tensors or None.
USUAL_TEXT = """\
{reference}


import contextlib
import functools
import types
import weakref
from operator import is_
from typing import Any

from torch.utils._device import DeviceContext

{beside}
_HAS_CALLS = {has_calls}  # of PyTorch's own operations, which look at how their operands lie
_GIVEN = [  # inputs: dtype, whether they have any number of rows, and their further sizes
    (getattr(torch, dtype), "batch" in shape, torch.Size(shape["batch" in shape :]))
    for dtype, shape in {inputs!r}
]
_IS_NUMBER = {is_number!r}  # of each argument
_TUNED_ROWS = {tuned_rows}  # with more of them, columns of a kernel may no longer fit in 32 bits
_FEWEST_ROWS, _MOST_ROWS = {fewest_rows}, {most_rows}  # between which forward does the same
_PLACES = {places}  # inputs that pick one of many: from which number on, below which, or that
_STATE = {state!r}
_FORMS = {{n: (getattr(torch, dtype), torch.Size(shape)) for n, (dtype, shape) in _STATE.items()}}
_SETTINGS = {settings}
_NAMES = {names}  # that code of this file has; None: it may read any attribute
_PUBLIC = {{}}  # attributes that may be settings
_KINDS = {{}}  # of classes derived from ModelNew
{containers}_DEFAULT_DTYPE = torch.{default_dtype}  # of what a forward makes, when it was captured
# Since PyTorch 2.7; before, what is exported has no operators of ours but in its strict mode.
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


{slots_of}


{setting_of}


{contents_of}


{made_from}


def leaves_parts(kind):
    # Whether a class that is derived from ours has no other methods and values for forward.
    is_known = _KINDS.get(kind)
    if is_known is None:
        own = ModelNew.__mro__[: ModelNew.__mro__.index(nn.Module)]
        own = {{name for each in own for name in vars(each) if name[:2] != "__"}} - {{"forward"}}
        # A class from before the file was loaded once more is none that is derived from ours.
        is_derived = ModelNew in kind.__mro__
        more = kind.__mro__[: kind.__mro__.index(ModelNew)] if is_derived else ()
        is_known = _KINDS[kind] = is_derived and all(own.isdisjoint(vars(each)) for each in more)
    return is_known


def are_notes(module, settings, usual):
    # Whether all that is other than it was are attributes more that no code here reads, such as a
    # framework's; or a forward around this one, which called it.
    if _NAMES is None or settings.keys() != usual.keys():
        return False
    for path, found in settings.items():
        known = usual[path]
        more = found.keys() - known.keys()
        if any([name not in found or found[name] != value for name, value in known.items()]):
            return False
        kind = type(module.get_submodule(path)) if more else None
        if more and path and kind.__module__ != __name__:
            return False
        for name in more if path else more - {{"forward"}}:
            if name in _NAMES or hasattr(kind, name) or not name.isidentifier():
                return False
    return True


def is_in_range(x, least, end, ignored):
    # On a CPU PyTorch refuses other places; on a GPU nobody waits to know.
    if torch.compiler.is_compiling():
        return False
    if least is None or end is None:
        is_wrong = x >= end if least is None else x < least
    else:
        is_wrong = (x < least) | (x >= end)
    return not bool((is_wrong if ignored is None else is_wrong & (x != ignored)).any())


def is_in_order(x):
    # Whether dimensions lie in memory as a contiguous tensor's do, with gaps between elements, as
    # halves of a tensor have: to PyTorch's operations it is then as good as a contiguous copy,
    # which operators make. By sizes of 1, too, convolutions see whether channels come last.
    counts_ones, least = x.dim() > 2, 1
    for size, stride in zip(x.shape[::-1], x.stride()[::-1]):
        if size > 1 or counts_ones:
            if stride < least:
                return False
            least = stride * size
    return True


def has_forms(inputs, on_cpu):
    # Whether inputs lie where they should, and have the dtypes and sizes that loops are for.
    batch = None
    for x, (dtype, is_batched, sizes) in zip(inputs, _GIVEN):
        if x.is_nested or x.layout is not torch.strided:
            return False
        if not (x.is_cpu if on_cpu else x.is_cuda):
            return False
        if x.dtype != dtype or x.dim() != len(sizes) + is_batched or not x.numel():
            return False
        shape = x.shape
        if is_batched:
            if batch is None:
                batch = shape[0]
                if batch < _FEWEST_ROWS or (_MOST_ROWS and batch > _MOST_ROWS):
                    return False
            elif batch != shape[0]:
                return False
            shape = shape[1:]
        if shape != sizes or (_HAS_CALLS and not x.is_contiguous() and not is_in_order(x)):
            return False
    if not on_cpu and batch is not None and batch > _TUNED_ROWS:
        return all([x.numel() < 2**31 - 2**20 for x in inputs])
    return True


{rows}def has_function_mode():
    # Whether somebody else sees PyTorch's functions: `torch.set_default_device` sees those alone
    # that make tensors, of which none here is made without its device.
    count = torch._C._len_torch_function_stack()
    return count > 0 and any(
        type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in range(count)
    )


def usual_state(module, inputs):
    # The module's tensors by name where the loops were written for such a call, else None.
    if _IS_EDITED:
        return None
    if torch.autograd.forward_ad._current_level >= 0:  # the tangents would be lost
        return None
    is_compiling = torch.compiler.is_compiling()
    if is_compiling:
        if _is_exporting():  # what is exported is used where this file is not
            return None
    # Mapped by torch.func PyTorch makes one call of many: in another way, and sooner.
    elif torch._C._functorch.peek_interpreter_stack() is not None or torch.jit.is_tracing():
        return None
    if True in _IS_NUMBER:
        if any(is_number != (type(x) is float) for x, is_number in zip(inputs, _IS_NUMBER)):
            return None
        inputs = [x for x, is_number in zip(inputs, _IS_NUMBER) if not is_number]
    if type(module) is not ModelNew and (is_compiling or not leaves_parts(type(module))):
        return None
    on_cpu = str(fused_device).startswith("cpu")
    # First, so that another batch than the usual one costs little. Of fake tensors last: a
    # question about sizes that are not known yet is an error.
    is_plain = not is_compiling and all([type(x) in (torch.Tensor, nn.Parameter) for x in inputs])
    if is_plain and not has_forms(inputs, on_cpu):
        return None
    usual = {known}
    listed = usual if is_compiling else None
    settings, state = contents_of(module, {has_modes}, _PUBLIC, listed)
    if len(state) != len(_FORMS):
        return None
    if settings != usual and (is_compiling or not are_notes(module, settings, usual)):
        return None
    if torch.nn.modules.module._has_any_global_hook():  # it would miss the parts of the module
        return None
    if torch.get_default_dtype() != _DEFAULT_DTYPE:
        return None
    for x in inputs:
        if not isinstance(x, torch.Tensor) or x.is_nested:
            return None
    tensors = (*inputs, *state.values())
    if torch.overrides.has_torch_function(tensors):  # of a tensor's class, or of a mode
        is_plain_class = all([type(x) in (torch.Tensor, nn.Parameter) for x in tensors])
        if is_compiling or has_function_mode() or not is_plain_class:
            return None
    for x in tensors:
        kind = type(x)
        if x.layout is not torch.strided:
            return None
        if kind is not torch.Tensor and kind is not nn.Parameter:  # a DTensor knows no operator
            own = torch.Tensor.__torch_dispatch__
            if is_compiling or kind.__torch_dispatch__ is not own:
                return None
    for name, (dtype, shape) in _FORMS.items():
        x = state.get(name)
        if x is None or x.dtype != dtype or x.shape != shape:
            return None
        if not (x.is_cpu if on_cpu else x.is_cuda) or (_HAS_CALLS and not x.is_contiguous()):
            return None
    if torch.is_autocast_enabled("cpu" if on_cpu else "cuda"):
        return None
    if not is_plain and not has_forms(inputs, on_cpu):
        return None
    if on_cpu and _PLACES and not all(is_in_range(inputs[i], *p) for i, p in _PLACES.items()):
        return None
    return state


def detached(op, *args):
    # Calls an operator past its autograd, which is Python of PyTorch's: nothing wants gradients.
    if torch.compiler.is_compiling():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def is_trained(module):
    # Whether a parameter wants gradients: `module.parameters()` takes the host ten times as long.
    for x in module._parameters.values():
        if x is not None and x.requires_grad:
            return True
    for part in module._modules.values():
        if part is not None and is_trained(part):
            return True
    return False


def wants_gradients(tensors):
    # Numbers among them have none; of what stands for one as it is traced it is not known.
    if not torch.is_grad_enabled():
        return False
    return any([getattr(x, "requires_grad", False) is True for x in tensors])


"""
