"""What every way of batching makes of an epoch, in one shape, and what it would cost under a model of step time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Micro:
    """A micro-batch of one rank."""

    samples: tuple[int, ...]
    """Positions of its samples in the lengths; empty: a filler."""
    padded_tokens: int
    """Rows x width, also of a filler."""
    squares: int
    """Sum over its sequences of (width in tokens)^2: what attention pays for. Padding-free: of the real lengths."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of all ranks."""

    steps: tuple[tuple[Micro, ...], ...]
    """[step][rank]"""
    lengths: tuple[int, ...]
    """Observed length (tokens) of each sample."""

    @property
    def emitted(self) -> Counter[int]:
        """How often each sample was emitted."""
        return Counter(index for step in self.steps for micro in step for index in micro.samples)

    @property
    def useful_tokens(self) -> int:
        """Real tokens of all samples that were emitted, each once."""
        return sum(self.lengths[index] for index in self.emitted)

    @property
    def padded_tokens(self) -> int:
        return sum(micro.padded_tokens for step in self.steps for micro in step)

    @property
    def fillers(self) -> int:
        return sum(not micro.samples for step in self.steps for micro in step)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a micro-batch: constant + per_token x padded tokens + per_square x squares. A step: the slowest."""

    constant: float = 0.0
    per_token: float = 1.0
    per_square: float = 0.0

    def of_micro(self, micro: Micro) -> float:
        return self.constant + self.per_token * micro.padded_tokens + self.per_square * micro.squares

    def of_step(self, step: Iterable[Micro]) -> float:
        return max(map(self.of_micro, step))

    def of_epoch(self, epoch: Epoch) -> float:
        return sum(map(self.of_step, epoch.steps))


def ideal_share(epoch: Epoch, time: StepTime = StepTime()) -> float:
    """Share of ideal time: what the samples' tokens would take, spread evenly and unpadded, over what the epoch takes.

    The constant of a step is no part of the ideal; a repeated sample counts once.
    """
    ranks = len(epoch.steps[0])
    work = sum(time.per_token * epoch.lengths[i] + time.per_square * epoch.lengths[i] ** 2 for i in epoch.emitted)
    return work / (ranks * time.of_epoch(epoch))
