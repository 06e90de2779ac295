"""The steps of an operator's calls in Triton, and the functions that these call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from tuner.capture.nests.indexing import is_split, is_split_by_blocks
from tuner.capture.nests.nest import Nest
from tuner.capture.nests.precision import in_float64
from tuner.capture.tasks.half_products import SHORTEST, Halves
from tuner.capture.tasks.library import Call
from tuner.capture.tasks.makers import Products
from tuner.capture.writers.product_epilogues import cuda_text, epilogue_of, python_text
from tuner.capture.writers.product_moments import (
    SMALLEST_PIECE,
    moments_behind,
    moments_cuda_text,
    moments_python_text,
)
from tuner.capture.writers.templates import (
    Part,
    arguments_of,
    between_of,
    call_step,
    function_of,
    place_of,
)
from tuner.capture.writers.triton_blocks import (
    Blocks,
    chosen,
    is_split_across,
    searched,
    with_sums_of,
)
from tuner.capture.writers.triton_loops import Writer
from tuner.capture.writers.triton_parameters import is_tiled, takes_blocks_of
from tuner.capture.writers.triton_scans import ScanWriter
from tuner.capture.writers.triton_split import AcrossWriter, SplitWriter
from tuner.capture.writers.triton_sums import Summed, SumsWriter, with_sums

__all__ = ["APART", "Behind", "Functions", "Groups", "by_halves_in", "suffix_of"]

Groups = Mapping[str, Sequence[Nest]]  # which share parameters, by what the names of these end in

_FUSED, APART = (f", when: \"product_epilogue == '{how}'\"" for how in ("fused", "apart"))


class Behind(NamedTuple):
    """What a product's kernel does of the nest behind it.

    Attributes:
        text: its CUDA C++.
        is_whole: whether that is all of the nest.
    """

    text: str
    is_whole: bool


class Functions:
    """The functions of an operator's calls, which are written one call after the other.

    Args:
        op: the operator's name.
        products: how large products of float32 are made; by PyTorch where that is None.
        groups: the forward's nests that share their parameters.
        num_before: how many functions others have written before these.

    Attributes:
        texts: of the functions; those of others are empty.
        epilogues: what products' kernels do of the nests behind them, by call and nest.
    """

    def __init__(
        self, op: str, products: Products | None, groups: Groups, *, num_before: int = 0
    ) -> None:
        self.op, self.products, self.groups = op, products, groups
        self.texts = [""] * num_before
        self.epilogues: dict[tuple[str, str], Behind] = {}

    def of(self, part: Part) -> tuple[list[str], list[str]]:
        """Write those of a call; return its steps, and its workspace."""
        return _CallWriter(self, part).written()


class _CallWriter:
    """Writes the steps of one call, and its functions."""

    def __init__(self, functions: Functions, part: Part) -> None:
        self._functions, self._part = functions, part
        self._stages, self._names = part.stages, part.names
        products = functions.products
        self._halves = Halves(products, part.graph, part.stages.calls) if products else None
        self._by_halves = by_halves_in(part, self._halves) if self._halves else set[str]()
        self._results = {*part.stages.outputs, *part.stages.updates.values()}
        self._steps: list[str] = []
        self._workspace = between_of(part.stages, part.names)
        # The product whose epilogue the next nest may be, or that may find its first moments.
        self._product: Call | None = None
        self._has_moments = False

    def written(self) -> tuple[list[str], list[str]]:
        """Return the steps, and the workspace."""
        part, halves = self._part, self._halves
        left_out = _left_out(part, halves, self._by_halves) if halves else set()
        for task in self._stages.tasks if part.is_forward else with_sums(self._stages):
            if not isinstance(task, Call):
                self._add_nest(task)
            elif halves and task.name in self._by_halves:
                self._add_product(task, halves)
            elif task.name not in left_out:
                self._steps.append(call_step(self._stages, task, self._names))
        return self._steps, self._workspace

    def _placed(self, name: str) -> str:
        return place_of(self._stages, self._names, name)

    def _add_product(self, call: Call, halves: Halves) -> None:
        """Add a product by a kernel of ours, which may do the next nest's work."""
        part, groups = self._part, self._functions.groups
        step, room = halves.step(call, self._placed)
        takes_it = halves.products.takes_epilogues and part.has_epilogues
        is_first = takes_it and epilogue_of(self._stages, call, self._results) is not None
        nest = None if is_first or not takes_it else _with_moments(part, halves, call, groups)
        self._has_moments = nest is not None
        self._product = call if is_first or self._has_moments else None
        self._steps.append(step[:-1] + APART + "}" if self._product else step)
        self._workspace += [room] * (call.name not in self._results)

    def _add_nest(self, task: Nest | Summed) -> None:
        """Add a nest's function and its call, also behind a product that does its work."""
        texts, product = self._functions.texts, self._product
        number = len(texts)
        function = function_of(self._functions.op, number)
        own = None
        if isinstance(task, Nest):
            suffix = suffix_of(self._part, task, self._functions.groups)
            if suffix is not None:
                own = searched(suffix, "tile" if is_tiled(task) else "block")
        is_given = product is not None and self._has_moments
        writer = _writer(task, function, self._names, own, SMALLEST_PIECE if is_given else 0)
        arguments = self._arguments(writer, number)
        text = writer.text()
        texts.append(in_float64(text) if writer.nest.is_wide else text)
        condition = ""
        if product is not None:
            self._add_behind(product, writer.nest, function, arguments)
            self._product, condition = None, APART
        self._steps.append(f"  - {{call: {function}, args: [{', '.join(arguments)}]{condition}}}")

    def _arguments(self, writer: Writer, number: int) -> list[str]:
        """Return what a nest's function is given, and add its own workspace."""
        nest, split = writer.nest, writer.split
        arguments = arguments_of(self._stages, nest, self._names)
        more = arguments_of(self._stages, split, self._names)
        arguments += [a for a in more if a not in arguments]
        if writer.pieces:
            count = len(split.reductions) * split.space.rows
            # Of terms that cancel, what a program found must not be rounded as it is stored.
            for what, form, dtype in (
                ("partial", f"{count} * {writer.pieces}", "float64"),
                ("totals", f"{count}", nest.precision),
            ):
                self._workspace.append(f'  {what}_{number}: {{shape: ["{form}"], dtype: {dtype}}}')
                arguments.append(f"{what}_{number}")
        arguments += [str(nest.space.rows), str(nest.space.cols)]
        return arguments + ([f'"{writer.pieces}"'] if writer.is_given_pieces else [])

    def _add_behind(
        self, product: Call, nest: Nest, function: str, arguments: Sequence[str]
    ) -> None:
        """Add the call of a product's kernel that does the nest behind it, or finds its moments.

        `function` is the nest's own, and `arguments` what that is given.
        """
        fused, halves, placed = f"{function}_behind_product", self._halves, self._placed
        assert halves is not None
        host = halves.products.behind or halves.products.function
        if self._has_moments:
            text, more = moments_python_text(nest, product, fused, function, host, arguments)
            made = Behind(moments_cuda_text(nest, product, fused), is_whole=False)
            place, behind = placed(product.name), [*arguments, *map(placed, more)]
        else:
            text, more = python_text(nest, product, fused, function, host)
            made = Behind(cuda_text(nest, product, fused), is_whole=True)
            place, behind = placed(nest.outputs[0].name), [*arguments[-2:], *map(placed, more)]
        self._functions.texts[-1] += text
        self._functions.epilogues[self._part.name, nest.name] = made
        given = halves.arguments(product, placed, place, behind)
        self._steps.append(f"  - {{call: {fused}, args: [{', '.join(given)}]{_FUSED}}}")


def _writer(
    task: Nest | Summed,
    function: str,
    names: Mapping[str, str],
    own: Blocks | None,
    smallest_given: int,
) -> Writer:
    """Return what writes a nest's kernels; `own` are blocks that a search decides.

    The first moments of some may be given instead, of pieces of `smallest_given` columns at least.
    """
    if isinstance(task, Summed):
        return SumsWriter(task, function, names, with_sums_of(task.nest))
    blocks = own or chosen(task)
    if is_split_across(task) and own is None:
        return AcrossWriter(task, function, names, blocks)
    if is_split(task) or is_split_by_blocks(task):
        return SplitWriter(task, function, names, blocks, smallest_given)
    return (ScanWriter if task.scans else Writer)(task, function, names, blocks)


def _with_moments(part: Part, halves: Halves, product: Call, groups: Groups) -> Nest | None:
    """Return the nest that takes moments of a product's columns from the product's kernel."""
    nest = None if halves.products.convolves else moments_behind(part.stages, product)
    is_across = nest is not None and is_split_across(nest)  # whose kernels take none
    if nest is None or (is_across and suffix_of(part, nest, groups) is None):
        return None
    return nest


def by_halves_in(part: Part, halves: Halves) -> set[str]:
    """Return the products of a call that are made by halves.

    A sum of a gradient may be as long as the batch, which is not known: the function that makes
    the product decides about those.
    """
    return halves.made(shortest=SHORTEST if part.is_forward else 1)


def _left_out(part: Part, halves: Halves, by_halves: Collection[str]) -> set[str]:
    """Return the transpositions that products by halves alone read, which turn them back."""
    stages = part.stages
    read = {t.name for nest in stages.nests for t in nest.arguments}
    for call in stages.calls:
        back = halves.read_turned(call) if call.name in by_halves else set()
        read |= {*call.reads} - back
    return {*halves.turned} - read - {*stages.outputs, *stages.updates.values()}


def suffix_of(part: Part, nest: Nest, groups: Groups) -> str | None:
    """Return what the names of a nest's parameters end in; None where no search decides them.

    A search times the forward. Nests whose blocks are of one kind may share them: what is kept
    has those of the forward's nest of its name, if it can.
    """
    if not part.is_forward:
        return None
    alike = [suffix for suffix, nests in groups.items() if takes_blocks_of(nest, nests)]
    own = [s for s in alike if any(other.name == nest.name for other in groups[s])]
    return next(iter([*own, *alike]), None)
