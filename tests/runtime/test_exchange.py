"""Where the collate processes meet, and the reductions between them."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from odb_factory.core.assignment import exclusive_sums
from odb_factory.runtime.errors import ExchangeError
from odb_factory.runtime.exchange import GlooExchange, LocalExchange, connect, try_gloo
from odb_factory.runtime.rendezvous import Rendezvous, _broadcast, meet, resolve_world, serve_store
from tests.dist import run_ranks

# --- which rank am I


def test_one_process_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert resolve_world(None, None) == (0, 1)
    assert resolve_world(2, 4) == (2, 4)


def test_several_announced_ranks_without_a_process_group_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ExchangeError, match=r"4 ranks \(WORLD_SIZE\).*init_process_group"):
        resolve_world(None, None)
    assert resolve_world(1, 4) == (1, 4)


@pytest.mark.parametrize(
    ("rank", "world_size", "text"),
    [(0, None, "both"), (None, 2, "both"), (2, 2, "rank 2 .* 2 ranks"), (-1, 2, "rank -1"), (0, 0, "rank 0")],
)
def test_half_a_place_or_an_impossible_one_is_an_error(rank: Any, world_size: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolve_world(rank, world_size)


def test_ranks_without_a_process_group_cannot_meet() -> None:
    with pytest.raises(ExchangeError, match=r"2 ranks need a torch\.distributed process group.*rendezvous="):
        meet(0, 2, 5.0)


def test_a_world_of_one_exchanges_nothing() -> None:
    exchange = connect(None, 5.0)
    assert isinstance(exchange, LocalExchange)
    assert exchange.minimum((3, -1), "a test") == [3, -1]
    assert exchange.sum((3, -1), "a test") == [3, -1]
    assert (exchange.count, exchange.sent_bytes) == (0, 0)


def test_gloo_works_in_this_process() -> None:
    assert try_gloo() is not None


def test_a_machine_without_a_usable_network_is_an_error_that_says_what_to_look_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(ExchangeError, match=r"cannot open a Gloo connection.*GLOO_SOCKET_IFNAME"):
        try_gloo()


# --- several ranks

BIG = 2**62


def _reduce(rank: int, world: int) -> tuple[Any, ...]:
    assert resolve_world(None, None) == (rank, world)
    place, store = meet(rank, world, 20.0)
    assert (store is not None) == (rank == 0)
    assert (place.rank, place.world_size) == (rank, world)
    exchange = connect(place, 20.0)
    assert isinstance(exchange, GlooExchange)
    low = exchange.minimum((rank, -rank, BIG, 7 - rank), "a test")
    total = exchange.sum((rank, 1, BIG // 8), "a test")
    many = exchange.sum(range(1000), "a test")
    dist.barrier()  # the store must outlive the exchange
    return low, total, many, exchange.count, exchange.sent_bytes


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_reductions_are_the_same_on_all_ranks(world: int) -> None:
    results = run_ranks(world, _reduce)
    top = world - 1
    for low, total, many, count, sent in results:
        assert low == [0, -top, BIG, 7 - top]
        assert total == [sum(range(world)), world, world * (BIG // 8)]
        assert many == [i * world for i in range(1000)]
        assert count == 3
        assert sent == 8 * (4 + 3 + 1000), "what a rank puts in does not depend on the number of ranks"


def _wrong_size(rank: int, world: int) -> str:
    with pytest.raises(ExchangeError) as caught:
        meet(rank, world + 1, 5.0)
    return str(caught.value)


@pytest.mark.distributed
def test_a_process_group_of_another_size_is_an_error() -> None:
    for text in run_ranks(2, _wrong_size):
        assert "3 ranks need a torch.distributed process group of that size" in text


def _meet_alone(rank: int, world: int, port: int, timeout: float) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(ExchangeError) as caught:
        GlooExchange(Rendezvous(host="127.0.0.1", port=port, rank=rank, world_size=2), timeout)
    return str(caught.value), time.monotonic() - start


@pytest.mark.distributed
def test_a_rank_that_never_comes_is_an_error_within_the_timeout() -> None:
    store = serve_store(30.0)
    [(text, seconds)] = run_ranks(1, _meet_alone, store.port, 3.0, init_group=False)
    assert f"rank 0 of 2 could not meet the others at 127.0.0.1:{store.port} within 3 s: rank 1 did not come;" in text
    assert "GLOO_SOCKET_IFNAME" in text
    assert 1.5 < seconds < 15


@pytest.mark.distributed
def test_a_store_that_nobody_serves_is_an_error_within_the_timeout() -> None:
    store = serve_store(5.0)
    port = store.port
    del store
    [(text, seconds)] = run_ranks(1, _meet_alone, port, 2.0, init_group=False)
    assert f"rank 0 of 2 could not meet the others at 127.0.0.1:{port}" in text
    assert "rank 0's trainer, which serves the meeting, does not answer" in text
    assert seconds < 10


def _die_before_the_meeting(rank: int, world: int, dead: int, seconds: float) -> str:
    if rank == dead:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        place, store = meet(rank, world, 20.0)
        GlooExchange(place, 4.0)
    except ExchangeError as error:
        return str(error)
    return f"nothing was raised, with the store {store}"


@pytest.mark.distributed
@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["before", "while the other waits"])
@pytest.mark.parametrize("dead", [0, 1])
def test_of_two_ranks_the_one_that_died_before_the_meeting_is_named(dead: int, seconds: float) -> None:
    other = 1 - dead
    text = run_ranks(2, _die_before_the_meeting, dead, seconds, may_die=[dead])[other]
    assert text.startswith(f"rank {other} of 2 could not meet the others ")
    named = rf"rank {dead} (ended before its loader had started|did not come); "
    assert re.search(named, text), text
    assert "another" not in text


@pytest.mark.distributed
def test_of_three_ranks_the_one_that_died_before_the_meeting_is_named() -> None:
    for text in run_ranks(3, _die_before_the_meeting, 2, 0.0, may_die=[2])[:2]:
        # of those that did not come, a survivor may be one that was late
        assert re.search(
            r"(another rank ended before its loader had started \(|: )ranks? (1, )?2 did not come", text
        ), text


def _come_in_vain(rank: int, world: int) -> str:
    if rank == 1:  # alive, but busy
        dist.distributed_c10d._get_default_store().wait(["gave up"])
        return ""
    for number in range(2):  # the second time, as after an early break
        with pytest.raises(ExchangeError) as caught:
            _broadcast(("", 0, ""), rank, world, 2.0)
        if number:
            dist.distributed_c10d._get_default_store().set("gave up", "1")
    return str(caught.value)


@pytest.mark.distributed
def test_a_rank_that_is_late_for_the_meeting_is_named() -> None:
    text, _ = run_ranks(2, _come_in_vain)
    where = "rank 0 of 2 could not meet the others through torch.distributed within 2 s (odb_timeout): "
    assert text.startswith(f"{where}no loader was started on rank 1; look there ")


def _die_in_the_middle(rank: int, world: int) -> tuple[str, float]:
    place, store = meet(rank, world, 60.0)
    exchange = GlooExchange(place, 60.0)
    assert exchange.sum((1,), "the first") == [world]
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(ExchangeError) as caught:
        exchange.minimum((1,), "the second exchange of round 3 of epoch 1")
    assert store is None or rank == 0
    return str(caught.value), time.monotonic() - start


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_dies_is_an_error_at_once(world: int) -> None:
    results = run_ranks(world, _die_in_the_middle, may_die=[world - 1])
    assert results[-1] is None
    for rank, (text, seconds) in enumerate(results[:-1]):
        assert f"rank {rank} of {world} lost the others in the second exchange of round 3 of epoch 1" in text
        assert f": rank {world - 1} ended without a word; look for the first error" in text
        assert seconds < 10, "not after the time-out of 60 s"


def _busy_elsewhere(rank: int, world: int) -> str:
    place, store = meet(rank, world, 60.0)
    exchange = GlooExchange(place, 60.0)
    exchange.sum((1,), "the first")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        time.sleep(12.0)  # collates, or its trainer computes
    with pytest.raises(ExchangeError) as caught:
        exchange.minimum((1,), "the next exchange")
    time.sleep(1.0 if rank == 2 else 9.0)  # the store is served by rank 0
    assert store is None or rank == 0
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_living_rank_that_is_busy_is_not_called_dead() -> None:
    first, _, third = run_ranks(3, _busy_elsewhere, may_die=[1])
    assert "no answer from ranks 1, 2, of which at least one ended" in first
    assert "rank 1 ended without a word" in third


def _prefix_sums(rank: int, world: int) -> list[Any]:
    place, store = meet(rank, world, 30.0)
    exchange = GlooExchange(place, 30.0)
    before = exchange.sent_bytes
    sums = [exchange.prefix_sum(value, "a prefix sum") for value in (7 * rank % 5, 0, 2**40 + rank)]
    dist.barrier()
    assert (store is not None) == (rank == 0)
    return [sums, exchange.sent_bytes - before]


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_prefix_sums_are_those_of_the_tree_and_cost_a_few_numbers(world: int) -> None:
    results = run_ranks(world, _prefix_sums)
    for number, value in enumerate((lambda r: 7 * r % 5, lambda r: 0, lambda r: 2**40 + r)):
        values = [value(rank) for rank in range(world)]
        expected = [(before, sum(values)) for before in exclusive_sums(values)]
        assert [sums[number] for sums, _ in results] == expected
    assert max(sent for _, sent in results) <= 3 * 5 * 8


def _come_late(rank: int, world: int) -> list[int]:
    place, store = meet(rank, world, 3.0)
    exchange = GlooExchange(place, 3.0)
    time.sleep(4.0 * rank)
    total = exchange.sum((1,), "an exchange to which rank 1 comes late")
    dist.barrier()
    assert (store is not None) == (rank == 0)
    return total


@pytest.mark.distributed
def test_a_reduction_waits_for_a_rank_that_comes_late() -> None:
    """Whether that is too late is for the trainers to say: it does not matter while they do something else."""
    assert run_ranks(2, _come_late) == [[2], [2]]
