"""Which rank reads which index of the dataset (design.md, assignment of indices).

`static`: rank r of W reads every W-th index from r on. `shared`: one cursor walks over the epoch's order. After each
round every rank asks for what its next window lacks, and the cursor moves by the sum of that. A rank's part begins
where the parts of the ranks before it end, which one prefix sum over ranks tells (`exclusive_sums`). Ranks with short
samples so read more of them. What is left in the end goes to the ranks whose windows hold the fewest tokens, so that
all run dry together; and never more than a window holds, so that what remains then fits into one round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from odb_factory.core.seeding import generator


def epoch_order(size: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of the whole dataset in `epoch`, the same on every rank: a permutation of `range(size)`."""
    order = list(range(size))
    if shuffle:
        generator(seed, "order", epoch).shuffle(order)
    return order


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a rank knows when new indices are handed out."""

    own: int
    """Samples that its next window lacks."""
    by_all: int
    """The same of all ranks."""
    load: int
    """Tokens that it holds, or will when it has read its indices."""
    load_of_all: int
    mean_length: float
    """Tokens of a sample, as far as all ranks know."""


class IndexSource(Protocol):
    """This rank's indices of one epoch."""

    @property
    def complete(self) -> bool:
        """Every index of the epoch belongs to some rank by now; the same on every rank."""
        ...

    def lasts_for(self, samples: int) -> bool:
        """Whether so many indices for each rank are not handed out yet; the same on every rank."""
        ...

    def start(self) -> list[int]:
        """The indices that this rank reads first, in order. Called once."""
        ...

    def ask(self, wanted: Wanted) -> int:
        """How many samples this rank asks for; over all ranks at least one where any lacks some."""
        ...

    def assign(self, own: int, before: int, total: int) -> list[int]:
        """The indices that this rank reads next.

        Args:
            own: what `ask` gave.
            before: the sum of that over the ranks before this one, in the order of `exclusive_sums`.
            total: its sum over all ranks.
        """
        ...


class StaticIndexSource:
    """Rank r of W reads `order[r::W]`: no padding, no duplicates; over all ranks every index once."""

    complete = True

    def __init__(self, order: Sequence[int], rank: int, world_size: int) -> None:
        self._indices = list(order[rank::world_size])

    def lasts_for(self, samples: int) -> bool:
        return samples == 0

    def ask(self, wanted: Wanted) -> int:
        return 0

    def start(self) -> list[int]:
        return self._indices

    def assign(self, own: int, before: int, total: int) -> list[int]:
        """Nothing: the assignment was fixed at the start of the epoch."""
        return []


class SharedIndexSource:
    """The indices of `order` go to the ranks that ask for them; every index to exactly one rank.

    Args:
        first: how many indices each rank reads before the first round.
    """

    def __init__(self, order: Sequence[int], rank: int, world_size: int, first: int) -> None:
        self._order = order
        self._world_size = world_size
        self._cursor = min(len(order), first * world_size)
        self._first = list(order[: self._cursor][rank::world_size])

    @property
    def complete(self) -> bool:
        return self._cursor == len(self._order)

    def start(self) -> list[int]:
        return self._first

    def lasts_for(self, samples: int) -> bool:
        return self._left >= samples * self._world_size

    @property
    def _left(self) -> int:
        return len(self._order) - self._cursor

    def ask(self, wanted: Wanted) -> int:
        """What the window lacks; near the end no more than what this rank lacks, in tokens, to an equal share."""
        if wanted.by_all <= self._left:
            return wanted.own
        equal = (wanted.load_of_all + self._left * wanted.mean_length) / self._world_size
        lacks = math.ceil(max(0.0, equal - wanted.load) / wanted.mean_length)
        # who wants any gets one at least: somebody must, or the epoch would not end
        return min(wanted.own, max(1, lacks))

    def assign(self, own: int, before: int, total: int) -> list[int]:
        """As asked for; where fewer are left, each rank's share of them."""
        begin, left = self._cursor, self._left
        taken = min(left, total)
        self._cursor += taken
        if taken == total:
            return list(self._order[begin + before : begin + before + own])
        return list(self._order[begin + left * before // total : begin + left * (before + own) // total])


def make_index_source(how: str, order: Sequence[int], rank: int, world_size: int, first: int = 1) -> IndexSource:
    """The source of kind `how` (one of `OdbConfig.assignment`).

    Args:
        order: the indices of the epoch, the same on every rank.
        first: how many indices each rank reads before the first round, where that matters.

    Raises:
        ValueError: unknown kind, or a rank outside of the world.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size} ranks")
    if how == "static":
        return StaticIndexSource(order, rank, world_size)
    if how == "shared":
        return SharedIndexSource(order, rank, world_size, first)
    raise ValueError(f"unknown index assignment {how!r}; known: static, shared")


def tree_children(rank: int, world_size: int) -> list[int]:
    """The ranks below `rank` in the binary tree over which prefix sums run; rank 0 is its root."""
    return [child for child in (2 * rank + 1, 2 * rank + 2) if child < world_size]


def exclusive_sums(values: Sequence[int]) -> list[int]:
    """For each rank the sum of the values of all ranks before it.

    "Before" is the order in which the tree of `tree_children` is walked from the root (a node, then its subtrees): any
    order would do, and with this one each rank sends at most three numbers, whatever the number of ranks.
    """
    result = [0] * len(values)
    passed = 0
    stack = [0] if values else []
    while stack:
        rank = stack.pop()
        result[rank] = passed
        passed += values[rank]
        stack.extend(reversed(tree_children(rank, len(values))))
    return result
