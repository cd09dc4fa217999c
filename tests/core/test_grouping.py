"""Grouping of a window, and splits."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from odb_factory.config import OdbConfig
from odb_factory.core.budget import Budget
from odb_factory.core.grouping import Group, group_window, make_group, split_balanced, split_singleton, split_to
from odb_factory.core.protocol import make_budget
from odb_factory.core.sample import SampleMeta
from tests.core.invariants import padded_rows
from tests.core.worlds import budgets, meta, metas, samples

SPLITS = {"balanced": split_balanced, "singleton": split_singleton}


def lengths(group: Group) -> list[int]:
    return [s.length for s in group.samples]


def indices(groups: list[Group]) -> list[int]:
    return sorted(s.index for group in groups for s in group.samples)


def within(group: Group, config: OdbConfig) -> bool:
    """Whether a group is within every bound, by other arithmetic than `Budget`'s; a single sample always is."""
    rows = padded_rows(group, config)
    patches = sum(s.patches for s in group.samples)
    return len(rows) == 1 or (
        sum(rows) <= config.token_budget
        and len(rows) <= (config.max_samples or len(rows))
        and patches <= (config.max_patches or patches)
    )


def configs() -> st.SearchStrategy[OdbConfig]:
    return budgets().map(lambda values: OdbConfig(**values))


@settings(max_examples=200)
@given(samples(30, 90), configs())
def test_a_window_is_partitioned_into_groups_within_every_bound(window: list[SampleMeta], config: OdbConfig) -> None:
    groups = group_window(window, make_budget(config))
    assert indices(groups) == list(range(len(window)))
    for group in groups:
        assert group.samples
        assert group.cost == sum(padded_rows(group, config))
        assert within(group, config)


@given(samples(30, 90), configs(), st.integers(0, 99))
def test_groups_do_not_depend_on_the_order_of_arrival(
    window: list[SampleMeta], config: OdbConfig, shuffle: int
) -> None:
    other = list(window)
    random.Random(shuffle).shuffle(other)
    assert group_window(other, make_budget(config)) == group_window(window, make_budget(config))


@given(samples(30, 90), configs())
def test_groups_follow_each_other_by_length_and_are_sorted_inside(window: list[SampleMeta], config: OdbConfig) -> None:
    groups = group_window(window, make_budget(config))
    flat = [s for group in reversed(groups) for s in group.samples]
    assert [s.length for s in flat] == sorted(s.length for s in window)
    for group in groups:
        keys = [(s.length, s.index) for s in group.samples]
        assert keys == sorted(keys)


@settings(max_examples=200)
@given(samples(30, 90), configs())
def test_every_group_but_the_last_is_full_because_the_next_sample_did_not_fit(
    window: list[SampleMeta], config: OdbConfig
) -> None:
    groups = group_window(window, make_budget(config))
    for group, following in pairwise(groups):
        assert group.full
        visited_next = max(following.samples, key=lambda s: (s.length, -s.index))
        together = Group((visited_next, *group.samples), 0, False, 0)
        assert not within(together, config)


@settings(max_examples=200)
@given(samples(12, 90, at_least=1), configs(), st.data())
def test_the_last_group_is_full_exactly_where_no_shorter_sample_could_fit(
    window: list[SampleMeta], config: OdbConfig, data: Any
) -> None:
    """The cheapest sample to add brings media (no dummy image) but no patches."""
    last = group_window(window, make_budget(config))[-1]
    length = data.draw(st.integers(1, last.samples[0].length))
    extra = SampleMeta(index=-1, length=length, loss_tokens=0, has_media=True)
    assert last.full == (not within(Group((extra, *last.samples), 0, False, 0), config))


def test_an_empty_window_has_no_groups() -> None:
    assert group_window([], Budget(tokens=10)) == []


def test_the_walk_goes_from_long_to_short() -> None:
    groups = group_window(metas(10, 40, 30, 20, 20), Budget(tokens=80))
    assert [lengths(g) for g in groups] == [[30, 40], [10, 20, 20]]
    assert [g.full for g in groups] == [True, False]
    assert [g.cost for g in groups] == [80, 60]


def test_a_sample_above_the_budget_is_a_full_group_of_one_and_keeps_others_out() -> None:
    groups = group_window(metas(5, 90, 200, 5), Budget(tokens=100))
    assert [lengths(g) for g in groups] == [[200], [90], [5, 5]]
    assert [g.full for g in groups] == [True, True, False]


def test_a_sample_above_the_patch_bound_is_a_group_of_one() -> None:
    groups = group_window([meta(0, 10, 50), meta(1, 9, 3), meta(2, 8)], Budget(tokens=100, max_patches=10))
    assert [lengths(g) for g in groups] == [[10], [8, 9]]
    assert groups[0].full


def test_a_group_that_the_budget_exactly_holds_is_full_although_nothing_followed() -> None:
    (group,) = group_window(metas(10, 10), Budget(tokens=29))
    assert group.full
    (group,) = group_window(metas(10, 10), Budget(tokens=30))
    assert not group.full


def test_the_sample_bound_fills_a_group() -> None:
    groups = group_window(metas(1, 1, 1, 1, 1), Budget(tokens=100, max_samples=2))
    assert [len(g.samples) for g in groups] == [2, 2, 1]
    assert [g.full for g in groups] == [True, True, False]


def test_equal_lengths_are_taken_by_index() -> None:
    groups = group_window(metas(10, 10, 10, 10), Budget(tokens=20))
    assert [[s.index for s in g.samples] for g in groups] == [[0, 1], [2, 3]]


def test_the_dummy_image_counts_only_for_groups_of_text() -> None:
    budget = Budget(tokens=20, dummy_tokens=4)
    assert [lengths(g) for g in group_window(metas(10, 9), budget)] == [[10], [9]]
    assert [lengths(g) for g in group_window([meta(0, 10), meta(1, 9, 1)], budget)] == [[9, 10]]
    assert [lengths(g) for g in group_window([meta(0, 10, 1), meta(1, 9)], budget)] == [[9, 10]]


def test_a_groups_totals_are_sums_over_its_samples() -> None:
    group = make_group([meta(0, 10, loss=3), meta(1, 7, loss=0), meta(2, 8, loss=8)], Budget(tokens=100), True)
    assert (group.tokens, group.loss_tokens, group.cost) == (25, 11, 30)


def drawn_group(window: list[SampleMeta], config: OdbConfig) -> Group:
    """The largest group of a window."""
    group = max(group_window(window, make_budget(config)), key=lambda g: len(g.samples))
    assume(len(group.samples) > 1)
    return group


@pytest.mark.parametrize("how", SPLITS)
@settings(max_examples=200)
@given(window=samples(20, 30, at_least=2), config=configs())
def test_a_split_makes_two_groups_within_every_bound_of_the_same_samples(
    how: str, window: list[SampleMeta], config: OdbConfig
) -> None:
    group = drawn_group(window, config)
    parts = SPLITS[how](group, make_budget(config))
    assert indices(list(parts)) == indices([group])
    for part in parts:
        assert part.samples
        assert not part.full
        assert part.cost == sum(padded_rows(part, config))
        assert within(part, config)


def test_the_balanced_split_halves_by_rank_of_length() -> None:
    group = make_group(metas(4, 1, 3, 2, 5), Budget(tokens=100), True)
    assert [lengths(p) for p in split_balanced(group, Budget(tokens=100))] == [[1, 2], [3, 4, 5]]


def test_the_singleton_split_takes_the_longest_sample_out() -> None:
    group = make_group(metas(4, 1, 3), Budget(tokens=100), True)
    assert [lengths(p) for p in split_singleton(group, Budget(tokens=100))] == [[1, 3], [4]]


def test_the_singleton_split_leaves_the_only_media_sample_in_the_rest() -> None:
    """Without it, the rest would need the dummy image: 9 + 4 tokens in 2 rows, above the budget."""
    budget = Budget(tokens=30, dummy_tokens=8)
    group = make_group([meta(0, 9), meta(1, 9), meta(2, 10, 1)], budget, True)
    rest, out = split_singleton(group, budget)
    assert [s.index for s in rest.samples] == [0, 2]
    assert [s.index for s in out.samples] == [1]


def test_the_singleton_split_may_take_a_media_sample_where_another_stays() -> None:
    budget = Budget(tokens=30, dummy_tokens=8)
    rest, out = split_singleton(make_group([meta(0, 9), meta(1, 9, 1), meta(2, 10, 1)], budget, True), budget)
    assert [s.index for s in out.samples] == [2]
    assert rest.cost == 18


def test_a_pair_with_one_media_sample_is_split_into_its_two_samples() -> None:
    budget = Budget(tokens=20, dummy_tokens=8)
    for how in SPLITS.values():
        parts = how(make_group([meta(0, 9), meta(1, 10, 1)], budget, True), budget)
        assert [len(p.samples) for p in parts] == [1, 1]


@pytest.mark.parametrize(
    "window",
    [
        pytest.param([meta(0, 8), meta(1, 8), meta(2, 10, 1), meta(3, 10)], id="the short half loses the media"),
        pytest.param([meta(0, 7, 1), meta(1, 8), meta(2, 10), meta(3, 10)], id="the long half loses the media"),
    ],
)
def test_the_balanced_split_falls_back_where_a_half_would_need_a_dummy_image_that_does_not_fit(
    window: list[SampleMeta],
) -> None:
    budget = Budget(tokens=40, dummy_tokens=13)
    group = make_group(window, budget, True)
    assert budget.fits(group.samples)
    parts = split_balanced(group, budget)
    assert [len(p.samples) for p in parts] == [3, 1]
    assert all(budget.fits(p.samples) for p in parts)


@pytest.mark.parametrize("how", SPLITS)
def test_a_group_of_one_cannot_be_split(how: str) -> None:
    with pytest.raises(ValueError):
        SPLITS[how](make_group(metas(5), Budget(tokens=10), False), Budget(tokens=10))


@pytest.mark.parametrize("how", SPLITS)
@settings(max_examples=200)
@given(window=samples(20, 60, at_least=1), config=configs(), data=st.data())
def test_split_to_makes_exactly_so_many_groups_of_the_same_samples(
    how: str, window: list[SampleMeta], config: OdbConfig, data: Any
) -> None:
    budget = make_budget(config)
    groups = group_window(window, budget)
    count = data.draw(st.integers(len(groups), len(window)))
    result = split_to(groups, count, budget, how)
    assert len(result) == count
    assert indices(result) == list(range(len(window)))
    assert all(within(g, config) for g in result)
    untouched = {g.samples for g in groups} & {g.samples for g in result}
    assert len(untouched) >= len(groups) - (count - len(groups)), "more groups were split than necessary"


def test_split_to_keeps_groups_that_are_enough() -> None:
    groups = group_window(metas(10, 40, 30, 20, 20), Budget(tokens=80))
    assert split_to(groups, 2, Budget(tokens=80), "balanced") == groups


def test_split_to_balanced_halves_the_costliest_group() -> None:
    budget = Budget(tokens=100)
    groups = [make_group(metas(2, 2, 2, 2, 2), budget, True), make_group([meta(7, 30), meta(8, 40)], budget, True)]
    assert [lengths(g) for g in split_to(groups, 3, budget, "balanced")] == [[2, 2, 2, 2, 2], [30], [40]]


def test_split_to_balanced_counts_attention() -> None:
    budget = Budget(tokens=100, attention_length=10)
    many, long = make_group(metas(*[5] * 18), budget, True), make_group([meta(20, 39), meta(21, 40)], budget, True)
    assert (many.cost, many.work) == (90, 135)
    assert (long.cost, long.work) == (80, 400)
    assert [len(g.samples) for g in split_to([many, long], 3, budget, "balanced")] == [18, 1, 1]


def test_split_to_balanced_passes_over_a_costly_group_of_one() -> None:
    budget = Budget(tokens=100)
    groups = [make_group(metas(100), budget, True), make_group([meta(7, 3), meta(8, 4)], budget, True)]
    assert [lengths(g) for g in split_to(groups, 3, budget, "balanced")] == [[100], [3], [4]]


def test_split_to_singleton_takes_from_the_group_with_most_samples() -> None:
    budget = Budget(tokens=100)
    groups = [make_group(metas(2, 2, 2, 2, 3), budget, True), make_group([meta(7, 30), meta(8, 40)], budget, True)]
    assert [lengths(g) for g in split_to(groups, 3, budget, "singleton")] == [[2, 2, 2, 2], [3], [30, 40]]


@pytest.mark.parametrize("count", [1, 4])
def test_split_to_refuses_what_it_cannot_make(count: int) -> None:
    """Three samples in two groups make neither one group nor four."""
    budget = Budget(tokens=20)
    groups = group_window(metas(20, 5, 5), budget)
    assert len(groups) == 2
    with pytest.raises(ValueError, match=f"2 groups of 3 samples do not make {count}"):
        split_to(groups, count, budget, "balanced")
