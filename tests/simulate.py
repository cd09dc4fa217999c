"""An epoch of W ranks in one process: the real `RankProtocol`, with an element-wise min and sum between its calls.

No processes and no collate: what the runtime does with a Gloo group, a loop does here. For tests, the model check and
benchmarks on length traces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from odb_factory.config import OdbConfig
from odb_factory.core.assignment import epoch_order, make_index_source
from odb_factory.core.protocol import PlannedStep, RankProtocol
from odb_factory.core.sample import SampleMeta


class Stuck(AssertionError):
    """In real processes this would hang: the ranks disagree on the next collective, or rounds emit nothing for ever."""


@dataclass(frozen=True, slots=True)
class RankRound:
    """What one rank did in one round."""

    observed: tuple[int, ...]
    """Indices that entered its window just before the round."""
    window: int
    """Samples in its window when the round began."""
    exhausted: bool
    steps: tuple[PlannedStep, ...]
    dropped: int
    """Samples that *all* ranks dropped since the round before, as this rank was told."""
    left: int


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of all ranks."""

    rounds: tuple[tuple[RankRound, ...], ...]
    """[rank][round]"""

    @property
    def steps(self) -> tuple[tuple[PlannedStep, ...], ...]:
        """[rank][step]"""
        return tuple(tuple(step for done in rank for step in done.steps) for rank in self.rounds)


class Reader:
    """The valid samples of one rank, in order; knows the next one ahead, so that `unread` and `exhausted` are true."""

    def __init__(self, indices: Iterable[int], samples: Sequence[SampleMeta], dropped: Collection[int]) -> None:
        self._queue = deque(indices)
        self._samples = samples
        self._dropped = dropped
        self._new_drops = 0
        self.unread = sum(i not in dropped for i in self._queue)
        self._skip()

    def take(self, count: int) -> list[SampleMeta]:
        """The next `count` valid samples, fewer where the data runs out."""
        taken: list[SampleMeta] = []
        while len(taken) < count and self.unread:
            taken.append(self._samples[self._queue.popleft()])
            self.unread -= 1
            self._skip()
        return taken

    def new_drops(self) -> int:
        """Samples dropped since this was last asked."""
        count, self._new_drops = self._new_drops, 0
        return count

    def _skip(self) -> None:
        while self._queue and self._queue[0] in self._dropped:
            self._queue.popleft()
            self._new_drops += 1


def reduce_elements(vectors: Sequence[Sequence[int]], by: Callable[[Iterable[int]], int]) -> tuple[int, ...]:
    """What a reduction over ranks gives each of them."""
    if len({len(vector) for vector in vectors}) > 1:
        raise Stuck(f"ranks reduce vectors of different lengths: {[len(vector) for vector in vectors]}")
    return tuple(by(column) for column in zip(*vectors, strict=True))


def simulate(
    samples: Sequence[SampleMeta],
    config: OdbConfig,
    world_size: int,
    *,
    epoch: int = 0,
    dropped: Collection[int] = (),
    exchange: bool = True,
    exact_unread: bool = True,
) -> Epoch:
    """Run one epoch over `samples` (`samples[i].index == i`).

    Args:
        dropped: indices that a policy takes out when they are read: they never enter a window.
        exchange: False: every rank sees its own vectors only, as if no communication took place.
        exact_unread: False: a rank knows of its unread samples only that there are some, as the runtime may.

    Raises:
        Stuck: real ranks would wait for one another for ever.
    """
    dropped = frozenset(dropped)
    order = epoch_order(len(samples), seed=config.seed, epoch=epoch, shuffle=config.shuffle)
    sources = [make_index_source(config.assignment, order, rank, world_size) for rank in range(world_size)]
    readers = [Reader(source, samples, dropped) for source in sources]
    ranks = [RankProtocol(config, rank=rank, epoch=epoch, dataset_size=len(samples)) for rank in range(world_size)]
    rounds: list[list[RankRound]] = [[] for _ in ranks]

    def reduced(vectors: list[tuple[int, ...]], by: Callable[[Iterable[int]], int]) -> list[tuple[int, ...]]:
        return [reduce_elements(vectors, by)] * len(vectors) if exchange else vectors

    running = list(range(world_size))
    for _ in range(len(samples) + 1):
        seen: dict[int, tuple[tuple[int, ...], int, bool]] = {}
        for r in running:
            new = readers[r].take(ranks[r].missing())
            ranks[r].add(new)
            seen[r] = (tuple(s.index for s in new), ranks[r].window_size, not readers[r].unread)
        minima = reduced([ranks[r].begin_round(exhausted=seen[r][2]) for r in running], min)
        unread = {r: readers[r].unread if exact_unread else min(1, readers[r].unread) for r in running}
        plans = [
            ranks[r].plan(low, dropped=readers[r].new_drops(), unread=unread[r])
            for r, low in zip(running, minima, strict=True)
        ]
        over: list[int] = []
        for r, sums in zip(running, reduced(plans, sum), strict=True):
            closed = ranks[r].close_round(sums)
            sources[r].consumed([step.totals.samples for step in closed.steps])
            rounds[r].append(RankRound(*seen[r], closed.steps, closed.dropped, closed.left))
            if closed.epoch_over:
                over.append(r)
        if exchange and 0 < len(over) < len(running):
            raise Stuck(f"only ranks {over} of {running} ended the epoch in this round")
        running = [r for r in running if r not in over]
        if not running:
            return Epoch(tuple(map(tuple, rounds)))
    raise Stuck(f"{len(samples) + 1} rounds did not end an epoch of {len(samples)} samples")
