"""Parameters of Triton kernels: which blocks are worth trying, what to begin with, what must hold.

Where images lie channels last, or a permutation turns what is read, blocks of pixels and channels
have parameters of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.capture.nests.indexing import is_split, is_split_by_blocks, lies_apart
from tuner.capture.nests.nest import Nest
from tuner.capture.writers.triton_blocks import is_split_across, power_of_2

__all__ = ["block_parameters", "is_tiled", "takes_blocks_of"]

_BLOCK = (
    '  {kind}_rows: {{about: "rows of one program{where}", default: {rows}, values: {all_rows}}}\n'
    '  {kind}_columns: {{about: "columns at a time{where}; a row that is no longer is read once", '
    "default: {columns}, values: {all_columns}}}\n"
)
_FITS = (
    '  - {{expr: "{kind}_rows * {kind}_columns <= num_warps * 32 * {per_lane}", why: "what a '
    'program holds fits in its registers"}}\n'
    '  - {{expr: "{kind}_rows * {kind}_columns >= num_warps * 32", why: "every lane has an '
    'element"}}\n'
)
# A lane adds up every COLUMNS-th number in float32, and lanes are put together in a tree, so that
# the error grows with the root of the numbers over the lanes: one mean in a million of 4,096
# numbers in 4 lanes was 1.3 times as far off as the class allows.
_EXACT = (
    '  - {{expr: "{cols} <= 64 * block_columns * block_columns", '
    'why: "sums of so many numbers in so few lanes are less exact than PyTorch\'s"}}\n'
)
MOST_SUMMED = 64 * 128 * 128  # what the most lanes there are may add up; they do with more, too
# Of images that lie channels last.
MOST_CHANNELS = 1024
TILES: Mapping[str, list[int]] = {
    "tile_rows": [8, 16, 32, 64, 128, 256],
    "tile_columns": [8, 16, 32, 64, 128, 256],
}


def blocks_of(nest: Nest) -> dict[str, list[int]]:
    """Return the sizes of blocks that are worth trying: long where memory is contiguous."""
    if not nest.space.is_across:
        return {
            "block_rows": [1] if is_split(nest) else [1, 2, 4, 8, 16],
            "block_columns": [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768],
        }
    return {
        "block_rows": [16, 32, 64, 128, 256, 512, 1024],
        "block_columns": [1, 2, 4, 8, 16, 32, 64, 128],
    }


def is_tiled(nest: Nest) -> bool:
    """Whether blocks have several rows and several columns: of pixels and of channels."""
    is_short = nest.space.cols <= MOST_CHANNELS
    is_of_images = nest.is_transposed or nest.space.is_across or is_short
    return (bool(nest.space.last) and is_of_images) or lies_apart(nest)


def takes_blocks_of(nest: Nest, others: Sequence[Nest]) -> bool:
    """Whether a nest's blocks are of a kind with those of others, which share their parameters.

    Blocks that read what lies together where columns are summed would take a row of many columns
    in a thousand steps, of 128 rows at a time.
    """
    first = next((other for other in others if is_tiled(other) is is_tiled(nest)), None)
    return first is not None and (is_tiled(nest) or _kind(first) == _kind(nest))


def _kind(nest: Nest) -> tuple[bool, ...]:
    return nest.space.is_across, is_split(nest), is_split_by_blocks(nest)


def first_blocks(nest: Nest) -> tuple[int, int, int]:
    """Return rows, columns and warps to begin with: a row in one block, some 16 values a lane.

    Where columns lie apart in memory, and where a row is too long for a block, warps are few and
    read what lies together.
    """
    whole = power_of_2(nest.space.cols)
    if is_split_by_blocks(nest):
        return 128, 16, 4
    if nest.space.is_across:
        columns = min(128, whole)
        return min(256, max(16, 2048 // columns)), columns, 4
    if not nest.reductions or is_split(nest) or whole > 16384:
        return 1, 1024, 4
    columns = max(128, whole)
    rows = max(1, 1024 // columns)
    return rows, columns, max(1, rows * columns // 512)


def _sums_in_lanes(nest: Nest) -> bool:
    """Whether a program's lanes add up whole rows that lie apart in memory, in float32."""
    is_apart = nest.space.is_across and not is_split_across(nest)
    return is_apart and any(r.fold == "sum" and not r.is_wide for r in nest.reductions)


def block_parameters(nests: Sequence[Nest]) -> tuple[str, str, int]:
    """Return what must hold of blocks, their parameters, and how many warps to begin with.

    Args:
        nests: that share the parameters, the largest first.
    """
    fits = blocks = ""
    most = 1
    for kind in ("block", "tile"):
        own = [nest for nest in nests if is_tiled(nest) is (kind == "tile")]
        if not own:
            continue
        first = own[0]
        num_whole = sum(first.is_dense(t.name) for t in first.arguments) + 2
        num_taps = max(len(nest.taps) for nest in own) if kind == "tile" else 0
        num_whole += num_taps
        fits += _FITS.format(kind=kind, per_lane=max(16, 256 // num_whole))
        summed = [n.space.cols for n in own if kind == "block" and _sums_in_lanes(n)]
        fits += _EXACT.format(cols=min(max(summed), MOST_SUMMED)) if summed else ""
        rows, columns, warps = first_blocks(first)
        if kind == "tile":  # for the nest of the most channels; of windows each place is read
            columns = min(64, max(8, *(power_of_2(n.space.cols) for n in own)))
            rows, warps = (2048 if num_taps <= 4 else 512) // columns, 4
        values = TILES if kind == "tile" else blocks_of(first)
        blocks += _BLOCK.format(
            kind=kind,
            where=" of images" if kind == "tile" else "",
            rows=rows,
            columns=columns,
            all_rows=values[f"{kind}_rows"],
            all_columns=values[f"{kind}_columns"],
        )
        most = max(most, warps)
    return fits, blocks, most
