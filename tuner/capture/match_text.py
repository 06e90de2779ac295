"""The text of a `ModelNew` around a family's operator: the user's class, with its own names.

It is the reference's own class. Where a call is as it was captured, the family's module makes it:
with the tensors of the user's module in place of its own, so that what trains, loads or copies the
one is seen by the other. Everywhere else it is `super().forward`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from tuner.capture.families import Matched
from tuner.capture.graph.graph import Graph
from tuner.capture.modules.module_text import (
    FROM_AND_TO_TEXT,
    asks_rows_of,
    other_mode_text,
    state_text,
    usual_text,
)
from tuner.capture.modules.rows_text import without_rows

__all__ = ["has_clash", "matched_text"]

_NAME = "OperatorModule"  # of the family's ModelNew in that text
_OURS = {
    *(_NAME, "around", "usual_state", "takes_rows", "is_within", "wants_gradients", "is_trained"),
    *("made_from",),
    *("contents_of", "ModelNew"),
}


def has_clash(reference: str, family: str) -> bool:
    """Whether a user's file and a family's module give the same name to two things."""
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.parse(reference).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    names = _given_in(reference) | imported
    return not names.isdisjoint(_given_in(family) | _OURS)


def matched_text(
    graph: Graph,
    matched: Matched,
    reference: str,
    settings: Mapping[str, object],
    has_modes: bool,
    family: str,
) -> str:
    """Return the text of a module around a family's operator.

    Args:
        graph: of the module's forward.
        matched: what is what.
        reference: the text of the module's file.
        settings: of `settings_of`, as they were.
        has_modes: whether those name modes.
        family: the text of the family's `model_new.py`.
    """
    batch = graph.batch if matched.has_any_batch else None
    # The family may differ between modes where the module does not.
    is_of_one_mode = has_modes or matched.has_modes
    inputs = {t.name for t in graph.inputs}
    source = {n: n if n in inputs else state_text(n) for n in (*matched.state.values(), *inputs)}
    for name, shape in matched.shapes.items():
        if name in source:  # the first dimension of an input is of any batch
            sizes = (-1, *shape[1:]) if name in inputs else shape
            source[name] += f".reshape({sizes})"
    view = f".reshape{(-1, *graph.value(graph.outputs[0]).shape[1:])}" if matched.shapes else ""
    names = ", ".join(a.name for a in graph.arguments)
    given = [f"            {mine!r}: {source[its]},\n" for mine, its in matched.state.items()]
    return _MODULE.format(
        usual=usual_text(graph, reference, settings, has_modes, batch, {}, has_calls=False),
        family=re.sub(r"\bModelNew\b", _NAME, without_rows(family)).strip(),
        init=_text_of(matched.init_inputs),
        numbers=dict(matched.settings),
        view=view,
        from_and_to=FROM_AND_TO_TEXT,
        is_training=graph.is_training,
        other_mode=other_mode_text(graph.is_training, names) if is_of_one_mode else "",
        absent={**matched.absent, **dict.fromkeys(matched.unused, 0.0)},
        names=names,
        asks_rows="".join(asks_rows_of(graph, batch)),
        tensors="".join(given),
        arguments=", ".join(source[name] for name in matched.arguments),
        first=matched.arguments[0],
    )


def _given_in(text: str) -> set[str]:
    """Return the names of functions, classes and values at the top level of a text."""
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            found |= {n.id for n in stored if isinstance(n.ctx, ast.Store)}
    return found - {"ModelNew"}


def _text_of(value: object) -> str:
    """Return constructor arguments, in which tuples differ from lists, as Python."""
    if isinstance(value, dict):
        return "(" + "".join(f"{_text_of(item)}, " for item in value["tuple"]) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text_of, value)) + "]"
    return repr(value)


_MODULE = """\
{usual}{family}


# The operator's module, without memory: a call is made by a copy around the tensors here.
with torch.device("meta"):
    _OPERATOR = {_name}(*{init}).train({is_training})
for _place, _number in {numbers!r}.items():
    _path, _, _attribute = _place.rpartition(".")
    setattr(_OPERATOR.get_submodule(_path), _attribute, _number)
# What the user's module lacks, and all elements of what stands for it.
_ABSENT = {absent!r}


def around(part, tensors, device, path=""):
    # A copy of a module whose parameters and buffers are these tensors.
    made = part.__class__.__new__(part.__class__)
    vars(made).update(vars(part))
    for kind in ("_parameters", "_buffers"):
        vars(made)[kind] = held = dict(vars(part)[kind])
        for name, form in held.items():
            place = path + name
            if place in _ABSENT:
                number = _ABSENT[place]
                held[name] = torch.full(form.shape, number, dtype=form.dtype, device=device)
            elif form is not None:
                held[name] = tensors[place]
    parts = vars(part)["_modules"].items()
    vars(made)["_modules"] = {{
        name: one and around(one, tensors, device, f"{{path}}{{name}}.") for name, one in parts
    }}
    return made


class ModelNew(Model):
    # The reference itself: another module makes its call where that is as usual.
{from_and_to}
    def forward(self, {names}):
        # A compiler cannot follow modules that are made at a call.
        if torch.compiler.is_compiling():
            return super().forward({names})
{other_mode}{asks_rows}        fused_state = usual_state(self, ({names},))
        if fused_state is None:
            return super().forward({names})
        tensors = {{
{tensors}        }}
        operator = around(_OPERATOR, tensors, {first}.device)
        return operator.forward({arguments}){view}
""".replace("{_name}", _NAME)
