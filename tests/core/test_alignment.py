"""The number of steps of a round, and what a rank emits in them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_factory.core.alignment import (
    GlobalView,
    RankReport,
    RoundPlan,
    decode,
    encode,
    make_report,
    plan_round,
    target,
)
from odb_factory.core.budget import Budget
from odb_factory.core.grouping import Group, group_window, make_group
from tests.core.worlds import meta, metas

BUDGET = Budget(tokens=100)


@st.composite
def reports(draw: st.DrawFn) -> RankReport:
    """A report that a rank could make."""
    count = draw(st.integers(0, 1024))
    groups = draw(st.integers(min(1, count), count))
    return RankReport(
        capacity=draw(st.integers(1, 2000)),
        samples=count,
        groups=groups,
        full=draw(st.integers(0, groups)),
        overdue=draw(st.integers(0, groups)),
        exhausted=draw(st.booleans()),
    )


def reduced(ranks: list[RankReport]) -> GlobalView:
    """The view after a minimum over ranks."""
    return decode([min(column) for column in zip(*map(encode, ranks), strict=True)])


@given(st.lists(reports(), min_size=1, max_size=64))
def test_one_minimum_over_ranks_carries_minima_of_active_ranks_and_maxima_of_all(ranks: list[RankReport]) -> None:
    active = [r for r in ranks if r.samples]
    view = reduced(ranks)
    assert view.empty == (not active)
    assert view.min_capacity == min((r.capacity for r in active), default=0)
    assert view.min_samples == min((r.samples for r in active), default=0)
    assert view.min_full == min((r.full for r in active), default=0)
    assert view.max_groups == max(r.groups for r in ranks)
    assert view.max_overdue == max(r.overdue for r in ranks)
    assert view.draining == any(r.exhausted for r in ranks)


@given(st.lists(reports(), min_size=1, max_size=64), st.sampled_from(["max", "carry"]))
def test_every_active_rank_can_make_the_target_out_of_its_samples(ranks: list[RankReport], rule: str) -> None:
    active = [r for r in ranks if r.samples]
    steps = target(reduced(ranks), rule)
    assert (steps >= 1) == bool(active)
    for r in active:
        assert steps <= r.samples
        assert steps <= r.capacity


def report(samples: int, groups: int, full: int, **changed: Any) -> RankReport:
    values = {"capacity": 1000, "overdue": 0, "exhausted": False} | changed
    return RankReport(samples=samples, groups=groups, full=full, **values)


def steps_of(rule: str, *ranks: RankReport) -> int:
    return target(reduced(list(ranks)), rule)


class TestTarget:
    @pytest.mark.parametrize("rule", ["max", "carry"])
    def test_there_is_no_step_without_samples(self, rule: str) -> None:
        assert steps_of(rule, report(0, 0, 0, exhausted=True), report(0, 0, 0, exhausted=True)) == 0

    def test_max_takes_the_most_groups(self) -> None:
        assert steps_of("max", report(50, 5, 4), report(50, 9, 8), report(50, 7, 6)) == 9

    def test_max_is_bounded_by_the_smallest_window_that_is_not_empty(self) -> None:
        assert steps_of("max", report(3, 2, 1), report(50, 9, 8), report(0, 0, 0)) == 3

    def test_carry_takes_the_fewest_full_groups(self) -> None:
        assert steps_of("carry", report(50, 5, 4), report(50, 9, 8), report(50, 7, 6)) == 4

    def test_carry_takes_at_least_one_step(self) -> None:
        assert steps_of("carry", report(50, 1, 0), report(50, 9, 8)) == 1

    def test_carry_makes_a_step_for_every_overdue_group(self) -> None:
        assert steps_of("carry", report(50, 5, 2), report(50, 9, 8, overdue=6)) == 6
        assert steps_of("carry", report(50, 5, 4), report(50, 9, 8, overdue=3)) == 4

    def test_carry_drains_as_max_once_any_rank_is_exhausted(self) -> None:
        assert steps_of("carry", report(50, 5, 4, exhausted=True), report(50, 9, 8)) == 9
        assert steps_of("carry", report(0, 0, 0, exhausted=True), report(50, 9, 8), report(6, 5, 4)) == 6

    def test_max_ignores_overdue_and_full_groups(self) -> None:
        assert steps_of("max", report(50, 5, 0, overdue=5), report(50, 4, 0)) == 5

    @pytest.mark.parametrize("rule", ["max", "carry"])
    def test_the_smallest_capacity_of_an_active_rank_bounds_it(self, rule: str) -> None:
        ranks = [report(50, 9, 8, capacity=2, overdue=5), report(50, 9, 8), report(0, 0, 0, capacity=1)]
        assert steps_of(rule, *ranks) == 2


def test_a_report_counts_samples_groups_full_and_overdue_groups() -> None:
    groups = [
        make_group(metas(10, 20), BUDGET, True),
        make_group([meta(5, 7), meta(6, 8)], BUDGET, False),
        make_group([meta(8, 3)], BUDGET, True),
    ]
    made = make_report(groups, {0: 1, 6: 3, 8: 2}, capacity=4, max_wait=2, exhausted=True)
    assert made == RankReport(capacity=4, samples=5, groups=3, full=2, overdue=2, exhausted=True)


def singles(count: int, full: int) -> list[Group]:
    """Groups of one sample, costs 1, 2, ...; the first `full` ones are full."""
    return [make_group([meta(i, i + 1)], BUDGET, i < full) for i in range(count)]


def plan(
    groups: list[Group], steps: int, waited: dict[int, int] | None = None, seed: int = 0, **changed: Any
) -> RoundPlan:
    values: dict[str, Any] = {"split": "balanced", "max_wait": 3} | changed
    return plan_round(groups, waited or {}, steps, BUDGET, rng=random.Random(seed), **values)


def emitted(result: RoundPlan) -> set[int]:
    return {s.index for slot in result.slots if slot for s in slot.samples}


class TestPlanRound:
    def test_an_empty_window_gives_idle_slots_only(self) -> None:
        assert plan([], 3) == RoundPlan((None, None, None), ())

    def test_no_steps_keep_every_sample(self) -> None:
        result = plan(singles(3, 3), 0)
        assert result.slots == ()
        assert {s.index for s in result.kept} == {0, 1, 2}

    def test_as_many_groups_as_steps_all_leave(self) -> None:
        groups = singles(3, 1)
        assert set(plan(groups, 3).slots) == set(groups)
        assert plan(groups, 3).kept == ()

    def test_too_few_groups_are_split_and_nothing_is_kept(self) -> None:
        groups = group_window(metas(10, 10, 10, 10, 90), BUDGET)
        assert len(groups) == 2
        result = plan(groups, 4)
        assert len(result.slots) == 4
        assert emitted(result) == {0, 1, 2, 3, 4}
        assert result.kept == ()

    @pytest.mark.parametrize(("split", "sizes"), [("balanced", [2, 2]), ("singleton", [1, 3])])
    def test_the_split_is_the_configured_one(self, split: str, sizes: list[int]) -> None:
        result = plan(group_window(metas(10, 10, 10, 10), BUDGET), 2, split=split)
        assert sorted(len(slot.samples) for slot in result.slots if slot) == sizes

    @given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12), st.integers(0, 99))
    def test_too_many_groups_overflow_and_no_sample_is_lost(self, count: int, steps: int, full: int, seed: int) -> None:
        result = plan(singles(count, full), min(steps, count), seed=seed)
        kept = [s.index for s in result.kept]
        assert len(result.slots) == min(steps, count)
        assert sorted([*kept, *emitted(result)]) == list(range(count))

    @pytest.mark.parametrize("seed", range(10))
    def test_full_groups_leave_before_others(self, seed: int) -> None:
        assert emitted(plan(singles(8, 5), 3, seed=seed)) < {0, 1, 2, 3, 4}
        assert emitted(plan(singles(8, 5), 6, seed=seed)) > {0, 1, 2, 3, 4}

    @pytest.mark.parametrize("seed", range(10))
    def test_an_overdue_group_leaves_before_full_ones(self, seed: int) -> None:
        assert emitted(plan(singles(8, 5), 1, {7: 3}, seed)) == {7}

    @pytest.mark.parametrize("seed", range(10))
    def test_of_overdue_groups_the_oldest_leave_first(self, seed: int) -> None:
        waited = {7: 5, 1: 4, 2: 3, 6: 9}
        assert emitted(plan(singles(8, 5), 1, waited, seed)) == {6}
        assert emitted(plan(singles(8, 5), 3, waited, seed)) == {6, 7, 1}

    @pytest.mark.parametrize("seed", range(10))
    def test_a_group_is_as_old_as_its_oldest_sample(self, seed: int) -> None:
        groups = [*singles(4, 4), make_group([meta(8, 5), meta(9, 6)], BUDGET, False)]
        assert emitted(plan(groups, 1, {9: 3, 0: 2}, seed)) == {8, 9}

    def test_waiting_short_of_the_bound_gives_no_precedence(self) -> None:
        drawn = Counter(min(emitted(plan(singles(8, 8), 1, {7: 2}, seed))) for seed in range(200))
        assert len(drawn) == 8
        assert drawn[7] < 60

    def test_held_back_groups_are_drawn_without_regard_to_length(self) -> None:
        """Each of 10 equally full groups leaves in about half of the draws of 5 (95 % of 400 lie in 180-220)."""
        drawn = Counter(i for seed in range(400) for i in emitted(plan(singles(10, 10), 5, seed=seed)))
        assert set(drawn) == set(range(10))
        assert all(150 < count < 250 for count in drawn.values()), drawn

    def test_the_draw_depends_on_the_generator_alone(self) -> None:
        assert plan(singles(9, 9), 4, seed=5) == plan(singles(9, 9), 4, seed=5)
        assert len({frozenset(emitted(plan(singles(9, 9), 4, seed=seed))) for seed in range(20)}) > 10
