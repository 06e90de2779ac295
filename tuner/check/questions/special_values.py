"""Values that mean something else than their neighbours, among those of a call.

A label that is ignored, the last row of a table, a bound that a forward compares with: they are
known by the inputs, by what submodules call them, or by the numbers in the reference's text.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.calls.parts import copied
from tuner.errors import ProblemError, says_no_memory
from tuner.problem.draws import Distribution
from tuner.problem.reference import Problem

if TYPE_CHECKING:
    import torch

__all__ = [
    "is_taken",
    "with_edges",
    "with_fractions",
    "with_last_integers",
    "with_odd_integers",
    "with_special_values",
    "with_wide_integers",
]

# By which parts name the integers that they treat apart.
SPECIAL = ("padding_idx", "ignore_index", "blank")
MOST_BEYOND = 4  # integers beyond the given ones that a reference is asked with: calls on the CPU
GIVING = ("get_inputs", "get_init_inputs")  # whose numbers are sizes of inputs
CONSTANTS = {"math.pi": math.pi, "torch.pi": math.pi, "math.e": math.e}
MOST = 16  # of each kind: a table of constants is no list of thresholds
LARGEST = 100.0  # beyond it a threshold is out of reach of usual inputs


def with_special_values(
    problem: Problem, model: torch.nn.Module, values: Sequence[Any], is_all: bool
) -> list[Any]:
    """Return integers with those that mean something else, and bools that are alike in a row.

    With `is_all` there are no others: one integer alone, and bools that are all true.
    Special are the least and the largest that were given, those that a submodule names or the
    reference's text has, and -100, which losses ignore; beyond the given ones, where the
    reference takes it.
    """
    import torch

    named = [getattr(part, name, None) for part in model.modules() for name in SPECIAL]
    own = [n for n in dict.fromkeys([*named, *_wholes_in(problem)]) if type(n) is int]
    result = list(values)
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or not value.numel():
            continue
        if value.dtype == torch.bool and value.ndim:
            result[i] = value.clone()
            if is_all:
                result[i].fill_(True)
            else:
                result[i][0], result[i][-1] = False, True
        if value.dtype not in (torch.int64, torch.int32):
            continue
        least, most = int(value.min()), int(value.max())
        beyond = [] if _reads_anywhere(problem) else [-100, *own]
        beyond = [n for n in beyond if not least <= n <= most][:MOST_BEYOND]
        within = [n for n in own if least <= n <= most]
        legal = []
        for number in beyond:
            one = _filled(value, number) if is_all else _marked(value, [number])
            if is_taken(problem, model, [*result[:i], one, *result[i + 1 :]]):
                legal.append(number)
        if is_all:
            result[i] = _filled(value, [*legal, *within, least][0])
        else:
            result[i] = _marked(value, [*legal, least, most, *within])
    return result


def _filled(value: torch.Tensor, number: int) -> torch.Tensor:
    return value.clone().fill_(number)


def _marked(value: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    """Return a tensor with a few of each number in it."""
    marked = value.clone().reshape(-1)
    for at, number in enumerate(numbers):
        marked[at::8][: max(1, len(marked) // 16)] = number
    return marked.view(value.shape)


def with_fractions(problem: Problem, values: Sequence[Any]) -> list[Any]:
    """Return floats with the numbers of the reference's text among them, as often as they do."""
    import torch

    numbers = _fractions_in(problem)
    result = list(values)
    for i, value in enumerate(values):
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if numbers and is_float and value.numel():
            made = value.clone().reshape(-1)
            for at, number in enumerate(numbers):
                made[at :: 2 * len(numbers)] = number
            result[i] = made.view(value.shape)
    return result


def with_edges(
    problem: Problem, model: torch.nn.Module, values: Sequence[Any], at: int
) -> list[Any]:
    """Return inputs of which one float tensor, `at` that place, has zeros and ones among it.

    They are the edges of what a probability may be, and a logarithm's. Where the reference
    refuses them, or its answer is not finite, they are left out: zeros, ones, then both.
    """
    import torch

    floats = [
        i for i, x in enumerate(values) if isinstance(x, torch.Tensor) and x.is_floating_point()
    ]
    if not floats:
        return list(values)
    place = floats[at % len(floats)]
    for edges in ((0.0, 1.0), (0.0,), (1.0,)):
        made = values[place].clone().reshape(-1)
        for first, edge in enumerate(edges):
            made[first::7] = edge
        result = [*values[:place], made.view(values[place].shape), *values[place + 1 :]]
        if is_finite_at(problem, model, result):
            return result
    return list(values)


def with_last_integers(
    problem: Problem, model: torch.nn.Module, values: Sequence[Any]
) -> list[Any]:
    """Return int64 tensors with the last rows of a table, some near its end, and 2^15 and 2^16."""
    import torch

    result = list(values)
    sizes = {len(p) for p in model.parameters() if p.ndim > 1}
    sizes |= {x.shape[-1] for x in values if isinstance(x, torch.Tensor) and x.ndim}
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or not value.numel():
            continue
        for size in sorted((n for n in sizes if n > int(value.max())), reverse=True):
            ends = [size - 1, size - 2, size - 1 - size // 20, size - 1 - size // 10]
            ends += [2**bits + more for bits in (15, 16) for more in (-1, 0, 1, 7)]
            flat = value.clone().reshape(-1)
            legal = [at for at in ends if 0 <= at < size]
            for k, at in enumerate(legal):
                flat[k :: 2 * len(legal)] = at
            result[i] = flat.view(value.shape)
            if is_taken(problem, model, result):
                break
            result[i] = value
    return result


def with_wide_integers(
    problem: Problem, model: torch.nn.Module, values: Sequence[Any]
) -> list[Any]:
    """Return integers of both signs, and of 8 and 16 bits all that the type has, or its ends.

    All of them where the reference takes that, or those of each tensor for which it does. Zeros
    are where there were some: a divisor may not be one.
    """
    import torch

    def wide(i: int, value: Any) -> Any:  # another way for each input
        is_number = isinstance(value, torch.Tensor) and value.numel() > 0
        if not is_number or value.dtype == torch.bool or value.is_floating_point():
            return value
        info = torch.iinfo(value.dtype)
        flat = value.clone().reshape(-1)
        if info.bits > 16:
            flat[i % 3 :: 3] *= -1
        else:
            span = info.max - info.min + 1
            step = 73 if info.bits == 8 else 8191  # prime to it: numbers far apart in turn
            places = torch.arange(len(flat), device=flat.device) + 101 * i
            flat = (places * step % span + info.min).to(value.dtype)
            flat[-1] = info.max
        if not (value == 0).any():
            flat[flat == 0] = 1
        return flat.view(value.shape)

    if _reads_anywhere(problem):
        return list(values)
    result = [wide(i, value) for i, value in enumerate(values)]
    if is_taken(problem, model, result):
        return result
    result = list(values)
    for i, value in enumerate(values):
        one = [*result[:i], wide(i, value), *result[i + 1 :]]
        result = one if one[i] is not value and is_taken(problem, model, one) else result
    return result


def _reads_anywhere(problem: Problem) -> bool:
    """Whether the reference reads memory at any label, as PyTorch's CTC loss on a CPU does.

    One beyond the alphabet ends the process.
    """
    return "ctc_loss" in problem.text or "CTCLoss" in problem.text


def is_taken(problem: Problem, model: torch.nn.Module, values: Sequence[Any]) -> bool:
    """Whether the reference answers, and the same twice; on the CPU, where refusals cost nothing.

    An index that a GPU refuses ends the use of that GPU.
    """
    import torch

    on_cpu = [x.cpu() if isinstance(x, torch.Tensor) else x for x in values]
    try:
        with torch.no_grad():
            first, again = (problem.call(copied(model).cpu().eval(), on_cpu) for _ in range(2))
    except ProblemError:
        return False
    pairs = zip(first, again, strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def is_finite_at(problem: Problem, model: torch.nn.Module, values: Sequence[Any]) -> bool:
    """Whether the reference answers with finite numbers, on its own device.

    Raises:
        ProblemError: memory ran out.
    """
    import torch

    try:
        with torch.no_grad():
            made = problem.call(copied(model).eval(), values)
    except ProblemError as error:
        if says_no_memory(str(error)):
            raise
        return False
    return all(bool(torch.isfinite(y).all()) for y in made)


def with_odd_integers(
    problem: Problem, model: torch.nn.Module, values: Sequence[Any], kind: Distribution
) -> list[Any]:
    """Return int64 tensors that are large, if the reference takes that, or one odd number in them.

    "negative_integers" has one -1, "integers_beyond" one that is the first too large: the size of
    a table or of a last dimension, or one more than was given.
    """
    import torch

    result = list(values)
    if _reads_anywhere(problem):
        return result
    sizes = [getattr(part, "num_embeddings", 0) for part in model.modules()]
    sizes += [x.shape[-1] for x in values if isinstance(x, torch.Tensor) and x.ndim]
    for i, value in enumerate(values):
        is_integer = isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)
        if not is_integer or not value.numel():
            continue
        most = int(value.max())
        tries = sorted({most + 1, *(size for size in sizes if size > most)})
        for number in [-1] if kind == "negative_integers" else tries:
            result[i] = value.clone()
            if kind == "large_integers":
                result[i] += 2**30
            else:
                result[i].view(-1)[value.numel() // 3] = number
            is_legal = is_taken(problem, model, result)
            if not is_legal:
                break
        if kind == "large_integers" and not is_legal:
            result[i] = value
        elif not is_legal:
            break  # one is enough to be refused
    return result


def _wholes_in(problem: Problem) -> list[int]:
    """Return whole numbers, each once; those of shapes are among them."""
    found = [n for n in _numbers_in(problem) if type(n) is int and abs(n) < 2**31]
    return [int(n) for n in dict.fromkeys(found)][:MOST]


def _fractions_in(problem: Problem) -> list[float]:
    """Return numbers that an input may be equal to, 0 and those beyond `LARGEST` left out."""
    found = [float(n) for n in _numbers_in(problem) if 0 < abs(n) <= LARGEST]
    return list(dict.fromkeys(found))[:MOST]


def _numbers_in(problem: Problem) -> list[int | float]:
    tree = ast.parse(problem.text)
    parts = [node for node in tree.body if getattr(node, "name", "") not in GIVING]
    parts.sort(key=lambda node: not isinstance(node, ast.ClassDef))  # the module's own first
    found: list[int | float] = []
    for node in (n for each in parts for n in ast.walk(each)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in CONSTANTS:
            found += [CONSTANTS[ast.unparse(node)], -CONSTANTS[ast.unparse(node)]]
        try:  # with its sign
            value: Any = ast.literal_eval(node) if isinstance(node, ast.expr) else None
        except ValueError:
            continue
        if type(value) in (int, float):
            found.append(value)
    given = problem.init_inputs(0)
    return [*found, *(x for x in given if type(x) in (int, float))]
