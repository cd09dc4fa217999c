"""Measures an epoch for each bound on the window's bytes, and one without."""

from __future__ import annotations

import argparse

from benchmarks.errors import BenchmarkError
from benchmarks.rows import RowWriter

HELP = "peak memory of the collate process under window_bytes, and what the bound costs in padding"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limits", type=int, nargs="+", help="window_bytes in MiB (default: 100 200 400 800)")
    parser.add_argument("--samples", type=int, help="default: 600, with --quick 120")
    parser.add_argument("--depth", type=int, help="default: 256, with --quick 128")
    parser.add_argument("--workers", type=int, default=2)


def measure(options: argparse.Namespace, rows: RowWriter) -> None:
    """A row for each bound.

    Raises:
        BenchmarkError: a peak was above its bound; all rows have been written.
    """
    from benchmarks.memory.epoch import BUDGET, MB, measure_epoch

    size = options.samples or (120 if options.quick else 600)
    depth = options.depth or (128 if options.quick else 256)
    limits = options.limits or ([100] if options.quick else [100, 200, 400, 800])
    over = []
    for limit in (*limits, None):
        bound = None if limit is None else limit * MB
        peak = measure_epoch(bound, size=size, depth=depth, workers=options.workers, seed=options.seed)
        rows.add(
            what="epoch",
            data="pixels of 1 to 25 MiB",
            method="odb",
            ranks=1,
            depth=depth,
            budget=BUDGET,
            seed=options.seed,
            settings={"window_mib": limit, "samples": size, "workers": options.workers},
            figures={
                "peak_mib": peak.peak / MB,
                "constant_mib": peak.constant / MB,
                "largest_batch_mib": peak.largest_batch / MB,
                "padding": peak.padding,
                "steps": peak.steps,
                "rounds": peak.rounds,
                "short_windows": peak.short,
                "within": peak.within,
                "emitted": peak.samples,
            },
        )
        print(f"  window_bytes {limit} MiB: peak {peak.peak / MB:.0f} MiB", flush=True)
        if not peak.within:
            over.append(str(limit))
    if over:
        raise BenchmarkError(f"the collate process took more than the bound with window_bytes {', '.join(over)} MiB.")
