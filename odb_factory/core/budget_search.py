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
"""Points of an extrapolation: each has at most this share of the next one's tokens, so that noise stays noise."""


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

    @property
    def over(self) -> float:
        """By how many bytes the first budget that did not fit is too large; -inf: none was."""
        return next((probe.over for probe in self.probes if probe.over > 0), -inf)


class Growth:
    """Extrapolates what a step of a kind needs: a fixed part, one that is linear in its tokens and a quadratic one."""

    def __init__(self) -> None:
        self._points: dict[int, float] = {}

    def add(self, tokens: int, need: float) -> None:
        """A step of so many padded tokens was measured."""
        if isfinite(need):
            self._points[tokens] = need

    def predict(self, tokens: int) -> float:
        """What a larger step will need; with one point as much, with two as if all growth were quadratic."""
        points = self._spread(tokens)
        if len(points) < 2:
            return points[0][1] if points else -inf
        (n2, v2), (n1, v1) = points[:2]
        slope = max(0.0, v2 - v1) / (n2 - n1)
        if len(points) == 2:
            return v2 + slope * (tokens**2 - n2**2) / (n2 + n1)
        n0, v0 = points[2]
        curve = max(0.0, slope - (v1 - v0) / (n1 - n0)) / (n2 - n0)
        return v2 + slope * (tokens - n2) + curve * (tokens - n2) * (tokens - n1)

    @property
    def is_known(self) -> bool:
        """There are enough points to tell the parts from each other."""
        return len(self._points) > 2

    def _spread(self, tokens: int) -> list[tuple[int, float]]:
        """Up to three points at or below `tokens`, the largest first."""
        chosen: list[tuple[int, float]] = []
        for n in sorted((n for n in self._points if n <= tokens), reverse=True):
            if not chosen or n <= chosen[-1][0] * _APART:
                chosen.append((n, self._points[n]))
        return chosen[:3]


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

    def _probe(self, budget: int, shape: GroupShape, lightly: bool) -> Probe:
        tokens, key = shape.padded_tokens, (shape.media, shape.lengths)
        if key in self._known:
            return Probe(budget, shape.kind, tokens, self._known[key])
        growth = self._growth.setdefault(shape.kind, Growth())
        expected = growth.predict(tokens)
        if expected > self._slack or (lightly and growth.is_known and expected < -self._slack):
            return Probe(budget, shape.kind, tokens, expected, foreseen=True)
        over = self._known[key] = self._measure(shape)
        growth.add(tokens, over)
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
    budget = min(lowest, max(unit, 256 // unit * unit))
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
    return Found(found if found >= lowest else 0, tuple(search.probes))


def _bisect(search: _Search, good: int, bad: int, lowest: int, unit: int, lightly: bool) -> int:
    """The largest budget that fits between one that does and one that does not (0: there is none)."""
    while bad > lowest and bad - good > max(unit, good // RESOLUTION):
        middle = (good + bad) // 2 // unit * unit
        if search.fits(middle, lightly):
            good = middle
        else:
            bad = middle
    return good
