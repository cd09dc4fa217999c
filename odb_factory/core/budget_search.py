"""Search for the largest token budget whose worst step fits into memory; pure, it does not know how one is measured.

Doubling, then bisection. What decides is only what `measure` returns, so ranks that reduce it search in lock step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from odb_factory.core.group_shapes import GroupShape

RESOLUTION = 64
"""Bisection ends when the gap is below this part of the budget found."""

_APART = 0.75
"""What is extrapolated from two lengths needs one of at most this share of the other, so that noise stays noise."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One step that was measured, or foreseen."""

    budget: int
    kind: str
    padded_tokens: int
    over: float
    """Bytes above (below, if negative) what the rank with the least to spare may use; infinite: it ran out."""
    foreseen: bool = False
    """It was not run: `over` is extrapolated."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    budget: int
    """Largest budget found to fit; 0: none is as large as `lowest`."""
    probes: tuple[Probe, ...]
    """In the order of the search."""
    over: float = 0.0
    """If none was found: about how many bytes `lowest` needs too many; infinite: a step ran out of memory."""


class Growth:
    """Extrapolates what a step of a family needs: a fixed part, one for each token, and one for each pair in a row.

    Without the fixed part, the need of a token is a straight line over the length of the rows.
    """

    def __init__(self) -> None:
        self._points: dict[tuple[int, int], float] = {}

    def add(self, tokens: int, width: int, need: float) -> None:
        """A step of so many padded tokens, in rows of that length, was measured."""
        if isfinite(need):
            self._points[tokens, width] = need

    @property
    def is_known(self) -> bool:
        """There are enough points to tell the parts from each other."""
        return len(self._points) > 2

    def predict(self, tokens: int, width: int) -> float:
        """What a larger step will need; rather too much than too little, and with one point as much as with that."""
        below = sorted((n, row, need) for (n, row), need in self._points.items() if n <= tokens)
        if len(below) < 2:
            return below[0][2] if below else -inf
        fixed = _fixed(below)
        # by row length, from the largest step with that, whose need is the least fixed
        rates = {row: max(0.0, need - fixed) / n for n, row, need in below}
        return fixed + tokens * _rate(rates, width, self.is_known)


def _fixed(points: list[tuple[int, int, float]]) -> float:
    """The fixed part of what steps need, out of (tokens, row length, need) in ascending order."""
    by_width: dict[int, list[tuple[int, float]]] = {}
    for n, row, need in points:
        by_width.setdefault(row, []).append((n, need))
    same = next((found for _, found in sorted(by_width.items()) if len(found) > 1), None)
    if same is not None:  # the same need of a token in both
        (n0, v0), (n1, v1) = same[0], same[-1]
        return v0 - max(0.0, v1 - v0) / (n1 - n0) * n0
    apart = sorted({n: need for n, _, need in reversed(points)}.items())
    if len(apart) < 2:
        return apart[0][1]
    (n0, v0), (n1, v1) = apart[:2]
    slope, curve = max(0.0, v1 - v0) / (n1 - n0), 0.0
    if len(apart) > 2:
        n2, v2 = apart[2]
        curve = max(0.0, (v2 - v1) / (n2 - n1) - slope) / (n2 - n0)
    return v0 - slope * n0 + curve * n0 * n1


def _rate(rates: dict[int, float], width: int, is_known: bool) -> float:
    """The need of a token in rows of this length: between known lengths, and on from the longest one."""
    longer = min((row for row in rates if row >= width), default=None)
    if longer is not None:
        shorter = max((row for row in rates if row < width), default=None)
        if shorter is None:
            return rates[longer]
        part = (width - shorter) / (longer - shorter)
        return rates[shorter] + max(0.0, rates[longer] - rates[shorter]) * part
    last = max(rates)
    before = max((row for row in rates if row <= last * _APART), default=None)
    if before is None or not is_known:  # all of it may be for pairs
        return rates[last] * width / last
    return rates[last] + max(0.0, rates[last] - rates[before]) / (last - before) * (width - last)


class _Search:
    def __init__(
        self,
        measure: Callable[[GroupShape], float],
        shapes: Callable[[int], Sequence[GroupShape]],
        slack: float,
    ) -> None:
        self._measure = measure
        self._shapes = shapes
        self._slack = slack
        self._growth: dict[str, Growth] = {}
        self._known: dict[tuple[bool, tuple[int, ...]], float] = {}
        self._worst = ""
        self.probes: list[Probe] = []

    def fits(self, budget: int, lightly: bool = False) -> bool:
        """Measure every shape at this budget, the one that needed most last time first, until one does not fit.

        `lightly` leaves those out that are foreseen to have as much to spare again as they must.
        """
        shapes = sorted(self._shapes(budget), key=lambda shape: shape.kind != self._worst)
        results = []
        for shape in shapes:
            probe = self._probe(budget, shape, lightly)
            self.probes.append(probe)
            results.append((probe.over, shape.kind))
            if probe.over > 0:
                break
        over, self._worst = max(results)
        return over <= 0

    def over_at(self, budget: int) -> float:
        """By how many bytes the worst step of this budget is too much, as far as is known."""
        if any(probe.over == inf for probe in self.probes):
            return inf
        known = [probe.over for probe in self.probes if probe.budget == budget]
        return max(known + [self._expected(shape) for shape in self._shapes(budget)])

    def _expected(self, shape: GroupShape) -> float:
        return self._growth.setdefault(shape.family, Growth()).predict(shape.padded_tokens, shape.width)

    def _probe(self, budget: int, shape: GroupShape, lightly: bool) -> Probe:
        tokens, key = shape.padded_tokens, (shape.media, shape.lengths)
        if key in self._known:
            return Probe(budget, shape.kind, tokens, self._known[key])
        expected = self._expected(shape)
        growth = self._growth[shape.family]
        if expected > self._slack or (lightly and growth.is_known and expected < -self._slack):
            return Probe(budget, shape.kind, tokens, expected, foreseen=True)
        over = self._known[key] = self._measure(shape)
        growth.add(tokens, shape.width, over)
        return Probe(budget, shape.kind, tokens, over)


def search_budget(
    measure: Callable[[GroupShape], float],
    shapes: Callable[[int], Sequence[GroupShape]],
    *,
    lowest: int,
    highest: int,
    unit: int,
    slack: float = 0.0,
) -> Found:
    """The largest multiple of `unit` in `lowest..highest` whose shapes all fit, to within 1/64 of it.

    Args:
        measure: runs a step of that shape; returns by how many bytes it is above what may be used (at most 0: it
            fits), infinity if it ran out of memory. With several ranks, the largest of theirs.
        shapes: the groups to try at a budget.
        lowest: smallest budget that is of use (tokens).
        highest: largest that is of use, at least `lowest` (tokens); both are rounded up to a multiple of `unit`.
        unit: granularity (tokens).
        slack: bytes by which a step may be foreseen to be above what may be used and is run all the same; above that
            it counts as too large without being run.
    """
    lowest, highest = (-(-value // unit) * unit for value in (lowest, max(lowest, highest)))
    search = _Search(measure, shapes, slack)
    good, bad = 0, 0
    budget = unit  # small steps first: they cost little, and what larger ones need is extrapolated from them
    while not bad:
        if search.fits(budget):
            good = budget
            if good == highest:
                break
            after = min(2 * good, highest)
            budget = lowest if good < lowest < after else after
        else:
            bad = budget
    found = _bisect(search, good, bad, lowest, unit, lightly=True)
    if found > good and not search.fits(found):  # what was left out was foreseen wrongly
        found = _bisect(search, good, found, lowest, unit, lightly=False)
    if found >= lowest:
        return Found(found, tuple(search.probes))
    return Found(0, tuple(search.probes), over=search.over_at(lowest))


def _bisect(search: _Search, good: int, bad: int, lowest: int, unit: int, lightly: bool) -> int:
    """The largest budget that fits between one that does and one that does not (0: there is none)."""
    while bad > lowest and bad - good > max(unit, good // RESOLUTION):
        middle = (good + bad) // 2 // unit * unit
        if search.fits(middle, lightly):
            good = middle
        else:
            bad = middle
    return good
