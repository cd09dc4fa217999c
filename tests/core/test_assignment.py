"""Which rank reads which index."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_factory.config import CHOICES
from odb_factory.core.assignment import epoch_order, make_index_source


@given(st.integers(0, 500), st.integers(1, 128), st.booleans(), st.integers(0, 99))
def test_every_index_is_read_by_exactly_one_rank(size: int, world_size: int, shuffle: bool, seed: int) -> None:
    order = epoch_order(size, seed=seed, epoch=0, shuffle=shuffle)
    shards = [list(make_index_source("static", order, rank, world_size)) for rank in range(world_size)]
    assert sorted(i for shard in shards for i in shard) == list(range(size))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_rank_r_reads_every_wth_index_of_the_order() -> None:
    order = epoch_order(7, seed=0, epoch=0, shuffle=True)
    assert list(make_index_source("static", order, 1, 3)) == [order[1], order[4]]


def test_the_order_is_the_same_for_the_same_seed_and_epoch() -> None:
    assert epoch_order(50, seed=1, epoch=2, shuffle=True) == epoch_order(50, seed=1, epoch=2, shuffle=True)


def test_each_epoch_and_seed_has_its_own_order() -> None:
    orders = {tuple(epoch_order(50, seed=seed, epoch=epoch, shuffle=True)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_without_shuffle_the_order_is_that_of_the_data_set_in_every_epoch() -> None:
    assert epoch_order(5, seed=3, epoch=4, shuffle=False) == [0, 1, 2, 3, 4]


def test_a_static_source_does_not_move_with_what_was_consumed() -> None:
    source = make_index_source("static", list(range(6)), 0, 2)
    source.consumed([5, 5])
    assert list(source) == [0, 2, 4]


@pytest.mark.parametrize("how", CHOICES["assignment"])
def test_every_configurable_assignment_exists(how: str) -> None:
    assert sorted(make_index_source(how, [0, 1], 0, 1)) == [0, 1]


def test_an_unknown_assignment_is_refused() -> None:
    with pytest.raises(ValueError, match="'magic'"):
        make_index_source("magic", [0], 0, 1)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not in a world of 2 ranks"):
        make_index_source("static", [0], rank, 2)
