"""Ours: counted by the runtime in real processes, and by the simulator in larger worlds."""

from __future__ import annotations

import time

import torch.distributed as dist

from benchmarks.exchange.world import CONFIG, NUMBER, RoundCost, Tokens, collate, lengths_of
from odb_factory import OdbDataLoader
from odb_factory.core.sample import SampleMeta
from odb_factory.core.simulate import simulate
from tests.dist import run_ranks


def measure_real(
    world: int, per_rank: int = 200, seed: int = 0, *, workers: int = 0, deadline: float = 240.0
) -> RoundCost:
    """An epoch of real gloo processes."""
    ranks = run_ranks(world, _epoch, per_rank, seed, workers, deadline=deadline)
    _, rounds, steps, _ = ranks[0]
    sent = max(sent for *_, sent in ranks) / rounds
    # a prefix sum brings no rank more than some rank sends
    return RoundCost(
        steps=steps / rounds,
        sent_bytes=sent,
        received_bytes=sent,
        first_step_s=max(first for first, *_ in ranks),
    )


def _epoch(rank: int, world: int, per_rank: int, seed: int, workers: int) -> tuple[float, int, int, int]:
    """(seconds to the first step, rounds, steps, bytes that this rank sent in the epoch)"""
    data = Tokens(lengths_of(per_rank * world, seed))
    dist.barrier()
    start = time.monotonic()
    first, steps = 0.0, 0
    with OdbDataLoader(data, collate, CONFIG, num_workers=workers) as loader:
        for _ in loader:
            first = first or time.monotonic() - start
            steps += 1
        end = loader.epoch_ends[-1]
    return first, end.rounds, steps, end.exchange_bytes


def count_simulated(world: int, per_rank: int = 200, seed: int = 0) -> RoundCost:
    """The same bytes, counted on simulated ranks, which run the same core."""
    lengths = lengths_of(per_rank * world, seed)
    samples = [SampleMeta(index=i, length=n, loss_tokens=1) for i, n in enumerate(lengths)]
    traffic: list[tuple[str, int]] = []
    epoch = simulate(samples, CONFIG, world, traffic=traffic)
    rounds = len(epoch.rounds[0])
    sent = NUMBER * sum(numbers for _, numbers in traffic) / rounds
    return RoundCost(steps=len(epoch.steps[0]) / rounds, sent_bytes=sent, received_bytes=sent)
