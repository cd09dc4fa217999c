"""`OdbDataLoader`: what a training loop iterates over."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from odb_factory.config import OdbConfig
from odb_factory.runtime.errors import ExchangeError, all_dropped
from odb_factory.runtime.memory import default_window_bytes
from odb_factory.runtime.messages import EpochEnd, Resumed, StepInfo
from odb_factory.runtime.observe import Observe, observe_sample
from odb_factory.runtime.rendezvous import Rendezvous, meet, resolve_world
from odb_factory.runtime.rounds import CollateJob
from odb_factory.runtime.session import Session
from odb_factory.runtime.signals import handled_later
from odb_factory.runtime.state import EpochProgress, Identity, StateError, pack, unpack


class OdbDataLoader:
    """Yields `(batch, StepInfo)`: micro-batches formed online under a token budget, the same number on every rank.

    It needs neither LLaMA-Factory nor transformers. Every rank makes one, with the same dataset and config, and
    iterates it the same number of times. Each `iter()` is one epoch. There is no `len()`: how many steps an epoch has
    is known when it ends (`StepInfo.last`). `state_dict` and `load_state_dict` carry on where a run stopped.

    Args:
        dataset: map-style dataset of processed samples (`__len__`, `__getitem__`); may raise `DropSample` and
            `BadSample`. Where it has `describe_sample(index) -> str`, errors quote that; where it has
            `fingerprint() -> str`, a state saved with another fingerprint is refused.
        collate_fn: makes a batch of a list of samples, shortest first. Runs in the collate process, on the CPU.
        config: see `OdbConfig`.
        rank, world_size: this process's place; by default those of `torch.distributed`.
        rendezvous: where the collate processes meet; by default agreed through the default process group. Given
            explicitly it can be used once, since an early `break` makes a new meeting necessary.
        num_workers: worker processes that read samples; 0 reads in a thread of the collate process, whose random
            numbers are then repeatable only if `collate_fn` draws none.
        prefetch_factor: reads in flight for each worker, each of one sample or of some that are small and quick.
        observe: `(index, sample) -> SampleMeta`; by default for mappings with `input_ids` and `labels`.
        pin_memory: page-lock the tensors of batches (only where CUDA is available).
        worker_init_fn: called in each worker with its id.

    Raises:
        ValueError, TypeError: unusable arguments.
        ExchangeError: several ranks, but no process group and no rendezvous.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any],
        config: OdbConfig,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        rendezvous: Rendezvous | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        observe: Observe = observe_sample,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        _check_arguments(dataset, collate_fn, observe, num_workers, prefetch_factor)
        if rendezvous is not None:
            rank, world_size = rendezvous.rank, rendezvous.world_size
        self.dataset = dataset
        self.config = config
        self.rank, self.world_size = resolve_world(rank, world_size)
        if self.world_size > 1 and rendezvous is None and not dist.is_initialized():
            raise ExchangeError(
                f"{self.world_size} ranks need a way to meet: call torch.distributed.init_process_group before the "
                "loader is made, or pass rendezvous=Rendezvous(...)."
            )
        self.epoch_ends: list[EpochEnd] = []
        """One entry for each epoch that was iterated to its end."""
        self._collate_fn = collate_fn
        self._observe = observe
        self._rendezvous = rendezvous
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._worker_init_fn = worker_init_fn
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self.window_bytes = (
            default_window_bytes(self.world_size) if config.window_bytes is None else config.window_bytes
        )
        """Most bytes of samples in this rank's window; None: no bound, since the host does not say what it has."""
        self._epoch = 0
        self.auto_commit = True
        """A step counts as trained when it is handed out; False: when `commit` is called after it."""
        self._progress = EpochProgress(len(dataset), 0)
        self._uncommitted: list[StepInfo] = []
        self._loaded: Resumed | None = None
        self._session: Session | None = None
        self._store: object | None = None
        self._iterating = False
        self._has_met = False

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch (0-based); by default they are counted from 0."""
        self._epoch = epoch

    def set_token_budget(self, budget: int) -> None:
        """The epochs to come have this token budget (tokens); each rank must set the same.

        Raises:
            RuntimeError: the collate process has been started with another one already.
            ValueError: see `OdbConfig`.
        """
        if self._session is not None:
            raise RuntimeError("the token budget of a loader whose collate process runs cannot change; close it first.")
        self.config = dataclasses.replace(self.config, token_budget=budget)

    def commit(self) -> None:
        """The steps that were handed out are trained, as `state_dict` will say; for loops with `auto_commit` off.

        Such as one that accumulates micro-batches: what was handed out for an update that is not done is lost with it.
        """
        for info in self._uncommitted:
            if info.last:
                self._progress = EpochProgress(len(self.dataset), info.epoch + 1)
            else:
                self._progress.record(info)
        self._uncommitted.clear()

    def state_dict(self) -> dict[str, Any]:
        """Which samples of the current epoch are done: those of the steps that were handed out, and those dropped.

        Collective over the default process group: with several ranks, each must call it, after the same step; each
        gets the whole state. Plain values, fit for JSON. With micro-batches accumulated, see `commit`.

        Raises:
            StateError: there are several ranks and no default process group.
        """
        return pack(self._identity(), self._progress.epoch, self._progress.gather(self.world_size))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on with the epoch of `state`, without the samples done, which are not read again.

        The number of ranks, the budget, the depth and all else may differ from the run that saved it; each rank must
        load the same state.

        Raises:
            StateError: it is of another dataset, seed or order; the text says which.
            RuntimeError: the loader is being iterated.
        """
        self._refuse_if_iterating()
        self._epoch, self._loaded = unpack(state, self._identity())
        self._progress = EpochProgress(len(self.dataset), self._epoch, self._loaded)
        self._uncommitted.clear()

    def _identity(self) -> Identity:
        return Identity.of(self.dataset, self.config)

    def _begin(self, epoch: int) -> Resumed | None:
        """What was done of `epoch` before, as the state that was loaded says."""
        loaded = self._loaded
        if loaded is not None and self._progress.epoch != epoch:
            raise StateError(
                f"the state that was loaded is of epoch {self._progress.epoch}, but set_epoch asked for {epoch}; "
                "iterate that epoch first."
            )
        self._progress = EpochProgress(len(self.dataset), epoch, loaded)
        self._uncommitted.clear()
        return loaded

    def __iter__(self) -> Iterator[tuple[Any, StepInfo]]:
        """One epoch. Leaving it early ends the collate process; the next iteration starts a new one on every rank.

        Raises:
            SampleError: a sample could not be read, too many were bad, or all of the epoch were dropped.
            CollateError, ExchangeError: see there.
        """
        self._refuse_if_iterating()
        return self._run_epoch()

    def _refuse_if_iterating(self) -> None:
        if self._iterating:
            raise RuntimeError("this loader is being iterated already; finish or close that iterator first.")

    def _run_epoch(self) -> Iterator[tuple[Any, StepInfo]]:
        self._refuse_if_iterating()  # again: an iterator that was made before may have begun since
        self._iterating = True
        epoch = self._epoch
        finished = False
        try:
            resumed = self._begin(epoch)
            session = self._session or self._start()
            session.start_epoch(epoch, resumed)
            self._epoch, self._loaded = epoch + 1, None
            while not finished:
                item = session.next()
                if isinstance(item, EpochEnd) or item[1].last:
                    # taken before the last step is handed out: the consumer may stop there, as a Trainer does
                    end = item if isinstance(item, EpochEnd) else session.next()
                    assert isinstance(end, EpochEnd)
                    self.epoch_ends.append(end)
                    if not end.steps and not (resumed and resumed.emitted):
                        raise all_dropped(self.rank, self.world_size, end.dropped, end.global_dropped)
                    self._iterating, finished = False, True
                if not isinstance(item, EpochEnd):
                    self._uncommitted.append(item[1])
                    if self.auto_commit:
                        self.commit()
                    yield item
                elif self.auto_commit:  # all that was left of an epoch was dropped
                    self._progress = EpochProgress(len(self.dataset), epoch + 1)
        finally:
            if not finished:
                self._iterating = False
                self.close()

    def _start(self) -> Session:
        job = CollateJob(
            dataset=self.dataset,
            collate_fn=self._collate_fn,
            observe=self._observe,
            config=self.config,
            rank=self.rank,
            world_size=self.world_size,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor,
            worker_init_fn=self._worker_init_fn,
            window_bytes=self.window_bytes,
            parent=os.getpid(),
        )
        with handled_later():
            session = self._session = Session(job, pin_memory=self._pin_memory)
        if self.world_size > 1:
            session.meet(self._agree())
        return session

    def _agree(self) -> Rendezvous:
        """Where to meet. Comes after the fork: threads that just served a collective may hold locks inside torch."""
        if self._rendezvous is None:
            rendezvous, self._store = meet(self.rank, self.world_size, self.config.timeout, self.config.port)
            return rendezvous
        if self._has_met:
            raise ExchangeError(
                f"rank {self.rank}: the rendezvous that this loader was given serves once, and the epoch that used it "
                "was left early or failed; make a new loader with a fresh rendezvous."
            )
        self._has_met = True
        return self._rendezvous

    def close(self) -> None:
        """End the collate process and its workers. The loader can be iterated again afterwards."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
        self._store = None

    def __enter__(self) -> OdbDataLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_session", None) is not None:
            self.close()


def _check_arguments(dataset: Any, collate_fn: Any, observe: Any, num_workers: Any, prefetch_factor: Any) -> None:
    map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not map_style or isinstance(dataset, IterableDataset):
        raise TypeError(
            f"OdbDataLoader needs a map-style dataset with __len__ and __getitem__, got {type(dataset).__name__}."
        )
    if len(dataset) == 0:
        raise ValueError("the dataset is empty; there is nothing to batch.")
    for name, function in (("collate_fn", collate_fn), ("observe", observe)):
        if not callable(function):
            raise TypeError(f"{name} must be a function, got {function!r}.")
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
        raise ValueError(f"num_workers must be an integer of at least 0, got {num_workers!r}.")
    whole = isinstance(prefetch_factor, int) and not isinstance(prefetch_factor, bool)
    if prefetch_factor is not None and not (whole and prefetch_factor > 0):
        raise ValueError(f"prefetch_factor must be a positive integer, or None, got {prefetch_factor!r}.")
