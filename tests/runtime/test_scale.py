"""What a rank sends does not grow with the number of ranks. `python -m benchmarks exchange` goes on to 4096."""

from __future__ import annotations

import pytest

from benchmarks.exchange.ours import count_simulated, measure_real
from benchmarks.exchange.world import CONFIG
from odb_factory.core.assignment import tree_children
from odb_factory.core.protocol import RankProtocol

FIRST = len(RankProtocol(CONFIG, rank=0, epoch=0, world_size=2).begin_round(exhausted=True))
MOST = 8 * (FIRST + RankProtocol.TAIL + 1 + 2 * 2)
"""Bytes: the first vector, what follows the steps in the second, and a prefix sum with two ranks below."""


@pytest.mark.parametrize("world", [2, 16, 128])
def test_counted_bytes_are_bounded_whatever_the_number_of_ranks(world: int) -> None:
    assert count_simulated(world, per_rank=60).fixed_bytes <= MOST


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_real_ranks_send_what_is_counted(world: int) -> None:
    real, counted = measure_real(world, per_rank=60, deadline=60), count_simulated(world, per_rank=60)
    assert real.steps == counted.steps
    assert real.sent_bytes <= counted.sent_bytes
    assert real.sent_bytes > counted.sent_bytes - 8 * 5
    assert real.fixed_bytes <= MOST


@pytest.mark.slow
@pytest.mark.distributed
def test_sixteen_ranks_start() -> None:
    first = measure_real(16, per_rank=20, deadline=100).first_step_s
    assert first is not None
    assert first < 100


@pytest.mark.parametrize("world", [1, 2, 7, 4096])
def test_no_rank_has_more_than_two_below_it_and_all_are_reached(world: int) -> None:
    children = [tree_children(rank, world) for rank in range(world)]
    assert max(map(len, children)) <= 2
    assert sorted(child for below in children for child in below) == list(range(1, world))
