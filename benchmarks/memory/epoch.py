"""One epoch over samples with large pixel tensors, in a fresh process, and what its collate process took."""

from __future__ import annotations

import multiprocessing
import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.core.stats import padding_share
from odb_factory.runtime.session import MORE_SLOTS

MB = 2**20
BUDGET = 8192
LARGEST = 25 * MB
LONGEST = 4096
START_SECONDS = 60.0
QUEUE_STEPS = 1


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
class Peak:
    """What one epoch took."""

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
        """Bytes that may come on top of the window.

        The micro-batches in memory that is shared with the trainer, which this process counts too; one more (the
        samples of the one that is made, or one for which there was no shared memory); and four samples: the filler, one
        that is known to follow, and one that arrives, which is there twice.
        """
        return (1 + QUEUE_STEPS + MORE_SLOTS) * self.largest_batch + 4 * LARGEST

    @property
    def within(self) -> bool:
        """Whether the peak kept to the bound; true where there is none."""
        return self.limit is None or self.peak <= self.limit + self.constant


def measure_epoch(limit: int | None, *, size: int, depth: int, workers: int, seed: int = 0) -> Peak:
    """An epoch of one rank in a process of its own, with `limit` bytes for its window."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        peak: Peak = pool.apply(_epoch, (limit, size, depth, workers, seed))
    return peak


def _epoch(limit: int | None, size: int, depth: int, workers: int, seed: int) -> Peak:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it has children
    config = OdbConfig(
        token_budget=BUDGET, depth=depth, window_bytes=limit or 2**50, ramp=False, queue_steps=QUEUE_STEPS, seed=seed
    )
    padded = tokens = largest = steps = samples = 0
    with OdbDataLoader(Pixels(size, seed), collate, config, num_workers=workers) as loader:
        loader._session = session = loader._start()
        end_of_start = time.monotonic() + START_SECONDS
        while session.phase != "waiting for the next epoch":
            if time.monotonic() > end_of_start:
                raise TimeoutError(f"the collate process is still at: {session.phase}")
            time.sleep(0.01)
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
    return Peak(
        limit, peak - before, largest, padding_share(tokens, padded), steps, end.rounds, end.short_windows, samples
    )


def _status(pid: Any, key: str) -> int:
    """A figure of /proc/PID/status in bytes."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))
