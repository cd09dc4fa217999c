"""Which rank reads which index."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_factory.config import OdbConfig
from odb_factory.core.assignment import Wanted, epoch_order, exclusive_sums, make_index_source
from odb_factory.option import options_of


def hand_out(size: int, world_size: int, first: int, wants: list[int]) -> list[list[int]]:
    """What each rank of a shared epoch reads, where in round k all ranks want `wants[k]` more samples, each in turn."""
    order = list(range(size))
    sources = [make_index_source("shared", order, rank, world_size, first) for rank in range(world_size)]
    read = [source.start() for source in sources]
    for number in range(10 * size + 10):
        if sources[0].complete:
            break
        own = [wants[(number + rank) % len(wants)] for rank in range(world_size)]
        if not any(own):
            own[0] = 1
        loads = [10 * len(indices) for indices in read]
        asks = [
            source.ask(Wanted(own=n, by_all=sum(own), load=load, load_of_all=sum(loads), mean_length=10.0))
            for source, n, load in zip(sources, own, loads, strict=True)
        ]
        assert sum(asks) > 0, "or the epoch would not end"
        assert all(ask <= n for ask, n in zip(asks, own, strict=True)), "never more than a window lacks"
        for rank, before in enumerate(exclusive_sums(asks)):
            read[rank] += sources[rank].assign(asks[rank], before, sum(asks))
    assert all(source.complete for source in sources)
    return read


@given(st.integers(0, 500), st.integers(1, 128), st.booleans(), st.integers(0, 99))
def test_every_index_is_read_by_exactly_one_rank(size: int, world_size: int, shuffle: bool, seed: int) -> None:
    order = epoch_order(size, seed=seed, epoch=0, shuffle=shuffle)
    shards = [make_index_source("static", order, rank, world_size).start() for rank in range(world_size)]
    assert sorted(i for shard in shards for i in shard) == list(range(size))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(st.integers(0, 200), st.integers(1, 20), st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=7))
def test_the_shared_cursor_hands_every_index_to_exactly_one_rank(
    size: int, world_size: int, first: int, wants: list[int]
) -> None:
    assert sorted(i for indices in hand_out(size, world_size, first, wants) for i in indices) == list(range(size))


def test_a_rank_that_wants_more_reads_more_of_the_shared_indices() -> None:
    order = list(range(100))
    sources = [make_index_source("shared", order, rank, 2, 5) for rank in range(2)]
    assert [source.start() for source in sources] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    wanted = [
        Wanted(own=own, by_all=12, load=own, load_of_all=12, mean_length=1.0)
        for own in (2, 10)
    ]  # fmt: skip
    asks = [source.ask(one) for source, one in zip(sources, wanted, strict=True)]
    assert asks == [2, 10]
    assert [sources[0].assign(2, 0, 12), sources[1].assign(10, 2, 12)] == [[10, 11], list(range(12, 22))]


def test_the_last_indices_go_to_the_rank_that_holds_the_fewest_tokens() -> None:
    sources = [make_index_source("shared", list(range(12)), rank, 2, 1) for rank in range(2)]
    for source in sources:
        source.start()
    loads = [200, 100]
    asks = [
        source.ask(Wanted(own=20, by_all=40, load=load, load_of_all=300, mean_length=10.0))
        for source, load in zip(sources, loads, strict=True)
    ]
    assert asks == [1, 10], "10 samples of 10 tokens make both equal; who wants any gets one at least"
    shares = [len(source.assign(ask, before, 11)) for source, ask, before in zip(sources, asks, [0, 1], strict=True)]
    assert shares == [0, 10]


@given(st.lists(st.integers(0, 100), max_size=70))
def test_exclusive_sums_tile_the_total_without_gap_or_overlap(values: list[int]) -> None:
    before = exclusive_sums(values)
    taken = sorted(place for start, n in zip(before, values, strict=True) for place in range(start, start + n))
    assert taken == list(range(sum(values)))


def test_rank_r_reads_every_wth_index_of_the_order() -> None:
    order = epoch_order(7, seed=0, epoch=0, shuffle=True)
    assert make_index_source("static", order, 1, 3).start() == [order[1], order[4]]


def test_the_order_is_the_same_for_the_same_seed_and_epoch() -> None:
    assert epoch_order(50, seed=1, epoch=2, shuffle=True) == epoch_order(50, seed=1, epoch=2, shuffle=True)


def test_each_epoch_and_seed_has_its_own_order() -> None:
    orders = {tuple(epoch_order(50, seed=seed, epoch=epoch, shuffle=True)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_without_shuffle_the_order_is_that_of_the_data_set_in_every_epoch() -> None:
    assert epoch_order(5, seed=3, epoch=4, shuffle=False) == [0, 1, 2, 3, 4]


def test_a_static_source_does_not_move() -> None:
    source = make_index_source("static", list(range(6)), 0, 2)
    assert source.start() == [0, 2, 4]
    wanted = Wanted(own=5, by_all=5, load=0, load_of_all=0, mean_length=1.0)
    assert source.complete
    assert source.ask(wanted) == 0
    assert source.assign(0, 0, 0) == []


@pytest.mark.parametrize("how", options_of(OdbConfig)["assignment"].choices)
def test_every_configurable_assignment_exists(how: str) -> None:
    assert sorted(make_index_source(how, [0, 1], 0, 1, 2).start()) == [0, 1]


def test_an_unknown_assignment_is_refused() -> None:
    with pytest.raises(ValueError, match="'magic'"):
        make_index_source("magic", [0], 0, 1)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not in a world of 2 ranks"):
        make_index_source("static", [0], rank, 2)
