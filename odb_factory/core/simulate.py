"""An epoch of W ranks in one process: the real `RankProtocol`, with an element-wise min and sum between its calls.

No processes and no collate: what the runtime does with a Gloo group, a loop does here. For the planner, tests, the
model check and benchmarks on length traces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from odb_factory.config import OdbConfig
from odb_factory.core.assignment import epoch_order, exclusive_sums, make_index_source, tree_children
from odb_factory.core.protocol import ClosedRound, PlannedStep, RankProtocol
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
    short_windows: int = 0
    """Windows that `window_bytes` kept below their number of samples, over all ranks."""

    @property
    def steps(self) -> tuple[tuple[PlannedStep, ...], ...]:
        """[rank][step]"""
        return tuple(tuple(step for done in rank for step in done.steps) for rank in self.rounds)


class Reader:
    """The valid samples of one rank, in order; knows the next one ahead, so that `unread` and `exhausted` are true.

    Args:
        limit: samples that may be held between `take` and `release`, at most.
        byte_limit: bytes that these may take; None: no bound.
    """

    def __init__(
        self,
        indices: Iterable[int],
        samples: Sequence[SampleMeta],
        dropped: Collection[int],
        limit: int,
        byte_limit: int | None = None,
    ) -> None:
        self._queue: deque[int] = deque()
        self._samples = samples
        self._dropped = dropped
        self._limit = limit
        self._byte_limit = byte_limit
        self._held = self._held_bytes = 0
        self._new_drops = 0
        self.unread = 0
        self.short = 0
        """How often bytes kept `take` below what it was asked for."""
        self.extend(indices)

    def extend(self, indices: Iterable[int]) -> None:
        """More indices to read."""
        new = list(indices)
        self._queue.extend(new)
        self.unread += sum(i not in self._dropped for i in new)
        self._skip()

    def take(self, count: int, *, needed: bool = False) -> list[SampleMeta]:
        """The next `count` valid samples, fewer where the data runs out, or where no more may be held.

        Args:
            needed: nothing is in the window: where there is a sample, take at least one, whatever its size.
        """
        taken: list[SampleMeta] = []
        while len(taken) < count and self.unread:
            sample = self._samples[self._queue[0]]
            forced = not self._held or (needed and not taken)
            if not forced and (self._held >= self._limit or not self._fits(sample)):
                self.short += not self._fits(sample)
                break
            self._queue.popleft()
            taken.append(sample)
            self.unread -= 1
            self._held += 1
            self._held_bytes += sample.nbytes
            self._skip()
        return taken

    def _fits(self, sample: SampleMeta) -> bool:
        return self._byte_limit is None or self._held_bytes + sample.nbytes <= self._byte_limit

    def release(self, samples: Iterable[SampleMeta]) -> None:
        """These samples have left the window."""
        for sample in samples:
            self._held -= 1
            self._held_bytes -= sample.nbytes

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
    """Run one epoch over `samples` (`samples[i].index == i`), within `config.window_bytes` where it is set.

    Args:
        dropped: indices that a policy takes out when they are read: they never enter a window.
        done: indices that were trained on before, in a run that is resumed.
        exchange: False: every rank sees its own vectors only, as if no communication took place.
        traffic: what one rank puts into each exchange is added here: (kind, numbers).
        exact_unread: False: a rank knows of its unread samples only that there are some, as the runtime may.

    Raises:
        Stuck: real ranks would wait for one another for ever.
    """
    order = epoch_order(len(samples), seed=config.seed, epoch=epoch, shuffle=config.shuffle)
    order = [index for index in order if index not in done]
    ranks = [
        RankProtocol(
            config,
            rank=rank,
            epoch=epoch,
            dataset_size=len(samples),
            source=make_index_source(config.assignment, order, rank, world_size, config.window_target(0) + 1),
            world_size=world_size,
            emitted=len(done),
        )
        for rank in range(world_size)
    ]
    drops = frozenset(dropped)
    readers = [Reader(rank.start(), samples, drops, config.depth + 1, config.window_bytes) for rank in ranks]
    world = _World(ranks, readers, exchange=exchange, exact_unread=exact_unread, traffic=traffic)
    limit = 2 * len(samples) + 1  # a round emits a sample, or else hands out an index
    for _ in range(limit):
        closed = world.run_round()
        if not world.running:
            return Epoch(tuple(map(tuple, world.rounds)), sum(reader.short for reader in readers))
        world.assign(closed)
    raise Stuck(f"{limit} rounds did not end an epoch of {len(samples)} samples")


class _World:
    """All ranks of an epoch, in step."""

    def __init__(
        self,
        ranks: list[RankProtocol],
        readers: list[Reader],
        *,
        exchange: bool,
        exact_unread: bool,
        traffic: list[tuple[str, int]] | None,
    ) -> None:
        self._ranks = ranks
        self._readers = readers
        self._exchange = exchange
        self._exact_unread = exact_unread
        self._traffic = traffic
        self._held_steps = 0
        self.running = list(range(len(ranks)))
        """Ranks whose epoch is not over."""
        self.rounds: list[list[RankRound]] = [[] for _ in ranks]

    def run_round(self) -> dict[int, ClosedRound]:
        """One round of all running ranks; those whose epoch ends with it leave `running`."""
        ranks, readers, running = self._ranks, self._readers, self.running
        seen = {r: self._fill(r) for r in running}
        minima = self._reduced([ranks[r].begin_round(exhausted=seen[r][2]) for r in running], min)
        unread = {r: readers[r].unread if self._exact_unread else min(1, readers[r].unread) for r in running}
        plans = [
            ranks[r].plan(low, dropped=readers[r].new_drops(), unread=unread[r])
            for r, low in zip(running, minima, strict=True)
        ]
        closed = {r: ranks[r].close_round(sums) for r, sums in zip(running, self._reduced(plans, sum), strict=True)}
        for r in running:
            self.rounds[r].append(RankRound(*seen[r], closed[r].steps, closed[r].dropped, self._held_steps))
            for step in closed[r].steps:
                readers[r].release(step.group.samples if step.group else ())
        planned = (len(plans[0]) - RankProtocol.TAIL) // StepTotals.WIDTH
        self._held_steps += planned - len(closed[running[0]].steps)
        over = [r for r in running if closed[r].epoch_over]
        if self._exchange and 0 < len(over) < len(running):
            raise Stuck(f"only ranks {over} of {running} ended the epoch in this round")
        self.running = [r for r in running if r not in over]
        return closed

    def _fill(self, r: int) -> tuple[tuple[int, ...], int, bool]:
        """Fill a rank's window: the indices that entered it, its size, whether the rank is exhausted."""
        rank, reader = self._ranks[r], self._readers[r]
        new = reader.take(rank.missing(), needed=not rank.window_size)
        rank.add(new)
        return tuple(s.index for s in new), rank.window_size, not reader.unread and rank.all_assigned

    def _reduced(self, vectors: list[tuple[int, ...]], by: Callable[[Iterable[int]], int]) -> list[tuple[int, ...]]:
        if self._traffic is not None:
            self._traffic.append(("minimum" if by is min else "sum", len(vectors[0])))
        return [reduce_elements(vectors, by)] * len(vectors) if self._exchange else vectors

    def assign(self, closed: dict[int, ClosedRound]) -> None:
        """Hand out indices to the running ranks that ask for some."""
        asks = {r: ask for r in self.running if (ask := closed[r].ask) is not None}
        if self._exchange and 0 < len(asks) < len(self.running):
            raise Stuck(f"only ranks {list(asks)} of {self.running} take part in the prefix sum")
        if self._traffic is not None and asks:
            world_size = len(self._ranks)
            self._traffic.append(("prefix sum", max(1 + 2 * len(tree_children(r, world_size)) for r in asks)))
        before = exclusive_sums(list(asks.values())) if self._exchange else [0] * len(asks)
        total = sum(asks.values())
        for (r, ask), offset in zip(asks.items(), before, strict=True):
            self._readers[r].extend(self._ranks[r].assign(ask, offset, total if self._exchange else ask))
