"""Write a candidate as one Python file that needs nothing but PyTorch and a compiler.

The file holds the candidate's source unchanged, the plan as a binding, the family's module
around it, and a header that says where it comes from. Verifying the file is `evaluate`'s work.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Mapping, Sequence

from tuner.capture.graph.settings import made_from
from tuner.capture.modules.rows_text import with_rows
from tuner.errors import TemplateError
from tuner.export.around import around_text
from tuner.export.blocks import autograd_text, block_text, escape, fused_text, has_cuda
from tuner.export.python_operators import operator_of
from tuner.export.several import (
    KEPT_TEXTS,
    Dispatch,
    apart,
    dispatch_text,
    futures_apart,
    named_in,
)
from tuner.kernel import kept_memory
from tuner.kernel.family import Family
from tuner.machine.platforms import platform_of
from tuner.problem.overrides import Overrides, text_at
from tuner.trial import Candidate, content_key

__all__ = ["UNVERIFIED", "VERIFIED", "export_text", "fallback_text"]

VERIFIED = "verified: checked and raced from this file"
UNVERIFIED = "unverified: not checked yet"
_IMPORTS = """\
import inspect

import torch
import torch.nn as nn
import torch.nn.functional as F
"""
OLDEST_TORCH = "2.4"  # torch.library.register_autograd and register_fake came with it


def export_text(
    family: Family,
    candidate: Candidate,
    *,
    reference: str,
    sizes: Mapping[str, int],
    flags: Sequence[str],
    provenance: Sequence[str],
    standing: str = UNVERIFIED,
    more: Sequence[tuple[Candidate, Sequence[str]]] = (),
    dispatch: Dispatch | None = None,
    steps_flags: Sequence[str] = (),
) -> str:
    """Return the text of the standalone module.

    Args:
        family: the operator's family.
        candidate: what to export.
        reference: the reference file's text, whose inputs the module offers again.
        sizes: the module-level sizes in force.
        flags: the compiler's flags, the same that the candidate was built with.
        provenance: lines for the header (device, versions, speed-up, errors, command ...);
            whatever they contain is escaped.
        standing: what the first line says of the file: `VERIFIED`, `UNVERIFIED`, or that it is
            rejected, and why. The code below the header is the same.
        more: further kernels, each with its compiler's flags, where the file has several.
        dispatch: which is for how many rows, then.
        steps_flags: the compiler's for the family's own steps of training, where it has some.
    """
    # The version of the file's own glue is part of the name: two exports never share a library.
    # At which rows it is taken is not: that is measured of what is compiled already.
    glue = with_rows(family.model_new, None)
    kernels = [(candidate, flags), *more]
    namespaces = [f"tuner_{content_key(each.key, glue, ' '.join(of))[:8]}" for each, of in kernels]
    steps = family.steps
    blocks = [block_text(*each, name) for each, name in zip(kernels, namespaces, strict=True)]
    try:
        endings = ["", *(f"_of_kernel_{number}" for number in range(2, len(blocks) + 1))]
        if not named_in(blocks[0]).isdisjoint(named_in(family.model_new)):
            endings[0] = "_of_kernel_1"  # the module's file may have a `cdiv` of its own
        if dispatch is None:
            fused = fused_text(candidate, namespaces[0], endings[0])
        else:
            device = f'fused_device = "{platform_of(candidate.language).torch_type}"'
            plans = [each.plan for each, _ in kernels]
            operators = [
                {
                    name: operator_of(call, each.language, namespace, end)
                    for name, call in {"op": each.plan, **each.plan.extra}.items()
                    if call is not None
                }
                for (each, _), namespace, end in zip(kernels, namespaces, endings, strict=True)
            ]
            fused = f"{device}\n\n\n{dispatch_text(plans, operators, dispatch)}"
        futures, model_new = futures_apart(family.model_new.strip())
        parts = [
            _header(family, [each for each, _ in kernels], provenance, standing),
            futures,
            _IMPORTS,
            *(
                apart(block, end) if end else block
                for block, end in zip(blocks, endings, strict=True)
            ),
            fused,
            model_new + "\n",
            *(
                autograd_text(each, name, end)
                for (each, _), name, end in zip(kernels, namespaces, endings, strict=True)
            ),
            *([] if steps is None else [around_text(family.model_new, steps, steps_flags)]),
            _inputs(reference, sizes, family.model_new),
        ]
        text = "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
        compile(text, "model_new.py", "exec")
    except (SyntaxError, ValueError) as error:  # a family's model_new.py, a Triton text, a NUL
        raise TemplateError(f"{family.name}: the exported file is not Python: {error}") from error
    return text


def fallback_text(
    family: Family,
    *,
    reference: str,
    sizes: Mapping[str, int],
    provenance: Sequence[str],
    standing: str = UNVERIFIED,
    has_from_module: bool = False,
) -> str:
    """Return the text of a standalone module that computes as the reference does.

    For where no candidate is faster: its ModelNew is the reference's own Model.

    Args:
        family: the operator's family.
        reference: the reference file's text; kept, without its comments.
        sizes: the module-level sizes in force.
        provenance: lines for the header, as for `export_text`.
        standing: as for `export_text`.
        has_from_module: whether ModelNew has that method, as operators derived from a module do.
    """
    title = f"{family.op.title}: PyTorch's own modules, since no kernel was faster"
    lines = [f"{title}; {standing}", "", *provenance]
    head = "\n".join(f"# {escape(line)}".rstrip() for line in lines)
    body = text_at(reference, sizes)
    end = "ModelNew = Model\n"
    if has_from_module:
        end = f"from typing import Any\n\n\n{inspect.getsource(made_from)}\n\n{_FROM_MODULE}"
    return f"{head}\n\n{body}\n\n\n{end}"


_FROM_MODULE = """\
class ModelNew(Model):
    @classmethod
    def from_module(cls, module):
        # A ModelNew of a live Model's parameters and buffers, which both then share.
        return made_from(cls, module, reference=Model)
"""


def _header(
    family: Family, candidates: Sequence[Candidate], provenance: Sequence[str], standing: str
) -> str:
    lines = [
        f"{family.op.title}: ModelNew by tuner, {standing}",
        "",
        "Replaces: " + ", ".join(family.op.replaces),
    ]
    for number, candidate in enumerate(candidates, 1):
        which = f"Kernel {number}, template" if len(candidates) > 1 else "Template"
        lines += [f"{which}: {_words(candidate)}", "Optimisations:"]
        lines += [f"  - {line}" for line in candidate.optimisations]
    every = [*candidates, *([family.steps.candidate] if family.steps else [])]
    is_deterministic = all(candidate.is_deterministic for candidate in every)
    needs = " and ".join(dict.fromkeys(_needs(candidate) for candidate in every))
    keeps = any(c.language == "cpp" and call.made for c in every for call in c.plan.calls)
    lines += [f"Memory: {kept_memory.WORDS}"] if keeps else []
    if family.steps is not None:
        steps = _words(family.steps.candidate)
        lines += [f"Steps of training: derived from the reference, {steps}"]
    lines += [
        f"Deterministic: {'yes' if is_deterministic else 'no (floating-point atomics)'}",
        f"Needs: PyTorch {OLDEST_TORCH} or later and {needs}",
        "",
        *provenance,
    ]
    return "\n".join(f"# {escape(line)}".rstrip() for line in lines)


def _words(candidate: Candidate) -> str:
    params = ", ".join(f"{k}={v}" for k, v in sorted(candidate.params.items()))
    return f"{candidate.template} ({params})"


def _needs(candidate: Candidate) -> str:
    """Name what the file is compiled with, and when."""
    if has_cuda(candidate):
        return "Triton (compiled at the first call), nvcc and a C++ compiler (at the first import)"
    if candidate.language == "triton":
        return "Triton (compiled at the first call)"
    return platform_of(candidate.language).needs


def _inputs(reference: str, sizes: Mapping[str, int], model_new: str) -> str:
    """Return the reference file without its Model, at the sizes in force.

    It is empty where the module's text holds the whole file, as that of a captured module does,
    and all that the file names is still what it was at the end.
    """
    overrides = Overrides(sizes)
    tree = overrides.visit(ast.parse(reference))
    _, is_whole, behind = model_new.partition(reference.rstrip())
    if is_whole and overrides.assigned.isdisjoint(sizes) and not _clashes(reference, behind):
        return ""
    kept: list[ast.stmt] = []
    for node in tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_model = isinstance(node, ast.ClassDef) and node.name == "Model"
        # The export's own imports come before: no future can be imported any more.
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not (is_docstring or is_model or is_future):
            kept.append(node)
    return ast.unparse(ast.fix_missing_locations(ast.Module(kept, [])))


def _clashes(reference: str, behind: str) -> bool:
    """Whether a text gives a name of the reference to something else, or that is not known."""
    mine, theirs = _named(reference), _named(behind)
    return "*" in mine or any(
        theirs[name] != mine[name] or not mine[name] for name in mine if name in theirs
    )


@functools.lru_cache(KEPT_TEXTS)
def _named(text: str) -> dict[str, str]:
    """Return what a text names at its top level, with what is imported by that name, if it is."""
    found: dict[str, str] = {}
    nodes: list[ast.AST] = [*ast.parse(text).body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = ""
        elif isinstance(node, ast.Import | ast.ImportFrom):
            of = f"{node.level * '.'}{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                found[name] = of + (alias.name if alias.asname or of else name)
        elif isinstance(node, ast.Name):
            found |= {node.id: ""} if isinstance(node.ctx, ast.Store) else {}
        else:
            nodes += ast.iter_child_nodes(node)
    return found
