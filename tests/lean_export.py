"""What PyTorch does again for each program that it decomposes, done once here.

`ExportedProgram.run_decompositions` looks through all operators of all namespaces, and registers
some 6,000 kernels, each with type annotations that Python evaluates: 0.08 s of the 0.2 s of CPU
that a small module takes. The annotations go, and what was found among the same operators is kept.
"""

from __future__ import annotations
import __future__

import functools
import inspect
import textwrap

__all__ = ["install"]


@functools.cache
def install() -> None:
    """Let PyTorch look once, where this version has the functions that do so."""
    import torch
    from torch.export import exported_program

    collect = getattr(exported_program, "_collect_all_valid_cia_ops", None)
    if collect is not None:
        exported_program._collect_all_valid_cia_ops = _kept(collect, torch._C)
    base = torch._ops.OperatorBase
    base.py_impl = _without_annotations(base.py_impl)


def _kept(collect, operators):
    """Return `collect` as a function that asks again only when an operator was registered."""
    found: dict[tuple[str, ...], frozenset] = {}

    def kept() -> frozenset:
        names = operators._dispatch_get_all_op_names()
        implicit = operators._dispatch_get_registrations_for_dispatch_key(
            "CompositeImplicitAutograd"
        )
        key = (*names, "", *implicit)
        if key not in found:
            found.clear()
            found[key] = frozenset(collect())
        return found[key]

    return kept


def _without_annotations(function):
    """Return the same function, of the same text, that evaluates no annotation when it runs."""
    lines, first = inspect.getsourcelines(function)
    text = "\n" * (first - 1) + textwrap.dedent("".join(lines))  # at the places where it stands
    flags = __future__.annotations.compiler_flag
    made: dict = {}
    exec(compile(text, inspect.getsourcefile(function), "exec", flags), function.__globals__, made)
    return made[function.__name__]
