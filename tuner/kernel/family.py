"""Template families: what an operator's folder holds, and rendering one candidate from it.

A family is one folder, `templates/<op>/`: `op.yaml` (the call), `reference.py` (what is right),
`model_new.py` (the module around the call) and any number of templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.errors import TemplateError, did_you_mean
from tuner.kernel.declared import CallHead, OpFile
from tuner.kernel.head import read_op, read_text
from tuner.kernel.places import in_template
from tuner.kernel.template import Signature, Template, load_template
from tuner.plans import Argument, Tensor
from tuner.space.constraints import Constraint, Parameter
from tuner.space.expression import Expression
from tuner.storage import sha256_of
from tuner.trial import Candidate, Params, Value

__all__ = [
    "Family",
    "OwnSteps",
    "builtin_folder",
    "family_names",
    "known_reference",
    "load_family",
]


def builtin_folder() -> Path:
    """Return the folder of the families that come with the tuner."""
    package = Path(__file__).parent.parent
    inside = package / "templates"  # in an installed wheel
    return inside if inside.is_dir() else package.parent / "templates"


def known_reference(sha256: str) -> Path | None:
    """Return the reference of a built-in family that has this hash; None if none has."""
    found = sorted(builtin_folder().glob("*/reference.py"))
    return next((path for path in found if sha256_of(path) == sha256), None)


@dataclass(frozen=True, slots=True)
class Family:
    """An operator: its call, its reference, and the templates that could replace it.

    `op` is what `op.yaml` says of it; `extra` are the calls that its templates may offer besides,
    by name; `steps` what files take steps of training by, where others than these calls do.
    """

    op: OpFile
    call: Signature
    extra: Mapping[str, Signature]
    flops: Expression
    bytes: Expression
    reference: Path
    model_new: str
    model_file: Path
    templates: Mapping[str, Template]
    roots: tuple[Path, ...]
    steps: OwnSteps | None = None

    @property
    def name(self) -> str:
        """The operator's name, which is its folder's."""
        return self.op.name

    @property
    def text_of_steps(self) -> str:
        """The text of the module that takes steps of training."""
        return self.model_new if self.steps is None else self.steps.family.model_new

    def render(self, params: Params, facts: Mapping[str, Value] | None = None) -> Candidate:
        """Render the template that `params["template"]` names.

        Args:
            params: one feasible configuration; parameters it lacks take their defaults.
            facts: device facts (`device.num_sms`, ...) that shapes, steps and defaults may use.

        Raises:
            TemplateError: the text does not render, an expression cannot be read, or a default
                needs a fact that is missing.
        """
        template = self.template(str(params["template"]))
        filled = template.filled(params, facts)
        constants = {**(facts or {}), **filled}
        head = template.head
        return Candidate(
            op=self.name,
            template=template.name,
            params=dict(params),
            language=head.language,
            source=template.text(filled, self.name, self.roots),
            plan=template.plan(self.call, self.extra, constants),
            optimisations=tuple(
                line.text for line in head.optimisations if template.holds(line.when, constants)
            ),
            is_deterministic=template.holds(str(head.deterministic), constants),
        )

    def renamed(self, params: Params) -> Params:
        """Return a configuration under today's names; the same where its template is unknown."""
        template = self.templates.get(str(params.get("template")))
        return params if template is None else template.renamed(params)

    def places(self, candidate: Candidate, facts: Mapping[str, Value] | None = None) -> list[str]:
        """Return the template's `file:line` for each line of a candidate's source.

        Empty where that cannot be determined. `facts` are those that it was rendered with.
        """
        template = self.template(candidate.template)
        filled = template.filled(candidate.params, facts)
        return template.places(candidate.source, filled, self.name, self.roots)

    def explained(
        self, candidate: Candidate, message: str, facts: Mapping[str, Value] | None = None
    ) -> str:
        """Return a compiler's message on a candidate with the template's own files and lines."""
        if "source." not in message:
            return message
        return in_template(message, self.places(candidate, facts))

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
            texts = [self._conditions(users, names, parameter, varied)]
            if conditions and parameter in conditions:
                texts.append(conditions[parameter].text)
            text = " and ".join(f"({text})" for text in texts if text)
            result.append(Parameter(parameter, values, Expression.parse(text) if text else None))
        return result

    def constraints(
        self, names: Sequence[str], varied: Mapping[str, tuple[Value, ...]]
    ) -> list[Constraint]:
        """Return what the templates themselves require, with the reason of each."""
        return [rule for name in names for rule in self.templates[name].constraints(varied)]

    def _conditions(
        self,
        users: Sequence[str],
        names: Sequence[str],
        parameter: str,
        varied: Mapping[str, tuple[Value, ...]],
    ) -> str:
        """Say when a parameter exists: for the templates that use it, under their own `when`."""
        groups: dict[str, list[str]] = {}
        for name in users:
            own = self.templates[name].condition(parameter, varied)
            groups.setdefault(own, []).append(name)
        if len(users) == len(names) and list(groups) == [""]:
            return ""
        terms = [
            f"template in {group!r}" + (f" and ({when})" if when else "")
            for when, group in groups.items()
        ]
        return " or ".join(f"({term})" for term in terms)


@dataclass(frozen=True, slots=True)
class OwnSteps:
    """A module that is derived from another family's reference, and the kernel for its steps."""

    family: Family
    candidate: Candidate


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
            + "".join(f"  {hint}\n" for hint in [did_you_mean(name, known)] if hint)
            + f"  looked in: {', '.join(map(str, roots))}"
        )
    files: dict[str, Path] = {}
    for home in reversed(homes):  # the user's own files win
        files.update({file.name: file for file in sorted(home.iterdir()) if file.is_file()})
    for needed in ("reference.py", "model_new.py"):
        if needed not in files:
            raise TemplateError(f"{homes[0]}: {needed} is missing\n  expected: see any family")
    op = read_op(files["op.yaml"], name)
    templates: dict[str, Template] = {}
    for file in files.values():
        if file.name.endswith(".j2"):
            template = load_template(file, roots, op)
            twin = templates.setdefault(template.name, template)
            if twin is not template:
                raise TemplateError(
                    f"{file}: a second template named {template.name!r}, beside {twin.path}\n"
                    "  next: rename one of them (the name is what stands before the first dot)"
                )
    if not templates:
        raise TemplateError(f"{homes[0]}: no template (*.cu.j2, *.cpp.j2, *.triton.py.j2)")
    return Family(
        op=op,
        call=_signature(op.function, op),
        extra={n: _further(f"{op.function}_{n}", call) for n, call in op.extra.items()},
        flops=Expression.parse(op.flops),
        bytes=Expression.parse(op.bytes),
        reference=files["reference.py"],
        model_new=read_text(files["model_new.py"]),
        model_file=files["model_new.py"],
        templates=templates,
        roots=roots,
    )


def _further(function: str, call: CallHead) -> Signature:
    rows = None if call.rows is None else Expression.parse(call.rows)
    return replace(_signature(function, call), rows=rows)


def _signature(function: str, call: OpFile | CallHead) -> Signature:
    return Signature(
        function,
        tuple(Argument(a.name, a.dtype, a.shape) for a in call.arguments),
        tuple(Tensor(o.name, tuple(str(d) for d in o.shape), o.dtype) for o in call.outputs),
    )
