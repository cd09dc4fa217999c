"""Which rank reads which index of the data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from odb_factory.core.seeding import generator


def epoch_order(size: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of the whole data set in `epoch`, the same on every rank: a permutation of `range(size)`."""
    order = list(range(size))
    if shuffle:
        generator(seed, "order", epoch).shuffle(order)
    return order


class IndexSource(Protocol):
    """This rank's indices of one epoch. The reader draws from it; what other ranks consumed is told to it."""

    def __iter__(self) -> Iterator[int]:
        """The indices that this rank reads, in order."""
        ...

    def consumed(self, samples_by_slot: Sequence[int]) -> None:
        """Called after each round with the samples (T,) that all ranks emitted in each step."""
        ...


class StaticIndexSource:
    """Rank r of W reads `perm[r::W]`: no padding, no duplicates; over all ranks every index once."""

    def __init__(self, order: Sequence[int], rank: int, world_size: int) -> None:
        self._indices = list(order[rank::world_size])

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def consumed(self, samples_by_slot: Sequence[int]) -> None:
        """Nothing to do: the assignment was fixed at the start of the epoch."""


def make_index_source(how: str, order: Sequence[int], rank: int, world_size: int) -> IndexSource:
    """The source of kind `how` (one of `OdbConfig.assignment`).

    Raises:
        ValueError: unknown kind, or a rank outside of the world.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size} ranks")
    if how == "static":
        return StaticIndexSource(order, rank, world_size)
    raise ValueError(f"unknown index assignment {how!r}; known: static")
