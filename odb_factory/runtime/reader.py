"""Reading and observing samples ahead of the rounds: a plain DataLoader in a thread of the collate process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import signal
import threading
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from odb_factory.config import OdbConfig
from odb_factory.core.protocol import make_budget
from odb_factory.core.sample import BadSample, Dropped, DropSample, SampleMeta
from odb_factory.runtime.errors import SampleError
from odb_factory.runtime.messages import dumps
from odb_factory.runtime.observe import Observe


@dataclass(frozen=True, slots=True)
class Held:
    """An observed sample in private memory: what is known of it, and its pickled content."""

    meta: SampleMeta
    payload: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """A sample that raised; travels as a value so that the worker lives on and nothing of the error is lost."""

    index: int
    message: str
    traceback: str


class ObservedDataset(Dataset[Held | Dropped | Failed]):
    """Runs in the workers: reads one sample, observes it, applies the policies, and packs it into bytes.

    A key is (epoch, index). Each sample has random numbers of its own that depend on these and the seed only: not on
    the worker that reads it, so that the number of workers, the timing and a resumption change nothing.
    """

    def __init__(self, dataset: Any, observe: Observe, config: OdbConfig) -> None:
        self.lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        """Where samples are read in a thread of the collate process: for that data set, and for random numbers."""
        self.seed = config.seed
        self.dataset = dataset
        self.observe = observe
        self.overlong = config.overlong
        self.skip_bad = config.on_bad_sample == "skip"
        self.budget = make_budget(config)

    def __getitem__(self, key: tuple[int, int]) -> Held | Dropped | Failed:
        epoch, index = key
        with self.lock, seeded(f"{self.seed}:{epoch}:{index}"):
            return self._read(index)

    def _read(self, index: int) -> Held | Dropped | Failed:
        try:
            sample = self.dataset[index]
            meta = self.observe(index, sample)
            self._check_length(meta)
            payload = dumps(sample)
            return Held(replace(meta, index=index, nbytes=len(payload)), payload)
        except DropSample as drop:
            return Dropped(index, str(drop.reason), str(drop.detail))
        except SampleError as error:
            return Failed(index, str(error), "")
        except Exception as error:
            if self.skip_bad and not is_of_the_machine(error):
                reason = error.reason if isinstance(error, BadSample) else "unreadable"
                detail = error.detail if isinstance(error, BadSample) else _describe(error)
                return Dropped(index, reason, self._describe(index) + detail, bad=True)
            message = f"sample {index} could not be read: {self._describe(index)}{_describe(error)}"
            return Failed(index, message, traceback.format_exc())

    def _describe(self, index: int) -> str:
        """The data set's own words for a sample, where it has any (`describe_sample`)."""
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


@contextlib.contextmanager
def seeded(name: str) -> Iterator[None]:
    """Python's, numpy's and torch's CPU generators are seeded by `name`, and afterwards go on as before."""
    generator = torch.default_generator  # torch.manual_seed would look for accelerators each time
    states = random.getstate(), np.random.get_state(), generator.get_state()
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        generator.set_state(states[2])


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, BadSample) else f"{type(error).__name__}: {error}"


_MACHINE_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}


def is_of_the_machine(error: BaseException) -> bool:
    """Whether the machine ran out of something, so that no sample is to blame."""
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # so says torch
        return True
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _MACHINE_ERRORS)


class _Pending(Sampler[tuple[int, int]]):
    """Indices of the epoch that is being read, which were handed out but not yet to a worker."""

    def __init__(self) -> None:
        self.epoch = 0
        self.indices: deque[int] = deque()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.indices:  # more may come while this is walked
            yield self.epoch, self.indices.popleft()


def _identity(item: Any) -> Any:
    return item


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that forked it ends (Linux; elsewhere nothing happens)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return


@dataclass(frozen=True)
class _WorkerInit:
    """Runs in each worker before its first sample."""

    parent: int
    user_init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        die_with_parent()
        if os.getppid() != self.parent:  # the parent died before the kernel was told
            os._exit(1)
        if self.user_init is not None:
            self.user_init(worker)


@dataclass(frozen=True, slots=True)
class Taken:
    """What `Reader.take` returns."""

    samples: tuple[Held, ...]
    dropped: tuple[Dropped, ...]
    """Samples dropped between those taken before and the next one to come."""
    short: bool
    """There are fewer than asked for since their bytes are too many."""


class Reader:
    """Keeps the next samples of this rank ready, in the order of its indices, whatever the timing of the workers.

    At most `depth` samples and one more are held between reading and `release`, and at most `window_bytes` of them;
    one further sample is read to know whether the data goes on. One thread lives as long as the reader, since workers
    die with the thread that forked them.

    Args:
        dataset: map-style data set of processed samples.
        observe: see `OdbDataLoader`.
        config: depth, budget and the policies for samples that are overlong or bad.
        num_workers: worker processes; 0 reads in the thread itself.
        prefetch_factor: samples in flight for each worker; None: torch's default.
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
        self._pending = _Pending()
        self._loader: DataLoader[Any] = DataLoader(
            self.observed,
            batch_size=None,
            sampler=self._pending,
            num_workers=num_workers,
            collate_fn=_identity,
            persistent_workers=num_workers > 0,
            prefetch_factor=prefetch_factor if num_workers > 0 else None,
            worker_init_fn=_WorkerInit(os.getpid(), worker_init_fn),
            multiprocessing_context="fork" if num_workers > 0 else None,
            generator=torch.Generator(),  # its own, or the seeding of samples and that of workers would meet
        )
        self._limit = config.depth + 1
        self._byte_limit = window_bytes
        self._changed = threading.Condition()
        self._ready: deque[Held | Dropped] = deque()
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
        with self._changed:
            if not self._is_idle() or self._ready:
                raise RuntimeError("an epoch is still being read")
            self._cancelled = False
            self._pending.epoch = epoch
            self._pending.indices.extend(indices)
            self._changed.notify_all()

    def extend(self, indices: Sequence[int]) -> None:
        """More indices of the same epoch, to be read after those before."""
        with self._changed:
            self._pending.indices.extend(indices)
            self._changed.notify_all()

    def _is_idle(self) -> bool:
        stopped = self._cancelled or self._error is not None
        return not self._reading and (stopped or not self._pending.indices)

    def take(self, count: int, *, needed: bool = False) -> Taken:
        """The next `count` samples; waits until it is known whether more will come.

        Fewer where the indices end, or where the next one would exceed `window_bytes`.

        Args:
            needed: nothing is in the window: where there is a sample, take at least one, whatever its size.

        Raises:
            SampleError: a sample could not be read or observed, or a worker died.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle() or self._known_ahead() > count or self._is_full(needed))
            if self._error is not None and self._known_ahead() <= count:  # at the same sample whatever the timing
                raise self._error
            short = self._ready_samples < count and self._in_hand is not None and not self._fits(self._in_hand)
            samples: list[Held] = []
            dropped: list[Dropped] = []
            while self._ready and (len(samples) < count or isinstance(self._ready[0], Dropped)):
                item = self._ready.popleft()
                if isinstance(item, Dropped):
                    dropped.append(item)
                else:
                    samples.append(item)
            self._ready_samples -= len(samples)
            return Taken(tuple(samples), tuple(dropped), short)

    def _known_ahead(self) -> int:
        return self._ready_samples + (self._in_hand is not None)

    def _is_full(self, needed: bool) -> bool:
        """Whether the next sample is there, but finds no room before others have left."""
        if self._in_hand is None or self._has_room(self._in_hand):
            return False
        if needed and not self._ready_samples:
            self._forced = True
            self._changed.notify_all()
            return False
        return True

    @property
    def unread(self) -> int:
        """A lower bound on the samples to come beyond those taken: 0 exactly when there are none. For after `take`."""
        with self._changed:
            return min(1, self._known_ahead())

    def release(self, samples: Sequence[SampleMeta]) -> None:
        """These samples have left the window: as many more may be read."""
        with self._changed:
            self._outstanding -= len(samples)
            self._outstanding_bytes -= sum(s.nbytes for s in samples)
            self._changed.notify_all()

    def cancel(self) -> None:
        """Read no further in this epoch, and forget what was read; waits until the reading has stopped."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
            self._changed.wait_for(self._is_idle)
            self._ready.clear()
            self._pending.indices.clear()
            self._error = None  # of a sample that nobody asked for any more
            self._ready_samples = self._outstanding = self._outstanding_bytes = 0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending.indices and not self._is_idle())
                self._reading = True
            error: SampleError | None = None
            try:
                self._read()
            except SampleError as sample_error:
                error = sample_error
            except BaseException as other:  # also what only ends a thread, or the rounds would wait for ever
                error = SampleError(f"reading failed: {_describe(other)}\n{traceback.format_exc()}")
            with self._changed:
                self._error = self._error or error
                self._reading = False
                self._changed.notify_all()

    def _read(self) -> None:
        """Until no index is pending: the workers then run dry, and start again with the next one."""
        for item in self._loader:
            if isinstance(item, Failed):
                raise SampleError("\n".join(filter(None, (item.message, item.traceback))))
            if not self._hand_over(item):
                return

    def _hand_over(self, item: Held | Dropped) -> bool:
        """Make `item` ready, once there is room for it; False: the epoch was cancelled."""
        with self._changed:
            if isinstance(item, Held):
                self._in_hand = item.meta.nbytes
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._has_room(item.meta.nbytes) or self._cancelled)
                self._in_hand, self._forced = None, False
            if self._cancelled:
                return False
            if isinstance(item, Held):
                self._outstanding += 1
                self._outstanding_bytes += item.meta.nbytes
                self._ready_samples += 1
            self._ready.append(item)
            self._changed.notify_all()
            return True

    def _has_room(self, nbytes: int) -> bool:
        if self._outstanding == 0 or self._forced:
            return True
        return self._outstanding < self._limit and self._fits(nbytes)

    def _fits(self, nbytes: int) -> bool:
        return self._byte_limit is None or self._outstanding_bytes + nbytes <= self._byte_limit
