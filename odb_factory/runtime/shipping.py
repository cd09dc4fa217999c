"""How samples get from the workers into the window: several small ones at a time, none by way of shared memory.

A worker keeps what it has read, and sends only where it lies; the collate process fetches it from there into private
memory, in one copy, when there is room in the window. Where reading the memory of a worker is forbidden, all that the
worker has read goes through its pipe.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset, Sampler, get_worker_info

from odb_factory.core.sample import Dropped, SampleMeta
from odb_factory.runtime.observed import Failed, Held, Key, ObservedDataset
from odb_factory.runtime.packing import Packed
from odb_factory.runtime.remote import Forbidden, Gone, Span, fetch, spans_of

TRIP_SECONDS = 0.005
"""A shipment should take about so long to read ..."""

TRIP_BYTES = 256 * 2**10
"""... and hold about so much. It is one sample at least."""


@dataclass(frozen=True, slots=True)
class OnLoan:
    """An observed sample in the memory of the worker that read it."""

    meta: SampleMeta
    spans: list[Span]
    """Its pickle, and the buffers beside it."""


Item = Held | OnLoan | Dropped | Failed


@dataclass(frozen=True, slots=True)
class Shipment:
    """What a worker makes of some keys: an item for each, up to the first that failed."""

    items: list[Item]
    seconds: float
    """What the reading took."""
    pid: int
    worker: int | None
    """None: it was read in this process."""
    number: int
    """Of this worker's shipments."""
    probe: Span
    """Where the worker has its process id, as 8 bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return sum(item.meta.nbytes for item in self.items if isinstance(item, Held | OnLoan))


_UNKNOWN, _OPEN, _CLOSED = range(3)


class Board:
    """What the collate process tells its workers, in a page of memory that they share; to be made before they start."""

    def __init__(self, workers: int) -> None:
        self._words = np.frombuffer(mmap.mmap(-1, 8 * (workers + 1)), np.int64)

    @property
    def lends(self) -> bool:
        """The workers' memory can be read."""
        return bool(self._words[0] == _OPEN)

    def find_out(self, shipment: Shipment) -> None:
        """Try it, once."""
        if self._words[0] != _UNKNOWN or shipment.worker is None:
            return
        try:
            (block,) = fetch(shipment.pid, [shipment.probe])
            same = block.cast("q")[0] == shipment.pid
        except Gone:  # as will be noticed soon
            return
        except (Forbidden, OSError):
            same = False
        self._words[0] = _OPEN if same else _CLOSED

    def done(self, shipment: Shipment) -> None:
        """The worker need not keep this shipment, or those before it."""
        if shipment.worker is not None:
            self._words[1 + shipment.worker] = shipment.number

    def last_done(self, worker: int) -> int:
        """Number of that worker's last shipment that was done."""
        return int(self._words[1 + worker])


def redeem(pid: int, loans: Sequence[OnLoan]) -> list[Held]:
    """Samples in private memory of this process, out of that of worker `pid`.

    Raises:
        Gone: the worker has ended.
    """
    blocks = iter(fetch(pid, [span for loan in loans for span in loan.spans]))
    held = []
    for loan in loans:
        head, *buffers = [next(blocks) for _ in loan.spans]
        held.append(Held(loan.meta, Packed(head, tuple(buffers))))
    return held


class Shipping(Dataset[Shipment]):
    """Runs in the workers: `[keys]` reads some samples, keeps them until they were fetched, and says where they are."""

    def __init__(self, observed: ObservedDataset, board: Board) -> None:
        self._observed = observed
        self._board = board
        self._kept: deque[tuple[int, list[Item]]] = deque()
        self._number = 0
        self._own_pid: np.ndarray | None = None

    def __getitem__(self, keys: Sequence[Key]) -> Shipment:
        begun = time.perf_counter()
        info = get_worker_info()
        worker = None if info is None else info.id
        lends = worker is not None and self._board.lends
        if worker is not None:
            self._forget(self._board.last_done(worker))
        items = list(self._read(keys, lends))
        seconds = time.perf_counter() - begun
        self._number += 1
        if self._own_pid is None:
            self._own_pid = np.array([os.getpid()], np.int64)
        if lends:
            self._kept.append((self._number, items))
            items = [_on_loan(item) for item in items]
        (probe,) = spans_of([self._own_pid])
        return Shipment(items, seconds, os.getpid(), worker, self._number, probe)

    def _forget(self, number: int) -> None:
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def _read(self, keys: Sequence[Key], lends: bool) -> Iterator[Item]:
        for key in keys:
            item = self._observed.read(key) if lends else self._observed[key]
            yield item
            if isinstance(item, Failed):
                return


def _on_loan(item: Item) -> Item:
    return OnLoan(item.meta, spans_of(item.payload.parts)) if isinstance(item, Held) else item


class Pending(Sampler[tuple[Key, ...]]):
    """Indices of the epoch that is being read, which were handed out but not yet to a worker.

    How many go to a worker at once depends on the time and the bytes that samples took; their order does not.

    Args:
        most: upper bound on that number.
    """

    def __init__(self, most: int) -> None:
        self.epoch = 0
        self.indices: deque[int] = deque()
        self._most = most
        self._seconds = 0.0
        self._bytes = 0.0
        self._size = 1

    def learn(self, shipment: Shipment) -> None:
        """Adapt to what a shipment took; a large sample is remembered for a while, a slow one averaged."""
        seconds = shipment.seconds / len(shipment.items)
        largest = max((item.meta.nbytes for item in shipment.items if isinstance(item, Held | OnLoan)), default=0)
        self._seconds += (seconds - self._seconds) * (0.2 if self._seconds else 1.0)
        self._bytes = max(largest, 0.97 * self._bytes)
        fits = min(TRIP_SECONDS / max(self._seconds, 1e-9), TRIP_BYTES / max(self._bytes, 1.0))
        self._size = max(1, min(self._most, int(fits)))

    def __iter__(self) -> Iterator[tuple[Key, ...]]:
        while self.indices:  # more may come while this is walked
            count = min(self._size, len(self.indices))
            yield tuple((self.epoch, self.indices.popleft()) for _ in range(count))
