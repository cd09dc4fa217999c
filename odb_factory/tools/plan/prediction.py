"""The predicted epoch of a batching method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from odb_factory.core.stats import padding_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One epoch over all ranks. The time of a step is that of its slowest rank, by `padded_work`."""

    method: str
    """`standard`, `sorted`, `packing` or `odb`."""
    world_size: int
    batch_size: int | None = None
    """Samples (packing: rows) in a rank's micro-batch, if fixed."""
    budget: int | None = None
    """ODB: most padded tokens in a micro-batch."""
    depth: int | None = None
    """ODB: most samples in a rank's window."""
    samples: int
    """Emitted samples, including repeated ones."""
    useful_work: int
    """The work of the samples, unpadded and each once (`useful_work`)."""
    tokens: int
    """Emitted tokens without padding."""
    padded_tokens: int
    slowest_work: int
    """Sum over steps of the slowest rank's work."""
    steps: int
    """Micro-batches of each rank."""
    updates: int
    """Optimizer updates."""
    fillers: int = 0
    """Zero-weight micro-batches, over all ranks."""
    short_windows: int = 0
    """Windows that the byte limit kept below their number of samples, over all ranks."""
    overlong: int = 0
    """Samples that `odb_overlong: drop` drops."""
    exact: bool
    """Whether this is the run's own first epoch, with every sample measured, and not an estimate."""

    @property
    def padding(self) -> float:
        """Share of the padded tokens that is padding."""
        return padding_share(self.tokens, self.padded_tokens)

    @property
    def samples_per_step(self) -> float:
        """Mean samples in a step, over all ranks."""
        return self.samples / self.steps if self.steps else 0.0

    @property
    def ideal_share(self) -> float:
        """Share of ideal time: useful work / (ranks x sum over steps of the slowest rank's work)."""
        paid = self.world_size * self.slowest_work
        return self.useful_work / paid if paid else 0.0

    def gain_over(self, other: Prediction) -> float:
        """Speed relative to `other`, by share of ideal time."""
        return self.ideal_share / other.ideal_share

    def as_json(self) -> dict[str, Any]:
        """The prediction as JSON values."""
        return {
            "method": self.method,
            "batch_size": self.batch_size,
            "token_budget": self.budget,
            "depth": self.depth,
            "padding": round(self.padding, 6),
            "samples_per_step": round(self.samples_per_step, 4),
            "steps_per_epoch": self.steps,
            "updates_per_epoch": self.updates,
            "ideal_time_share": round(self.ideal_share, 6),
            "samples": self.samples,
            "tokens": self.tokens,
            "padded_tokens": self.padded_tokens,
            "slowest_rank_work": self.slowest_work,
            "fillers": self.fillers,
            "short_windows": self.short_windows,
            "dropped_overlong": self.overlong,
            "exact": self.exact,
        }


def padded_and_slowest(steps: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, int]:
    """Sum of padded tokens, and sum of each step's largest work, of (padded tokens, work) by step and rank."""
    return sum(padded for step in steps for padded, _ in step), sum(max(work for _, work in step) for step in steps)


def useful_work(lengths: Iterable[int], attention_length: int | None) -> int:
    """The work of samples with these lengths (tokens), unpadded."""
    counted = list(lengths)
    squares = 0 if attention_length is None else sum(length * length for length in counted) // attention_length
    return sum(counted) + squares


def ranks_in_words(count: int) -> str:
    """A number of ranks, with its noun."""
    return "1 rank" if count == 1 else f"{count} ranks"
