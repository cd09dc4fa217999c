"""Measures real worlds, and counts larger ones."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from benchmarks.rows import RowWriter

if TYPE_CHECKING:
    from benchmarks.exchange.world import RoundCost

HELP = "bytes and time of a round against the number of ranks"

PER_RANK = 200
LARGE_WORLD, LARGE_PER_RANK = 1000, 40
"""Beyond so many ranks, so many samples a rank."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--real", type=int, nargs="+", help="worlds of real processes (default: 2 4 8 16)")
    parser.add_argument("--counted", type=int, nargs="+", help="worlds that are counted (default: 64 512 4096)")
    parser.add_argument("--rounds", type=int, help="rounds whose time is measured (default: 200, with --quick 20)")


def measure(options: argparse.Namespace, rows: RowWriter) -> None:
    """A row for each world and method."""
    from benchmarks.exchange import ours, public
    from benchmarks.exchange.times import time_rounds

    with_public = public.installed()
    if not with_public:
        print("public: the package online-dynamic-batching is not installed; its rows are left out.", flush=True)
    writer = _Writer(rows, options.seed)
    per_rank = 60 if options.quick else PER_RANK
    for world in options.real or ([2, 4] if options.quick else [2, 4, 8, 16]):
        times = time_rounds(world, options.rounds or (20 if options.quick else 200))
        cost = ours.measure_real(world, per_rank, options.seed, workers=1)
        writer.add("odb", world, "processes", per_rank, cost, times["odb"])
        if with_public:
            cost = public.measure_real(world, per_rank, options.seed)
            writer.add("public", world, "processes", per_rank, cost, times["public"])
    for world in options.counted or ([64] if options.quick else [64, 512, 4096]):
        each = min(per_rank, LARGE_PER_RANK) if world > LARGE_WORLD else per_rank
        writer.add("odb", world, "counted", each, ours.count_simulated(world, each, options.seed))
        if with_public:
            writer.add("public", world, "formula, at most", each, public.by_formula(world))


class _Writer:
    def __init__(self, rows: RowWriter, seed: int) -> None:
        self._rows = rows
        self._seed = seed

    def add(
        self, method: str, world: int, how: str, per_rank: int, cost: RoundCost, seconds: float | None = None
    ) -> None:
        """A row; what is not known for this method and world is None."""
        from benchmarks.exchange.world import CONFIG

        self._rows.add(
            what="round",
            data="log-normal",
            method=method,
            ranks=world,
            depth=CONFIG.depth,
            budget=CONFIG.token_budget,
            seed=self._seed,
            settings={"how": how, "samples_per_rank": per_rank},
            figures={
                "steps_per_round": None if math.isnan(cost.steps) else cost.steps,
                "sent_bytes_per_round": cost.sent_bytes,
                "fixed_bytes_per_round": cost.fixed_bytes if method == "odb" else None,
                "received_bytes_per_round": cost.received_bytes,
                "round_s": seconds,
                "first_step_s": cost.first_step_s,
            },
        )
        text = (
            f"  {method}, {world} ranks, {how}: {cost.sent_bytes:,.0f} bytes sent, {cost.received_bytes:,.0f} received"
        )
        print(text, flush=True)
