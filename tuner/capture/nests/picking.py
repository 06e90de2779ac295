"""What says which elements are picked: inputs, and what they may hold; a place of each row."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from tuner.capture.graph.graph import Graph, Node, Ref
from tuner.capture.nests.index_space import viewed
from tuner.capture.nests.nest import COLUMN, Nest, Pass, Reduction, still_needed
from tuner.capture.nests.viewing import real_name

__all__ = ["Places", "picked_place", "picking_inputs", "with_picks_apart"]

# What holds where a comparison does not.
_NEGATED = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}


class Places(NamedTuple):
    """The numbers that an input may hold: from `least` on, below `end`, and `ignored`.

    None where there is no such bound, and no such number.
    """

    least: int | None
    end: int | None
    ignored: int | None = None

    def allows(self, number: object) -> bool:
        """Whether it is a number that may be held."""
        if not isinstance(number, int | float):
            return False
        is_above = self.least is None or number >= self.least
        return number == self.ignored or (is_above and (self.end is None or number < self.end))

    def where(self, relation: str, number: int) -> Places:
        """Return what may be held where only numbers of that relation to one get this far."""
        if relation == "ne":
            return self._replace(ignored=number)
        first = number + (relation == "gt")  # the least that does
        if relation in ("ge", "gt") and self.least is not None and first >= self.least:
            return self._replace(least=None)
        end = number + (relation == "le")
        if relation in ("le", "lt") and self.end is not None and end <= self.end:
            return self._replace(end=None)
        return self

    def both(self, other: Places) -> Places:
        """Return what both allow."""
        least = max((n for n in (self.least, other.least) if n is not None), default=None)
        end = min((n for n in (self.end, other.end) if n is not None), default=None)
        ignored = (n for n in (self.ignored, other.ignored) if n is not None)
        beside = (n for n in ignored if self.allows(n) and other.allows(n))
        return Places(least, end, next(beside, None))


def picking_inputs(graph: Graph) -> dict[str, Places]:
    """Return inputs that pick places of something, with the numbers that they may hold.

    With others outside a loop would find nothing where PyTorch refuses the place. A number that
    picks none is a loss's `ignore_index`. What is computed of an input in another way than by a
    choice or by a bound is not followed.
    """
    found: list[dict[str, Places]] = []
    for node in graph.nodes:
        if node.op == "gather":
            size = graph.value(node.refs[0]).shape[int(str(node.attrs["axis"]))]
            found.append(_origins(graph, node.refs[1], Places(0, size)))
    bound = _merged(found).items()
    return {n: places for n, places in bound if places.least is not None or places.end is not None}


def _origins(graph: Graph, name: str, allowed: Places) -> dict[str, Places]:
    """Return the inputs that are the places `name` as they are, with what they may hold.

    `allowed` is what these places may be.
    """
    value = viewed(graph, name)
    if not isinstance(value, Node):
        return {value.name: allowed} if value in graph.inputs else {}
    if value.op in ("maximum", "minimum", "clamp"):
        bounds = [arg for arg in value.args if not isinstance(arg, Ref)]
        # What is beyond a bound is that number; up to it each stays what it is.
        is_inside = allowed._replace(ignored=None).allows
        if value.op != "minimum" and any(map(is_inside, bounds[:1])):
            allowed = allowed._replace(least=None)
        if value.op != "maximum" and any(map(is_inside, bounds[-1:])):
            allowed = allowed._replace(end=None)
        return _merged([_origins(graph, ref, allowed) for ref in value.refs])
    if value.op != "where":
        return {}
    branches = [arg.name if isinstance(arg, Ref) else arg for arg in value.args[1:]]
    found: list[dict[str, Places]] = []
    for place, branch in enumerate(branches):
        if isinstance(branch, str):
            passed, other = allowed, _number(graph, branches[1 - place])
            asked = _asked(graph, value.refs[0], is_so=place == 0)
            if asked is not None and allowed.allows(other) and _is_same(graph, branch, asked[0]):
                passed = allowed.where(*asked[1:])
            found.append(_origins(graph, branch, passed))
    return _merged(found)


def _is_same(graph: Graph, first: str, second: str) -> bool:
    """Whether two values are one, or made alike of one, as the same slice that is taken twice."""
    one, other = (graph.value(real_name(graph, name)) for name in (first, second))
    if not isinstance(one, Node) or not isinstance(other, Node) or one.name == other.name:
        return one.name == other.name
    alike = one.op == other.op == "slice" and one.attrs == other.attrs
    return alike and _is_same(graph, one.refs[0], other.refs[0])


def _merged(found: list[dict[str, Places]]) -> dict[str, Places]:
    made: dict[str, Places] = {}
    for each in found:
        made |= {n: made[n].both(p) if n in made else p for n, p in each.items()}
    return made


def _asked(graph: Graph, condition: str, *, is_so: bool) -> tuple[str, str, int] | None:
    """Return what a comparison asks, and its relation to which number where it is so, or not."""
    node = graph.value(real_name(graph, condition))
    while isinstance(node, Node) and node.op == "logical_not":
        node, is_so = graph.value(real_name(graph, node.refs[0])), not is_so
    if not isinstance(node, Node) or node.op not in _NEGATED or len(node.refs) != 1:
        return None
    first, number = node.args
    if type(number) is not int or not isinstance(first, Ref):
        return None
    return first.name, node.op if is_so else _NEGATED[node.op], number


def _number(graph: Graph, branch: object) -> float | None:
    """Return the number that a branch is everywhere, if it is one."""
    if isinstance(branch, str):
        value = graph.value(real_name(graph, branch))
        branch = value.args[0] if isinstance(value, Node) and value.op == "full" else None
    return branch if isinstance(branch, int | float) else None


def picked_place(nest: Nest, number: int, kept: Collection[str]) -> str | None:
    """Return the value that says of which column alone a pass takes anything of a row, if any.

    Over all columns such a pass of a cross entropy took as long, for the label, as that of the
    exponentials (2026-12-03). `kept` are values that passes keep for later ones, of all columns.
    """
    each = nest.passes[number]
    names = {s.name for s in each.statements}
    earlier = {s.name for p in nest.passes[:number] for s in p.statements}
    if each.writes or nest.scans or not earlier.issuperset(names.intersection(kept)):
        return None
    places = {_place_of(nest, each, reduction) for reduction in each.reductions}
    return places.pop() if len(places) == 1 else None


def with_picks_apart(nest: Nest) -> Nest:
    """Return a nest whose passes take of one place of a row in passes of their own."""
    if nest.scans:
        return nest
    passes: list[Pass] = []
    for each in nest.passes:
        places = {r.name: _place_of(nest, each, r) for r in each.reductions}
        groups: dict[str | None, list[Reduction]] = {None: []} if each.writes else {}
        for reduction in each.reductions:
            groups.setdefault(places[reduction.name], []).append(reduction)
        if len(groups) < 2:
            passes.append(each)
            continue
        for place, reductions in groups.items():
            own = replace(each, reductions=reductions, after=[])
            own.writes = each.writes if place is None else []
            own.statements = still_needed(own, [])
            passes.append(own)
        passes[-1].after = each.after
    return replace(nest, passes=tuple(passes))


def _place_of(nest: Nest, each: Pass, reduction: Reduction) -> str | None:
    """Return the value that says which column alone a reduction takes, if it takes one."""
    statements = {s.name: s for s in each.statements}
    picked = statements.get(reduction.value)
    asked = None if picked is None else statements.get(str(picked.operands[0]))
    if reduction.fold != "sum" or picked is None or asked is None:
        return None
    if picked.op != "where" or picked.operands[2] != 0.0 or asked.op != "eq":
        return None
    column, place = asked.operands
    is_of_row = isinstance(place, str) and not nest.is_inner(place)
    return str(place) if column == COLUMN and is_of_row else None
