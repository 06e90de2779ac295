"""What a reference's `get_inputs` gives: on the device itself, by seed, with other rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import ProblemError, says_no_memory
from tuner.problem.draws import seed_everything

if TYPE_CHECKING:
    import torch

__all__ = ["MOST_DRAWS", "Given", "first_with_rows"]

LARGE_BYTES = 2**26  # from here on a draw on the CPU takes longer than all else that is asked
MOST_DRAWS = 2**18  # of `get_inputs`, joined for more rows than one gives: more take minutes
MOST_WAYS = 16  # that are asked whether forward takes them
KEPT_BYTES = 2**31  # on a GPU, which draws more than that sooner than it finds memory for it


class Given:
    """The inputs of one reference.

    They are drawn where they are needed: on a CPU KernelBench's larger inputs take 10 s each time.
    Where `get_inputs` cannot do that, as with numbers of NumPy, they are drawn on the CPU.

    Args:
        path: of the file, for messages.
        ask: `get_inputs`.
        takes: whether forward takes inputs of such shapes, which are on the device "meta".
        rows: how many a problem's inputs have, where it is not as many as `ask` gives.
    """

    def __init__(
        self,
        path: Path,
        ask: Callable[[], list[Any]],
        takes: Callable[[list[Any]], bool],
        rows: int | None = None,
    ) -> None:
        self._path = path
        self._as_given = ask
        self._takes = takes
        self._ask = ask if rows is None else lambda: self._resized(ask(), rows, lambda _: ask())
        self._is_drawn_on_cpu = False
        self._forms: list[Any] | None = None
        self._with_rows: tuple[bool, ...] | None = None
        # The last draw is kept: the probes of one check share a few seeds.
        self._last: dict[tuple[int, torch.device], list[Any]] = {}

    def forms(self) -> list[Any]:
        """Return the inputs without their numbers, on the device "meta" where that can be.

        Raises:
            ProblemError: `get_inputs` fails.
        """
        if self._forms is None:
            self._forms = self._formed(self._ask)
        return self._forms

    def _formed(self, ask: Callable[[], list[Any]]) -> list[Any]:
        import torch

        seed_everything(0)
        try:
            with torch.device("meta"):
                return ask()
        except ProblemError:  # it looks at numbers
            seed_everything(0)
            return ask()

    def with_rows(self) -> tuple[bool, ...]:
        """Return of each input whether its dim 0 is the batch.

        Those are all that have as many rows as the first. Where another of the inputs' sizes is
        that number as well, by chance, and forward takes another batch of fewer of them only, as
        of A in A @ B, those are.

        Raises:
            ProblemError: `get_inputs` fails.
        """
        if self._with_rows is None:
            forms = self._formed(self._as_given)
            ways = _ways_of_batches(forms)
            found = (way for way in ways if len(ways) > 1 and self._takes(_one_more(forms, way)))
            self._with_rows = next(found, ways[0])
        return self._with_rows

    def strided(self) -> list[int]:
        """Return the places of tensors that are not contiguous, as images with channels last.

        Raises:
            ProblemError: `get_inputs` fails.
        """
        import torch

        given = self._formed(self._as_given)
        tensors = [(i, x) for i, x in enumerate(given) if isinstance(x, torch.Tensor)]
        return [i for i, x in tensors if x.layout == torch.strided and not x.is_contiguous()]

    def num_bytes(self) -> int:
        """Return the bytes of the inputs as they are given.

        Raises:
            ProblemError: `get_inputs` fails.
        """
        return sum(int(getattr(x, "nbytes", 0)) for x in self.forms())

    def drawn(self, seed: int, batch: int | None, device: str | torch.device) -> list[Any]:
        """Return a draw that the caller may edit, with `batch` rows (None: as given).

        Args:
            seed: of the draw; on one kind of device the same numbers each time.
            batch: of the inputs of `with_rows`; fewer are a slice, more are drawn afresh.
            device: where the tensors shall be.

        Raises:
            ProblemError: `get_inputs` fails, gives 0 rows where some are asked for, or would
                have to be called more than `MOST_DRAWS` times.
        """
        import torch

        where = torch.device(device)
        return self._resized(
            self._whole(seed, where), batch, lambda n: self._asked(seed + n, where)
        )

    def shapes(self, batch: int | None, device: str | torch.device) -> list[Any] | None:
        """Return inputs of no numbers in particular; None where not all are floating-point.

        Raises:
            ProblemError: as for `drawn`.
        """
        import torch

        forms = self.forms()
        if not all(isinstance(x, torch.Tensor) and x.is_floating_point() for x in forms):
            return None
        resized = self._resized(forms, batch, lambda _: forms)
        return [torch.empty(x.shape, dtype=x.dtype, device=device) for x in resized]

    def stand_ins(self, batch: int | None) -> list[Any]:
        """Return inputs on the CPU of which shapes matter: numbers of a draw only where few.

        Raises:
            ProblemError: as for `drawn`.
        """
        import torch

        tensors = [x for x in self.forms() if isinstance(x, torch.Tensor)]
        if sum(x.nbytes for x in tensors) < LARGE_BYTES:
            return self.drawn(0, batch, "cpu")

        def blank(value: Any) -> Any:  # memory that is not touched is none
            if not isinstance(value, torch.Tensor):
                return value
            made = torch.empty(value.shape, dtype=value.dtype)
            return made if value.is_floating_point() else made.zero_()

        resized = self._resized(self.forms(), batch, lambda _: self.forms())
        try:
            return [blank(value) for value in resized]
        except RuntimeError as error:
            if not says_no_memory(str(error)):
                raise
            raise ProblemError(
                f"{self._path}: get_inputs(): the inputs take {self.num_bytes() / 2**30:.1f} GiB, "
                "more than this machine has memory for\n"
                "  next: give smaller sizes, or tune it on a machine with more memory"
            ) from None

    def _whole(self, seed: int, where: torch.device) -> list[Any]:
        if where.type != "cpu" and self.num_bytes() > KEPT_BYTES:
            self._last.clear()
            return self._asked(seed, where)
        if (seed, where) not in self._last:
            self._last.clear()  # first: there may be no memory for both
            self._last[seed, where] = self._asked(seed, where)
        return self._last[seed, where]

    def _asked(self, seed: int, where: torch.device) -> list[Any]:
        import torch

        seed_everything(seed)
        if where.type == "cpu" or self._is_drawn_on_cpu:
            values = self._ask()
        else:
            try:
                with where:
                    values = self._ask()
            except ProblemError as error:
                if says_no_memory(str(error)):  # there may be some the next time
                    raise
                self._is_drawn_on_cpu = True
                return self._asked(seed, where)
        # Rows are edited in place; how inputs lie in memory is asked for by probes.
        return [x.to(where).contiguous() if isinstance(x, torch.Tensor) else x for x in values]

    def _resized(
        self, inputs: Sequence[Any], batch: int | None, more: Callable[[int], list[Any]]
    ) -> list[Any]:
        """Return copies with `batch` rows; `more` gives the n-th further draw that is needed."""
        import torch

        first = first_with_rows(inputs)
        if batch is None or first is None or first.shape[0] == batch:
            is_kept = any(inputs is kept for kept in (self._forms, *self._last.values()))
            if not is_kept:
                return list(inputs)
            return [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        rows = first.shape[0]
        if rows == 0:
            raise ProblemError(
                f"{self._path}: get_inputs() gives 0 rows; cannot make {batch} of them"
            )
        num_further = max(0, batch - 1) // rows
        if num_further >= MOST_DRAWS:
            raise ProblemError(
                f"{self._path}: get_inputs() gives {rows} rows; {batch} of them take "
                f"{num_further + 1} calls of it\n  expected: at most {MOST_DRAWS} calls\n"
                "  next: fewer rows, or inputs of more rows"
            )
        draws = [inputs, *map(more, range(1, 1 + num_further))]

        def resized(has_rows: bool, parts: Sequence[Any]) -> Any:
            if has_rows and parts[0].is_meta:  # 1 ms by PyTorch's own decompositions
                return parts[0].new_empty((batch, *parts[0].shape[1:]))
            if has_rows:
                return torch.cat([part[:batch] for part in parts])[:batch]
            return parts[0].clone() if isinstance(parts[0], torch.Tensor) else parts[0]

        parts_of_each = zip(*draws, strict=True)
        return [resized(*each) for each in zip(self.with_rows(), parts_of_each, strict=True)]


def first_with_rows(inputs: Sequence[Any]) -> Any:
    """Return the first tensor that has a dimension, or None."""
    import torch

    return next((x for x in inputs if isinstance(x, torch.Tensor) and x.ndim > 0), None)


def _ways_of_batches(inputs: Sequence[Any]) -> list[tuple[bool, ...]]:
    """Return which inputs may have the batch in dim 0, those with the most such inputs first.

    Several ways only where that number is another size of an input, too.
    """
    import torch

    first = first_with_rows(inputs)
    shapes = [x.shape if isinstance(x, torch.Tensor) else () for x in inputs]
    if first is None:
        return [(False,) * len(shapes)]
    rows = first.shape[0]
    all_of_them = tuple(shape[:1] == (rows,) for shape in shapes)
    if not any(rows in shape[1:] for shape in shapes):
        return [all_of_them]
    others = [i for i, has_rows in enumerate(all_of_them) if has_rows and inputs[i] is not first]
    left_out = itertools.chain.from_iterable(
        itertools.combinations(others, count) for count in range(len(others) + 1)
    )
    return [
        tuple(has_rows and i not in apart for i, has_rows in enumerate(all_of_them))
        for apart in itertools.islice(left_out, MOST_WAYS)
    ]


def _one_more(inputs: Sequence[Any], way: Sequence[bool]) -> list[Any]:
    """Return inputs on the device "meta", with one row more where `way` says so."""
    import torch

    def formed(x: Any, is_more: bool) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        shape = (x.shape[0] + 1, *x.shape[1:]) if is_more else x.shape
        return torch.empty(shape, dtype=x.dtype, device="meta")

    return [formed(x, is_more) for x, is_more in zip(inputs, way, strict=True)]
