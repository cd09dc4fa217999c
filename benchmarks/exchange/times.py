"""Time of a round's collectives between idle ranks: those of ours, and those of the public package."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.exchange.public import FIRST, SECOND
from benchmarks.exchange.world import CONFIG
from odb_factory.core.protocol import RankProtocol
from odb_factory.core.stats import StepTotals
from odb_factory.runtime.exchange import GlooExchange
from odb_factory.runtime.rendezvous import meet
from tests.dist import run_ranks

STEPS = 32
"""Steps of the rounds of ours whose time is measured."""
MINIMA = 17
"""Numbers of the first reduction."""


def time_rounds(world: int, rounds: int, deadline: float = 240.0) -> dict[str, float]:
    """Median seconds of a round on rank 0, by method; the methods take turns in the same processes."""
    ranks = run_ranks(world, _rounds, rounds, deadline=deadline)
    return {method: statistics.median(seconds) for method, seconds in ranks[0].items()}


def _rounds(rank: int, world: int, rounds: int) -> dict[str, list[float]]:
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, about the call that the public package makes
    place, store = meet(rank, world, CONFIG.timeout)
    exchange = GlooExchange(place, CONFIG.timeout)

    def ours() -> None:
        exchange.minimum([1] * MINIMA, "a round")
        exchange.sum([1] * (StepTotals.WIDTH * STEPS + RankProtocol.TAIL), "a round")
        exchange.prefix_sum(1, "a round")

    def public() -> None:
        for numbers in (FIRST, SECOND):
            gathered = torch.empty(world * numbers, dtype=torch.int64)
            dist.all_gather_into_tensor(gathered, torch.ones(numbers, dtype=torch.int64))

    times = {"odb": [_timed(ours) for _ in range(rounds)], "public": [_timed(public) for _ in range(rounds)]}
    dist.barrier()
    assert (store is not None) == (rank == 0)
    return times


def _timed(function: Callable[[], None]) -> float:
    start = time.monotonic()
    function()
    return time.monotonic() - start
