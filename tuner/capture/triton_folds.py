"""How Triton kernels reduce: where each fold starts, how two results of it are joined."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["JOINED", "START", "fold_functions", "put_together"]

START = {"sum": "0.0", "amax": 'float("-inf")', "amin": 'float("inf")',
          "argmax": 'float("-inf")', "argmin": 'float("inf")'}  # fmt: skip
JOINED = {"sum": "add", "amax": "maximum", "amin": "minimum"}
_EXTREME = """

@triton.jit
def {function}_{fold}(one, other):
    return tl.{name}(one, other, propagate_nan=tl.PropagateNan.ALL)
"""
# NaN is beyond every number; of equals the first one counts.
_PLACE = """

@triton.jit
def {function}_{fold}(one, one_at, other, other_at):
    is_beyond = (other {order} one) | ((other != other) & (one == one))
    is_equal = (other == one) | ((other != other) & (one != one))
    taken = is_beyond | (is_equal & (other_at < one_at))
    return tl.where(taken, other, one), tl.where(taken, other_at, one_at)
"""
_FOLD = """

@triton.jit
def {function}_put_together_{fold}(partial, totals, num_rows, pieces, NUMBER: tl.constexpr):
    program = tl.program_id(0)
    at = (NUMBER * num_rows + program).to(tl.int64)
    found = tl.full([1024], {start}, tl.float64)
    for piece in range(0, pieces, 1024):
        ids = piece + tl.arange(0, 1024)
        more = tl.load(partial + at * pieces + ids, mask=ids < pieces, other={start})
        found = {joined}
    tl.store(totals + at, {folded})
"""


def fold_functions(function: str, folds: Collection[str]) -> str:
    """Return the functions, named after that one, which join two results of each fold."""
    head = ""
    for fold in sorted({*folds} - {"sum"}):
        if fold in JOINED:
            head += _EXTREME.format(function=function, fold=fold, name=JOINED[fold])
        else:
            order = ">" if fold == "argmax" else "<"
            head += _PLACE.format(function=function, fold=fold, order=order)
    return head


def put_together(function: str, fold: str) -> str:
    """Return the kernel that puts together what several programs found of a row."""
    extreme = f"{function}_{fold}"
    is_sum = fold == "sum"
    return _FOLD.format(
        function=function,
        fold=fold,
        start=START[fold],
        joined="found + more" if is_sum else f"{extreme}(found, more.to(tl.float64))",
        folded="tl.sum(found)" if is_sum else f"tl.reduce(found, 0, {extreme})",
    ).rstrip("\n")
