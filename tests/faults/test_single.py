"""Faults and circumstances that have no place in the table: peers that never come, ports, several loaders."""

from __future__ import annotations

import itertools
import re
import socket
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch.distributed as dist

from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.runtime import loader as loader_module
from odb_factory.runtime.rendezvous import Rendezvous
from tests.dist import descendants, run_ranks
from tests.faults.rank import is_open
from tests.runtime.helpers import Epoch, Lengths, PadCollate, check_steps, check_world, heavy_tail, run_epoch

pytestmark = pytest.mark.distributed

BASE: dict[str, Any] = {"token_budget": 160, "depth": 16, "timeout": 40.0}


def _outcome(loader: OdbDataLoader) -> tuple[str, str, float]:
    """(class, text, seconds) of what the loader raises at its first step."""
    begun = time.monotonic()
    try:
        with loader:
            next(iter(loader))
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "nothing was raised", time.monotonic() - begun


# --- a peer that never comes

TIMEOUT = 6.0


def _without(rank: int, world: int, absent: int) -> tuple[str, str, float]:
    """One rank never makes its loader, but lives on, as one does that still downloads its data."""
    store = dist.distributed_c10d._get_default_store()
    if rank == absent:
        store.wait([f"gave up {other}" for other in range(world) if other != absent])
        return "", "", 0.0
    config = OdbConfig(**{**BASE, "timeout": TIMEOUT})
    outcome = _outcome(OdbDataLoader(Lengths(heavy_tail(60)), PadCollate(), config))
    store.set(f"gave up {rank}", "1")
    return outcome


@pytest.mark.parametrize("absent", [1, 0], ids=["any rank", "the rank that serves the store"])
def test_a_rank_that_never_makes_its_loader_is_an_error_on_the_others_within_the_timeout(absent: int) -> None:
    results = run_ranks(3, _without, absent, deadline=25.0)
    for rank, (name, text, seconds) in enumerate(results):
        if rank != absent:
            assert name == "ExchangeError", text
            assert seconds < TIMEOUT + 9
            assert re.search(rf"rank {absent} did not come|no loader was started on rank {absent};", text), text
            if absent != 0:  # rank 0 gives the address: without it, there is none to name
                where = r"(at [\w.-]+:\d+|through torch\.distributed) within 6 s"
                assert re.search(rf"rank {rank} of 3 could not meet the others {where}", text)


# --- the port


def _with_port(rank: int, world: int, port: int) -> tuple[str, str, float]:
    return _outcome(OdbDataLoader(Lengths(heavy_tail(60)), PadCollate(), OdbConfig(**BASE, port=port)))


@pytest.mark.parametrize("world", [2, 3])
def test_a_port_in_use_is_one_clear_error_on_every_rank_at_once(world: int) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        results = run_ranks(world, _with_port, port)
    assert len({text for _, text, _ in results}) == 1, results
    for name, text, seconds in results:
        assert name == "ExchangeError", text
        assert f"rank 0 cannot open port {port} (odb_port)" in text
        assert "it is in use" in text
        assert seconds < 15


def _on_port(rank: int, world: int, port: int, data: Lengths) -> tuple[list[Epoch], list[int], bool, bool]:
    places: list[Rendezvous] = []
    meet = loader_module.meet

    def note(*args: Any) -> Any:
        result = meet(*args)
        places.append(result[0])
        return result

    loader_module.meet = note  # type: ignore[attr-defined]
    with OdbDataLoader(data, PadCollate(), OdbConfig(**BASE, port=port)) as loader:
        epochs = [run_epoch(loader, data)]
        was_open = is_open(port)
        dist.barrier()
        next(iter(loader))  # and leave: the next epoch meets anew, on the same port
        dist.barrier()
        epochs.append(run_epoch(loader, data))
        dist.barrier()
    dist.barrier()
    return epochs, [place.port for place in places], was_open, is_open(port)


def test_a_given_port_is_used_as_often_as_needed_and_free_afterwards() -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("0.0.0.0", 0))
        port = sock.getsockname()[1]
    data = Lengths(heavy_tail(60))
    results = run_ranks(2, _on_port, port, data)
    for ranks in zip(*(epochs for epochs, _, _, _ in results), strict=True):
        check_world(ranks, data)
    for _, ports, was_open, is_still_open in results:
        assert set(ports) == {port}
        assert len(ports) == 2, "before and after the loop was left early"
        assert was_open
        assert not is_still_open


# --- two loaders in one process (for one rank, alternating steps: tests/runtime/test_loader.py)

SIZES = (70, 90)


def _two_loaders(rank: int, world: int, how: str) -> tuple[list[list[Epoch]], list[int]]:
    """Epochs of two loaders, and the processes left: epoch after epoch in turn, or step by step at the same time."""
    sets = [Lengths(heavy_tail(size, seed=size)) for size in SIZES]
    epochs: list[list[Epoch]] = [[], []]
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(OdbDataLoader(data, PadCollate(), OdbConfig(**BASE, seed=number), num_workers=number))
            for number, data in enumerate(sets)
        ]
        for _ in range(2):
            if how == "in turn":
                for seen, loader, data in zip(epochs, loaders, sets, strict=True):
                    seen.append(run_epoch(loader, data))
                continue
            both = Epoch(), Epoch()
            for pair in itertools.zip_longest(*loaders):
                for item, epoch in zip(pair, both, strict=True):
                    if item is not None:
                        epoch.infos.append(item[1])
            for epoch, seen, loader in zip(both, epochs, loaders, strict=True):
                epoch.end = loader.epoch_ends[-1]
                check_steps(epoch)
                seen.append(epoch)
    return epochs, descendants()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["in turn", "at the same time"])
def test_two_loaders_in_one_process_both_finish_with_every_index_once(how: str, world: int) -> None:
    results = run_ranks(world, _two_loaders, how, init_group=world > 1)
    for number, size in enumerate(SIZES):
        data = Lengths(heavy_tail(size, seed=size))
        for ranks in zip(*(epochs[number] for epochs, _ in results), strict=True):
            check_world(ranks, data)
            if world > 1:
                assert all(rank.end.exchanges == 2 * rank.end.rounds > 0 for rank in ranks)
    assert [left for _, left in results] == [[]] * world
