"""Seeded faults: each breaks the real code in one place, and the search must find it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

from odb_factory.core import assignment, grouping, protocol
from odb_factory.core.alignment import GlobalView, RankReport, RoundPlan
from odb_factory.core.assignment import SharedIndexSource, Wanted
from odb_factory.core.grouping import Group
from odb_factory.core.protocol import ClosedRound, RankProtocol
from odb_factory.core.stats import StepTotals
from tests.formal.space import Space
from tests.formal.spaces import MEDIA_KINDS, TWO_KINDS, make

STATIC = make("mutant", {}, samples=3)
CARRY = make("mutant", {"depth": 3, "max_wait": 1}, samples=6, kinds=TWO_KINDS)
QUOTA = make("mutant", {"join": False, "quota": 0.5}, samples=3, orders=True)
SHARED = make("mutant", {"assignment": "shared"}, samples=9)
SHARED_DROPS = make("mutant", {"assignment": "shared", "depth": 1}, samples=8, drops=True, kinds=TWO_KINDS)
MEDIA = make("mutant", {"depth": 4, "dummy_tokens": 4, "token_budget": 8}, samples=4, kinds=MEDIA_KINDS)


class Mutant(NamedTuple):
    """A fault, and what catches it where."""

    name: str
    apply: Callable[[], AbstractContextManager[Any]]
    space: Space
    caught_by: str
    """The guarantee that the search must find violated."""


def _patch(owner: Any, name: str, make_new: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Replace `owner.name` by what `make_new` makes of it."""
    return lambda: mock.patch.object(owner, name, make_new(getattr(owner, name)))


def _lose_overflow(real: Any) -> Any:
    return lambda *args, **kwargs: RoundPlan(real(*args, **kwargs).slots, ())


def _emit_overflow_too(real: Any) -> Any:
    """The samples of the first slot stay in the window although they are emitted."""

    def plan_round(groups: Sequence[Group], *args: Any, **kwargs: Any) -> RoundPlan:
        plan = real(groups, *args, **kwargs)
        first = plan.slots[0].samples if plan.slots and plan.slots[0] else ()
        return RoundPlan(plan.slots, plan.kept + first)

    return plan_round


def _forget_rest_of_rank_1(real: Any) -> Any:
    """`remaining` lacks what rank 1 has left."""

    def plan(self: RankProtocol, minima: Sequence[int], **kwargs: Any) -> tuple[int, ...]:
        *steps, remaining, dropped, bad, wanted, load = real(self, minima, **kwargs)
        return (*steps, 0 if self.rank == 1 else remaining, dropped, bad, wanted, load)

    return plan


def _count_empty_windows(real: Any) -> Any:
    """The minima run over all ranks, not over those with a sample."""

    def encode(report: RankReport) -> tuple[int, ...]:
        vector = real(report)
        return vector if report.samples else (report.capacity, 0, vector[2], 0, *vector[4:])

    return encode


def _shift_target(by: int) -> Callable[[Any], Any]:
    def make_new(real: Any) -> Any:
        def target(view: GlobalView, rule: str) -> int:
            steps: int = real(view, rule)
            return steps + by if steps else 0

        return target

    return make_new


def _ignore_minima_on_rank_1(real: Any) -> Any:
    """It decides by its own report, as if the reduction had not taken place."""

    def plan(self: RankProtocol, minima: Sequence[int], **kwargs: Any) -> tuple[int, ...]:
        own = self.begin_round(exhausted=not kwargs["unread"]) if self.rank == 1 else minima
        result: tuple[int, ...] = real(self, own, **kwargs)
        return result

    return plan


def _ignore_overdue(real: Any) -> Any:
    return lambda *args, **kwargs: dataclasses.replace(real(*args, **kwargs), overdue=0)


def _draw_overdue_like_others(real: Any) -> Any:
    """The target counts overdue groups, but the draw does not prefer them."""
    return lambda groups, waited, *args, **kwargs: real(groups, {}, *args, **kwargs)


def _never_cut(real: Any) -> Any:
    def cut(self: RankProtocol, totals: list[StepTotals]) -> bool:
        real(self, list(totals))
        return False

    return cut


def _cut_one_step_late(real: Any) -> Any:
    def cut(self: RankProtocol, totals: list[StepTotals]) -> bool:
        self.emitted -= 1
        over: bool = real(self, totals)
        self.emitted += 1
        return over

    return cut


def _assign_twice(real: Any) -> Any:
    """The part of each rank is one longer than it asked for."""
    return lambda self, own, before, total: real(self, own + 1, before, total)


def _skip_index(real: Any) -> Any:
    """The cursor moves one further than what is handed out."""

    def assign(self: SharedIndexSource, own: int, before: int, total: int) -> list[int]:
        indices: list[int] = real(self, own, before, total)
        self._cursor = min(len(self._order), self._cursor + 1)
        return indices

    return assign


def _ask_nothing_near_the_end(real: Any) -> Any:
    def ask(self: SharedIndexSource, wanted: Wanted) -> int:
        return real(self, wanted) if wanted.by_all <= self._left else 0

    return ask


def _wrong_prefix_sum(real: Any) -> Any:
    """The last rank takes one rank too few into its sum."""
    return lambda values: [*real(values)[:-1], 0]


def _closed(change: Callable[[RankProtocol, ClosedRound], ClosedRound]) -> Callable[[Any], Any]:
    """`close_round` with its result changed."""

    def make_new(real: Any) -> Any:
        def close_round(self: RankProtocol, sums: Sequence[int]) -> ClosedRound:
            return change(self, real(self, sums))

        return close_round

    return make_new


def _last_too_early(_: RankProtocol, closed: ClosedRound) -> ClosedRound:
    if not closed.epoch_over or len(closed.steps) < 2:
        return closed
    steps = list(closed.steps)
    steps[-2:] = [dataclasses.replace(steps[-2], last=True), dataclasses.replace(steps[-1], last=False)]
    return dataclasses.replace(closed, steps=tuple(steps))


def _hold_nothing_back(self: RankProtocol, closed: ClosedRound) -> ClosedRound:
    """The step that may be the last one is handed out before it is known."""
    more = tuple(protocol.PlannedStep(group, totals, last=False) for group, totals in self._held_back)
    self._held_back = []
    self.steps += len(more)
    return dataclasses.replace(closed, steps=closed.steps + more)


def _lose_held_back(self: RankProtocol, closed: ClosedRound) -> ClosedRound:
    self._held_back = []
    return closed


def _leave_prefix_sum_out(self: RankProtocol, closed: ClosedRound) -> ClosedRound:
    """Rank 0 takes part in the prefix sum only if it holds samples."""
    return closed if self.rank or self.window_size else dataclasses.replace(closed, ask=None)


def _halve_without_looking(_: Any) -> Any:
    def split(group: Group, budget: Any) -> tuple[Group, Group]:
        middle = len(group.samples) // 2
        short, long = group.samples[:middle], group.samples[middle:]
        return grouping.make_group(short, budget, False), grouping.make_group(long, budget, False)

    return split


def _count_real_tokens_as_padded(_: Any) -> Any:
    return _totals(lambda group: (group.tokens, group.work))


def _count_padded_tokens_as_work(_: Any) -> Any:
    return _totals(lambda group: (group.cost, group.cost))


def _totals(last_two: Callable[[Group], tuple[int, int]]) -> Any:
    def totals(group: Group | None) -> tuple[int, ...]:
        return (len(group.samples), group.loss_tokens, group.tokens, *last_two(group)) if group else (0, 0, 0, 0, 0)

    return totals


def mutants() -> Iterator[Mutant]:
    """All of them."""
    planned, closed = RankProtocol, "close_round"
    yield Mutant("overflow is lost", _patch(protocol, "plan_round", _lose_overflow), STATIC, "G2")
    yield Mutant("emitted samples are kept too", _patch(protocol, "plan_round", _emit_overflow_too), STATIC, "G2")
    yield Mutant("the rest of one rank is ignored", _patch(planned, "plan", _forget_rest_of_rank_1), STATIC, "G2")
    yield Mutant("empty windows enter the minima", _patch(protocol, "encode", _count_empty_windows), STATIC, "G5")
    yield Mutant("one step too many", _patch(protocol, "target", _shift_target(1)), STATIC, "G5")
    yield Mutant("one step too few", _patch(protocol, "target", _shift_target(-1)), STATIC, "G5")
    yield Mutant("one rank ignores the minima", _patch(planned, "plan", _ignore_minima_on_rank_1), STATIC, "G5")
    yield Mutant("overdue is ignored", _patch(protocol, "make_report", _ignore_overdue), CARRY, "waiting")
    yield Mutant(
        "overdue is not preferred", _patch(protocol, "plan_round", _draw_overdue_like_others), CARRY, "waiting"
    )
    yield Mutant("the quota cuts nothing", _patch(planned, "_cut_at_quota", _never_cut), QUOTA, "G3")
    yield Mutant("the quota cuts late", _patch(planned, "_cut_at_quota", _cut_one_step_late), QUOTA, "G3")
    yield Mutant("an index is assigned twice", _patch(SharedIndexSource, "assign", _assign_twice), SHARED, "G2")
    yield Mutant("an index is skipped", _patch(SharedIndexSource, "assign", _skip_index), SHARED, "G2")
    yield Mutant(
        "nobody asks near the end", _patch(SharedIndexSource, "ask", _ask_nothing_near_the_end), SHARED_DROPS, "G4"
    )
    yield Mutant("a wrong prefix sum", _patch(assignment, "exclusive_sums", _wrong_prefix_sum), SHARED, "G2")
    yield Mutant(
        "one rank skips the prefix sum", _patch(planned, closed, _closed(_leave_prefix_sum_out)), SHARED_DROPS, "G5"
    )
    yield Mutant("last is set too early", _patch(planned, closed, _closed(_last_too_early)), STATIC, "G1")
    yield Mutant("nothing is held back", _patch(planned, closed, _closed(_hold_nothing_back)), SHARED_DROPS, "G5")
    yield Mutant("the held-back step is lost", _patch(planned, closed, _closed(_lose_held_back)), SHARED_DROPS, "G2")
    yield Mutant("a half exceeds the budget", _patch(grouping, "split_balanced", _halve_without_looking), MEDIA, "G6")
    yield Mutant("totals count other tokens", _patch(protocol, "totals_of", _count_real_tokens_as_padded), STATIC, "G7")
    yield Mutant("totals count no attention", _patch(protocol, "totals_of", _count_padded_tokens_as_work), STATIC, "G7")
