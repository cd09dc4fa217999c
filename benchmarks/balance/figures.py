"""What an epoch came to, as figures of a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.batchers.online import Online
from benchmarks.epochs import Epoch, StepTime, ideal_share
from benchmarks.rows import Value

PARTS = 10
"""Parts of the epoch whose mean lengths are compared."""


def epoch_figures(epoch: Epoch, budget: int, time: StepTime) -> dict[str, Value]:
    """Figures that every method has.

    Args:
        budget: padded tokens of a micro-batch, at most.
        time: the model of step time, for `ideal_share`.
    """
    emitted = epoch.emitted
    count = emitted.total()
    tokens = sum(epoch.lengths[i] * times for i, times in emitted.items())
    padded = sum(micro.padded_tokens for step in epoch.steps for micro in step if micro.samples)
    widest = max(micro.padded_tokens for step in epoch.steps for micro in step)
    slowest = sum(max(micro.padded_tokens for micro in step) for step in epoch.steps)
    return {
        "ideal_share": ideal_share(epoch, time),
        "padding": 1 - tokens / padded,
        "balance": padded / (len(epoch.steps[0]) * slowest),
        "steps": len(epoch.steps),
        "samples_per_step": count / len(epoch.steps),
        "fillers": epoch.fillers,
        "repeated": count - len(emitted),
        "missing": len(epoch.lengths) - len(emitted),
        "largest_of_budget": widest / budget,
        **order_figures(epoch),
    }


def order_figures(epoch: Epoch) -> dict[str, Value]:
    """Whether the order of the epoch depends on length.

    `order_correlation`: Pearson, of the step and the length of each sample. `part_*`: mean length in tenths of the
    epoch's samples, over the mean of all: least, most, and of the last tenth.
    """
    steps, lengths = _in_order(epoch)
    mean = lengths.mean()
    parts = [part.mean() / mean for part in np.array_split(lengths, PARTS) if len(part)]
    constant = lengths.std() == 0 or steps.std() == 0
    return {
        "order_correlation": 0.0 if constant else float(np.corrcoef(steps, lengths)[0, 1]),
        "part_least": float(min(parts)),
        "part_most": float(max(parts)),
        "part_last": float(parts[-1]),
    }


def _in_order(epoch: Epoch) -> tuple[np.ndarray, np.ndarray]:
    """(samples,) step and (samples,) length of each emitted sample, in the order of emission."""
    numbers = [(number, i) for number, step in enumerate(epoch.steps) for micro in step for i in micro.samples]
    steps, samples = np.array(numbers).T
    return steps, np.asarray(epoch.lengths)[samples]


def online_figures(online: Online) -> dict[str, Value]:
    """Figures of those methods that form batches as they go, on our core."""
    deferrals: Sequence[int] = online.deferrals
    return {
        "rounds": online.rounds,
        "deferral": max(deferrals),
        "deferral_bound": online.config.max_wait,
        "deferral_mean": sum(deferrals) / len(deferrals),
        "cpu_ms_per_sample": 1000 * online.cpu_s / len(deferrals),
    }
