"""The calls of a plan as lines of Python: of an exported file, and of what runs in a search.

They expect `torch`, `cdiv`, the functions that steps call, and helpers around them: `_prepared`
and `_expect` for arguments, `_dense` and `channels_last` for what steps give, and `as_no_view` for
what of that is returned. Those of a search also need `_on`, and of C functions `_pointer`,
`_integer`, `_double`, `_stream`, `_finished` and, on a CPU, `_kept`, which makes results.
"""

from __future__ import annotations

import re

from tuner.kernel.operands import as_python
from tuner.machine.platforms import platform_of
from tuner.plans import Plan, Step
from tuner.trial import Language

__all__ = [
    "call_lines", "check_lines", "given", "returned", "size_lines", "tensor_names", "work_lines",
]  # fmt: skip

_APART = "as_no_view({}, {})"


def call_lines(plan: Plan, language: Language) -> list[str]:
    """Return the lines of a function whose parameters are the plan's arguments, for a search.

    Args:
        plan: of one call.
        language: of the functions that it calls.
    """
    lines = [*check_lines(plan), *_made_lines(plan, language).values()]
    # As PyTorch's schema does: an int is a float, but no float is an int.
    numbers = {a.name: "float" if a.dtype == "float" else "_index" for a in plan.arguments}
    lines += [f"{a.name} = {numbers[a.name]}({a.name})" for a in plan.arguments if a.shape is None]
    lines += ["num_threads = torch.get_num_threads()", f"with _on({_first(plan)}.device):"]
    lines += ["    stream = _stream()"] if _has_stream(language) else []
    lines += [f"    {line}" for step in plan.steps for line in _step(step, plan, language)]
    return [*lines, f"return ({returned(plan, _APART)},)"]


def check_lines(plan: Plan) -> list[str]:
    """Return the lines that make arguments as kernels expect them, or raise."""
    tensors = [a for a in plan.arguments if a.shape is not None]
    device = f"{_first(plan)}.device"
    lines = []
    for argument in tensors:
        name, num_dims = argument.name, len(argument.shape or ())
        lines.append(
            f'{name} = _prepared({name}, "{name}", {num_dims}, {device}, torch.{argument.dtype})'
        )
    lines += size_lines(plan)
    for argument in tensors:
        shape = ", ".join(argument.shape or ())
        lines.append(f'_expect({argument.name}, "{argument.name}", ({shape},))')
    return lines


def work_lines(plan: Plan) -> list[str]:
    """Return the lines of one call in an exported file, in Triton, of arguments that were checked.

    A single output is returned as it is, in no tuple. Kernels start on the current device.
    """
    # What a step does not need yet is made behind it: an idle GPU waits for the first one alone.
    made, lines = _made_lines(plan, "triton"), list[str]()
    for line in (line for step in plan.steps for line in _step(step, plan)):
        words = {*re.findall(r"\w+", line)}
        lines += [made.pop(name) for name in [*made] if name in words]
        lines.append(line)
    lines += [*made.values(), f"return {returned(plan, _APART)}"]
    # To ask for a size takes 0.1 us, and most have fixed ones.
    words = {word for line in lines for word in re.findall(r"\w+", line)}
    sizes = [line for line in size_lines(plan) if line.partition(" ")[0] in words]
    return [*sizes, *lines]


def _first(plan: Plan) -> str:
    return next(a.name for a in plan.arguments if a.shape is not None)


def _made_lines(plan: Plan, language: Language) -> dict[str, str]:
    """Return the lines that make outputs and workspace, by name, in order."""
    lines = {}
    for tensor in plan.made:
        if not platform_of(language).is_gpu:
            made = f"_kept(({', '.join(tensor.shape)},), torch.{tensor.dtype})"
            lines[tensor.name] = f"{tensor.name} = {made}{'.zero_()' if tensor.zero else ''}"
            continue
        make = "zeros" if tensor.zero else "empty"
        lines[tensor.name] = (
            f"{tensor.name} = torch.{make}(({', '.join(tensor.shape)},), "
            f"dtype=torch.{tensor.dtype}, device={_first(plan)}.device)"
        )
    return lines


def _has_stream(language: Language) -> bool:
    return language != "triton" and platform_of(language).is_gpu


def _step(step: Step, plan: Plan, language: Language = "triton") -> list[str]:
    if step.gives:
        words = [as_python(a) for a in step.args]
        call = f"torch.ops.aten.{step.function}({', '.join(words)})"
        lines = []
        if step.gives in plan.together:
            name = plan.together[step.gives]
            lines = [f"{name} = {call}"] if plan.is_first_of(step) else []
            call = name
        call += "" if step.pick is None else f"[{step.pick}]"
        return [*lines, f"{step.gives} = {given(step, call, plan.dense, '_')}"]
    if step.kind == "aten":
        words = [f"{a[:-2]}.t()" if a.endswith(".t") else a for a in step.args]
        return [f"torch.ops.aten.{step.function}.out({', '.join(words)}, out={step.out})"]
    if language == "triton":
        words = ["None" if a == "null" else a.removesuffix(".t") for a in step.args]
        return [f"{step.function}({', '.join(words)})"]
    kinds = dict.fromkeys(tensor_names(plan), "_pointer")
    kinds |= {a.name: "_double" for a in plan.arguments if a.dtype == "float"}
    words = ["None" if a == "null" else f"{kinds.get(a, '_integer')}({a})" for a in step.args]
    words += ["stream"] if _has_stream(language) else []
    return [f'_finished("{step.function}", {step.function}({", ".join(words)}))']


def given(step: Step, made: str, dense: set[str], prefix: str) -> str:
    """Write what a step gives as functions read it; the same in C++, without the prefix."""
    if step.layout == "bytes":
        made += ".view(torch.uint8)" if prefix else ".view(at::kByte)"
    if step.gives in dense:
        return f"{prefix}dense({made})"
    return f"channels_last({made})" if step.layout == "channels_last" else made


def returned(plan: Plan, apart: str) -> str:
    """Write the results; what PyTorch gave as `apart` takes it, and all it may share memory with.

    `apart` is `as_no_view({}, {})`, or the like in C++.
    """
    names, given_names = [output.name for output in plan.outputs], plan.given_outputs
    return ", ".join(
        apart.format(name, ", ".join(plan.beside(name))) if name in given_names else name
        for name in names
    )


def tensor_names(plan: Plan) -> set[str]:
    """Return the names of all tensors of a call."""
    made = {tensor.name for tensor in (*plan.outputs, *plan.workspace)} | plan.given
    return made | {a.name for a in plan.arguments if a.shape is not None}


def size_lines(plan: Plan) -> list[str]:
    """Return lines that bind every named size from the tensors' shapes."""
    lines, seen = [], set()
    for argument in plan.arguments:
        for dim, size in enumerate(argument.shape or ()):
            if size not in seen:
                seen.add(size)
                lines.append(f"{size} = {argument.name}.shape[{dim}]")
    return lines
