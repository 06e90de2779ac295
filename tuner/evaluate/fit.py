"""Whether a family's `model_new.py` fits its operator and its reference, asked without a kernel.

    names      what it uses is there; ModelNew, setup_context and backward are as expected
    model      it is constructed with the reference's arguments, and has the reference's state
    sizes      it calls its operator with what op.yaml declares; the sizes that this makes
    rehearse   it takes what the operator returns, and autograd can go back through it

The operator is a stand-in that returns numbers of no meaning, so values are not judged here. Every
mistake is reported with the file and line of `model_new.py`: its author is the one to read of it.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import inspect
import operator
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from tuner.check.calls.exercise import keys_of, outputs_of
from tuner.errors import InputError, ProblemError, TemplateError, did_you_mean
from tuner.evaluate.described import declared, described, differences, form_of, kind_of
from tuner.evaluate.modules import (
    TookReference,
    arguments_for,
    constructed,
    differentiable,
    module_of,
    without_reference,
)
from tuner.kernel.binding import match_sizes
from tuner.plans import Argument, Tensor
from tuner.problem.reference import Problem
from tuner.space.expression import Expression
from tuner.wording import one_line

__all__ = ["Fit"]

FEW_ROWS = 4  # of a rehearsal: the weights' gradients cost most, and need no more
LARGE_BYTES = 2**26  # of weights
MOST_SHOWN = 4  # keys of a state_dict in one message


class _Seen(Exception):
    """Carries the arguments that a module passed to its operator."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One `model_new.py` beside a reference.

    Attributes:
        problem: the loaded reference.
        file: the module's file, for messages; `text` is what stands in it.
        declared: the operator's arguments, and `outputs` what it returns.
        further: names of the extra operators.
    """

    problem: Problem
    file: Path
    text: str
    declared: Sequence[Argument]
    outputs: Sequence[Tensor]
    further: Sequence[str]

    # ---- the file -----------------------------------------------------------------------------

    def names(self) -> dict[str, Any]:
        """Execute the file; return its names, once it is known that all it needs is there.

        Raises:
            TemplateError: it is not Python, raises, or lacks a part or a name.
        """
        import torch

        try:
            with self._said("running it"):
                module = module_of(self.text, str(self.file))
        except SyntaxError as error:
            raise TemplateError(
                f"{self.file}:{error.lineno}: not valid Python: {error.msg}\n"
                f"  got: {(error.text or '').strip()}"
            ) from None
        own = [name for name, value in module.items() if callable(value)]
        kind = module.get("ModelNew")
        if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
            found = "no class ModelNew" if kind is None else f"ModelNew is {kind_of(kind)}"
            raise TemplateError(
                f"{self.file}: {found}\n  expected: class ModelNew(nn.Module)\n"
                f"  {did_you_mean('ModelNew', own) or 'next: docs/architecture.md shows one'}"
            )
        gradients = [f"grad_{output.name}" for output in self.outputs]
        self._check_function(module, own, "setup_context", ["ctx", "inputs", "output"])
        self._check_function(module, own, "backward", ["ctx", *gradients])
        given = {"fused_op", "fused_device", *(f"fused_{name}" for name in self.further)}
        self._check_names({*module, *given, *dir(builtins)})
        return module

    def _check_function(
        self, module: Mapping[str, Any], own: Sequence[str], name: str, wanted: Sequence[str]
    ) -> None:
        """The autograd formula is two functions, with a gradient for each output."""
        function = module.get(name)
        expected = f"def {name}({', '.join(wanted)})"
        if not callable(function):
            hint = did_you_mean(name, own) or "next: add it; autograd cannot go back without it"
            raise TemplateError(
                f"{self.file}: no function {name}\n  expected: {expected}\n  {hint}"
            )
        try:
            takes = inspect.signature(function)
        except (TypeError, ValueError):
            return  # made in C: its call will tell
        try:
            takes.bind(*wanted)
        except TypeError:
            raise TemplateError(
                f"{self._place_of(function)}: {name} does not take {len(wanted)} arguments\n"
                f"  got: def {name}{takes}\n  expected: {expected}\n"
                "  next: op.yaml lists the outputs; backward takes a gradient for each"
            ) from None

    def _check_names(self, known: set[str]) -> None:
        """Refuse a name that is nowhere, also where no call of ours comes by."""
        codes = list(_codes(compile(self.text, str(self.file), "exec")))
        steps = [step for code in codes for step in dis.get_instructions(code)]
        stored = {s.argval for s in steps if s.opname in ("STORE_NAME", "STORE_GLOBAL")}
        for code in codes:
            line = code.co_firstlineno
            for step in dis.get_instructions(code):
                place = step.positions.lineno if step.positions else None
                line = place or line
                name = str(step.argval)
                is_global = step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
                if not is_global or name in known or name in stored or name.startswith("__"):
                    continue
                near = did_you_mean(name, sorted(n for n in known if n.startswith(name[:1])))
                raise TemplateError(
                    f"{self.file}:{line}: name {name!r} is not defined\n"
                    f"  known: torch, nn, F, fused_op, fused_device"
                    f"{''.join(f', fused_{n}' for n in self.further)}, and what the file makes\n"
                    f"  {near or 'next: import it in the file, or correct it'}"
                )

    # ---- the module ---------------------------------------------------------------------------

    def model(self, module: Mapping[str, Any]) -> Any:
        """Construct ModelNew in the reference's mode, and compare its state with that one's.

        Raises:
            TemplateError, ProblemError: it raises, or its state_dict is another.
        """
        arguments = arguments_for(self.problem, module, self.file)
        listed = ", ".join(map(described, arguments))
        place = self._place_of(module["ModelNew"])
        with self._said(f"ModelNew({listed})", f"get_init_inputs() gives [{listed}]", place):
            model = self._constructed(module["ModelNew"], arguments)
            mine, own = keys_of(model), [name for name, _ in model.named_parameters()]
        reference = self.problem.model_without_memory()
        model.train(reference.training)
        wanted = [name for name, _ in reference.named_parameters()]
        found = differences(mine, keys_of(reference), own, wanted)
        if found:
            shown = "; ".join(found[:MOST_SHOWN])
            more = f"; and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
            raise self._error(
                place,
                f"the state_dict of ModelNew is not the reference's\n  got: {shown}{more}\n"
                f"  expected: the keys, shapes, dtypes and order of Model in {self.problem.path}\n"
                "  next: give ModelNew the same modules and parameters, under the same names",
            )
        return model

    def _constructed(self, kind: Any, arguments: Sequence[Any]) -> Any:
        """Construct it on the CPU: large weights without numbers, which would take seconds."""
        # What looks at numbers, and what is wrong, is constructed below.
        with contextlib.suppress(ProblemError, NotImplementedError, RuntimeError):
            state = self.problem.model_without_memory().state_dict()
            if sum(tensor.nbytes for tensor in state.values()) >= LARGE_BYTES:
                return constructed(kind, arguments, "meta", is_quick=True).to_empty(device="cpu")
        return constructed(kind, arguments, "cpu")

    # ---- its call -----------------------------------------------------------------------------

    def sizes(self, module: dict[str, Any], model: Any, inputs: Sequence[Any]) -> dict[str, int]:
        """Return the sizes with which a module calls the stand-in of its operator.

        Raises:
            TemplateError, ProblemError: it raises, calls it with something else, or never.
        """
        import torch

        def seen(*args: Any, **named: Any) -> Any:
            raise _Seen(args, named)

        module |= {**self._absent(), "fused_op": seen}
        for has_gradients in (False, True):  # one without them is called in the first alone
            try:
                with (
                    self._said("ModelNew.forward", self._inputs(inputs), passing=_Seen),
                    torch.set_grad_enabled(has_gradients),
                    without_reference(module),
                ):
                    model(*inputs)
            except _Seen as call:
                args, named = call.args
                return self._matched(args, named, self._place_in(call) or str(self.file))
            except TookReference:
                continue
        raise ProblemError(
            f"{self.problem.path}: the operator's module never called its operator on these "
            f"inputs\n  got: {self._inputs(inputs)}\n"
            "  expected: inputs that the family's templates handle (dtype, rank, mode)\n"
            f"  next: see the conditions before fused_op in {self.file}"
        )

    def _absent(self) -> dict[str, Any]:
        return {"fused_device": "cpu", **{f"fused_{name}": None for name in self.further}}

    def _matched(
        self, args: Sequence[Any], named: Mapping[str, Any], place: str
    ) -> dict[str, int]:
        """Return the sizes that the arguments of one call make, or say what does not fit."""
        import torch

        wanted = ", ".join(map(declared, self.declared))
        got = ", ".join([*map(described, args), *(f"{n}=..." for n in named)]) or "nothing"

        def refused(reason: str) -> InputError:
            return self._error(
                place,
                f"{reason}\n  got: fused_op({got})\n  expected: fused_op({wanted})\n"
                "  next: make the call and `arguments:` of op.yaml agree",
            )

        if named:
            raise refused("fused_op takes its arguments by position, not by name")
        if len(args) != len(self.declared):
            raise refused(f"fused_op gets {len(args)} arguments, not {len(self.declared)}")
        shapes = {}
        for argument, value in zip(self.declared, args, strict=True):
            name = argument.name
            if argument.shape is not None:
                if not isinstance(value, torch.Tensor):
                    raise refused(f"{name} is {described(value)}, not a tensor")
                if value.dtype is not getattr(torch, argument.dtype):
                    raise refused(f"{name} is {described(value)}, not {argument.dtype}")
                shapes[name] = tuple(value.shape)
                continue
            try:
                (float if argument.dtype == "float" else operator.index)(value)
            except (TypeError, ValueError, RuntimeError):
                raise refused(f"{name} is {described(value)}, not {argument.dtype}") from None
        try:
            return match_sizes(self.declared, shapes)
        except ValueError as error:
            raise refused(str(error)) from error

    # ---- forward and backward with a stand-in -------------------------------------------------

    def rehearse(self, module: dict[str, Any], model: Any) -> None:
        """Go forward and back once, at few rows, with outputs of the declared shapes.

        Raises:
            TemplateError, ProblemError: the module or its autograd formula raises, or the
                answer has another form than the reference's.
        """
        import torch

        try:
            inputs = self.problem.stand_ins(FEW_ROWS)
            sizes = self.sizes(module, model, inputs)
            shapes = [
                [int(Expression.parse(dim).evaluate(sizes)) for dim in output.shape]
                for output in self.outputs
            ]
        except InputError:
            return  # not at so few rows, which the check at the problem's own will judge

        def stand_in(*_: Any) -> Any:
            made = zip(shapes, self.outputs, strict=True)
            return tuple(torch.rand(s).to(getattr(torch, output.dtype)) for s, output in made)

        for value in inputs:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.requires_grad_()
        module |= {**self._absent(), "fused_op": differentiable(stand_in, module)}
        try:
            with self._said("ModelNew.forward", self._inputs(inputs)), without_reference(module):
                result = model(*inputs)
        except TookReference:  # where gradients are wanted: no formula of ours goes back there
            return
        self._compare_forms(module, result, inputs)
        outputs = [y for y in outputs_of(result) if getattr(y, "requires_grad", False)]
        if outputs:
            self._go_back(module, outputs)

    def _compare_forms(
        self, module: Mapping[str, Any], result: Any, inputs: Sequence[Any]
    ) -> None:
        """Compare what was returned with what the reference returns, but for the values."""
        import torch

        moved = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in inputs]
        try:
            with torch.device("meta"):
                reference = self.problem.model_without_memory().to("meta")
                answer = self.problem.result_of(reference, moved)
        except (ProblemError, NotImplementedError, RuntimeError):
            return  # it wants numbers: the check will have them
        mine, theirs = form_of(result), form_of(answer)
        if mine != theirs:
            raise self._error(
                self._place_of(module["ModelNew"].forward),
                f"ModelNew.forward returns another kind of answer than the reference\n"
                f"  got: {mine}\n  expected: {theirs}\n"
                f"  next: fused_op returns a tuple of {len(self.outputs)}, as op.yaml lists them",
            )

    def _go_back(self, module: Mapping[str, Any], outputs: Sequence[Any]) -> None:
        import torch

        gradients = [torch.rand_like(y) for y in outputs]
        backward = module["backward"]
        # Numbers without meaning may be what a formula refuses, such as a matrix to invert.
        spared = (torch.linalg.LinAlgError, ValueError, ArithmeticError, AssertionError)
        with (
            contextlib.suppress(*spared),
            self._said("backward", fallback=self._place_of(backward), passing=spared),
        ):
            torch.autograd.backward(outputs, gradients)

    # ---- words --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _said(
        self,
        what: str,
        got: str = "",
        fallback: str = "",
        passing: type[Exception] | tuple[type[Exception], ...] = (),
    ) -> Iterator[None]:
        """Turn whatever the user's code raises into a message with its file and line."""
        try:
            yield
        except (InputError, SyntaxError, TookReference):
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, passing):
                raise
            place = self._place_in(error) or fallback or str(self.file)
            text = one_line(str(error)) or "no message"
            lines = [f"{what} raised {type(error).__name__}: {text}"]
            lines += [f"  got: {got}"] if got else []
            lines += [f"  expected: what Model in {self.problem.path} takes"] if got else []
            raise self._error(place, "\n".join(lines)) from error

    def _error(self, place: str, text: str) -> InputError:
        """Blame the reference first where it is not the family's own."""
        if self.problem.path.parent == self.file.parent:
            return TemplateError(f"{place}: {text}")
        return ProblemError(f"{self.problem.path}: does not fit the operator: {place}: {text}")

    def _place_in(self, error: BaseException) -> str:
        """Return `file:line` of the file's last frame; empty where no line of it was reached."""
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(self.file)
        ]
        return f"{self.file}:{frames[-1].lineno}" if frames else ""

    def _place_of(self, thing: Any) -> str:
        """Return `file:line` where a function, or a class's constructor, begins."""
        thing = inspect.unwrap(getattr(thing, "__func__", thing))
        code = getattr(thing, "__code__", None)
        if isinstance(thing, type):
            code = getattr(thing.__dict__.get("__init__"), "__code__", None)
            if code is None:
                return str(self.file)
        if code is None or code.co_filename != str(self.file):
            return str(self.file)
        return f"{self.file}:{code.co_firstlineno}"

    def _inputs(self, inputs: Sequence[Any]) -> str:
        return f"get_inputs() gives [{', '.join(map(described, inputs))}]"


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all that are inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
