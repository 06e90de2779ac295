"""The plan of one call of an operator: what to allocate and what to call, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Argument", "DType", "Plan", "Step", "Tensor"]

DType = Literal[
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of the operator's call: a tensor with named sizes, or a number.

    `shape` is None for a number (passed to C as `double` for "float", `int64_t` for "int"). A
    tensor of another dtype is refused by whatever makes the call.
    """

    name: str
    dtype: DType | Literal["float", "int"] = "float32"
    shape: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """An output or a piece of workspace that the caller allocates before each call.

    Each entry of `shape` is an expression over the sizes (the parameters are already numbers).
    """

    name: str
    shape: tuple[str, ...]
    dtype: DType = "float32"
    zero: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the call.

    `kind` "call" runs our function `function` of the source; "aten" runs PyTorch's
    `at::<function>_out(out, *args)`. An argument is the name of a tensor (`x.t` is its
    transpose, for "aten" only), `null`, or an expression over sizes, numbers and parameters.
    An "aten" step with `gives` in place of `out` runs `at::<function>(*args)` and names its
    fresh result, of several the one that `pick` counts from 0; its arguments are as
    `kernel.operands` has them. `layout` is the order of memory in which functions read that, or
    "bytes" where they read truths so: as it is written if nothing else is said.
    """

    kind: Literal["call", "aten"]
    function: str
    args: tuple[str, ...]
    out: str | None = None
    gives: str | None = None
    pick: int | None = None
    layout: Literal["channels_last", "bytes"] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is needed to run a candidate: what to allocate and what to call, in order.

    `extra` holds the plan of each extra operator that the family declares, by its name (None where
    the template does not offer it); those have none themselves.
    """

    function: str
    arguments: tuple[Argument, ...]
    outputs: tuple[Tensor, ...]
    workspace: tuple[Tensor, ...]
    steps: tuple[Step, ...]
    extra: Mapping[str, Plan | None] = field(default_factory=dict)

    @property
    def given(self) -> set[str]:
        """Tensors that PyTorch's operations make: nothing is allocated for them."""
        return {step.gives for step in self.steps if step.gives}

    @property
    def given_outputs(self) -> set[str]:
        """Those of `given` that are returned."""
        return self.given & {output.name for output in self.outputs}

    def beside(self, output: str) -> list[str]:
        """Return what a result that PyTorch gives may be a view of: arguments, other results."""
        arguments = [a.name for a in self.arguments if a.shape is not None]
        return [*arguments, *(o.name for o in self.outputs if o.name != output)]

    @property
    def dense(self) -> set[str]:
        """Those of `given` that functions of the source read, and outputs: contiguous, aligned.

        What has a layout lies in that one instead, unless it is an output.
        """
        read = {arg for step in self.steps if step.kind == "call" for arg in step.args}
        read -= {str(step.gives) for step in self.steps if step.layout == "channels_last"}
        return self.given & (read | {output.name for output in self.outputs})

    @property
    def together(self) -> dict[str, str]:
        """Of what one call gives several results of, by name, what all of these are called."""
        calls: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for step in self.steps:
            if step.gives and step.pick is not None:
                calls.setdefault((step.function, step.args), []).append(step.gives)
        several = [names for names in calls.values() if len(names) > 1]
        return {name: f"all_of_{names[0]}" for names in several for name in names}

    def is_first_of(self, step: Step) -> bool:
        """Whether a step is the first that takes a result of its call."""
        return self.together.get(str(step.gives)) == f"all_of_{step.gives}"

    @property
    def made(self) -> tuple[Tensor, ...]:
        """What is allocated before a call: outputs and workspace, without `given`."""
        given = self.given
        return tuple(t for t in (*self.outputs, *self.workspace) if t.name not in given)

    @property
    def calls(self) -> tuple[Plan, ...]:
        """The operator's own call, and the extra ones that the template offers."""
        return (self, *(plan for plan in self.extra.values() if plan is not None))
