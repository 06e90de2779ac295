"""What is written in a family's files: `op.yaml`, and the head at the top of each template.

Read as records, or refused with every error of a file at once, each with its line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from tuner.config.document import Document, read_document, require_keys, validated, with_known
from tuner.errors import ExpressionError, TemplateError
from tuner.kernel.declared import (
    KEYS_WERE,
    CallHead,
    DefaultHead,
    Head,
    OpFile,
    PartHead,
    StepHead,
)
from tuner.kernel.operands import names_in, problem_with
from tuner.kernel.shared_heads import joined, part_files, with_conditions
from tuner.machine.platforms import FILE_ENDINGS
from tuner.space.expression import Expression, unknown_name
from tuner.space.reserved import refusal_of

__all__ = [
    "FLOAT_ARGUMENTS",
    "read_head",
    "read_op",
    "read_text",
    "refuse",
]

FLOAT_ARGUMENTS = {"num_threads"}  # passed by name, known only when the call is made
_M = TypeVar("_M", bound=BaseModel)


# ---- reading --------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """Return a file of a family as text; a TemplateError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path}: cannot be read: {error}") from error


def read_op(path: Path, name: str) -> OpFile:
    """Read `op.yaml`.

    Args:
        path: of the file.
        name: of its folder, which the operator must bear.

    Raises:
        TemplateError: with every error of the file.
    """
    document, op = _read(OpFile, path, read_text(path))
    _check_op(op, name, document)
    refuse(document)
    return op


def read_head(path: Path, op: OpFile, roots: Sequence[Path]) -> tuple[str, Head, str, Document]:
    """Read a template's file.

    Args:
        path: of the file, whose ending goes with the head's language.
        op: the call that the template makes.
        roots: the folders in which the heads of its parts are looked up, in order.

    Returns:
        The template's name, its head, its Jinja2 text with the file's line numbers, and what is
        wrong with the head: the caller adds what is wrong with the text, and refuses it.

    Raises:
        TemplateError: there is no head, or it cannot be read as one.
    """
    text = read_text(path)
    parts = text.split("\n---\n", 1)
    if not text.startswith("---\n") or len(parts) != 2:
        raise TemplateError(
            f"{path}: no head\n  expected: YAML between two lines of '---', then the text"
        )
    # It begins with a newline in place of the '---': lines are the file's.
    document, own = _read(Head, path, parts[0][3:])
    for file in part_files(own.uses, roots, document):
        joined(document, _read(PartHead, file, read_text(file))[0])
    head = Head.model_validate(with_conditions(document))
    ending = FILE_ENDINGS[head.language]
    if not path.name.endswith(ending):
        expected = f"{head.language}\n  expected: a file name that ends in {ending}"
        raise TemplateError(document.places.located("language", expected))
    # Blank lines in place of the head keep Jinja's line numbers those of the file.
    body = "\n" * (parts[0].count("\n") + 2) + parts[1]
    _check_head(document, head, op)
    return path.name.removesuffix(ending), head, body, document


def refuse(document: Document) -> None:
    """Raise a TemplateError with all that is wrong with a document, if there is anything."""
    if document.problems:
        raise TemplateError(str(document.error()))


def _read(model: type[_M], path: Path, text: str) -> tuple[Document, _M]:
    document = read_document(path, text)
    for key in KEYS_WERE.keys() & (document.data if isinstance(document.data, dict) else {}):
        document.report(key, f"it is called {KEYS_WERE[key]} now")
        del document.data[key]
    found = validated(document, model) if require_keys(document, model) else None
    refuse(document)
    assert found is not None  # or something was reported
    return document, found


# ---- checking what was read -----------------------------------------------------------------


def _check_op(op: OpFile, name: str, document: Document) -> None:
    if op.name != name:
        document.report("name", f"{op.name!r} is not the folder's name {name!r}")
    own = _run_time_sizes(op)
    for key in ("flops", "bytes"):
        _judge(document, key, getattr(op, key), own | set(op.sizes))
    _check_call(document, "", op)
    for number, argument in enumerate(op.arguments):
        for size in argument.shape or ():
            place = f"arguments[{number}].shape"
            if refused := refusal_of(size, {}):
                document.report(place, f"{size}: {refused[0]}\n  {refused[1]}")
            elif size not in op.sizes:
                document.report(
                    place,
                    with_known(f"{size!r} is not among `sizes:`", size, list(op.sizes)),
                )
    for call, head in op.extra.items():
        if not call.isidentifier() or call in ("op", "device"):  # `fused_op`, `fused_device`
            document.report(
                f"extra.{call}",
                "this name is taken, or is no name\n"
                "  reserved: op and device, since fused_op and fused_device are there already",
            )
        _check_call(document, f"extra.{call}.", head)
        _judge(document, f"extra.{call}.rows", head.rows, own)


def _check_call(document: Document, place: str, call: OpFile | CallHead) -> None:
    taken = dict.fromkeys(_run_time_sizes(call), "a size")
    names = [("arguments", i, a.name) for i, a in enumerate(call.arguments)]
    names += [("outputs", i, o.name) for i, o in enumerate(call.outputs)]
    for kind, number, name in names:
        if refused := refusal_of(name, taken):
            document.report(f"{place}{kind}[{number}]", f"{name}: {refused[0]}\n  {refused[1]}")
        taken[name] = f"another of the {kind}"
    for number, argument in enumerate(call.arguments):
        if (argument.dtype in ("float", "int")) is not (argument.shape is None):
            document.report(
                f"{place}arguments[{number}]",
                f"{argument.name}: a tensor has a shape, and only it",
            )
    if not any(argument.shape for argument in call.arguments):
        document.report(f"{place}arguments", "at least one of them is a tensor")
    for number, output in enumerate(call.outputs):
        for dim in output.shape:
            _judge(document, f"{place}outputs[{number}].shape", str(dim), _run_time_sizes(call))


def _run_time_sizes(call: OpFile | CallHead) -> set[str]:
    return {size for argument in call.arguments for size in argument.shape or ()}


def _tensors(call: OpFile | CallHead) -> set[str]:
    tensors = {argument.name for argument in call.arguments if argument.shape is not None}
    return tensors | {output.name for output in call.outputs}


def _check_head(document: Document, head: Head, op: OpFile) -> None:
    sizes = _run_time_sizes(op)
    calls: list[OpFile | CallHead] = [op, *op.extra.values()]
    outside = {argument.name for call in calls for argument in call.arguments}
    outside |= {output.name for call in calls for output in call.outputs}
    taken = dict.fromkeys({*sizes, *op.sizes}, "a size of op.yaml")
    taken |= dict.fromkeys(outside, "an argument or output of op.yaml")
    own = taken | dict.fromkeys(head.workspace, "a workspace")
    for kind, names, others, is_parameter in (
        ("parameters", list(head.parameters), own, True),
        ("workspace", list(head.workspace), taken, False),
    ):
        for name in names:
            if refused := refusal_of(name, others, is_parameter=is_parameter):
                document.report(f"{kind}.{name}", "\n  ".join(refused))
    tuned = set(head.parameters)
    for name, condition in head.where.items():
        if refused := refusal_of(name, {**own, **dict.fromkeys(tuned, "a parameter")}):
            document.report(f"where.{name}", "\n  ".join(refused))
        _judge(document, f"where.{name}", condition, tuned)
    for number, requirement in enumerate(head.requires):
        _judge(document, f"requires[{number}]", requirement.expr, {*tuned, *sizes, *op.sizes})
    for name, parameter in head.parameters.items():
        _judge(document, f"parameters.{name}", parameter.when, {*tuned, *sizes, *op.sizes})
        if isinstance(parameter.default, DefaultHead):
            _judge(document, f"parameters.{name}", parameter.default.expr, ())
        elif parameter.values is not None and parameter.default not in parameter.values:
            document.report(f"parameters.{name}", "its default is not one of its values")
    for name, item in head.workspace.items():
        _judge(document, f"workspace.{name}", item.when, tuned)
        for dim in item.shape:
            _judge(document, f"workspace.{name}", str(dim), tuned | _sizes_for(name, head, op))
    for number, line in enumerate(head.optimisations):
        _judge(document, f"optimisations[{number}]", line.when, tuned)
    _judge(document, "deterministic", str(head.deterministic), tuned)
    for number, step in enumerate(head.steps):
        _check_step(document, f"steps[{number}]", step, head, op, head.steps)
    for name, offer in head.extra.items():
        if name not in op.extra:
            known = sorted(op.extra) or ["none (`extra:` of op.yaml declares them)"]
            document.report(
                f"extra.{name}",
                with_known("the operator has no such extra operator", name, known),
            )
            continue
        _judge(document, f"extra.{name}", offer.when, tuned)
        for number, step in enumerate(offer.steps):
            step_place = f"extra.{name}.steps[{number}]"
            _check_step(document, step_place, step, head, op.extra[name], offer.steps)


def _sizes_for(workspace: str, head: Head, op: OpFile) -> set[str]:
    """Return the sizes that are known in every call that a workspace is made for."""
    offers = [(offer.steps, op.extra[n]) for n, offer in head.extra.items() if n in op.extra]
    calls: list[tuple[Iterable[StepHead], OpFile | CallHead]] = [(head.steps, op), *offers]
    users = [
        _run_time_sizes(call)
        for steps, call in calls
        if any(workspace in map(str, (*step.args, step.out)) for step in steps)
    ]
    return set.intersection(*users) if users else _run_time_sizes(op)


def _check_step(
    document: Document,
    place: str,
    step: StepHead,
    head: Head,
    call: OpFile | CallHead,
    steps: Iterable[StepHead],
) -> None:
    _judge(document, place, step.when, set(head.parameters))
    tensors = _tensors(call) | set(head.workspace) | {s.gives for s in steps if s.gives}
    words = {a.name for a in call.arguments if a.shape is None} | FLOAT_ARGUMENTS | {"null"}
    if (step.call is None) == (step.aten is None):
        document.report(place, "a step has either `call:` or `aten:`")
    elif not str(step.call or step.aten).isidentifier():
        document.report(place, f"{step.call or step.aten!r} is no function's name")
    if step.gives is None and (step.pick, step.layout) != (None, None):
        document.report(place, "`pick:` and `layout:` are of what a step `gives:`")
    if step.aten is not None and step.gives is None and step.out not in tensors:
        document.report(place, "an `aten:` step needs `out:`, the tensor that it writes")
    if step.call is not None and (step.out or step.gives) is not None:
        document.report(place, "a `call:` step has no `out:`; its outputs are among `args:`")
    if step.aten is not None and step.gives is not None:
        for word in map(str, step.args):
            if wrong := problem_with(word):
                document.report(place, wrong)
            elif unknown := names_in(word) - tensors:
                document.report(place, f"{sorted(unknown)[0]!r} is no tensor of the call")
        return
    for argument in step.args:
        word = str(argument)
        if word.endswith(".t") and word[:-2] in tensors and step.aten is None:
            document.report(place, f"{word!r}: only an `aten:` step takes a transpose")
        elif argument is not None and word.removesuffix(".t") not in tensors | words:
            _judge(document, place, word, set(head.parameters) | _run_time_sizes(call))


def _judge(document: Document, place: str, text: str | None, known: Collection[str]) -> None:
    """Refuse an expression outside the grammar, or one with a name that is not known."""
    if text is None:
        return
    try:
        expression = Expression.parse(text)
    except ExpressionError as error:
        document.report(place, str(error))
        return
    for name in sorted(expression.names - set(known)):
        if not name.startswith("device."):
            document.report(place, f"{text!r}: {unknown_name(name, sorted(known))}")
