"""What is replayed: made profiles, real conversations, files of lengths; how many samples, cutoff and budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lengths import PROFILES, draw, read_lengths

REAL = "sharegpt"
NAMES = (*PROFILES, REAL)

BUDGETS = {"ultrachat": 12288, "llava": 12288, "sharegpt4o": 14334, "mm_mix": 12288, REAL: 8192}
"""The paper's best, where it names one; for real conversations four of the longest."""

FEWEST_WINDOWS, WINDOWS, MOST_WINDOWS = 4, 12, 24
"""An epoch of a profile has as many samples as its data set, if these fill the windows of all ranks from
`FEWEST_WINDOWS` to `MOST_WINDOWS` times; else it has `WINDOWS` times what they hold, or is cut at `MOST_WINDOWS`."""


@dataclass(frozen=True)
class Source:
    """Lengths by number of samples and seed."""

    name: str
    cutoff: int
    """No sample is longer (tokens)."""
    budget: int
    lengths: Callable[[int, int], Sequence[int]]
    """(size, seed) -> observed lengths"""
    size: int
    """Samples of the data set."""
    real: bool
    """These are the lengths there are; none can be drawn beyond them."""

    def size_for(self, world: int, depth: int) -> int:
        """Samples of an epoch."""
        window = world * depth
        if self.real:
            return self.size
        if self.size < FEWEST_WINDOWS * window:
            return WINDOWS * window
        return min(self.size, MOST_WINDOWS * window)


def profile(name: str) -> Source:
    """A made profile (`benchmarks.lengths`), or the real conversations."""
    if name == REAL:
        from benchmarks.balance.real_lengths import CUTOFF, sharegpt_lengths

        return fixed(name, sharegpt_lengths(), CUTOFF, BUDGETS[name])
    made = PROFILES[name]
    return Source(name, made.longest, BUDGETS[name], lambda size, seed: draw(name, size, seed), made.size, False)


def from_file(file: Path, cutoff: int | None, budget: int | None) -> Source:
    """A file of lengths. Without a budget: eight times the mean, and at least the longest."""
    lengths = read_lengths(file)
    longest = max(lengths)
    return fixed(file.stem, lengths, cutoff or longest, budget or max(longest, 8 * sum(lengths) // len(lengths)))


def fixed(name: str, lengths: Sequence[int], cutoff: int, budget: int) -> Source:
    """The same lengths whatever the seed."""
    return Source(name, cutoff, budget, lambda size, seed: lengths[:size], len(lengths), True)
