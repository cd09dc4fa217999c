"""What a group costs and whether it fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_factory.core.budget import Budget, ceil_multiple, padded_work
from odb_factory.core.grouping import make_group
from odb_factory.core.sample import SampleMeta
from tests.core.worlds import meta, metas


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_ceil_multiple_is_the_least_multiple_at_or_above(value: int, multiple: int) -> None:
    result = ceil_multiple(value, multiple)
    assert result % multiple == 0
    assert value <= result < value + multiple


def test_the_cost_is_the_longest_length_times_the_number_of_samples() -> None:
    assert Budget(tokens=100).cost(metas(3, 10, 7)) == 30


def work(samples: list[SampleMeta], budget: Budget) -> int:
    return make_group(samples, budget, True).work


def test_work_is_the_cost_where_attention_counts_nothing() -> None:
    assert work(metas(3, 10, 7), Budget(tokens=100)) == 30


def test_attention_doubles_the_work_of_rows_of_its_length_and_grows_with_the_length() -> None:
    budget = Budget(tokens=100, pad_to_multiple_of=8, attention_length=16)
    assert work(metas(3, 10, 7), budget) == 3 * 16 * 2
    assert work(metas(3, 8), budget) == 2 * 8 * 3 // 2
    assert work(metas(32), budget) == 32 * 3


def test_attention_bounds_nothing() -> None:
    assert Budget(tokens=30, attention_length=1).fits(metas(10, 1, 1))
    assert Budget(tokens=30, attention_length=1).cost(metas(10, 1, 1)) == 30


def test_of_like_padded_tokens_the_longer_rows_are_more_work() -> None:
    narrow, wide = padded_work(16, 128, 1000), padded_work(2, 1024, 1000)
    assert narrow == 2048 + 262
    assert wide == 2048 + 2097


@pytest.mark.parametrize(("length", "padded"), [(1, 8), (8, 8), (9, 16), (16, 16)])
def test_lengths_are_padded_to_the_multiple(length: int, padded: int) -> None:
    assert Budget(tokens=100, pad_to_multiple_of=8).padded_length(metas(1, length)) == padded


def test_the_bound_on_tokens_is_inclusive_and_counts_padding() -> None:
    assert Budget(tokens=30).fits(metas(10, 1, 1))
    assert not Budget(tokens=29).fits(metas(10, 1, 1))
    assert not Budget(tokens=32, pad_to_multiple_of=16).fits(metas(10, 17))


class TestDummyImage:
    budget = Budget(tokens=100, dummy_tokens=6)

    def test_it_widens_a_group_whose_shortest_sample_is_near_the_longest(self) -> None:
        assert self.budget.padded_length(metas(10, 8)) == 14

    def test_it_is_free_where_the_shortest_sample_has_room_for_it(self) -> None:
        assert self.budget.padded_length(metas(10, 4)) == 10
        assert self.budget.padded_length(metas(10, 5)) == 11

    def test_it_is_not_added_where_a_sample_has_media(self) -> None:
        assert self.budget.padded_length([meta(0, 10), meta(1, 9, media=True)]) == 10

    def test_media_without_patches_count_as_media(self) -> None:
        assert self.budget.padded_length([meta(0, 10, patches=0, media=True)]) == 10

    def test_it_is_added_before_padding_to_the_multiple(self) -> None:
        assert Budget(tokens=100, dummy_tokens=6, pad_to_multiple_of=8).padded_length(metas(11)) == 24

    def test_it_can_make_a_group_exceed_the_budget(self) -> None:
        assert Budget(tokens=20).fits(metas(10, 9))
        assert not Budget(tokens=20, dummy_tokens=2).fits(metas(10, 9))
        assert Budget(tokens=20, dummy_tokens=2).fits(metas(10, 8))


def test_the_bound_on_samples_is_inclusive() -> None:
    budget = Budget(tokens=1000, max_samples=2)
    assert budget.fits(metas(1, 1))
    assert not budget.fits(metas(1, 1, 1))


def test_the_bound_on_patches_is_inclusive_and_sums_over_the_group() -> None:
    budget = Budget(tokens=1000, max_patches=9)
    assert budget.fits([meta(0, 1, 4), meta(1, 1, 5)])
    assert not budget.fits([meta(0, 1, 4), meta(1, 1, 6)])


def test_a_sample_is_overlong_by_its_padded_length() -> None:
    assert not Budget(tokens=20).overlong(meta(0, 20))
    assert Budget(tokens=20).overlong(meta(0, 21))
    assert Budget(tokens=20, pad_to_multiple_of=16).overlong(meta(0, 17))
    assert not Budget(tokens=20, pad_to_multiple_of=16).overlong(meta(0, 16))


def test_the_dummy_counts_where_a_lone_sample_is_overlong() -> None:
    budget = Budget(tokens=100, dummy_tokens=30)
    assert budget.overlong(meta(0, 90))
    assert not budget.overlong(meta(0, 90, media=True))
