"""An epoch of W ranks in one process: the real `RankProtocol`, with an element-wise min and sum between its calls.

No processes and no collate: what the runtime does with a Gloo group, a loop does here. For tests, the model check and
benchmarks on length traces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from odb_factory.config import OdbConfig
from odb_factory.core.assignment import epoch_order, exclusive_sums, make_index_source, tree_children
from odb_factory.core.protocol import PlannedStep, RankProtocol
from odb_factory.core.sample import SampleMeta
from odb_factory.core.stats import StepTotals


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
    carried: int
    """How many of the steps, at their front, were planned in the round before."""


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
        self._queue: deque[int] = deque()
        self._samples = samples
        self._dropped = dropped
        self._new_drops = 0
        self.unread = 0
        self.extend(indices)

    def extend(self, indices: Iterable[int]) -> None:
        """More indices to read."""
        new = list(indices)
        self._queue.extend(new)
        self.unread += sum(i not in self._dropped for i in new)
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
    done: Collection[int] = (),
    exchange: bool = True,
    exact_unread: bool = True,
    traffic: list[tuple[str, int]] | None = None,
) -> Epoch:
    """Run one epoch over `samples` (`samples[i].index == i`).

    Args:
        dropped: indices that a policy takes out when they are read: they never enter a window.
        done: indices that were trained on before, in a run that is resumed.
        exchange: False: every rank sees its own vectors only, as if no communication took place.
        traffic: what one rank puts into each exchange is added here: (kind, numbers).
        exact_unread: False: a rank knows of its unread samples only that there are some, as the runtime may.

    Raises:
        Stuck: real ranks would wait for one another for ever.
    """
    dropped = frozenset(dropped)
    order = epoch_order(len(samples), seed=config.seed, epoch=epoch, shuffle=config.shuffle)
    order = [index for index in order if index not in done]
    ranks = [
        RankProtocol(
            config,
            rank=rank,
            epoch=epoch,
            dataset_size=len(samples),
            source=make_index_source(config.assignment, order, rank, world_size, config.window_target(0) + 1),
            emitted=len(done),
        )
        for rank in range(world_size)
    ]
    readers = [Reader(rank.start(), samples, dropped) for rank in ranks]
    rounds: list[list[RankRound]] = [[] for _ in ranks]

    def reduced(vectors: list[tuple[int, ...]], by: Callable[[Iterable[int]], int]) -> list[tuple[int, ...]]:
        if traffic is not None:
            traffic.append(("minimum" if by is min else "sum", len(vectors[0])))
        return [reduce_elements(vectors, by)] * len(vectors) if exchange else vectors

    running = list(range(world_size))
    held = 0
    limit = 2 * len(samples) + 1  # a round emits a sample, or else hands out an index
    for _ in range(limit):
        seen: dict[int, tuple[tuple[int, ...], int, bool]] = {}
        for r in running:
            new = readers[r].take(ranks[r].missing())
            ranks[r].add(new)
            exhausted = not readers[r].unread and ranks[r].all_assigned
            seen[r] = (tuple(s.index for s in new), ranks[r].window_size, exhausted)
        minima = reduced([ranks[r].begin_round(exhausted=seen[r][2]) for r in running], min)
        unread = {r: readers[r].unread if exact_unread else min(1, readers[r].unread) for r in running}
        plans = [
            ranks[r].plan(low, dropped=readers[r].new_drops(), unread=unread[r])
            for r, low in zip(running, minima, strict=True)
        ]
        closed = {r: ranks[r].close_round(sums) for r, sums in zip(running, reduced(plans, sum), strict=True)}
        for r in running:
            rounds[r].append(RankRound(*seen[r], closed[r].steps, closed[r].dropped, held))
        planned = (len(plans[0]) - RankProtocol.TAIL) // StepTotals.WIDTH
        held += planned - len(closed[running[0]].steps)
        over = [r for r in running if closed[r].epoch_over]
        if exchange and 0 < len(over) < len(running):
            raise Stuck(f"only ranks {over} of {running} ended the epoch in this round")
        running = [r for r in running if r not in over]
        if not running:
            return Epoch(tuple(map(tuple, rounds)))
        asks = {r: ask for r in running if (ask := closed[r].ask) is not None}
        if exchange and 0 < len(asks) < len(running):
            raise Stuck(f"only ranks {list(asks)} of {running} take part in the prefix sum")
        if traffic is not None and asks:
            traffic.append(("prefix sum", max(1 + 2 * len(tree_children(r, world_size)) for r in asks)))
        before = exclusive_sums(list(asks.values())) if exchange else [0] * len(asks)
        total = sum(asks.values())
        for (r, ask), offset in zip(asks.items(), before, strict=True):
            readers[r].extend(ranks[r].assign(ask, offset, total if exchange else ask))
    raise Stuck(f"{limit} rounds did not end an epoch of {len(samples)} samples")
