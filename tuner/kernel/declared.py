"""What a family's files may say, as records: `op.yaml`, a template's head, the head of a part."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tuner.plans import DType
from tuner.trial import Language, Value

__all__ = [
    "KEYS_WERE", "CallHead", "DefaultHead", "Head", "OpFile", "ParameterHead", "PartHead",
    "StepHead",
]  # fmt: skip


KEYS_WERE = {"also": "extra", "also_sizes": "extra_sizes"}  # in earlier releases


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _ArgumentHead(_Strict):
    name: str
    dtype: DType | Literal["float", "int"] = "float32"
    shape: tuple[str, ...] | None = None


class _OutputHead(_Strict):
    name: str
    shape: tuple[str | int, ...]
    dtype: DType = "float32"


class CallHead(_Strict):
    """What `op.yaml` says of an extra operator.

    `rows` is a batch at which `model_new.py` makes it in eval mode, for the check to ask with.
    """

    arguments: tuple[_ArgumentHead, ...]
    outputs: tuple[_OutputHead, ...]
    rows: str | None = None


class OpFile(_Strict):
    """`op.yaml`: shapes name sizes; `extra_sizes` are those that only extra operators name.

    `arithmetic` is the fastest that any kernel of an accuracy class may use, as `peak_tflops`
    names it: less time than it takes is impossible.
    """

    name: str
    title: str
    function: str
    replaces: tuple[str, ...]
    sizes: dict[str, int]
    arguments: tuple[_ArgumentHead, ...]
    outputs: tuple[_OutputHead, ...]
    flops: str
    bytes: str
    extra: dict[str, CallHead] = {}
    extra_sizes: dict[str, int] = {}
    arithmetic: dict[str, Annotated[str, Field(pattern=r"^(fp32|tf32|fp16)(x[1-9])?$")]] = {}


class _RequirementHead(_Strict):
    expr: str
    why: str


class DefaultHead(_Strict):
    """A default that follows from the device: an expression over its facts."""

    expr: str


class ParameterHead(_Strict):
    """What a template says of one of its parameters; `was`, `values_were`: earlier names."""

    about: str
    default: Value | DefaultHead
    values: tuple[Value, ...] | None = None
    when: str | None = None
    was: str | None = None
    values_were: dict[str, str] = {}


class _WorkspaceHead(_Strict):
    shape: tuple[str | int, ...]
    dtype: DType = "float32"
    zero: bool = False
    when: str | None = None


class StepHead(_Strict):
    """One step of a call, where `when` holds."""

    call: str | None = None
    aten: str | None = None
    args: tuple[str | int | float | None, ...]
    out: str | None = None
    gives: str | None = None
    pick: int | None = None
    layout: Literal["channels_last", "bytes"] | None = None
    when: str | None = None


class _OfferHead(_Strict):
    when: str | None = None
    steps: tuple[StepHead, ...]


class _OptimisationHead(_Strict):
    text: str
    when: str | None = None


class PartHead(_Strict):
    """What a part of `_lib` declares for every template that uses it; see `shared_heads`."""

    requires: tuple[_RequirementHead, ...] = ()
    parameters: dict[str, ParameterHead] = {}
    workspace: dict[str, _WorkspaceHead] = {}
    optimisations: tuple[_OptimisationHead, ...] = ()
    deterministic: str | bool = True
    where: dict[str, str] = {}


class Head(PartHead):
    """All that the tuner knows of a template beside its text.

    What its parts declare is among its own, and its expressions have the conditions of `where`
    written out.
    """

    title: str
    language: Language
    uses: tuple[str, ...] = ()
    steps: tuple[StepHead, ...]
    extra: dict[str, _OfferHead] = {}
