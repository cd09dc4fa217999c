"""v1's strategies beside ours on the same lengths; see README of `benchmarks/`."""

from __future__ import annotations

import argparse

from benchmarks.errors import BenchmarkError
from benchmarks.lengths import PROFILES
from benchmarks.rows import RowWriter

HELP = "LLaMA-Factory's v1: its normal and dynamic_batching strategies beside ours, lengths replayed"

MICRO_BATCH_SIZE = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", nargs="+", default=["ultrachat", "llava", "sharegpt4o"], choices=tuple(PROFILES))
    parser.add_argument("--world", type=int, nargs="+", default=[2, 8], help="ranks")
    parser.add_argument("--depth", type=int, default=None, help="samples a rank holds (default 1024)")
    parser.add_argument("--size", type=int, default=None, help="samples (default 24 windows of all ranks)")
    parser.add_argument("--micro-batch-size", type=int, default=MICRO_BATCH_SIZE)


def measure(options: argparse.Namespace, rows: RowWriter) -> None:
    """A row for each profile, world and strategy, all with a budget of `micro_batch_size` x `cutoff_len`."""
    from benchmarks.balance.figures import epoch_figures, online_figures
    from benchmarks.batchers.online import odb_config, run_online
    from benchmarks.epochs import StepTime
    from benchmarks.lengths import draw
    from benchmarks.v1.strategies import dynamic_batching, normal

    depth = options.depth or (64 if options.quick else 1024)
    size = options.micro_batch_size
    if min(depth, size, *options.world) < 1 or (options.size or 1) < 1:
        raise BenchmarkError("--depth, --micro-batch-size, --world and --size must be at least 1.")
    for profile in options.profile:
        cutoff = PROFILES[profile].longest
        for world in options.world:
            lengths = draw(profile, options.size or (6 if options.quick else 24) * world * depth, options.seed)
            online = run_online(lengths, odb_config(depth, size * cutoff, options.seed, 1), world)
            epochs = {
                "v1 normal": normal(lengths, world=world, batch_size=size, seed=options.seed),
                "v1 dynamic_batching": dynamic_batching(
                    lengths, world=world, batch_size=size, cutoff=cutoff, seed=options.seed
                ),
                "odb": online.epoch,
            }
            for method, epoch in epochs.items():
                figures = epoch_figures(epoch, size * cutoff, StepTime())
                row = rows.add(
                    what="epoch",
                    data=profile,
                    method=method,
                    ranks=world,
                    depth=depth if method == "odb" else None,
                    budget=size * cutoff,
                    seed=options.seed,
                    settings={"samples": len(lengths), "micro_batch_size": size, "cutoff": cutoff},
                    figures=figures | (online_figures(online) if method == "odb" else {}),
                )
                print(f"{profile:11} W={world} {method:20} ideal {row.figures['ideal_share']:.4f}", flush=True)
