"""Peak memory of the collate process under `window_bytes`, and what the bound costs in padding.

The peak must stay within `window_bytes` and a constant: two micro-batches (one that is made, and its samples unpacked)
and four samples (the filler, one that is known to follow, and one that arrives, which is there twice). Samples
hold pixel tensors of 1 to 25 MB, in proportion to their length. Each row is an epoch in a fresh process:

    python -m benchmarks.memory
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.tables import table
from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.core.stats import padding_share

MB = 2**20
BUDGET = 8192
LARGEST = 25 * MB
LONGEST = 4096


class Pixels:
    """Sample i has `lengths[i]` tokens, and pixels of 1 to 25 MB in proportion to that."""

    def __init__(self, size: int, seed: int) -> None:
        rng = random.Random(seed)
        self.lengths = [min(LONGEST, max(164, int(rng.lognormvariate(6.6, 0.8)))) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self.lengths[index]
        pixels = torch.full((LARGEST * length // LONGEST // 4,), 1.0)
        return {"input_ids": torch.full((length,), index), "pixel_values": pixels}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Padded ids, and all pixels one after the other, as a vision-language model takes them."""
    ids = torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True)
    return {"input_ids": ids, "pixel_values": torch.cat([s["pixel_values"] for s in samples])}


@dataclass(frozen=True)
class Row:
    """One epoch."""

    limit: int | None
    peak: int
    """Bytes by which the resident memory of the collate process rose above what it was before the epoch."""
    largest_batch: int
    """Bytes of the largest micro-batch."""
    padding: float
    steps: int
    rounds: int
    short: int
    """Rounds whose window the bound kept small."""
    samples: int

    @property
    def constant(self) -> int:
        """What may come on top of the window: a micro-batch, its samples unpacked, and samples on their way in."""
        return 2 * self.largest_batch + 4 * LARGEST


def measure(limit: int | None, *, size: int, depth: int, workers: int, seed: int = 0) -> Row:
    """An epoch of one rank in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        row: Row = pool.apply(_epoch, (limit, size, depth, workers, seed))
    return row


def _epoch(limit: int | None, size: int, depth: int, workers: int, seed: int) -> Row:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it has children
    config = OdbConfig(
        token_budget=BUDGET, depth=depth, window_bytes=limit or 2**50, ramp=False, queue_steps=1, seed=seed
    )
    padded = tokens = largest = steps = samples = 0
    with OdbDataLoader(Pixels(size, seed), collate, config, num_workers=workers) as loader:
        loader._session = session = loader._start()
        while session.phase != "waiting for the next epoch":
            pass
        pid = session.process.pid
        before = _status(pid, "VmRSS")
        peak = before
        for batch, info in loader:
            largest = max(largest, batch["pixel_values"].nbytes)
            padded, tokens = padded + info.padded_tokens, tokens + info.tokens
            steps, samples = steps + 1, samples + info.samples
            peak = _status(pid, "VmHWM")
        end = loader.epoch_ends[-1]
        peak = max(peak, _status(pid, "VmHWM"))
    return Row(
        limit, peak - before, largest, padding_share(tokens, padded), steps, end.rounds, end.short_windows, samples
    )


def _status(pid: Any, key: str) -> int:
    """A figure of /proc/PID/status in bytes."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


HEAD = ["window_bytes", "peak over start", "bound", "micro-batch, at most", "padding", "steps", "short windows"]


def render(rows: list[Row]) -> str:
    """The table; sizes in MB."""

    def cells(row: Row) -> list[object]:
        bound = f"{(row.limit + row.constant) / MB:.0f}" if row.limit else "none"
        return [
            f"{row.limit / MB:.0f}" if row.limit else "none",
            f"{row.peak / MB:.0f}",
            bound,
            f"{row.largest_batch / MB:.0f}",
            f"{row.padding:.1%}",
            row.steps,
            f"{row.short} of {row.rounds}",
        ]

    return table(HEAD, map(cells, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limits", type=int, nargs="+", default=[100, 200, 400, 800], help="window_bytes in MB")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--depth", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    how: dict[str, Any] = {"size": options.samples, "depth": options.depth, "workers": options.workers}
    rows = [measure(limit * MB, **how) for limit in options.limits] + [measure(None, **how)]
    print(f"{options.samples} samples of 1 to 25 MB, depth {options.depth}, {options.workers} workers; sizes in MB:\n")
    print(render(rows))
    over = [row for row in rows if row.limit and row.peak > row.limit + row.constant]
    if over:
        raise SystemExit(f"{len(over)} runs took more than the bound")


if __name__ == "__main__":
    main()
