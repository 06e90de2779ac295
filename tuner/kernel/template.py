"""One template: its file read and checked, and what it amounts to for some parameters.

A template is a YAML head between two `---` lines, then Jinja2 text; its name is its file's name
up to the first dot. docs/architecture.md tells the whole of it with an example.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.config.document import Document
from tuner.errors import ExpressionError, TemplateError, did_you_mean
from tuner.kernel.c_functions import CFunction, Operand, c_functions, operands_of
from tuner.kernel.declared import DefaultHead, Head, OpFile, ParameterHead, StepHead
from tuner.kernel.head import FLOAT_ARGUMENTS, read_head, refuse
from tuner.kernel.operands import names_in
from tuner.kernel.places import places_of
from tuner.kernel.rendering import free_variables, rendered
from tuner.kernel.shared_heads import with_names
from tuner.plans import Argument, Plan, Step, Tensor
from tuner.space.constraints import Constraint
from tuner.space.expression import Expression
from tuner.space.reserved import FREE_NAMES
from tuner.trial import Language, Params, Value

__all__ = ["Signature", "Template", "load_template"]

_BELOW = 10**9  # a line of the text, after all of the head


@dataclass(frozen=True, slots=True)
class Signature:
    """A call as its callers see it.

    Attributes:
        function: its name in `torch.ops`.
        arguments: in order; the shape of a tensor names the sizes.
        outputs: in order; their shapes are expressions over sizes.
        rows: of an extra operator, a batch at which the family's module calls it in eval mode,
            over sizes and device facts.
    """

    function: str
    arguments: tuple[Argument, ...]
    outputs: tuple[Tensor, ...]
    rows: Expression | None = None


@dataclass(frozen=True, slots=True)
class Template:
    """One way to compute the operator.

    Attributes:
        name: its file's, up to the first dot.
        path: its file.
        head: all that the tuner knows of it beside its text.
        body: its Jinja2 text.
        function: the operator's, with which names of C functions begin.
        operands: what its steps may be given.
    """

    name: str
    path: Path
    head: Head
    body: str
    function: str
    operands: tuple[Operand, ...]

    @property
    def language(self) -> Language:
        """The language of the rendered text."""
        return self.head.language

    @property
    def parameters(self) -> Mapping[str, ParameterHead]:
        """Every parameter that the text uses, with its default."""
        return self.head.parameters

    def filled(self, params: Params, facts: Mapping[str, Value] | None = None) -> Params:
        """Return the template's parameters: from `params`, else the defaults.

        Args:
            params: some of the parameters.
            facts: of the device, from which some defaults follow.

        Raises:
            TemplateError: a default cannot be computed from the facts, or is not allowed.
        """
        return {
            name: params[name] if name in params else self._default(name, facts or {})
            for name in self.parameters
        }

    def renamed(self, params: Params) -> Params:
        """Return parameters under today's names, as an earlier release may have recorded them."""
        names = {head.was: name for name, head in self.parameters.items() if head.was}
        now = {names.get(name, name): value for name, value in params.items()}
        values_were = {name: head.values_were for name, head in self.parameters.items()}
        return {n: values_were.get(n, {}).get(str(v), v) for n, v in now.items()}

    def _default(self, name: str, facts: Mapping[str, Value]) -> Value:
        head = self.parameters[name]
        if not isinstance(head.default, DefaultHead):
            return head.default
        place = f"{self.path}: parameters.{name}: its default"
        try:
            value = Expression.parse(head.default.expr).evaluate(facts)
        except ExpressionError as error:
            raise TemplateError(
                f"{place} cannot be computed here: {error}\n"
                f"  expected: a device that has these facts\n  next: give {name} a value"
            ) from error
        if head.values is not None and value not in head.values:
            known = ", ".join(map(str, head.values))
            raise TemplateError(
                f"{place} {head.default.expr!r}: got {value!r}\n  expected: one of {known}\n"
                f"  next: give {name} a value"
            )
        return value

    def text(self, filled: Params, op: str, roots: Sequence[Path]) -> str:
        """Render the text.

        Args:
            filled: a value for every parameter.
            op: the operator's name.
            roots: the folders in which includes are looked up, in order.

        Raises:
            TemplateError: it does not render; names the file and line.
        """
        return rendered(self.path, self.body, roots, self._variables(filled, op))

    def places(self, text: str, filled: Params, op: str, roots: Sequence[Path]) -> list[str]:
        """Return the template's `file:line` for each line of `text`, which it rendered.

        Empty where that cannot be determined. The other arguments are those of `text`.
        """
        return places_of(self.path, self.body, roots, self._variables(filled, op), text)

    def _variables(self, filled: Params, op: str) -> dict[str, object]:
        where = {name: self._found(text, filled) for name, text in self.head.where.items()}
        calls = {"call_operands": self.operands, "call_functions": lambda: self._functions(filled)}
        return {**calls, **filled, **where, "params": dict(filled), "op": op}

    def _functions(self, filled: Params) -> list[CFunction]:
        offers = [offer for offer in self.head.extra.values() if self.holds(offer.when, filled)]
        heads = [*self.head.steps, *(step for offer in offers for step in offer.steps)]
        steps = [step for step in heads if self.holds(step.when, filled)]
        return c_functions(self.function, steps, self.operands)

    def plan(
        self, call: Signature, extra: Mapping[str, Signature], constants: Mapping[str, Value]
    ) -> Plan:
        """Return what each call allocates and does, with all that is constant filled in.

        Args:
            call: the operator's own.
            extra: the extra ones that the family declares, by name.
            constants: the parameters, and device facts.

        Raises:
            TemplateError: an expression cannot be read, or a condition needs what is not constant.
        """
        plans: dict[str, Plan | None] = dict.fromkeys(extra)
        for name, offer in self.head.extra.items():
            if self.holds(offer.when, constants):
                plans[name] = self._plan(extra[name], offer.steps, constants)
        return replace(self._plan(call, self.head.steps, constants), extra=plans)

    def _plan(
        self, call: Signature, heads: Sequence[StepHead], constants: Mapping[str, Value]
    ) -> Plan:
        heads = [step for step in heads if self.holds(step.when, constants)]
        words = {str(word) for step in heads for word in (*step.args, step.out)}
        used = {word.removesuffix(".t") for word in words}
        used |= {
            name for step in heads if step.gives for a in step.args for name in names_in(str(a))
        }

        def filled(text: str | int | float) -> str:
            return self._substitute(str(text), constants)

        workspace = tuple(
            Tensor(name, tuple(filled(d) for d in item.shape), item.dtype, item.zero)
            for name, item in self.head.workspace.items()
            if name in used and self.holds(item.when, constants)
        )
        tensors = {a.name for a in call.arguments} | {o.name for o in call.outputs}
        absent = set(self.head.workspace) - {item.name for item in workspace}
        tensors |= {item.name for item in workspace} | {s.gives for s in heads if s.gives}

        def argument(text: str | int | float | None) -> str:
            word = str(text)
            if text is None or word in absent:
                return "null"
            if word.removesuffix(".t") in tensors or word in FLOAT_ARGUMENTS:
                return word
            return filled(word)

        steps = tuple(
            Step(
                kind="call" if step.call else "aten",
                function=step.call or step.aten or "",
                args=tuple(str(a) if step.gives else argument(a) for a in step.args),
                out=step.out,
                gives=step.gives,
                pick=step.pick,
                layout=step.layout,
            )
            for step in heads
        )
        return Plan(call.function, call.arguments, call.outputs, workspace, steps)

    def holds(self, text: str | None, constants: Mapping[str, Value]) -> bool:
        """Whether a condition of the head holds; one that is not written does."""
        return text is None or bool(self._found(text, constants))

    def _found(self, text: str, constants: Mapping[str, Value]) -> Value:
        try:
            return Expression.parse(text).evaluate(constants)
        except ExpressionError as error:
            raise TemplateError(f"{self.path}: {text!r}: {error}") from error

    def condition(self, parameter: str, varied: Mapping[str, tuple[Value, ...]]) -> str:
        """Return the template's own `when` of a parameter, with what is not varied filled in."""
        when = self.parameters[parameter].when
        return self._substitute(when, self._fixed(varied)) if when else ""

    def constraints(self, varied: Mapping[str, tuple[Value, ...]]) -> list[Constraint]:
        """Return what the template requires of a search that varies these parameters."""
        result: list[Constraint] = []
        fixed = self._fixed(varied)
        for requirement in self.head.requires:
            text = self._substitute(requirement.expr, fixed)
            result.append(self._guarded(text, requirement.why))
        for parameter, head in self.parameters.items():
            if head.values is not None and parameter in varied:
                known = list(head.values)
                why = f"template {self.name} knows {parameter}: {', '.join(map(str, known))}"
                result.append(self._guarded(f"{parameter} in {known!r}", why))
        return result

    def _fixed(self, varied: Mapping[str, tuple[Value, ...]]) -> dict[str, Value | DefaultHead]:
        """Return the defaults of the parameters that a search does not vary."""
        return {n: head.default for n, head in self.parameters.items() if n not in varied}

    def _guarded(self, text: str, why: str) -> Constraint:
        """A requirement of one template says nothing of the others."""
        try:
            expression = Expression.parse(text)
            when = Expression.parse(f"template == {self.name!r}")
        except ExpressionError as error:
            raise TemplateError(f"{self.path}: requires {text!r}: {error}") from error
        return Constraint(expression, why, f"template {self.name}", when)

    def _substitute(self, text: str, values: Mapping[str, Value | DefaultHead]) -> str:
        try:
            Expression.parse(text)  # refuses whatever is outside the grammar
        except ExpressionError as error:
            raise TemplateError(f"{self.path}: {text!r}: {error}") from error
        return with_names(text, lambda name: _tree_of(values[name]) if name in values else None)


def _tree_of(value: Value | DefaultHead) -> ast.expr:
    if isinstance(value, DefaultHead):
        return ast.parse(value.expr, mode="eval").body
    if isinstance(value, (int, float)) and value < 0:  # so that (-2) ** 2 keeps its brackets
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    return ast.Constant(value)


def load_template(path: Path, roots: Sequence[Path], op: OpFile) -> Template:
    """Read and check one template.

    Args:
        path: its file.
        roots: the folders in which includes are looked up, in order.
        op: the call that it makes.

    Raises:
        TemplateError: with every error of the file, at once where possible.
    """
    name, head, body, document = read_head(path, op, roots)
    template = Template(name, path, head, body, op.function, operands_of(op, head))
    _check_names(document, template, roots)
    refuse(document)
    return template


def _check_names(document: Document, template: Template, roots: Sequence[Path]) -> None:
    known = {*template.parameters, *template.head.where} | FREE_NAMES
    used = free_variables(template.path, template.body, roots)
    for name in sorted(used.keys() - known):
        hint = did_you_mean(name, sorted(known)) or f"next: declare {name} under `parameters:`"
        lines = [
            f"{used[name]}: undefined variable {name!r}",
            f"  known: {', '.join(sorted(known))}",
        ]
        document.problems.append((_BELOW, "\n".join([*lines, f"  {hint}"])))
