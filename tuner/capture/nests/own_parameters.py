"""Nests that have parameters of their own in a template: which, and how their texts name them.

The largest nest's parameters have plain names, and the next one's, where it is not small beside
it, end in `_2`. All other nests share the plain ones: each set of its own multiplies the space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tuner.capture.nests.nest import Nest
from tuner.trial import Params

__all__ = [
    "NAMES",
    "SECOND",
    "canonical",
    "declared",
    "groups_of",
    "largest_first",
    "named",
    "renamed",
    "suffixes_of",
]

# What a nest may have for itself; the others are of headers and steps that all nests share.
NAMES = (
    *("unroll", "keep", "num_warps", "stages", "split"),
    *("tile_rows", "tile_columns", "block_rows", "block_columns"),
)
SECOND = "_2"
# Times fewer elements than the largest nest: not worth parameters of its own. No power of 2, which
# a module may have at its own batch but not at the next prime.
SMALL = 7.5
_NAME = re.compile(rf"\b({'|'.join(NAMES)})\b")
_TAG = re.compile(r"\{\{.*?\}\}|\{%.*?%\}")


def suffixes_of(nests: Sequence[Nest]) -> Mapping[str, str]:
    """Return, by nest, what the names of its parameters end in; nothing where they are plain."""
    first, *others = [*largest_first(nests), None, None]
    second = others[0]
    if first is None or second is None or SMALL * second.num_elements <= first.num_elements:
        second = None
    return {nest.name: SECOND if nest is second else "" for nest in nests}


def largest_first(nests: Sequence[Nest]) -> list[Nest]:
    """Return nests by the elements of their spaces."""
    return sorted(nests, key=lambda nest: nest.num_elements, reverse=True)


def groups_of(nests: Sequence[Nest]) -> dict[str, list[Nest]]:
    """Return the nests that share their parameters, by suffix, the largest of each first."""
    suffixes = suffixes_of(nests)
    found: dict[str, list[Nest]] = {}
    for nest in largest_first(nests):
        found.setdefault(suffixes[nest.name], []).append(nest)
    return found


def named(expression: str, suffix: str) -> str:
    """Return an expression with a nest's own parameters in place of the plain ones."""
    return _NAME.sub(rf"\1{suffix}", expression)


def renamed(text: str, suffix: str) -> str:
    """Return a nest's text, which is Jinja2 still, with its own parameters."""
    if not suffix:
        return text
    text = re.sub(r"\bkUnroll\b", f"kUnroll{suffix}", text)
    return _TAG.sub(lambda tag: named(tag[0], suffix), text)


def declared(lines: str, nest: Nest, suffix: str) -> str:
    """Return the lines of a head that declare parameters, as those of a nest's own."""
    if not suffix:
        return lines
    own = rf"  \1{suffix}: \2task {nest.name}: "
    return re.sub(r"^  (\w+): (.*?about: \")", own, lines, flags=re.M)


def canonical(params: Params, suffix: str) -> Params:
    """Return the parameters of nests with a suffix, under their plain names."""
    if suffix:
        own = {n.removesuffix(suffix): v for n, v in params.items() if n.endswith(suffix)}
        return {name: value for name, value in own.items() if name in NAMES}
    return {name: value for name, value in params.items() if not name.endswith(SECOND)}
