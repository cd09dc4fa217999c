"""What the alignment costs as the world grows: bytes and time a round, and the start of many ranks.

Real gloo processes on this machine for 2 to 16 ranks; for larger worlds the bytes are counted on simulated ranks, which
run the same core. Times are given relative to two ranks, since the machine has few cores for many ranks:

    python -m benchmarks.scale
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch.distributed as dist

from benchmarks.tables import table
from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.core.sample import SampleMeta
from odb_factory.core.simulate import simulate
from odb_factory.runtime.exchange import GlooExchange
from odb_factory.runtime.rendezvous import meet
from tests.dist import run_ranks
from tests.runtime.helpers import Lengths, PadCollate

CONFIG = OdbConfig(token_budget=4096, depth=64, timeout=120.0)
STEPS = 32
"""Steps of the rounds whose time is measured."""


def lengths_of(size: int, seed: int = 0) -> list[int]:
    """Log-normal lengths (tokens)."""
    rng = random.Random(seed)
    return [min(2048, max(8, int(rng.lognormvariate(5.5, 0.8)))) for _ in range(size)]


def _bytes_and_start(rank: int, world: int, per_rank: int) -> tuple[float, int, int, float]:
    """(seconds to the first step, rounds, steps, bytes that this rank sent in the epoch)"""
    dist.barrier()
    start = time.monotonic()
    first = 0.0
    with OdbDataLoader(Lengths(lengths_of(per_rank * world)), PadCollate(), CONFIG) as loader:
        for _, info in loader:
            first = first or time.monotonic() - start
            step = info.step
        end = loader.epoch_ends[-1]
    return first, end.rounds, step + 1, end.exchange_bytes


def _time_of_rounds(rank: int, world: int, rounds: int) -> list[float]:
    """Seconds of each round's exchanges: a minimum, a sum over 32 steps, and a prefix sum."""
    place, store = meet(rank, world, CONFIG.timeout)
    exchange = GlooExchange(place, CONFIG.timeout)
    times = []
    for _ in range(rounds):
        start = time.monotonic()
        exchange.minimum([1] * 17, "a round")
        exchange.sum([1] * (4 * STEPS + 5), "a round")
        exchange.prefix_sum(1, "a round")
        times.append(time.monotonic() - start)
    dist.barrier()
    assert (store is not None) == (rank == 0)
    return times


def measure_real(world: int, per_rank: int = 200, rounds: int = 200, deadline: float = 240.0) -> dict[str, float]:
    """Bytes per step and round of a rank, median time of a round, and time to the first step (the slowest rank's)."""
    results = run_ranks(world, _bytes_and_start, per_rank, deadline=deadline)
    times = run_ranks(world, _time_of_rounds, rounds, deadline=deadline)
    steps, round_count = results[0][2], results[0][1]
    most = max(sent for *_, sent in results)
    return {
        "steps a round": steps / round_count,
        "bytes a round": most / round_count,
        "seconds a round": statistics.median(times[0]),
        "seconds to the first step": max(first for first, *_ in results),
    }


def count_simulated(world: int, per_rank: int = 200) -> dict[str, float]:
    """The same bytes, counted on simulated ranks."""
    samples = [SampleMeta(index=i, length=n, loss_tokens=1) for i, n in enumerate(lengths_of(per_rank * world))]
    traffic: list[tuple[str, int]] = []
    epoch = simulate(samples, CONFIG, world, traffic=traffic)
    rounds = len(epoch.rounds[0])
    return {
        "steps a round": len(epoch.steps[0]) / rounds,
        "bytes a round": 8 * sum(numbers for _, numbers in traffic) / rounds,
    }


def fixed_part(figures: dict[str, float]) -> float:
    """Bytes of a round beyond the totals of its steps (4 numbers each), which depend on the data."""
    return figures["bytes a round"] - 8 * 4 * figures["steps a round"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--counted", type=int, nargs="+", default=[64, 512, 4096])
    options = parser.parse_args()
    rows: list[list[Any]] = []
    base: dict[str, float] | None = None
    for world in options.real:
        figures = measure_real(world)
        base = base or figures
        times = [figures[key] / base[key] for key in ("seconds a round", "seconds to the first step")]
        rows.append([world, "processes", *_bytes(figures), *(f"{value:.1f}" for value in times)])
    for world in options.counted:
        per_rank = 200 if world <= 512 else 40
        rows.append([world, "counted", *_bytes(count_simulated(world, per_rank)), "", ""])
    print("Per rank; times relative to the first row:\n")
    head = ["ranks", "how", "steps a round", "bytes a round", "of these not for steps"]
    print(table([*head, "time of a round's exchanges", "time to the first step"], rows))


def _bytes(figures: dict[str, float]) -> list[str]:
    return [f"{figures['steps a round']:.1f}", f"{figures['bytes a round']:.0f}", f"{fixed_part(figures):.0f}"]


if __name__ == "__main__":
    main()
