"""What of a run is kept to draw it: bounded, however long the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

BINS_PER_OCTAVE = 4
BIN_EDGES = 2.0 ** (np.arange(24 * BINS_PER_OCTAVE + 1) / BINS_PER_OCTAVE)
"""Edges of the bins of lengths: four to a doubling, up to 2^24 tokens."""

MOST_POINTS = 1024


class Lengths:
    """A histogram of observed lengths, of all ranks once it is summed."""

    def __init__(self) -> None:
        self.counts = np.zeros(len(BIN_EDGES) - 1, dtype=np.int64)

    def add(self, lengths: Iterable[int]) -> None:
        """Count lengths (tokens)."""
        values = np.asarray(tuple(lengths), dtype=np.float64)
        places = np.searchsorted(BIN_EDGES, values, side="right") - 1
        np.add.at(self.counts, np.clip(places, 0, len(self.counts) - 1), 1)


class Series:
    """Rows of numbers over time; when there are too many, two neighbours become one.

    Args:
        merge: how two rows of shape (columns,) become one.
        most: rows that are kept, at most, without the one that still grows.
    """

    def __init__(self, merge: Callable[[np.ndarray, np.ndarray], np.ndarray] = np.add, most: int = MOST_POINTS) -> None:
        self._merge = merge
        self._most = most
        self._rows: list[np.ndarray] = []
        self._each = 1
        self._grown = 0

    def add(self, *row: float) -> None:
        """One more row."""
        new = np.asarray(row, dtype=np.float64)
        if self._grown:
            self._rows[-1] = self._merge(self._rows[-1], new)
        else:
            self._rows.append(new)
        self._grown = (self._grown + 1) % self._each
        if self._grown == 0 and len(self._rows) >= 2 * self._most:
            pairs = zip(self._rows[::2], self._rows[1::2], strict=True)
            self._rows = [self._merge(one, other) for one, other in pairs]
            self._each *= 2

    def rows(self) -> np.ndarray:
        """(rows, columns)"""
        return np.array(self._rows)
