"""Micro-batches out of samples: what padding makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.epochs import Micro
from odb_factory.core.budget import ceil_multiple

IDLE = Micro((), 0, 0)
"""No micro-batch at all: the rank waits."""


def padded(samples: Sequence[int], lengths: Sequence[int], multiple: int) -> Micro:
    """Samples, each a row of its own, all as wide as the longest one.

    Args:
        samples: positions in `lengths`, at least one.
        multiple: rows are padded to a multiple of this (tokens).
    """
    width = ceil_multiple(max(lengths[i] for i in samples), multiple)
    return Micro(tuple(samples), width * len(samples), width * width * len(samples))


def filler(length: int, multiple: int) -> Micro:
    """A repetition, with weight 0, of one sample of that length."""
    width = ceil_multiple(length, multiple)
    return Micro((), width, width * width)
