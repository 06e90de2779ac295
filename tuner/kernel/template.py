"""Template families: what an operator's folder says, and rendering one candidate from it.

A family is one folder, `templates/<op>/`: `op.yaml` (the call), `reference.py` (what is right),
`model_new.py` (the module around the call) and any number of templates. A template is a YAML
head between two `---` lines, then Jinja2 text; its name is its file's name up to the first dot.
docs/architecture.md tells the whole of it with an example.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import jinja2
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from tuner.errors import ExpressionError, TemplateError, did_you_mean
from tuner.space.constraints import Constraint, Parameter
from tuner.space.expression import Expression, unknown_name
from tuner.trial import (
    Argument,
    Candidate,
    DType,
    Language,
    Params,
    Plan,
    Step,
    Tensor,
    Value,
)

__all__ = ["Family", "ParameterHead", "Template", "builtin_folder", "family_names", "load_family"]

_FILE_NAME = {"cuda": ".cu.j2", "cpp": ".cpp.j2", "triton": ".triton.py.j2"}
_FREE_NAMES = {"params", "op"}  # what every text may use beside its parameters
_FLOAT_ARGUMENTS = {"num_threads"}  # passed by name, known only when the call is made


def builtin_folder() -> Path:
    """Return the folder of the families that come with the tuner."""
    package = Path(__file__).parent.parent
    inside = package / "templates"  # in an installed wheel
    return inside if inside.is_dir() else package.parent / "templates"


# ---- what is written in the files -----------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _ArgumentHead(_Strict):
    name: str
    dtype: Literal["float32", "float", "int"] = "float32"
    shape: tuple[str, ...] | None = None


class _OutputHead(_Strict):
    name: str
    shape: tuple[str | int, ...]
    dtype: DType = "float32"


class _OpFile(_Strict):
    name: str
    title: str
    function: str
    replaces: tuple[str, ...]
    sizes: dict[str, int]
    arguments: tuple[_ArgumentHead, ...]
    outputs: tuple[_OutputHead, ...]
    flops: str
    bytes: str


class _RequirementHead(_Strict):
    expr: str
    why: str


class ParameterHead(_Strict):
    """What a template says of one of its parameters."""

    about: str
    default: Value
    values: tuple[Value, ...] | None = None
    when: str | None = None


class _WorkspaceHead(_Strict):
    shape: tuple[str | int, ...]
    dtype: DType = "float32"
    zero: bool = False
    when: str | None = None


class _StepHead(_Strict):
    call: str | None = None
    aten: str | None = None
    args: tuple[str | int | float | None, ...]
    out: str | None = None
    when: str | None = None


class _OptimisationHead(_Strict):
    text: str
    when: str | None = None


class _Head(_Strict):
    title: str
    language: Language
    requires: tuple[_RequirementHead, ...] = ()
    parameters: dict[str, ParameterHead] = {}
    workspace: dict[str, _WorkspaceHead] = {}
    steps: tuple[_StepHead, ...]
    optimisations: tuple[_OptimisationHead, ...] = ()
    deterministic: str | bool = True


# ---- a family and its templates -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Template:
    """One way to compute the operator; `path` is its file, `body` its Jinja2 text."""

    name: str
    path: Path
    head: _Head
    body: str

    @property
    def language(self) -> Language:
        """The language of the rendered text."""
        return self.head.language

    @property
    def parameters(self) -> Mapping[str, ParameterHead]:
        """Every parameter that the text uses, with its default."""
        return self.head.parameters

    def filled(self, params: Params) -> Params:
        """Return the template's parameters: from `params`, else the defaults."""
        return {name: params.get(name, head.default) for name, head in self.parameters.items()}


@dataclass(frozen=True, slots=True)
class Family:
    """An operator: its call, its reference, and the templates that could replace it."""

    name: str
    title: str
    function: str
    replaces: tuple[str, ...]
    sizes: Mapping[str, int]
    arguments: tuple[Argument, ...]
    outputs: tuple[Tensor, ...]
    flops: Expression
    bytes: Expression
    reference: Path
    model_new: str
    templates: Mapping[str, Template]
    roots: tuple[Path, ...]

    def render(self, params: Params, facts: Mapping[str, Value] | None = None) -> Candidate:
        """Render the template that `params["template"]` names.

        Args:
            params: one feasible configuration; parameters it lacks take their defaults.
            facts: device facts (`device.num_sms`, ...) that shapes and steps may use.

        Raises:
            TemplateError: the text does not render, or an expression cannot be read.
        """
        template = self.template(str(params["template"]))
        filled = template.filled(params)
        constants = {**(facts or {}), **filled}
        head = template.head
        return Candidate(
            op=self.name,
            template=template.name,
            params=dict(params),
            language=head.language,
            source=self._text(template, filled),
            plan=_plan(self, template, constants),
            optimisations=tuple(
                line.text for line in head.optimisations if _holds(line.when, constants, template)
            ),
            is_deterministic=_holds(str(head.deterministic), constants, template),
        )

    def template(self, name: str) -> Template:
        """Return the template of that name, or raise a TemplateError that lists those there."""
        if name in self.templates:
            return self.templates[name]
        known = sorted(self.templates)
        raise TemplateError(
            f"{self.name} has no template {name!r}\n  known: {', '.join(known)}\n"
            f"  {did_you_mean(name, known) or 'next: look into templates/' + self.name}"
        )

    def parameters(
        self,
        names: Sequence[str],
        varied: Mapping[str, tuple[Value, ...]],
        conditions: Mapping[str, Expression] | None = None,
    ) -> list[Parameter]:
        """Return the parameters of a search over the templates `names`.

        A parameter that only some of the templates use is absent for the others.

        Args:
            names: the templates to search, in order.
            varied: the values to search per parameter, as the config lists them.
            conditions: the config's own `when` of some of them.
        """
        result = [Parameter("template", tuple(names), None)]
        for parameter, values in varied.items():
            users = [name for name in names if parameter in self.templates[name].parameters]
            if not users:
                continue
            texts = [_conditions(self, users, names, parameter, varied)]
            if conditions and parameter in conditions:
                texts.append(conditions[parameter].text)
            text = " and ".join(f"({text})" for text in texts if text)
            result.append(Parameter(parameter, values, Expression.parse(text) if text else None))
        return result

    def constraints(
        self, names: Sequence[str], varied: Mapping[str, tuple[Value, ...]]
    ) -> list[Constraint]:
        """Return what the templates themselves require, with the reason of each."""
        result: list[Constraint] = []
        for name in names:
            template = self.templates[name]
            fixed = _fixed(template, varied)
            for requirement in template.head.requires:
                text = _substitute(requirement.expr, fixed, template)
                result.append(_guarded(name, text, requirement.why, template))
            for parameter, head in template.parameters.items():
                if head.values is not None and parameter in varied:
                    known = list(head.values)
                    why = f"template {name} knows {parameter}: {', '.join(map(str, known))}"
                    result.append(_guarded(name, f"{parameter} in {known!r}", why, template))
        return result

    def _text(self, template: Template, filled: Params) -> str:
        environment = _environment(self.roots)
        context = {**filled, "params": dict(filled), "op": self.name}
        try:
            code = environment.compile(template.body, filename=str(template.path))
            text = jinja2.Template.from_code(environment, code, dict(environment.globals))
            return text.render(context).lstrip("\n")
        except Exception as error:  # the text may also divide by zero, include itself, ...
            raise _render_error(template, self.roots, error) from error


def family_names(folders: Sequence[Path] = ()) -> list[str]:
    """Return the operators found in `folders` and among those that come with the tuner."""
    roots = [*folders, builtin_folder()]
    return sorted({file.parent.name for root in roots for file in root.glob("*/op.yaml")})


def load_family(name: str, folders: Sequence[Path] = ()) -> Family:
    """Load an operator's family.

    Args:
        name: the folder's name.
        folders: folders of the user's own that hold `<name>/`; they may add templates to a
            family that comes with the tuner, replace its files, or hold a new operator.

    Raises:
        TemplateError: no such family, or a file in it is wrong (every error of a file at once).
    """
    for folder in folders:
        if not folder.is_dir():
            raise TemplateError(f"{folder}: not a folder\n  expected: a folder that holds {name}/")
    roots = (*folders, builtin_folder())
    homes = [root / name for root in roots if (root / name).is_dir()]
    if not any((home / "op.yaml").is_file() for home in homes):
        known = family_names(folders)
        raise TemplateError(
            f"unknown operator {name!r}: no folder {name}/op.yaml\n  known: {', '.join(known)}\n"
            f"  {did_you_mean(name, known) or 'looked in: ' + ', '.join(map(str, roots))}"
        )
    files: dict[str, Path] = {}
    for home in reversed(homes):  # the user's own files win
        files.update({file.name: file for file in sorted(home.iterdir()) if file.is_file()})
    for needed in ("reference.py", "model_new.py"):
        if needed not in files:
            raise TemplateError(f"{homes[0]}: {needed} is missing\n  expected: see any family")
    text = _read(files["op.yaml"])
    op: _OpFile = _validated(_OpFile, files["op.yaml"], text)
    _check_op(op, name, files["op.yaml"], text)
    templates: dict[str, Template] = {}
    for file in files.values():
        if file.name.endswith(".j2"):
            template = _load_template(file, roots, op)
            twin = templates.setdefault(template.name, template)
            if twin is not template:
                raise TemplateError(
                    f"{file}: a second template named {template.name!r}, beside {twin.path}\n"
                    "  next: rename one of them (the name is what stands before the first dot)"
                )
    if not templates:
        raise TemplateError(f"{homes[0]}: no template (*.cu.j2, *.cpp.j2, *.triton.py.j2)")
    return Family(
        name=name,
        title=op.title,
        function=op.function,
        replaces=op.replaces,
        sizes=op.sizes,
        arguments=tuple(Argument(a.name, a.dtype, a.shape) for a in op.arguments),
        outputs=tuple(Tensor(o.name, tuple(str(d) for d in o.shape), o.dtype) for o in op.outputs),
        flops=Expression.parse(op.flops),
        bytes=Expression.parse(op.bytes),
        reference=files["reference.py"],
        model_new=_read(files["model_new.py"]),
        templates=templates,
        roots=roots,
    )


# ---- reading --------------------------------------------------------------------------------


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path}: cannot be read: {error}") from error


def _validated(model: type[BaseModel], path: Path, text: str) -> Any:
    try:
        data = yaml.safe_load(text)
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
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            place = ".".join(map(str, item["loc"]))
            lines.append(f"{path}:{_line(text, item['loc'])}: {place}: {item['msg']}")
            if item["type"] in ("extra_forbidden", "missing"):
                known_here = sorted(_model_at(model, item["loc"]).model_fields)
                hint = did_you_mean(str(item["loc"][-1]), known_here)
                is_missing = item["type"] == "missing"
                lines.append(f"  known: {', '.join(known_here)}")
                lines += [f"  {hint}"] if hint and not is_missing else []
        raise TemplateError("\n".join(lines)) from error


_Place = Sequence[str | int]  # keys and positions, from the top of a YAML text


def _line(text: str, place: _Place) -> int:
    """Return the line of a YAML text where the entry at `place`, or what holds it, begins."""
    node = yaml.compose(text, yaml.SafeLoader)
    line = 0
    for step in place:
        if isinstance(node, yaml.MappingNode):
            inside = [(key, value) for key, value in node.value if key.value == str(step)]
            if not inside:
                break
            line, node = inside[0][0].start_mark.line, inside[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            node = node.value[step]
            line = node.start_mark.line
    return line + 1


def _model_at(model: type[BaseModel], place: _Place) -> type[BaseModel]:
    """Return the model of the mapping that holds the entry at `place`."""
    field = model.model_fields.get(str(place[0]))
    if len(place) > 1 and field is not None:
        for kind in get_args(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                return kind
    return model


def _check_op(op: _OpFile, name: str, path: Path, text: str) -> None:
    findings = _Findings(path, text)
    if op.name != name:
        findings.add(["name"], f"{op.name!r} is not the folder's name {name!r}")
    for number, argument in enumerate(op.arguments):
        if (argument.dtype == "float32") is (argument.shape is None):
            findings.add(
                ["arguments", number], f"{argument.name}: a tensor has a shape, and only it"
            )
    if not any(argument.shape for argument in op.arguments):
        findings.add(["arguments"], "at least one of them is a tensor")
    sizes = _run_time_sizes(op) | set(op.sizes)
    for key in ("flops", "bytes"):
        findings.judge([key], getattr(op, key), sizes)
    for number, output in enumerate(op.outputs):
        for dim in output.shape:
            findings.judge(["outputs", number, "shape"], str(dim), _run_time_sizes(op))
    findings.report()


def _run_time_sizes(op: _OpFile) -> set[str]:
    return {size for argument in op.arguments for size in argument.shape or ()}


def _load_template(path: Path, roots: Sequence[Path], op: _OpFile) -> Template:
    text = _read(path)
    parts = text.split("\n---\n", 1)
    if not text.startswith("---\n") or len(parts) != 2:
        raise TemplateError(
            f"{path}: no head\n  expected: YAML between two lines of '---', then the text"
        )
    head_text = parts[0][3:]  # begins with a newline in place of the '---': lines are the file's
    head: _Head = _validated(_Head, path, head_text)
    ending = _FILE_NAME[head.language]
    if not path.name.endswith(ending):
        raise TemplateError(
            f"{path}:{_line(head_text, ['language'])}: language: {head.language}\n"
            f"  expected: a file name that ends in {ending}"
        )
    # Blank lines in place of the head keep Jinja's line numbers those of the file.
    body = "\n" * (parts[0].count("\n") + 2) + parts[1]
    template = Template(path.name.removesuffix(ending), path, head, body)
    findings = _Findings(path, head_text)
    _check_head(findings, head, op)
    _check_names(findings, template, roots)
    findings.report()
    return template


class _Findings:
    """What is wrong with one YAML text, each with its line."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.lines: list[str] = []

    def add(self, place: _Place, reason: str, hint: str = "") -> None:
        name = ".".join(map(str, place))
        self.lines.append(f"{self.path}:{_line(self.text, place)}: {name}: {reason}")
        self.lines += [f"  {hint}"] if hint else []

    def judge(self, place: _Place, text: str | None, known: Collection[str]) -> None:
        """Refuse an expression outside the grammar, or one with a name that is not known."""
        if text is None:
            return
        try:
            expression = Expression.parse(text)
        except ExpressionError as error:
            self.add(place, str(error))
            return
        for name in sorted(expression.names - set(known)):
            if not name.startswith("device."):
                self.add(place, f"{text!r}: {unknown_name(name, sorted(known))}")

    def report(self) -> None:
        if self.lines:
            raise TemplateError("\n".join(self.lines))


def _check_head(findings: _Findings, head: _Head, op: _OpFile) -> None:
    sizes = _run_time_sizes(op)
    outside = {argument.name for argument in op.arguments} | {output.name for output in op.outputs}
    taken = {*sizes, *op.sizes, *outside, *head.workspace, *_FREE_NAMES, "template", "num_threads"}
    for name in head.parameters:
        if not name.isidentifier() or name in taken:
            findings.add(["parameters", name], "this name is taken, or is no name")
    for name in head.workspace:
        if not name.isidentifier() or name in sizes | set(op.sizes) | outside:
            findings.add(["workspace", name], "this name is taken, or is no name")
    tuned = set(head.parameters)
    for number, requirement in enumerate(head.requires):
        findings.judge(["requires", number], requirement.expr, {*tuned, *sizes, *op.sizes})
    for name, parameter in head.parameters.items():
        findings.judge(["parameters", name], parameter.when, {*tuned, *sizes, *op.sizes})
        if parameter.values is not None and parameter.default not in parameter.values:
            findings.add(["parameters", name], "its default is not one of its values")
    for name, item in head.workspace.items():
        findings.judge(["workspace", name], item.when, tuned)
        for dim in item.shape:
            findings.judge(["workspace", name], str(dim), tuned | sizes)
    for number, line in enumerate(head.optimisations):
        findings.judge(["optimisations", number], line.when, tuned)
    findings.judge(["deterministic"], str(head.deterministic), tuned)
    for number, step in enumerate(head.steps):
        findings.judge(["steps", number], step.when, tuned)
        _check_step(findings, ["steps", number], step, head, op)


def _check_step(
    findings: _Findings, place: _Place, step: _StepHead, head: _Head, op: _OpFile
) -> None:
    tensors = {a.name for a in op.arguments if a.shape is not None}
    tensors |= {output.name for output in op.outputs} | set(head.workspace)
    words = {a.name for a in op.arguments if a.shape is None} | _FLOAT_ARGUMENTS | {"null"}
    if (step.call is None) == (step.aten is None):
        findings.add(place, "a step has either `call:` or `aten:`")
    elif not str(step.call or step.aten).isidentifier():
        findings.add(place, f"{step.call or step.aten!r} is no function's name")
    if step.aten is not None and step.out not in tensors:
        findings.add(place, "an `aten:` step needs `out:`, the tensor that it writes")
    if step.call is not None and step.out is not None:
        findings.add(place, "a `call:` step has no `out:`; its outputs are among `args:`")
    for argument in step.args:
        word = str(argument)
        if word.endswith(".t") and word[:-2] in tensors and step.aten is None:
            findings.add(place, f"{word!r}: only an `aten:` step takes a transpose")
        elif argument is not None and word.removesuffix(".t") not in tensors | words:
            findings.judge(place, word, set(head.parameters) | _run_time_sizes(op))


def _check_names(findings: _Findings, template: Template, roots: Sequence[Path]) -> None:
    known = set(template.parameters) | _FREE_NAMES
    environment = _environment(roots)
    try:
        used = _undeclared(environment, template.path, template.body, frozenset(), set())
    except jinja2.TemplateSyntaxError as error:
        place = error.filename or str(template.path)
        raise TemplateError(f"{place}:{error.lineno}: {error.message}") from error
    for name in sorted(used.keys() - known):
        hint = did_you_mean(name, sorted(known)) or f"next: declare {name} under `parameters:`"
        findings.lines.append(f"{used[name]}: undefined variable {name!r}")
        findings.lines.append(f"  known: {', '.join(sorted(known))}")
        findings.lines.append(f"  {hint}")


def _undeclared(
    environment: jinja2.Environment,
    path: Path,
    source: str,
    declared: frozenset[str],
    seen: set[str],
) -> dict[str, str]:
    """Return the variables that a text and all it includes expect from outside.

    Each with the file and line of its first use. `declared` is what the texts that include this
    one have set themselves.
    """
    tree = environment.parse(source, filename=str(path))
    words = list(tree.find_all(jinja2.nodes.Name))
    names: dict[str, str] = {}
    for name in jinja2.meta.find_undeclared_variables(tree) - declared:
        uses = [word.lineno for word in words if word.name == name and word.ctx == "load"]
        names[name] = f"{path}:{min(uses)}"
    inner = declared | {word.name for word in words if word.ctx != "load"}
    kinds = (jinja2.nodes.Include, jinja2.nodes.Import, jinja2.nodes.FromImport)
    for node in tree.find_all(kinds):
        included = getattr(
            getattr(node, "template", None), "value", None
        )  # not a word: known when rendered
        if not isinstance(included, str) or included in seen:
            continue
        seen.add(included)
        assert environment.loader is not None
        try:
            text, file, _ = environment.loader.get_source(environment, included)
        except jinja2.TemplateNotFound as error:
            hint = did_you_mean(included, environment.list_templates())
            raise TemplateError(
                f"{path}:{node.lineno}: includes {included!r}, which does not exist\n"
                f"  {hint or 'next: look into templates/_lib'}"
            ) from error
        found = _undeclared(environment, Path(file or included), text, inner, seen)
        names = {**found, **names}
    return names


def _environment(roots: Sequence[Path]) -> jinja2.Environment:
    return jinja2.sandbox.SandboxedEnvironment(
        loader=jinja2.FileSystemLoader([str(root) for root in roots]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _render_error(template: Template, roots: Sequence[Path], error: Exception) -> TemplateError:
    """Name the file and line of the text that the error came from: Jinja2 keeps them in frames."""
    place = str(template.path)
    for frame in traceback.extract_tb(error.__traceback__):
        if any(Path(frame.filename).is_relative_to(root) for root in roots):
            place = f"{frame.filename}:{frame.lineno}"
    if isinstance(error, jinja2.TemplateNotFound):
        return TemplateError(f"{place}: includes {error.name!r}, which does not exist")
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return TemplateError(f"{place}: does not render: {kind}{error}")


# ---- expressions with the parameters filled in ----------------------------------------------


class _Constants(ast.NodeTransformer):
    """Replace names (and dotted `device.x`) that have a value by that value."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._filled(node, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._filled(node, ast.unparse(node))

    def _filled(self, node: ast.expr, name: str) -> ast.AST:
        if name not in self.values:
            return node
        value = self.values[name]
        if isinstance(value, (int, float)) and value < 0:  # so that (-2) ** 2 keeps its brackets
            return ast.UnaryOp(ast.USub(), ast.Constant(-value))
        return ast.Constant(value)


def _substitute(text: str, values: Mapping[str, Value], template: Template) -> str:
    try:
        Expression.parse(text)  # refuses whatever is outside the grammar
    except ExpressionError as error:
        raise TemplateError(f"{template.path}: {text!r}: {error}") from error
    return ast.unparse(_Constants(values).visit(ast.parse(text, mode="eval")))


def _holds(text: str | None, constants: Mapping[str, Value], template: Template) -> bool:
    if text is None:
        return True
    try:
        return bool(Expression.parse(text).evaluate(constants))
    except ExpressionError as error:
        raise TemplateError(f"{template.path}: {text!r}: {error}") from error


def _guarded(name: str, text: str, why: str, template: Template) -> Constraint:
    """A requirement of one template says nothing of the others."""
    try:
        expression = Expression.parse(text)
        when = Expression.parse(f"template == {name!r}")
    except ExpressionError as error:
        raise TemplateError(f"{template.path}: requires {text!r}: {error}") from error
    return Constraint(expression, why, f"template {name}", when)


def _fixed(template: Template, varied: Mapping[str, tuple[Value, ...]]) -> Params:
    """Return the defaults of the parameters that a search does not vary."""
    return {n: head.default for n, head in template.parameters.items() if n not in varied}


def _conditions(
    family: Family,
    users: Sequence[str],
    names: Sequence[str],
    parameter: str,
    varied: Mapping[str, tuple[Value, ...]],
) -> str:
    """Say when a parameter exists: for the templates that use it, under their own `when`."""
    groups: dict[str, list[str]] = {}
    for name in users:
        template = family.templates[name]
        when = template.parameters[parameter].when
        own = _substitute(when, _fixed(template, varied), template) if when else ""
        groups.setdefault(own, []).append(name)
    if len(users) == len(names) and list(groups) == [""]:
        return ""
    terms = [
        f"template in {group!r}" + (f" and ({when})" if when else "")
        for when, group in groups.items()
    ]
    return " or ".join(f"({term})" for term in terms)


def _plan(family: Family, template: Template, constants: Mapping[str, Value]) -> Plan:
    def filled(text: str | int | float) -> str:
        return _substitute(str(text), constants, template)

    workspace = tuple(
        Tensor(name, tuple(filled(d) for d in item.shape), item.dtype, item.zero)
        for name, item in template.head.workspace.items()
        if _holds(item.when, constants, template)
    )
    tensors = {a.name for a in family.arguments} | {o.name for o in family.outputs}
    absent = set(template.head.workspace) - {item.name for item in workspace}
    tensors |= {item.name for item in workspace}

    def argument(text: str | int | float | None) -> str:
        word = str(text)
        if text is None or word in absent:
            return "null"
        if word.removesuffix(".t") in tensors or word in _FLOAT_ARGUMENTS:
            return word
        return filled(word)

    steps = tuple(
        Step(
            kind="call" if step.call else "aten",
            function=step.call or step.aten or "",
            args=tuple(argument(a) for a in step.args),
            out=step.out,
        )
        for step in template.head.steps
        if _holds(step.when, constants, template)
    )
    return Plan(family.function, family.arguments, family.outputs, workspace, steps)
