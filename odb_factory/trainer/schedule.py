"""Learning rate by progress in samples, since the number of steps is not known before the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from odb_factory.trainer.progress import SampleProgress

BY_SAMPLES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
)
"""Schedules whose shape depends on the fraction of the run only."""

NEEDS_STEPS = ("warmup_stable_decay",)
"""Schedules with lengths in steps that would need the number of steps of the run."""


@dataclass
class Position:
    """Where on a schedule of `progress.total` ticks the run stands.

    A tick is a sample. A warm-up that the user gave in updates takes that many updates: its ticks are then walked one
    an update, and the samples that remain are spread over the remaining ticks.

    Args:
        progress: the run.
        warmup_updates: warm-up in updates; 0 where it is none or given as a share of the run.
    """

    progress: SampleProgress
    warmup_updates: int = 0
    handled_in_warmup: int = field(default=0, repr=False)
    """Samples handled when the warm-up ended; saved with a checkpoint."""

    def __call__(self) -> float:
        """The position in ticks, from 0 to `progress.total`."""
        progress, warmup = self.progress, self.warmup_updates
        if not warmup:
            return float(min(progress.handled, progress.total))
        if progress.updates <= warmup:
            self.handled_in_warmup = progress.handled
            return float(progress.updates)
        if progress.finished or progress.total <= warmup:
            return float(progress.total)
        share = (progress.handled - self.handled_in_warmup) / (progress.total - self.handled_in_warmup)
        return warmup + share * (progress.total - warmup)


def follow(scheduler: Any, position: Position) -> None:
    """Make a `LambdaLR` of `position.progress.total` steps follow `position` instead of counting its own steps.

    The lambdas are replaced by plain functions, which `LambdaLR.state_dict` leaves out of checkpoints.

    Raises:
        TypeError: the scheduler is no LambdaLR.
    """
    if not hasattr(scheduler, "lr_lambdas"):
        raise TypeError(f"{type(scheduler).__name__} cannot follow the samples; use one of {', '.join(BY_SAMPLES)}.")
    scheduler.lr_lambdas = [_at(position, shape) for shape in scheduler.lr_lambdas]


def _at(position: Position, shape: Callable[[float], float]) -> Callable[[int], float]:
    def factor(_: int) -> float:
        return shape(position())

    return factor
