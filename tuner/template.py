"""Template families: what an operator's folder says, and rendering one candidate from it.

A family is one folder, `templates/<op>/`: `op.yaml` (the call), `reference.py` (what is right),
`model_new.py` (the module around the call) and any number of templates. A template is a YAML
head between two `---` lines, then Jinja2 text; its name is its file's name up to the first dot.
docs/architecture.md tells the whole of it with an example.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.meta
import jinja2.sandbox
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from tuner.errors import ExpressionError, TemplateError, did_you_mean
from tuner.space import Constraint, Expression, Parameter
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
    inside = Path(__file__).parent / "templates"  # in an installed wheel
    return inside if inside.is_dir() else Path(__file__).parent.parent / "templates"


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
        context = {**filled, "params": filled, "op": self.name}
        try:
            return environment.from_string(template.body).render(context).lstrip("\n")
        except jinja2.TemplateError as error:
            raise _jinja_error(template.path, error) from error


def family_names(folders: Sequence[Path] = ()) -> list[str]:
    """Return the operators found in `folders` and among those that come with the tuner."""
    roots = [*folders, builtin_folder()]
    return sorted({file.parent.name for root in roots for file in root.glob("*/op.yaml")})


def load_family(name: str, folders: Sequence[Path] = ()) -> Family:
    """Load an operator's family.

    Args:
        name: the folder's name, for example `gemm_scale_batchnorm`.
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
    op = _validated(_OpFile, files["op.yaml"], _read(files["op.yaml"]))
    templates = {}
    for file in files.values():
        if file.name.endswith(".j2"):
            template = _load_template(file, roots)
            templates[template.name] = template
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


def _validated(model: type[Any], path: Path, text: str) -> Any:
    try:
        return model.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise TemplateError(f"{path}: not YAML: {error}") from error
    except ValidationError as error:
        lines = []
        for item in error.errors():
            place = ".".join(map(str, item["loc"]))
            lines.append(f"{path}: {place}: {item['msg']}")
            if item["type"] == "extra_forbidden":
                known = sorted(model.model_fields)
                word = str(item["loc"][-1])
                lines.append(f"  known: {', '.join(known)}  {did_you_mean(word, known)}".rstrip())
        raise TemplateError("\n".join(lines)) from error


def _load_template(path: Path, roots: Sequence[Path]) -> Template:
    text = _read(path)
    parts = text.split("\n---\n", 1)
    if not text.startswith("---\n") or len(parts) != 2:
        raise TemplateError(
            f"{path}: no head\n  expected: YAML between two lines of '---', then the text"
        )
    head: _Head = _validated(_Head, path, parts[0][4:])
    ending = _FILE_NAME[head.language]
    if not path.name.endswith(ending):
        raise TemplateError(f"{path}: language {head.language}: its name must end in {ending}")
    # Blank lines in place of the head keep Jinja's line numbers those of the file.
    body = "\n" * (parts[0].count("\n") + 2) + parts[1]
    template = Template(path.name.removesuffix(ending), path, head, body)
    _check_names(template, roots)
    return template


def _check_names(template: Template, roots: Sequence[Path]) -> None:
    environment = _environment(roots)
    try:
        used = _undeclared(environment, template.body, set())
    except jinja2.TemplateError as error:
        raise _jinja_error(template.path, error) from error
    known = set(template.parameters) | _FREE_NAMES
    lines = []
    for name in sorted(used - known):
        lines.append(f"{_place(template, name)}: undefined variable {name!r}")
        lines.append(f"  known: {', '.join(sorted(known))}")
        lines.append(f"  {did_you_mean(name, sorted(known)) or 'declare it under parameters:'}")
    for step in template.head.steps:
        if (step.call is None) == (step.aten is None):
            lines.append(f"{template.path}: steps: a step has either `call:` or `aten:`")
    if lines:
        raise TemplateError("\n".join(lines))


def _undeclared(environment: jinja2.Environment, source: str, seen: set[str]) -> set[str]:
    """Return the variables that a text and all it includes expect from outside."""
    tree = environment.parse(source)
    names = set(jinja2.meta.find_undeclared_variables(tree))
    for included in jinja2.meta.find_referenced_templates(tree):
        if included is not None and included not in seen:
            seen.add(included)
            assert environment.loader is not None
            inner = environment.loader.get_source(environment, included)[0]
            names |= _undeclared(environment, inner, seen)
    return names


def _place(template: Template, word: str) -> str:
    for number, line in enumerate(template.body.splitlines(), 1):
        if word in line and "{" in line:
            return f"{template.path}:{number}"
    return str(template.path)


def _environment(roots: Sequence[Path]) -> jinja2.Environment:
    return jinja2.sandbox.SandboxedEnvironment(
        loader=jinja2.FileSystemLoader([str(root) for root in roots]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _jinja_error(path: Path, error: jinja2.TemplateError) -> TemplateError:
    line = getattr(error, "lineno", None)
    if isinstance(error, jinja2.TemplateNotFound):
        return TemplateError(f"{path}: includes {error.name!r}, which does not exist")
    if isinstance(error, jinja2.TemplateSyntaxError) and error.name:
        path = Path(error.name)
    return TemplateError(f"{path}{f':{line}' if line else ''}: {error.message}")


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
        return ast.Constant(self.values[name]) if name in self.values else node


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
