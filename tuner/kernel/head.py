"""What is written in a family's files: `op.yaml`, and the head at the top of each template.

Read as records, or refused with every error of a file at once, each with its line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from tuner.errors import TemplateError, did_you_mean
from tuner.kernel.declared import CallHead, DefaultHead, Head, OpFile, PartHead, StepHead
from tuner.kernel.findings import Findings, Place, data_of, line_of
from tuner.kernel.naming import refusal_of
from tuner.kernel.operands import names_in, problem_with
from tuner.kernel.shared_heads import joined, part_files, with_conditions

__all__ = ["FLOAT_ARGUMENTS", "read_head", "read_op", "read_text"]

FLOAT_ARGUMENTS = {"num_threads"}  # passed by name, known only when the call is made
_FILE_NAME = {"cuda": ".cu.j2", "cpp": ".cpp.j2", "triton": ".triton.py.j2"}
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
    text = read_text(path)
    op = _validated(OpFile, path, text, _data(OpFile, path, text))
    findings = Findings(path, text)
    _check_op(op, name, findings)
    findings.report()
    return op


def read_head(path: Path, op: OpFile, roots: Sequence[Path]) -> tuple[str, Head, str, Findings]:
    """Read a template's file.

    Args:
        path: of the file, whose ending goes with the head's language.
        op: the call that the template makes.
        roots: the folders in which the heads of its parts are looked up, in order.

    Returns:
        The template's name, its head, its Jinja2 text with the file's line numbers, and what is
        wrong with the head: the caller adds what is wrong with the text, and reports.

    Raises:
        TemplateError: there is no head, or it cannot be read as one.
    """
    text = read_text(path)
    parts = text.split("\n---\n", 1)
    if not text.startswith("---\n") or len(parts) != 2:
        raise TemplateError(
            f"{path}: no head\n  expected: YAML between two lines of '---', then the text"
        )
    head_text = parts[0][3:]  # begins with a newline in place of the '---': lines are the file's
    findings = Findings(path, head_text)
    data = _data(Head, path, head_text)
    _validated(Head, path, head_text, data)
    for file in part_files(data.get("uses", ()), roots, findings):
        part_text = read_text(file)
        part = _data(PartHead, file, part_text)
        _validated(PartHead, file, part_text, part)
        findings.parts.append((file, part_text))
        data = joined(data, part)
    head = Head.model_validate(with_conditions(data, findings))
    ending = _FILE_NAME[head.language]
    if not path.name.endswith(ending):
        raise TemplateError(
            f"{path}:{line_of(head_text, ['language'])}: language: {head.language}\n"
            f"  expected: a file name that ends in {ending}"
        )
    # Blank lines in place of the head keep Jinja's line numbers those of the file.
    body = "\n" * (parts[0].count("\n") + 2) + parts[1]
    _check_head(findings, head, op)
    return path.name.removesuffix(ending), head, body, findings


def _data(model: type[BaseModel], path: Path, text: str) -> dict[str, Any]:
    try:
        data = data_of(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = getattr(error, "problem", None) or str(error)
        raise TemplateError(
            f"{place}: not YAML: {reason}\n  hint: quote texts that hold ': ', '#' or a bracket"
        ) from error
    if not isinstance(data, dict):
        known = ", ".join(model.model_fields)
        raise TemplateError(f"{path}: no `key: value` lines\n  known: {known}")
    return data


def _validated(model: type[_M], path: Path, text: str, data: Mapping[str, Any]) -> _M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            place = ".".join(map(str, item["loc"]))
            lines.append(f"{path}:{line_of(text, item['loc'])}: {place}: {item['msg']}")
            if item["type"] in ("extra_forbidden", "missing"):
                known_here = sorted(_model_at(model, item["loc"]).model_fields)
                hint = did_you_mean(str(item["loc"][-1]), known_here)
                is_missing = item["type"] == "missing"
                lines.append(f"  known: {', '.join(known_here)}")
                lines += [f"  {hint}"] if hint and not is_missing else []
        raise TemplateError("\n".join(lines)) from error


def _model_at(model: type[BaseModel], place: Place) -> type[BaseModel]:
    """Return the model of the mapping that holds the entry at `place`."""
    for key in place[:-1]:
        field = model.model_fields.get(str(key))
        for kind in get_args(field.annotation) if field is not None else ():
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                model = kind
    return model


# ---- checking what was read -----------------------------------------------------------------


def _check_op(op: OpFile, name: str, findings: Findings) -> None:
    if op.name != name:
        findings.add(["name"], f"{op.name!r} is not the folder's name {name!r}")
    own = _run_time_sizes(op)
    for key in ("flops", "bytes"):
        findings.judge([key], getattr(op, key), own | set(op.sizes))
    _check_call(findings, [], op)
    for number, argument in enumerate(op.arguments):
        for size in argument.shape or ():
            place: Place = ["arguments", number, "shape"]
            if refused := refusal_of(size, {}):
                findings.add(place, f"{size}: {refused[0]}", refused[1])
            elif size not in op.sizes:
                findings.add(
                    place,
                    f"{size!r} is not among `sizes:`",
                    did_you_mean(size, list(op.sizes)) or f"known: {', '.join(op.sizes)}",
                )
    for call, head in op.also.items():
        if not call.isidentifier() or call in ("op", "device"):  # `fused_op`, `fused_device`
            findings.add(
                ["also", call],
                "this name is taken, or is no name",
                "reserved: op and device, since fused_op and fused_device are there already",
            )
        _check_call(findings, ["also", call], head)
        findings.judge(["also", call, "rows"], head.rows, own)


def _check_call(findings: Findings, place: Place, call: OpFile | CallHead) -> None:
    taken = dict.fromkeys(_run_time_sizes(call), "a size")
    names = [("arguments", i, a.name) for i, a in enumerate(call.arguments)]
    names += [("outputs", i, o.name) for i, o in enumerate(call.outputs)]
    for kind, number, name in names:
        if refused := refusal_of(name, taken):
            findings.add([*place, kind, number], f"{name}: {refused[0]}", refused[1])
        taken[name] = f"another of the {kind}"
    for number, argument in enumerate(call.arguments):
        if (argument.dtype in ("float", "int")) is not (argument.shape is None):
            findings.add(
                [*place, "arguments", number],
                f"{argument.name}: a tensor has a shape, and only it",
            )
    if not any(argument.shape for argument in call.arguments):
        findings.add([*place, "arguments"], "at least one of them is a tensor")
    for number, output in enumerate(call.outputs):
        for dim in output.shape:
            findings.judge([*place, "outputs", number, "shape"], str(dim), _run_time_sizes(call))


def _run_time_sizes(call: OpFile | CallHead) -> set[str]:
    return {size for argument in call.arguments for size in argument.shape or ()}


def _tensors(call: OpFile | CallHead) -> set[str]:
    tensors = {argument.name for argument in call.arguments if argument.shape is not None}
    return tensors | {output.name for output in call.outputs}


def _check_head(findings: Findings, head: Head, op: OpFile) -> None:
    sizes = _run_time_sizes(op)
    calls: list[OpFile | CallHead] = [op, *op.also.values()]
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
                findings.add([kind, name], *refused)
    tuned = set(head.parameters)
    for name, condition in head.where.items():
        if refused := refusal_of(name, {**own, **dict.fromkeys(tuned, "a parameter")}):
            findings.add(["where", name], *refused)
        findings.judge(["where", name], condition, tuned)
    for number, requirement in enumerate(head.requires):
        findings.judge(["requires", number], requirement.expr, {*tuned, *sizes, *op.sizes})
    for name, parameter in head.parameters.items():
        findings.judge(["parameters", name], parameter.when, {*tuned, *sizes, *op.sizes})
        if isinstance(parameter.default, DefaultHead):
            findings.judge(["parameters", name], parameter.default.expr, ())
        elif parameter.values is not None and parameter.default not in parameter.values:
            findings.add(["parameters", name], "its default is not one of its values")
    for name, item in head.workspace.items():
        findings.judge(["workspace", name], item.when, tuned)
        for dim in item.shape:
            findings.judge(["workspace", name], str(dim), tuned | _sizes_for(name, head, op))
    for number, line in enumerate(head.optimisations):
        findings.judge(["optimisations", number], line.when, tuned)
    findings.judge(["deterministic"], str(head.deterministic), tuned)
    for number, step in enumerate(head.steps):
        _check_step(findings, ["steps", number], step, head, op, head.steps)
    for name, offer in head.also.items():
        if name not in op.also:
            known = ", ".join(op.also) or "none (`also:` of op.yaml declares them)"
            findings.add(
                ["also", name],
                "the operator has no such further call",
                did_you_mean(name, sorted(op.also)) or f"known: {known}",
            )
            continue
        findings.judge(["also", name], offer.when, tuned)
        for number, step in enumerate(offer.steps):
            step_place: Place = ["also", name, "steps", number]
            _check_step(findings, step_place, step, head, op.also[name], offer.steps)


def _sizes_for(workspace: str, head: Head, op: OpFile) -> set[str]:
    """Return the sizes that are known in every call that a workspace is made for."""
    offers = [(offer.steps, op.also[n]) for n, offer in head.also.items() if n in op.also]
    calls: list[tuple[Iterable[StepHead], OpFile | CallHead]] = [(head.steps, op), *offers]
    users = [
        _run_time_sizes(call)
        for steps, call in calls
        if any(workspace in map(str, (*step.args, step.out)) for step in steps)
    ]
    return set.intersection(*users) if users else _run_time_sizes(op)


def _check_step(
    findings: Findings,
    place: Place,
    step: StepHead,
    head: Head,
    call: OpFile | CallHead,
    steps: Iterable[StepHead],
) -> None:
    findings.judge(place, step.when, set(head.parameters))
    tensors = _tensors(call) | set(head.workspace) | {s.gives for s in steps if s.gives}
    words = {a.name for a in call.arguments if a.shape is None} | FLOAT_ARGUMENTS | {"null"}
    if (step.call is None) == (step.aten is None):
        findings.add(place, "a step has either `call:` or `aten:`")
    elif not str(step.call or step.aten).isidentifier():
        findings.add(place, f"{step.call or step.aten!r} is no function's name")
    if step.gives is None and (step.pick, step.layout) != (None, None):
        findings.add(place, "`pick:` and `layout:` are of what a step `gives:`")
    if step.aten is not None and step.gives is None and step.out not in tensors:
        findings.add(place, "an `aten:` step needs `out:`, the tensor that it writes")
    if step.call is not None and (step.out or step.gives) is not None:
        findings.add(place, "a `call:` step has no `out:`; its outputs are among `args:`")
    if step.aten is not None and step.gives is not None:
        for word in map(str, step.args):
            if wrong := problem_with(word):
                findings.add(place, wrong)
            elif unknown := names_in(word) - tensors:
                findings.add(place, f"{sorted(unknown)[0]!r} is no tensor of the call")
        return
    for argument in step.args:
        word = str(argument)
        if word.endswith(".t") and word[:-2] in tensors and step.aten is None:
            findings.add(place, f"{word!r}: only an `aten:` step takes a transpose")
        elif argument is not None and word.removesuffix(".t") not in tensors | words:
            findings.judge(place, word, set(head.parameters) | _run_time_sizes(call))
