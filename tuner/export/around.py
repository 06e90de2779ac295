"""Steps of training by kernels of their own, in the file of an operator that was written by hand.

They are a module of their own, derived from the operator's reference, with names that end in
`_of_steps`; the file's `ModelNew` is both: calls that want gradients are that module's.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from tuner.capture.modules.rows_text import has_rows, without_rows_line
from tuner.errors import TemplateError
from tuner.export.blocks import autograd_text, block_text, fused_text
from tuner.export.several import apart, futures_apart
from tuner.kernel.family import OwnSteps
from tuner.trial import content_key

__all__ = ["around_text", "forward_of"]

_ENDING = "_of_steps"


def around_text(model_new: str, steps: OwnSteps, flags: Sequence[str]) -> str:
    """Return what stands behind a module that was written by hand, so that steps are others'.

    Args:
        model_new: the module's text; at which rows kernels are taken is one line of it for both.
        steps: the module that is derived from the same reference, and its kernel.
        flags: the compiler's for that kernel.

    Raises:
        TemplateError: the module's forward has not one list of arguments.
    """
    candidate, text = steps.candidate, steps.family.model_new
    namespace = f"tuner_{content_key(candidate.key, text, ' '.join(flags))[:8]}"
    _, text = futures_apart(text.strip())
    if has_rows(model_new):
        text = without_rows_line(text)
    parts = [
        block_text(candidate, flags, namespace),
        fused_text(candidate, namespace, ""),
        text,
        autograd_text(candidate, namespace),
    ]
    whole = apart("\n\n".join(part.strip("\n") for part in parts) + "\n", _ENDING)
    signature, given = forward_of(model_new)
    more = given.partition(", ")[2]
    around = _AROUND.format(ending=_ENDING, signature=signature, given=given, more=more)
    return f"{whole}\n\n{around}"


def forward_of(model_new: str) -> tuple[str, str]:
    """Return the arguments of `ModelNew.forward` as it declares them, and as a call gives them.

    Raises:
        TemplateError: it takes others than named ones, or there is none.
    """
    for node in ast.parse(model_new).body:
        if not (isinstance(node, ast.ClassDef) and node.name == "ModelNew"):
            continue
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "forward":
                arguments = each.args
                if arguments.vararg or arguments.kwarg or arguments.kwonlyargs:
                    break
                names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
                return ast.unparse(arguments), ", ".join(names)
    raise TemplateError("ModelNew.forward: expected named arguments alone")


_AROUND = """\
class Unbuilt{ending}(ModelNew{ending}):
    # Its parts are made by the constructor of the module that was written by hand.
    def __init__(self):
        nn.Module.__init__(self)


class ModelNew(ModelNew, Unbuilt{ending}):
    # The module that was written by hand, but in calls that may want gradients: what such a call
    # keeps, and its gradients, have kernels of their own.
    def forward({signature}):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return ModelNew{ending}.forward({given})
        return super().forward({more})
"""
