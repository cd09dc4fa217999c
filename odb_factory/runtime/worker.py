"""Stage 1, the workers: keys in, observed samples out.

In: a few keys (epoch, index) from the window's sampler. Out: a `Chunk` with an item for each: a sample that was read,
observed and serialised, or why there is none. Runs in the DataLoader's workers, or in the window's thread without any.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from odb_factory.config import OdbConfig
from odb_factory.core.protocol import make_budget
from odb_factory.core.sample import BadSample, Dropped, DropSample, SampleMeta
from odb_factory.runtime.allocation import keep_freed_memory
from odb_factory.runtime.errors import SampleError, describe_error, is_of_the_machine
from odb_factory.runtime.observe import Observe
from odb_factory.runtime.serialise import serialise
from odb_factory.runtime.signals import ignore_in_this_process
from odb_factory.runtime.transport.samples import Chunk, FailedSample, Item, ObservedSample, SampleSender

Key = tuple[int, int]
"""Epoch and index of a sample."""

CHUNK_SECONDS = 0.005
"""A chunk should take about so long to read ..."""

CHUNK_BYTES = 256 * 2**10
"""... and hold about so much. It is one sample at least."""


class ObservedDataset(Dataset[Item]):
    """Runs in the workers: reads one sample, observes it, applies the policies, and serialises it.

    A key is (epoch, index). Each sample has random numbers of its own that depend on these and the seed only: not on
    the worker that reads it, so that the number of workers, the timing and a resumption change nothing.
    """

    def __init__(self, dataset: Any, observe: Observe, config: OdbConfig) -> None:
        self.lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        """Where samples are read in a thread of the collate process: for that dataset, and for random numbers."""
        self.restore = True
        """Others in this process draw random numbers too."""
        self.seed = config.seed
        self.dataset = dataset
        self.observe = observe
        self.overlong = config.overlong
        self.skip_bad = config.on_bad_sample == "skip"
        self.budget = make_budget(config)

    def __getitem__(self, key: Key) -> Item:
        item = self.read(key)
        return item.copy() if isinstance(item, ObservedSample) else item

    def read(self, key: Key) -> Item:
        """As `[key]`, but a sample's large tensors may lie where the dataset made them."""
        epoch, index = key
        with self.lock, seeded(f"{self.seed}:{epoch}:{index}", restore=self.restore):
            return self._read(index)

    def _read(self, index: int) -> Item:
        try:
            sample = self.dataset[index]
            meta = self.observe(index, sample)
            self._check_length(meta)
            content = serialise(sample)
            return ObservedSample(replace(meta, index=index, nbytes=content.nbytes), content)
        except DropSample as drop:
            return Dropped(index, str(drop.reason), str(drop.detail))
        except SampleError as error:
            return FailedSample(index, str(error), "")
        except Exception as error:
            if self.skip_bad and not is_of_the_machine(error):
                reason = error.reason if isinstance(error, BadSample) else "unreadable"
                detail = error.detail if isinstance(error, BadSample) else describe_error(error)
                return Dropped(index, reason, self._describe(index) + detail, bad=True)
            message = f"sample {index} could not be read: {self._describe(index)}{describe_error(error)}"
            return FailedSample(index, message, traceback.format_exc())

    def _describe(self, index: int) -> str:
        """The dataset's own words for a sample, where it has any (`describe_sample`)."""
        describe = getattr(self.dataset, "describe_sample", None)
        if describe is None:
            return ""
        try:
            return f"{describe(index)}: "
        except Exception:  # of a sample that is bad already
            return ""

    def _check_length(self, meta: SampleMeta) -> None:
        if self.overlong == "keep" or not self.budget.overlong(meta):
            return
        detail = f"{meta.length} tokens, budget {self.budget.tokens}"
        if self.overlong == "drop":
            raise DropSample("overlong", detail)
        raise SampleError(
            f"sample {meta.index} is longer than the token budget ({detail}); raise the budget, shorten the samples "
            "(cutoff_len), or set overlong (odb_overlong) to keep or drop."
        )


class ChunkDataset(Dataset[Chunk]):
    """What the DataLoader reads from: `[keys]` reads some samples."""

    def __init__(self, observed: ObservedDataset, sender: SampleSender) -> None:
        self._observed = observed
        self._sender = sender

    def __getitem__(self, keys: Sequence[Key]) -> Chunk:
        begun = time.perf_counter()
        by_reference = self._sender.by_reference()
        items = list(self._read(keys, by_reference))
        return self._sender.chunk(items, time.perf_counter() - begun, by_reference=by_reference)

    def _read(self, keys: Sequence[Key], by_reference: bool) -> Iterator[Item]:
        for key in keys:
            item = self._observed.read(key) if by_reference else self._observed[key]
            yield item
            if isinstance(item, FailedSample):
                return


class ChunkSampler(Sampler[tuple[Key, ...]]):
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

    def learn(self, chunk: Chunk) -> None:
        """Adapt to what a chunk took; a large sample is remembered for a while, a slow one averaged."""
        seconds = chunk.seconds / len(chunk.items)
        largest = max((sample.meta.nbytes for sample in chunk.samples), default=0)
        self._seconds += (seconds - self._seconds) * (0.2 if self._seconds else 1.0)
        self._bytes = max(largest, 0.97 * self._bytes)
        fits = min(CHUNK_SECONDS / max(self._seconds, 1e-9), CHUNK_BYTES / max(self._bytes, 1.0))
        self._size = max(1, min(self._most, int(fits)))

    def __iter__(self) -> Iterator[tuple[Key, ...]]:
        while self.indices:  # more may come while this is walked
            count = min(self._size, len(self.indices))
            yield tuple((self.epoch, self.indices.popleft()) for _ in range(count))


@contextlib.contextmanager
def seeded(name: str, *, restore: bool = True) -> Iterator[None]:
    """Python's, numpy's and torch's CPU generators are seeded by `name`.

    Args:
        restore: afterwards they go on as before. That takes ten times as long.
    """
    generator = torch.default_generator  # torch.manual_seed would look for accelerators each time
    states = (random.getstate(), np.random.get_state(), generator.get_state()) if restore else None
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    generator.manual_seed(seed)
    try:
        yield
    finally:
        if states is not None:
            random.setstate(states[0])
            np.random.set_state(states[1])
            generator.set_state(states[2])


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that forked it ends (Linux; elsewhere nothing happens)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return


@dataclass(frozen=True)
class WorkerInit:
    """Runs in each worker before its first sample."""

    parent: int
    user_init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        die_with_parent()
        if os.getppid() != self.parent:  # the parent died before the kernel was told
            os._exit(1)
        ignore_in_this_process()  # torch has just set its own handler of SIGTERM
        keep_freed_memory()
        if self.user_init is not None:
            self.user_init(worker)
