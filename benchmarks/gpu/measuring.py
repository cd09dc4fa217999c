"""One method, measured: warm-up, then every sample once, with the clock read at both ends only."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.data import Sample
from benchmarks.gpu.feeds import Feed
from benchmarks.gpu.shape import Work
from benchmarks.gpu.trainee import Trainee

WARM_UPS = 2
"""Runs of each warm-up micro-batch: the first one loads kernels and grows the allocator's cache."""


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    seconds: float = 0.0
    """From when the first micro-batch was there until the device was done with the last one."""
    steps: int = 0
    indices: list[int] = field(default_factory=list)
    """Samples in the order in which they were trained on."""
    padded_tokens: int = 0
    wait_s: float = 0.0
    """Spent in the loader, but for the first micro-batch."""
    first_batch_s: float = 0.0
    """Until the first micro-batch was there, with the start of the loader."""
    loss: float = math.nan
    """Mean over the steps."""
    complete: bool = False
    """Every sample was due and came; otherwise time ran out."""


def run(trainee: Trainee, feed: Feed, limit_s: float) -> Outcome:
    """Trains on what `feed` gives, about `limit_s` seconds at most, and one step at least.

    Raises:
        OutOfMemory: in the warm-up or in the run.
    """
    for costly in feed.warm_up:
        for _ in range(WARM_UPS):
            trainee.step(costly)
    trainee.wait()
    outcome = Outcome()
    opened = time.perf_counter()
    with feed.open() as batches:
        item = next(batches, None)
        begun = time.perf_counter()
        outcome.first_batch_s = begun - opened
        total: Any = 0.0
        while item is not None:
            batch, scale = item
            total = total + trainee.step(batch, scale)
            outcome.steps += 1
            outcome.indices += batch["indices"]
            outcome.padded_tokens += batch["input_ids"].numel()
            asked = time.perf_counter()
            if asked - begun > limit_s:
                break
            item = next(batches, None)
            outcome.wait_s += time.perf_counter() - asked
        outcome.complete = item is None
        trainee.wait()
        outcome.seconds = time.perf_counter() - begun
    outcome.loss = float(total) / max(1, outcome.steps)
    return outcome


def figures_of(
    outcome: Outcome, samples: Sequence[Sample], work: Work, peak_flops: float | None
) -> dict[str, float | int]:
    """The figures of a row. MFU is by the model FLOPs of real tokens; absent where the device's peak is not known."""
    trained = [samples[index] for index in outcome.indices]
    real_tokens = sum(sample.length for sample in trained)
    figures: dict[str, float | int] = {
        "samples_per_s": len(trained) / outcome.seconds,
        "tokens_per_s": real_tokens / outcome.seconds,
        "padded_tokens_per_s": outcome.padded_tokens / outcome.seconds,
        "padding_share": 1 - real_tokens / outcome.padded_tokens,
        "wait_share": outcome.wait_s / outcome.seconds,
        "samples": len(trained),
        "unique_samples": len(set(outcome.indices)),
        "visual_tokens": sum(sample.visual_tokens for sample in trained),
        "steps": outcome.steps,
        "seconds": outcome.seconds,
        "first_batch_s": outcome.first_batch_s,
        "loss": outcome.loss,
    }
    if peak_flops is not None:
        flops = sum(work.of_sample(sample.length, sample.images) for sample in trained)
        figures["mfu"] = flops / (outcome.seconds * peak_flops)
    return figures
