"""One epoch of one rank, inside the collate process: fill, group, exchange, align, collate, send."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from odb_factory.config import OdbConfig
from odb_factory.core.assignment import epoch_order, make_index_source
from odb_factory.core.grouping import Group
from odb_factory.core.protocol import ClosedRound, PlannedStep, RankProtocol
from odb_factory.core.sample import Dropped
from odb_factory.runtime.errors import CollateError, ExchangeError, SampleError
from odb_factory.runtime.exchange import Exchange
from odb_factory.runtime.messages import EpochEnd, Phase, StepInfo, loads, send
from odb_factory.runtime.observe import Observe
from odb_factory.runtime.reader import Failed, Held, Reader


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
    parent: int
    """Process id of the trainer process."""


class RankEpoch:
    """One epoch of this rank. `run` sends every step as (batch, StepInfo), then an `EpochEnd`.

    Raises (from `run`):
        SampleError: a sample could not be read.
        ExchangeError, ProtocolError: the other ranks are gone, or differ.
        CollateError: the collate function raised.
    """

    def __init__(self, job: CollateJob, sock: socket.socket, exchange: Exchange, reader: Reader, epoch: int) -> None:
        self._job = job
        self._sock = sock
        self._exchange = exchange
        self._reader = reader
        self._epoch = epoch
        config = job.config
        self._protocol = RankProtocol(config, rank=job.rank, epoch=epoch, dataset_size=len(job.dataset))
        self._order = epoch_order(len(job.dataset), seed=config.seed, epoch=epoch, shuffle=config.shuffle)
        self._source = make_index_source(config.assignment, self._order, job.rank, job.world_size)
        self._indices = list(self._source)
        self._held: dict[int, Held] = {}
        self._filler: Held | None = None
        self._new_drops: list[Dropped] = []
        self._drops = 0
        self._emitted = 0
        self._steps_sent = 0

    def run(self) -> None:
        exchanges, sent_bytes = self._exchange.count, self._exchange.sent_bytes
        self._reader.start_epoch(self._epoch, self._indices)
        while True:
            closed = self._round()
            for position, step in enumerate(closed.steps):
                self._emit(step, global_dropped=closed.dropped if position == 0 else 0)
            if closed.epoch_over:
                break
        left = len(self._indices) - self._emitted - self._drops
        end = EpochEnd(
            epoch=self._epoch,
            steps=self._steps_sent,
            rounds=self._protocol.round_index,
            left=left,
            dropped=self._pop_drops(),
            global_dropped=0 if closed.steps else closed.dropped,
            exchanges=self._exchange.count - exchanges,
            exchange_bytes=self._exchange.sent_bytes - sent_bytes,
        )
        send(self._sock, end)
        self._reader.cancel()

    def _round(self) -> ClosedRound:
        where = f"round {self._protocol.round_index} of epoch {self._epoch}"
        send(self._sock, Phase(f"reading samples for {where}"))
        dropped = self._fill(where)
        send(self._sock, Phase(f"the exchange of {where}", for_others=True))
        unread = self._reader.unread
        vector = self._protocol.begin_round(exhausted=unread == 0)
        minima = self._exchange.minimum(vector, f"the first exchange of {where}")
        vector = self._protocol.plan(minima, dropped=dropped, unread=unread)
        sums = self._exchange.sum(vector, f"the second exchange of {where}")
        closed = self._protocol.close_round(sums)
        self._source.consumed([step.totals.samples for step in closed.steps])
        send(self._sock, Phase(f"collating the steps of {where}"))
        return closed

    def _fill(self, where: str) -> int:
        """Fill the window; returns how many samples were dropped on the way."""
        try:
            taken = self._reader.take(self._protocol.missing())
        except SampleError:
            # the others must not wait for this rank until the time-out
            with contextlib.suppress(ExchangeError):
                self._exchange.minimum(self._protocol.begin_round(exhausted=False, failed=True), where)
            raise
        for held in taken.samples:
            self._held[held.meta.index] = held
            self._protocol.add((held.meta,))
            self._filler = _better_filler(self._filler, held)
        self._new_drops.extend(taken.dropped)
        self._drops += len(taken.dropped)
        return len(taken.dropped)

    def _emit(self, step: PlannedStep, *, global_dropped: int) -> None:
        group, totals = step.group, step.totals
        info = StepInfo(
            epoch=self._epoch,
            step=self._steps_sent,
            round=self._protocol.round_index - 1,
            idle=group is None,
            last=step.last,
            indices=tuple(s.index for s in group.samples) if group else (),
            lengths=tuple(s.length for s in group.samples) if group else (),
            loss_tokens=group.loss_tokens if group else 0,
            tokens=group.tokens if group else 0,
            padded_tokens=group.cost if group else 0,
            global_samples=totals.samples,
            global_loss_tokens=totals.loss_tokens,
            global_tokens=totals.tokens,
            global_padded_tokens=totals.padded_tokens,
            global_dropped=global_dropped,
            dropped=self._pop_drops(),
        )
        send(self._sock, (self._batch(group), info))
        self._steps_sent += 1

    def _batch(self, group: Group | None) -> Any:
        if group is None:
            if self._job.config.idle == "skip":
                return None
            return self._collate([loads(self._borrow_filler().payload)], "a filler")
        samples = [loads(self._held.pop(s.index).payload) for s in group.samples]
        self._reader.release(len(samples))
        self._emitted += len(samples)
        return self._collate(samples, f"samples {', '.join(str(s.index) for s in group.samples)}")

    def _collate(self, samples: list[Any], what: str) -> Any:
        try:
            return self._job.collate_fn(samples)
        except Exception as error:
            raise CollateError(f"the collate function failed on {what}: {type(error).__name__}: {error}") from error

    def _borrow_filler(self) -> Held:
        """The filler of this rank; one that never had a sample of its own takes the first valid one of the epoch."""
        for index in self._order if self._filler is None else ():
            item = self._reader.observed[index]
            if isinstance(item, Failed):
                raise SampleError(item.message)
            if isinstance(item, Held):
                self._filler = item
                break
        if self._filler is None:
            raise SampleError("there is no valid sample in the data set to fill an IDLE slot with.")
        return self._filler

    def _pop_drops(self) -> tuple[Dropped, ...]:
        drops, self._new_drops = tuple(self._new_drops), []
        return drops


def _better_filler(best: Held | None, new: Held) -> Held:
    """The cheaper of two fillers: with media if any has, so that every parameter takes part; then the shortest."""
    if best is None:
        return new
    rank = (not new.meta.has_media, new.meta.length) < (not best.meta.has_media, best.meta.length)
    return new if rank else best
