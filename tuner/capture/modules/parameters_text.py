"""The parameters of a `ModelNew`'s forward: those that a call was captured with, and all others.

What a call leaves out of them, or gives besides, the reference's own forward takes.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

__all__ = ["parameters_of"]


def parameters_of(reference: str, names: Sequence[str]) -> tuple[str, str]:
    """Return the head of forward, and what it asks of its arguments before all else.

    Args:
        reference: the text of the module's file. Where it neither writes `Model.forward` itself
            nor says how it is declared, as the file of a live module does, there are no others.
        names: what a call was captured with, in order.
    """
    arguments = _declared_in(reference)
    if arguments is None:
        return _head(names), ""
    given = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][1:]
    defaults = given[len(given) - len(arguments.defaults) :] if arguments.defaults else []
    optional = [name for name in names if name in defaults]
    has_more = len(given) > len(names) or arguments.kwonlyargs or arguments.kwarg
    if not optional and not has_more:
        return _head(names), ""
    declared = [f"{name}={_ABSENT}" if name in optional else name for name in names]
    fixed = [name for name in names if name not in optional]
    named = "".join(f"({name!r}, {name}), " for name in optional)
    listed = "".join(f"{name}, " for name in names)
    lines = [f"fused_given = {{n: x for n, x in ({named}) if x is not {_ABSENT}}}"]
    asked = ["fused_more", "fused_named", f"len(fused_given) < {len(optional)}"]
    lines += [
        f"if {' or '.join(asked)}:  # other arguments than those of the captured call",
        "    if fused_more:",
        f"        return super().forward({listed}*fused_more, **fused_named)",
        f"    return super().forward({''.join(f'{n}, ' for n in fixed)}"
        "**fused_given, **fused_named)",
    ]
    text = "".join(f"        {line}\n" for line in lines)
    # For who asks how it is declared, as trainers do that choose columns by that.
    return _WRAPPED + _head([*declared, "*fused_more", "**fused_named"]), text


def _head(parameters: Sequence[str]) -> str:
    return f"def forward(self, {', '.join(parameters)}):"


_WRAPPED = "@functools.wraps(Model.forward, assigned=(), updated=())\n    "
_ABSENT = "Ellipsis"  # a constant of Python's that no forward is given
_OF_LIVE = "_LIVE_FORWARD"  # how a live module's forward is declared, in its file


def _declared_in(reference: str) -> ast.arguments | None:
    """Return what `Model.forward` declares in a file's text."""
    for node in ast.parse(reference).body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "forward":
                    return part.args
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == _OF_LIVE:
            declared = ast.parse(f"def forward{ast.literal_eval(node.value)}: ...").body[0]
            assert isinstance(declared, ast.FunctionDef)
            return declared.args
    return None
