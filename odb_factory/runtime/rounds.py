"""Stage 3, the rounds of an epoch: fill the window, group, exchange, align, collate, send.

In: observed samples from the window, and the other ranks' numbers from the exchange. Out: a batch and its `StepInfo`
for each step, then an `EpochEnd`. Runs in the main thread of the collate process.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from odb_factory.config import OdbConfig
from odb_factory.core.assignment import epoch_order, make_index_source
from odb_factory.core.grouping import Group
from odb_factory.core.protocol import ClosedRound, PlannedStep, RankProtocol, TooManyBadSamples
from odb_factory.core.sample import Dropped
from odb_factory.runtime.errors import EXAMPLES, CollateError, ExchangeError, SampleError, reasons
from odb_factory.runtime.exchange import Exchange
from odb_factory.runtime.messages import EpochEnd, Phase, Resumed, StepInfo, unpack_flags
from odb_factory.runtime.observe import Observe
from odb_factory.runtime.transport.batches import BatchSender
from odb_factory.runtime.transport.connection import send
from odb_factory.runtime.transport.samples import FailedSample, ObservedSample
from odb_factory.runtime.window import WindowReader
from odb_factory.runtime.worker import seeded

TELL_SECONDS = 10.0
"""How long a rank that fails waits for the others to hear of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollateJob:
    """All that the collate process needs; must pickle where the start method is `spawn`."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any]
    observe: Observe
    config: OdbConfig
    rank: int
    world_size: int
    num_workers: int
    prefetch_factor: int | None
    worker_init_fn: Callable[[int], None] | None
    window_bytes: int | None
    parent: int
    """Process id of the trainer process."""


class RankEpoch:
    """One epoch of this rank. `run` sends every step as (batch, StepInfo), then an `EpochEnd`.

    Args:
        resumed: what was done of this epoch before: left out, without being read.

    Raises (from `run`):
        SampleError: a sample could not be read, or too many were bad.
        ExchangeError, ProtocolError: the other ranks are gone, or differ.
        CollateError: the collate function raised.
    """

    def __init__(
        self,
        job: CollateJob,
        sock: socket.socket,
        sender: BatchSender,
        exchange: Exchange,
        reader: WindowReader,
        epoch: int,
        resumed: Resumed | None = None,
    ) -> None:
        self._job = job
        self._sock = sock
        self._sender = sender
        self._exchange = exchange
        self._reader = reader
        self._epoch = epoch
        config = job.config
        size = len(job.dataset)
        self._order = epoch_order(size, seed=config.seed, epoch=epoch, shuffle=config.shuffle)
        order = self._order
        if resumed is not None:
            done = unpack_flags(resumed.done, size)
            order = [index for index in order if not done[index]]
        self._to_do = len(order)
        self._protocol = RankProtocol(
            config,
            rank=job.rank,
            epoch=epoch,
            dataset_size=size,
            source=make_index_source(config.assignment, order, job.rank, job.world_size, config.window_target(0) + 1),
            world_size=job.world_size,
            emitted=resumed.emitted if resumed else 0,
            bad=resumed.bad if resumed else 0,
            state_check=zlib.crc32(resumed.done) if resumed else 0,
        )
        self._held: dict[int, ObservedSample] = {}
        self._filler: ObservedSample | None = None
        self._new_drops: list[Dropped] = []
        self._handled = 0
        self._global_dropped = 0
        self._bad_here: deque[Dropped] = deque(maxlen=EXAMPLES)
        self._short_windows = 0
        self._window = (0, 0)
        self._align_seconds = 0.0
        self._first_step = self._next_step = resumed.steps if resumed else 0

    def run(self) -> None:
        exchanges, sent_bytes = self._exchange.count, self._exchange.sent_bytes
        self._reader.start_epoch(self._epoch, self._protocol.start())
        while True:
            closed = self._round()
            self._handled += closed.dropped + sum(step.totals.samples for step in closed.steps)
            self._global_dropped += closed.dropped
            for step in closed.steps:
                self._emit(step)
            if closed.epoch_over:
                break
        end = EpochEnd(
            epoch=self._epoch,
            steps=self._next_step - self._first_step,
            rounds=self._protocol.round_index,
            left=self._to_do - self._handled,
            dropped=self._pop_drops(),
            global_dropped=self._global_dropped,
            exchanges=self._exchange.count - exchanges,
            exchange_bytes=self._exchange.sent_bytes - sent_bytes,
            short_windows=self._short_windows,
        )
        send(self._sock, end)
        self._reader.cancel()

    def _round(self) -> ClosedRound:
        where = f"round {self._protocol.round_index} of epoch {self._epoch}"
        send(self._sock, Phase(f"reading samples for {where}"))
        dropped = self._fill(where)
        send(self._sock, Phase(f"the exchange of {where}", for_others=True))
        self._window, self._align_seconds = (self._protocol.window_size, self._protocol.window_bytes), 0.0
        unread = self._reader.unread
        vector = self._protocol.begin_round(exhausted=unread == 0)
        with self._aligning():
            minima = self._exchange.minimum(vector, f"the first exchange of {where}")
        bad = sum(d.bad for d in dropped)
        vector = self._protocol.plan(minima, dropped=len(dropped), unread=unread, bad=bad)
        with self._aligning():
            sums = self._exchange.sum(vector, f"the second exchange of {where}")
        closed = self._close(sums)
        if closed.ask is not None:
            with self._aligning():
                before, total = self._exchange.prefix_sum(closed.ask, f"the index assignment of {where}")
            self._reader.extend(self._protocol.assign(closed.ask, before, total))
        send(self._sock, Phase(f"collating the steps of {where}"))
        return closed

    @contextlib.contextmanager
    def _aligning(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._align_seconds += time.perf_counter() - begun

    def _close(self, sums: list[int]) -> ClosedRound:
        try:
            return self._protocol.close_round(sums)
        except TooManyBadSamples as error:
            raise SampleError(f"{error} The last ones on this rank: {reasons(self._bad_here) or 'none'}") from None

    def _fill(self, where: str) -> tuple[Dropped, ...]:
        """Fill the window; returns the samples that were dropped on the way."""
        missing = self._protocol.missing()
        try:
            taken = self._reader.take(missing, needed=not self._protocol.window_size)
        except SampleError:
            self._tell_the_others(where)
            raise
        self._short_windows += taken.short
        for held in taken.samples:
            self._held[held.meta.index] = held
            self._protocol.add((held.meta,))
            self._filler = _better_filler(self._filler, held)
        self._new_drops.extend(taken.dropped)
        self._bad_here.extend(d for d in taken.dropped if d.bad)
        return taken.dropped

    def _tell_the_others(self, where: str) -> None:
        """They must not wait for this rank until the time-out; nor this one's error for ranks that do not come."""

        def tell() -> None:
            with contextlib.suppress(ExchangeError):
                self._exchange.minimum(self._protocol.begin_round(exhausted=False, failed=True), where)

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        thread.join(TELL_SECONDS)

    def _emit(self, step: PlannedStep) -> None:
        group, totals = step.group, step.totals
        global_dropped, self._global_dropped = self._global_dropped, 0
        info = StepInfo(
            epoch=self._epoch,
            step=self._next_step,
            round=self._protocol.round_index - 1,
            idle=group is None,
            last=step.last,
            indices=tuple(s.index for s in group.samples) if group else (),
            lengths=tuple(s.length for s in group.samples) if group else (),
            loss_tokens=group.loss_tokens if group else 0,
            tokens=group.tokens if group else 0,
            padded_tokens=group.cost if group else 0,
            work=group.work if group else 0,
            global_samples=totals.samples,
            global_loss_tokens=totals.loss_tokens,
            global_tokens=totals.tokens,
            global_padded_tokens=totals.padded_tokens,
            global_work=totals.work,
            global_dropped=global_dropped,
            dropped=self._pop_drops(),
            window_samples=self._window[0],
            window_bytes=self._window[1],
            align_seconds=self._align_seconds,
        )
        self._sender.send(lambda: (self._batch(group), info))
        self._next_step += 1

    def _batch(self, group: Group | None) -> Any:
        if group is None:
            if self._job.config.idle == "skip":
                return None
            return self._collate([self._load(self._find_filler())], "a filler")
        samples = [self._load(self._held.pop(s.index)) for s in group.samples]
        self._reader.release(group.samples)
        return self._collate(samples, f"samples {', '.join(str(s.index) for s in group.samples)}")

    def _load(self, held: ObservedSample) -> Any:
        """A sample, for the collate function, which may write into it: the filler is needed again."""
        return (held.copy() if held is self._filler else held).load()

    def _collate(self, samples: list[Any], what: str) -> Any:
        config = self._job.config
        name = f"{config.seed}:{self._epoch}:step {self._next_step}:{self._job.rank}"
        # without workers the window's thread draws from the same generators at the same time
        numbers = seeded(name, restore=False) if self._job.num_workers else contextlib.nullcontext()
        try:
            with numbers:
                return self._job.collate_fn(samples)
        except Exception as error:
            raise CollateError(f"the collate function failed on {what}: {type(error).__name__}: {error}") from error

    def _find_filler(self) -> ObservedSample:
        """The filler of this rank; one that never had a sample of its own takes the first valid one of the epoch."""
        for index in self._order if self._filler is None else ():
            item = self._reader.observed[self._epoch, index]
            if isinstance(item, FailedSample):
                raise SampleError(item.message)
            if isinstance(item, ObservedSample):
                self._filler = item
                break
        if self._filler is None:
            raise SampleError("there is no valid sample in the dataset to fill an IDLE slot with.")
        return self._filler

    def _pop_drops(self) -> tuple[Dropped, ...]:
        drops, self._new_drops = tuple(self._new_drops), []
        return drops


def _better_filler(best: ObservedSample | None, new: ObservedSample) -> ObservedSample:
    """The cheaper of two fillers: with media if any has, so that every parameter takes part; then the shortest."""
    if best is None:
        return new
    rank = (not new.meta.has_media, new.meta.length) < (not best.meta.has_media, best.meta.length)
    return new if rank else best
