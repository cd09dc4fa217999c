"""What a way of batching makes of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from odb_factory.core.stats import padding_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One epoch over all ranks. Time is taken to be proportional to the padded tokens of each step's slowest rank."""

    method: str
    """`standard`, `sorted`, `packing` or `odb`."""
    world_size: int
    batch_size: int | None = None
    """Samples (packing: rows) of a rank's micro-batch where that is fixed."""
    budget: int | None = None
    """ODB: padded tokens of a micro-batch, at most."""
    depth: int | None = None
    """ODB: samples of a rank's window, at most."""
    samples: int
    """Samples emitted, repeated ones included."""
    useful_tokens: int
    """Real tokens, those of repeated samples left out."""
    tokens: int
    """Real tokens emitted."""
    padded_tokens: int
    slowest_tokens: int
    """Sum over steps of the padded tokens of the rank that has most."""
    steps: int
    """Micro-batches of each rank."""
    updates: int
    """Optimizer updates."""
    fillers: int = 0
    """Zero-weight micro-batches, over all ranks."""
    short_windows: int = 0
    """Windows that bytes kept below their number of samples, over all ranks."""
    overlong: int = 0
    """Samples that `odb_overlong: drop` leaves out."""
    exact: bool
    """Every sample was measured, and the epoch is the first one of the run itself, not an estimate."""

    @property
    def padding(self) -> float:
        """Share of the padded tokens that is padding."""
        return padding_share(self.tokens, self.padded_tokens)

    @property
    def samples_per_step(self) -> float:
        """Over all ranks."""
        return self.samples / self.steps if self.steps else 0.0

    @property
    def ideal_share(self) -> float:
        """Share of ideal time: real tokens / (ranks x sum over steps of the slowest rank's padded tokens)."""
        paid = self.world_size * self.slowest_tokens
        return self.useful_tokens / paid if paid else 0.0

    def gain_over(self, other: Prediction) -> float:
        """How many times as fast as `other`, by share of ideal time."""
        return self.ideal_share / other.ideal_share

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
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
            "slowest_rank_padded_tokens": self.slowest_tokens,
            "fillers": self.fillers,
            "short_windows": self.short_windows,
            "dropped_overlong": self.overlong,
            "exact": self.exact,
        }


def sums_of_costs(costs: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Padded tokens, and those of each step's slowest rank, out of costs of shape (steps, W)."""
    return sum(map(sum, costs)), sum(map(max, costs))


def ranks_in_words(count: int) -> str:
    """A number of ranks."""
    return "1 rank" if count == 1 else f"{count} ranks"
