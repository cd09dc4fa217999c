"""What an epoch asks of every rank in every step, as arrays: quick to evaluate for many constants of step time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.epochs import Epoch, StepTime


@dataclass(frozen=True)
class Work:
    """An epoch without its samples; each array is (steps, ranks)."""

    tokens: np.ndarray
    """Padded tokens."""
    squares: np.ndarray
    """Sum of the squared widths of the rows."""
    rows: np.ndarray
    """Samples that are emitted."""

    @classmethod
    def of(cls, epoch: Epoch) -> Work:
        """Of an epoch; samples that it repeats are emitted as often."""
        numbers = np.array(
            [[(m.padded_tokens, m.squares, len(m.samples)) for m in step] for step in epoch.steps], dtype=np.float64
        )
        return cls(numbers[..., 0], numbers[..., 1], numbers[..., 2])

    @property
    def steps(self) -> int:
        return len(self.tokens)

    @property
    def emitted(self) -> int:
        return int(self.rows.sum())

    def seconds(self, time: StepTime, per_sample: float = 0.0) -> float:
        """Seconds of the epoch; every step lasts as long as its slowest rank.

        Args:
            per_sample: seconds for each sample of a micro-batch, besides those of `time`.
        """
        ranks = time.per_token * self.tokens + time.per_square * self.squares + per_sample * self.rows
        return float(time.constant * self.steps + ranks.max(axis=1).sum())

    def rate(self, time: StepTime, per_sample: float = 0.0) -> float:
        """Emitted samples a second."""
        return self.emitted / self.seconds(time, per_sample)

    def features(self) -> np.ndarray:
        """(3,): mean over steps of 1, of the slowest rank's tokens, and of its squares.

        Raises:
            ValueError: the rank with the most tokens is not the one with the most squares in some step, so that the
                seconds are not linear in the constants. With one batch size for all it always is.
        """
        tokens, squares = self.tokens.max(axis=1), self.squares.max(axis=1)
        both = (self.tokens == tokens[:, None]) & (self.squares == squares[:, None])
        if not both.any(axis=1).all():
            raise ValueError("no single rank is the slowest in tokens and in squares; a fit needs batches of one size.")
        return np.array([1.0, tokens.mean(), squares.mean()])
