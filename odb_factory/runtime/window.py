"""Stage 2, the window: reads ahead of the rounds, through a plain DataLoader in a thread of the collate process.

In: the indices of this rank's samples, and which samples have left the window. Out: observed samples in private
memory, in the order of the indices, as the rounds ask for them; bounded in samples and in bytes.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from odb_factory.config import OdbConfig
from odb_factory.core.sample import Dropped, SampleMeta
from odb_factory.runtime.errors import SampleError, describe_error
from odb_factory.runtime.observe import Observe
from odb_factory.runtime.signals import block_in_this_thread
from odb_factory.runtime.transport.process_memory import ProcessGoneError
from odb_factory.runtime.transport.samples import (
    Chunk,
    FailedSample,
    ObservedSample,
    SampleReceiver,
    SampleSender,
    WorkerStatus,
)
from odb_factory.runtime.worker import ChunkDataset, ChunkSampler, ObservedDataset, WorkerInit

COPY_AT_ONCE = 2**20
"""A chunk of several samples that is no larger than this is copied whole, before there is room for all of it."""

_IN_FLIGHT_SHARE = 16
"""Small samples that are read at once, one of so many of the depth, are in flight at most."""


def _identity(item: Any) -> Any:
    return item


@dataclass(frozen=True, slots=True)
class Taken:
    """What `WindowReader.take` returns."""

    samples: tuple[ObservedSample, ...]
    dropped: tuple[Dropped, ...]
    """Samples dropped between those taken before and the next one to come."""
    short: bool
    """There are fewer than requested, since more would exceed `window_bytes`."""


class WindowReader:
    """Keeps the next samples of this rank ready, in the order of its indices, whatever the timing of the workers.

    At most `depth` samples and one more are held between reading and `release`, and at most `window_bytes` of them;
    one further sample is read to know whether the data goes on. One thread lives as long as the reader, since workers
    die with the thread that forked them.

    Args:
        dataset: map-style dataset of processed samples.
        observe: see `OdbDataLoader`.
        config: depth, budget and the policies for samples that are overlong or bad.
        num_workers: worker processes; 0 reads in the thread itself.
        prefetch_factor: reads in flight for each worker, each of one sample, or of some that are small and quick; None:
            torch's default.
        worker_init_fn: called in each worker with its id.
        window_bytes: bound on what is held (bytes); None: no bound.
    """

    def __init__(
        self,
        dataset: Any,
        observe: Observe,
        config: OdbConfig,
        *,
        num_workers: int,
        prefetch_factor: int | None,
        worker_init_fn: Callable[[int], None] | None,
        window_bytes: int | None = None,
    ) -> None:
        self.observed = ObservedDataset(dataset, observe, config)
        if num_workers == 0:
            self.observed.lock = threading.RLock()
        self.observed.restore = num_workers == 0
        in_flight = num_workers * (prefetch_factor or 2)
        self._sampler = ChunkSampler(most=max(1, config.depth // (_IN_FLIGHT_SHARE * in_flight)) if num_workers else 1)
        status = WorkerStatus(num_workers)
        self._receiver = SampleReceiver(status)
        self._loader: DataLoader[Any] = DataLoader(
            ChunkDataset(self.observed, SampleSender(status)),
            batch_size=None,
            sampler=self._sampler,
            num_workers=num_workers,
            collate_fn=_identity,
            persistent_workers=num_workers > 0,
            prefetch_factor=prefetch_factor if num_workers > 0 else None,
            worker_init_fn=WorkerInit(os.getpid(), worker_init_fn),
            multiprocessing_context="fork" if num_workers > 0 else None,
            generator=torch.Generator(),  # its own, or the seeding of samples and that of workers would meet
        )
        self._limit = config.depth + 1
        self._byte_limit = window_bytes
        lock = threading.Lock()
        self._freed = threading.Condition(lock)
        """Waited for by the thread that reads."""
        self._came = threading.Condition(lock)
        """Waited for by the one that takes."""
        self._awaited: Callable[[], bool] | None = None
        """What that one waits for; it is woken when this is true, and not at each sample."""
        self._ready: deque[ObservedSample | Dropped] = deque()
        self._ready_samples = 0
        self._in_hand: int | None = None  # bytes of a sample that was read and waits for room
        self._forced = False
        self._outstanding = self._outstanding_bytes = 0
        self._reading = False
        self._cancelled = False
        self._error: SampleError | None = None
        threading.Thread(target=self._run, name="odb-reader", daemon=True).start()

    def start_epoch(self, epoch: int, indices: Sequence[int]) -> None:
        """Begin to read `indices`; the epoch before must have been read to its end, or cancelled."""
        with self._freed:
            if not self._is_idle() or self._ready:
                raise RuntimeError("an epoch is still being read")
            self._cancelled = False
            self._sampler.epoch = epoch
            self._sampler.indices.extend(indices)
            self._freed.notify()

    def extend(self, indices: Sequence[int]) -> None:
        """More indices of the same epoch, to be read after those before."""
        with self._freed:
            self._sampler.indices.extend(indices)
            self._freed.notify()

    def _is_idle(self) -> bool:
        stopped = self._cancelled or self._error is not None
        return not self._reading and (stopped or not self._sampler.indices)

    def take(self, count: int, *, needed: bool = False) -> Taken:
        """The next `count` samples; waits until it is known whether more will come.

        Fewer where the indices end, or where the next one would exceed `window_bytes`.

        Args:
            needed: nothing is in the window: where there is a sample, take at least one, whatever its size.

        Raises:
            SampleError: a sample could not be read or observed, or a worker died.
        """
        with self._came:
            self._await(lambda: self._is_idle() or self._known_ahead() > count or self._is_full(needed))
            if self._error is not None and self._known_ahead() <= count:  # at the same sample whatever the timing
                raise self._error
            short = self._ready_samples < count and self._in_hand is not None and not self._fits(self._in_hand)
            samples: list[ObservedSample] = []
            dropped: list[Dropped] = []
            while self._ready and (len(samples) < count or isinstance(self._ready[0], Dropped)):
                item = self._ready.popleft()
                if isinstance(item, Dropped):
                    dropped.append(item)
                else:
                    samples.append(item)
            self._ready_samples -= len(samples)
            return Taken(tuple(samples), tuple(dropped), short)

    def _await(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds; to be called with the lock, which is not held meanwhile."""
        self._awaited = condition
        self._came.wait_for(condition)
        self._awaited = None

    def _wake(self) -> None:
        """Wake the one that waits if there is reason to; to be called with the lock."""
        if self._awaited is not None and self._awaited():
            self._came.notify()

    def _known_ahead(self) -> int:
        return self._ready_samples + (self._in_hand is not None)

    def _is_full(self, needed: bool) -> bool:
        """Whether the next sample is there, but finds no room before others have left."""
        if self._in_hand is None or self._has_room(self._in_hand):
            return False
        if needed and not self._ready_samples:
            self._forced = True
            self._freed.notify()
            return False
        return True

    @property
    def unread(self) -> int:
        """A lower bound on the samples to come beyond those taken: 0 exactly when there are none. For after `take`."""
        with self._came:
            return min(1, self._known_ahead())

    def release(self, samples: Sequence[SampleMeta]) -> None:
        """These samples have left the window: as many more may be read."""
        with self._freed:
            self._outstanding -= len(samples)
            self._outstanding_bytes -= sum(s.nbytes for s in samples)
            self._freed.notify()

    def cancel(self) -> None:
        """Read no further in this epoch, and forget what was read; waits until the reading has stopped."""
        with self._freed:
            self._cancelled = True
            self._freed.notify()
            self._await(self._is_idle)
            self._ready.clear()
            self._sampler.indices.clear()
            self._error = None  # of a sample that nobody needs any more
            self._ready_samples = self._outstanding = self._outstanding_bytes = 0

    def _run(self) -> None:
        if self._loader.num_workers > 0:
            block_in_this_thread()
        while True:
            with self._freed:
                self._freed.wait_for(lambda: self._sampler.indices and not self._is_idle())
                self._reading = True
            error: SampleError | None = None
            try:
                self._read()
            except SampleError as sample_error:
                error = sample_error
            except BaseException as other:  # also what only ends a thread, or the rounds would wait for ever
                error = SampleError(f"reading failed: {describe_error(other)}\n{traceback.format_exc()}")
            with self._freed:
                self._error = self._error or error
                self._reading = False
                self._wake()

    def _read(self) -> None:
        """Until no index is pending: the workers then run dry, and start again with the next one."""
        for chunk in self._loader:
            self._receiver.probe(chunk)
            self._sampler.learn(chunk)
            if not self._receive(chunk):
                return
            self._receiver.acknowledge(chunk)

    def _receive(self, chunk: Chunk) -> bool:
        """Make its items ready, as there is room for them; False: the epoch was cancelled."""
        copied = iter(self._copy(chunk, chunk.samples)) if chunk.nbytes <= COPY_AT_ONCE else None
        for item in chunk.items:
            if isinstance(item, FailedSample):
                raise SampleError("\n".join(filter(None, (item.message, item.traceback))))
            if isinstance(item, ObservedSample):
                if not self._find_room(item.meta.nbytes):
                    return False
                item = next(copied) if copied is not None else self._copy(chunk, [item])[0]
            if not self._hand_over(item):
                return False
        return True

    def _copy(self, chunk: Chunk, samples: Sequence[ObservedSample]) -> list[ObservedSample]:
        try:
            return self._receiver.copy(chunk, samples)
        except ProcessGoneError:
            raise SampleError(f"a DataLoader worker (pid {chunk.pid}) exited unexpectedly") from None

    def _find_room(self, nbytes: int) -> bool:
        """Wait until there is room for a sample in hand of so many bytes; False: the epoch was cancelled."""
        with self._freed:
            self._in_hand = nbytes
            if not self._has_room(nbytes):
                self._wake()
                self._freed.wait_for(lambda: self._has_room(nbytes) or self._cancelled)
            return not self._cancelled

    def _hand_over(self, item: ObservedSample | Dropped) -> bool:
        """Make `item` ready; False: the epoch was cancelled."""
        with self._freed:
            self._in_hand, self._forced = None, False
            if self._cancelled:
                return False
            if isinstance(item, ObservedSample):
                self._outstanding += 1
                self._outstanding_bytes += item.meta.nbytes
                self._ready_samples += 1
            self._ready.append(item)
            self._wake()
            return True

    def _has_room(self, nbytes: int) -> bool:
        if self._outstanding == 0 or self._forced:
            return True
        return self._outstanding < self._limit and self._fits(nbytes)

    def _fits(self, nbytes: int) -> bool:
        return self._byte_limit is None or self._outstanding_bytes + nbytes <= self._byte_limit
