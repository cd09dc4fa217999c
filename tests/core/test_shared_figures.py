"""The shared cursor against static assignment, in a small world. `python -m benchmarks balance`: up to 64 ranks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from odb_factory.config import OdbConfig
from odb_factory.core.sample import SampleMeta
from odb_factory.core.simulate import simulate
from odb_factory.core.stats import ideal_time_share

LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "log-normal": lambda rng: min(4096, max(8, int(rng.lognormvariate(6.2, 0.8)))),
    "two kinds": lambda rng: rng.randint(20, 200) if rng.random() < 0.5 else rng.randint(1500, 4000),
    "nearly equal": lambda rng: rng.randint(900, 1100),
}
"""Draws one observed length (tokens)."""


def measure(kind: str, world_size: int, per_rank: int, assignment: str, *, depth: int, seed: int) -> tuple[float, int]:
    """(share of ideal time, IDLE slots) of one epoch over `world_size * per_rank` samples."""
    rng = random.Random(seed)
    lengths = [LENGTHS[kind](rng) for _ in range(world_size * per_rank)]
    samples = [SampleMeta(index=i, length=length, loss_tokens=1) for i, length in enumerate(lengths)]
    config = OdbConfig(token_budget=8192, depth=depth, assignment=assignment, seed=seed)
    steps = zip(*simulate(samples, config, world_size).steps, strict=True)
    costs = [[step.group.cost if step.group else 0 for step in ranks] for ranks in steps]
    padded = sum(map(sum, costs))
    return ideal_time_share(costs) * sum(lengths) / padded, sum(ranks.count(0) for ranks in costs)


@pytest.mark.parametrize("kind", LENGTHS)
def test_the_shared_cursor_is_not_worse_than_static_assignment(kind: str) -> None:
    """Means over some epochs: single ones depend on the draw."""
    runs = {how: [measure(kind, 8, 400, how, depth=64, seed=seed) for seed in range(4)] for how in ("static", "shared")}
    ideal = {how: sum(share for share, _ in rows) for how, rows in runs.items()}
    idle = {how: sum(count for _, count in rows) for how, rows in runs.items()}
    assert ideal["shared"] > ideal["static"] * (0.999 if kind == "nearly equal" else 1.005)
    assert idle["shared"] <= idle["static"]
