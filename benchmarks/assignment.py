"""Static against shared assignment of indices: fillers and share of ideal time, on simulated ranks.

The rounds are those of the real core (`odb_factory.core.simulate`), without processes. Lengths are drawn at random:

    python -m benchmarks.assignment
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.tables import table
from odb_factory.config import OdbConfig
from odb_factory.core.sample import SampleMeta
from odb_factory.core.simulate import simulate
from odb_factory.core.stats import ideal_time_share

BUDGET = 8192

LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "log-normal": lambda rng: min(4096, max(8, int(rng.lognormvariate(6.2, 0.8)))),
    "two kinds": lambda rng: rng.randint(20, 200) if rng.random() < 0.5 else rng.randint(1500, 4000),
    "nearly equal": lambda rng: rng.randint(900, 1100),
}
"""Draws one observed length (tokens)."""


@dataclass(frozen=True)
class Row:
    """What one epoch of all ranks came to."""

    steps: int
    fillers: float
    """Share of the step slots of all ranks."""
    ideal: float
    """Real tokens / (ranks x sum over steps of the slowest rank's padded tokens)."""


def measure(kind: str, world_size: int, per_rank: int, assignment: str, *, depth: int, seed: int) -> Row:
    """One epoch over `world_size * per_rank` samples."""
    rng = random.Random(seed)
    lengths = [LENGTHS[kind](rng) for _ in range(world_size * per_rank)]
    samples = [SampleMeta(index=i, length=length, loss_tokens=1) for i, length in enumerate(lengths)]
    config = OdbConfig(token_budget=BUDGET, depth=depth, assignment=assignment, seed=seed)
    epoch = simulate(samples, config, world_size)
    costs = [[step.group.cost if step.group else 0 for step in steps] for steps in zip(*epoch.steps, strict=True)]
    slots = len(costs) * world_size
    padded = sum(map(sum, costs))
    return Row(
        steps=len(costs),
        fillers=sum(step.group is None for rank in epoch.steps for step in rank) / slots,
        ideal=ideal_time_share(costs) * sum(lengths) / padded,
    )


def compare(kinds: Sequence[str], worlds: Sequence[int], per_rank: int, depth: int, seeds: int) -> list[list[object]]:
    """A row for each kind and world: fillers and share of ideal time, means over seeds, and the ratio of each epoch."""
    rows: list[list[object]] = []
    for kind in kinds:
        for world_size in worlds:
            epochs = range(seeds if world_size <= 64 else 1)
            static, shared = (
                [measure(kind, world_size, per_rank, how, depth=depth, seed=seed) for seed in epochs]
                for how in ("static", "shared")
            )
            ratios = [b.ideal / a.ideal for a, b in zip(static, shared, strict=True)]
            fillers = [f"{_mean([r.fillers for r in runs]):.1%}" for runs in (static, shared)]
            ideal = [f"{_mean([r.ideal for r in runs]):.3f}" for runs in (static, shared)]
            rows.append([kind, world_size, *fillers, *ideal, f"{_mean(ratios):.3f}", f"{min(ratios):.3f}"])
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


HEAD = [
    "lengths",
    "ranks",
    "fillers, static",
    "fillers, shared",
    "ideal, static",
    "ideal, shared",
    "ratio",
    "least ratio of an epoch",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 8, 64, 512])
    parser.add_argument("--per-rank", type=int, default=600, help="samples of each rank")
    parser.add_argument("--depth", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=5, help="epochs over which is averaged (512 ranks: one)")
    options = parser.parse_args()
    rows = compare(list(LENGTHS), options.worlds, options.per_rank, options.depth, options.seeds)
    print(f"{options.per_rank} samples a rank, depth {options.depth}, budget {BUDGET} tokens, one epoch:\n")
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
