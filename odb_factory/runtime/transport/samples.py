"""Samples from the workers into the window, none through shared memory.

In: samples that a worker has read, several small ones at a time. Out: the same in memory of the collate process.

A worker keeps what it has read and sends references; the collate process copies from them when there is room in the
window, and acknowledges that. Where reading the memory of a worker is forbidden, the samples go through its pipe.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.utils.data import get_worker_info

from odb_factory.core.sample import Dropped, SampleMeta
from odb_factory.runtime.serialise import Serialised
from odb_factory.runtime.transport.process_memory import (
    ProcessGoneError,
    ReadForbiddenError,
    Reference,
    Span,
    copy_from,
    read,
    refer_to,
    spans_of,
)


@dataclass(frozen=True, slots=True)
class ObservedSample:
    """A sample that was read and observed."""

    meta: SampleMeta
    content: Serialised | Reference
    """Reference: it lies in the memory of the worker that read it."""

    def load(self) -> object:
        """The sample, of which nothing lies in another process; its large tensors share the content's memory."""
        assert isinstance(self.content, Serialised)
        return self.content.load()

    def copy(self) -> ObservedSample:
        """With buffers in memory of their own."""
        assert isinstance(self.content, Serialised)
        return replace(self, content=self.content.copy())


@dataclass(frozen=True, slots=True)
class FailedSample:
    """A sample that raised; travels as a value so that the worker lives on and nothing of the error is lost."""

    index: int
    message: str
    traceback: str


Item = ObservedSample | Dropped | FailedSample


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a worker sends at once: an item for each key, up to the first that failed."""

    items: list[Item]
    seconds: float
    """What the reading took."""
    pid: int
    worker: int | None
    """None: it was read in this process."""
    number: int
    """Of this worker's chunks."""
    probe: Span
    """Where the worker has its process id, as 8 bytes."""

    @property
    def samples(self) -> list[ObservedSample]:
        """Its items that are samples."""
        return [item for item in self.items if isinstance(item, ObservedSample)]

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return sum(sample.meta.nbytes for sample in self.samples)


_UNKNOWN, _READABLE, _FORBIDDEN = range(3)


class WorkerStatus:
    """A page that the collate process and its workers share: whether their memory can be read, and what has been."""

    def __init__(self, workers: int) -> None:
        self.words = np.frombuffer(mmap.mmap(-1, 8 * (workers + 1)), np.int64)
        """The first is one of the three states; then, for each worker, the number of its last chunk that was copied."""

    @property
    def readable(self) -> bool:
        """The workers' memory is known to be readable."""
        return bool(self.words[0] == _READABLE)


class SampleSender:
    """The workers' side, one of them or all in copies."""

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status
        self._kept: deque[tuple[int, list[Item]]] = deque()
        self._number = 0
        self._own_pid: np.ndarray | None = None

    def by_reference(self) -> bool:
        """Whether the next chunk's samples may stay where they are; also frees those that were copied."""
        info = get_worker_info()
        if info is None:
            return False
        while self._kept and self._kept[0][0] <= self._status.words[1 + info.id]:
            self._kept.popleft()
        return self._status.readable

    def chunk(self, items: list[Item], seconds: float, *, by_reference: bool) -> Chunk:
        """These items, to be returned by the worker; with references they are kept until they were copied."""
        info = get_worker_info()
        self._number += 1
        if self._own_pid is None:
            self._own_pid = np.array([os.getpid()], np.int64)
        if by_reference:
            self._kept.append((self._number, items))
            items = [_referred_to(item) for item in items]
        (probe,) = spans_of([self._own_pid])
        return Chunk(items, seconds, os.getpid(), None if info is None else info.id, self._number, probe)


def _referred_to(item: Item) -> Item:
    if isinstance(item, ObservedSample) and isinstance(item.content, Serialised):
        return replace(item, content=refer_to(item.content))
    return item


class SampleReceiver:
    """The collate process's side."""

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status

    def probe(self, chunk: Chunk) -> None:
        """Find out, once, whether the memory of workers can be read."""
        if self._status.words[0] != _UNKNOWN or chunk.worker is None:
            return
        try:
            (block,) = read(chunk.pid, [chunk.probe])
            same = block.cast("q")[0] == chunk.pid
        except ProcessGoneError:  # as will be noticed soon
            return
        except (ReadForbiddenError, OSError):
            same = False
        self._status.words[0] = _READABLE if same else _FORBIDDEN

    def copy(self, chunk: Chunk, samples: Sequence[ObservedSample]) -> list[ObservedSample]:
        """These samples of `chunk`, in private memory of this process.

        Raises:
            ProcessGoneError: the worker has ended.
        """
        far = [sample for sample in samples if isinstance(sample.content, Reference)]
        copies = iter(copy_from(chunk.pid, [s.content for s in far if isinstance(s.content, Reference)]) if far else ())
        return [replace(s, content=next(copies)) if isinstance(s.content, Reference) else s for s in samples]

    def acknowledge(self, chunk: Chunk) -> None:
        """The worker need not keep this chunk, or those before it."""
        if chunk.worker is not None:
            self._status.words[1 + chunk.worker] = chunk.number
