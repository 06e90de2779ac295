"""The verdict on what is no number: keys, kinds and shapes, memory, edits, late work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tuner.check.calls.crossing import Answer
from tuner.check.calls.exercise import NAMED, checksums
from tuner.check.calls.gradients import IS_SPARSE
from tuner.check.calls.handover import REFUSED
from tuner.check.judge.expected import Expected

__all__ = ["judge_behaviour", "judge_form", "label_of", "refused_load"]


def judge_form(expected: Expected, answer: Answer) -> str:
    """Judge the state_dict's keys and the outputs' number, type, dtype, shape and device."""
    report, reference = answer.report, expected.report
    mine, theirs = dict(_by_name(report.keys)), dict(_by_name(reference.keys))
    for name in theirs:
        if mine.get(name) != theirs[name]:
            found = mine.get(name, "missing")
            return f"state_dict: {name!r} is {found}; the reference's is {theirs[name]}"
    extra = [name for name in mine if name not in theirs]
    if extra:
        return f"state_dict: {extra[0]!r} is not in the reference's"
    weights = {name[7:] for name in reference.checksums if name.startswith("weight.")}
    order, wanted = ([name for name in keys if name in weights] for keys in (mine, theirs))
    if order != wanted:
        at = next(i for i, name in enumerate(order) if name != wanted[i])
        return (
            f"state_dict: parameter {at + 1} is {order[at]!r}, the reference's is {wanted[at]!r}: "
            "an optimiser's state goes by position"
        )
    for call, kinds in enumerate(reference.kinds):
        got = report.kinds[call] if call < len(report.kinds) else ()
        of_named = [name for each in (got, kinds) for name in each if name.startswith(f"{NAMED} ")]
        if got != kinds and [k for k in got if k not in of_named] == [
            k for k in kinds if k not in of_named
        ]:
            mine_in, theirs_in = (
                next((k for k in each if k in of_named), "in a tuple or a list without names")
                for each in (got, kinds)
            )
            return f"call {call + 1} returned its outputs {mine_in}; expected them {theirs_in}"
        if got != kinds:
            is_disguised = any(not k.startswith(("torch.Tensor ", f"{NAMED} ")) for k in got)
            hint = ": a lazy or disguised tensor?" if is_disguised else ""
            return (
                f"call {call + 1} returned {', '.join(got) or 'nothing'}; "
                f"expected {', '.join(kinds)}{hint}"
            )
    for name, want in expected.oracle.items():
        got_tensor = answer.tensors.get(name)
        if got_tensor is None and not name.startswith("grad"):
            return f"{label_of(name)} is missing from the answer"
        if got_tensor is not None and got_tensor.shape != want.shape:
            return f"{label_of(name)} has shape {list(got_tensor.shape)}, not {list(want.shape)}"
        # Announced kinds were compared above; the received bytes must be of that kind as well.
        if got_tensor is not None and got_tensor.dtype != expected.dtypes[name]:
            return f"{label_of(name)} is {got_tensor.dtype}, not {expected.dtypes[name]}"
    return ""


def _by_name(
    keys: Sequence[tuple[str, str, tuple[int, ...]]],
) -> Iterator[tuple[str, str]]:
    for name, dtype, shape in keys:
        yield name, f"{dtype.removeprefix('torch.')}{list(shape)}"


def judge_behaviour(expected: Expected, answer: Answer) -> str:
    """Judge what must hold whatever the values: memory, edits, late work."""
    report, is_random = answer.report, expected.probe.is_random
    known = expected.report.changes
    changes = [
        text for text in report.changes if text not in known and not (is_random and _is_draw(text))
    ]
    if changes:
        more = ", where the reference's is dense" if changes[0].endswith(IS_SPARSE) else ""
        return changes[0] + more
    sparse = [text for text in known if text.endswith(IS_SPARSE) and text not in report.changes]
    if sparse and not (expected.probe.accumulates or expected.probe.at_once):
        return f"{sparse[0].removesuffix(IS_SPARSE)}is dense, where the reference's is sparse"
    aliases = [
        text
        for text in report.aliases
        if text not in expected.report.aliases and not _is_of_input(expected, text)
    ]
    if aliases:
        return aliases[0]
    wrong = _wrong_load(expected, answer, is_refusal=False)
    if wrong:
        return wrong
    if report.num_forks_left:
        return f"{report.num_forks_left} forks of its process outlived the call"
    for name, checksum in expected.report.checksums.items():
        if report.checksums.get(name) == checksum:
            continue
        kind, _, rest = name.partition(".")
        if kind == "input":
            return f"input {rest} was edited by the call"
        is_own = expected.question.script.own_seed is not None
        if is_own and report.checksums.get(f"drawn.{name}") != checksum:
            return (
                f"{rest} differs from the reference's initial value: with the same seed, the "
                "constructor must draw the same random numbers in the same order"
            )
        return f"the weight {rest} was edited by the call"
    returned = {
        name: tensor
        for name, tensor in answer.tensors.items()
        if name.startswith("call") and not _is_view(expected, name)
    }
    for name, checksum in checksums(returned).items():
        if report.checksums.get(f"late.{name}") != checksum:
            return (
                f"{label_of(name)} changed after the call had returned: a later call or another "
                "thread or stream writes to it"
            )
    return ""


def refused_load(expected: Expected, answer: Answer) -> str:
    """Say which wrong state_dict the candidate refuses and the reference does not."""
    return _wrong_load(expected, answer, is_refusal=True)


def _wrong_load(expected: Expected, answer: Answer, is_refusal: bool) -> str:
    for mine, theirs in zip(answer.report.loads, expected.report.loads, strict=False):
        if mine != theirs and mine.endswith(f": {REFUSED}") == is_refusal:
            return f"{mine}; the reference: {theirs.partition(': ')[2]}"
    return ""


def _is_draw(change: str) -> bool:
    """Whether what was changed is the state of a generator that the reference draws from."""
    return any(f"state of {whose} random numbers" in change for whose in ("PyTorch's", "CUDA's"))


def _is_of_input(expected: Expected, text: str) -> bool:
    """Whether elements share memory because those of the input do, of which it is a view."""
    start = text.partition(" share memory with each other")[0]
    return start.startswith("elements of ") and any(
        known.startswith(f"{start.removeprefix('elements of ')} shares memory with input ")
        for known in expected.report.aliases
    )


def _is_view(expected: Expected, name: str) -> bool:
    """Whether the reference itself returns memory of its input or state at that call."""
    call = int(name.partition(".")[0].removeprefix("call"))
    start = f"the output of call {call + 1} shares"
    return any(text.startswith(start) for text in expected.report.aliases)


def label_of(name: str) -> str:
    """Return what a tensor of the answer is called in a message."""
    kind, _, rest = name.partition(".")
    if kind.startswith("call"):
        which = "" if rest == "output0" else f" {int(rest.removeprefix('output')) + 1}"
        return f"output{which} of call {int(kind[4:]) + 1}"
    if kind.startswith("tangent"):
        return f"forward derivative of output {int(rest.removeprefix('output')) + 1}"
    if kind == "buffer":
        return f"buffer {rest}"
    return f"gradient of {rest}" + (f" (backward {int(kind[4:]) + 1})" if kind != "grad0" else "")
