"""The public package `online-dynamic-batching`: its own collate loop, as installed, for all ranks in one process.

Driven, unchanged: `odb.collate.collate_loop_odb` (when a window is full, its warm-up, the recycling of what did not
fit, the shuffling, the end of the epoch) with `odb.grouping.grouping_data` (grouping, alignment, splitting), in join
mode, a thread for each rank. Replaced is only what moves things: the gather over Gloo is one over threads (`_World`),
the processes' queues are `queue.Queue`, a sample is a dict whose `input_ids` have a length and no content, and the
collate function is the identity. Each rank reads its share of a random order as torch's DistributedSampler and
accelerate give it: as many samples on every rank, the first ones once more where the data does not divide.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.batchers.micro import IDLE, padded
from benchmarks.epochs import Epoch
from benchmarks.errors import BenchmarkError
from odb_factory.tools.plan.fixed import random_order

SAMPLE = "sample"
"""Key under which a sample's dict holds its position."""

PATIENCE = 300.0
"""A rank that waits longer than this for the others has failed (seconds)."""


def is_installed() -> bool:
    return importlib.util.find_spec("odb") is not None


def public(lengths: Sequence[int], *, world: int, depth: int, budget: int, seed: int = 0, multiple: int = 8) -> Epoch:
    """One epoch of the public package with `buffer_size=depth` and `token_budget=budget`.

    Its budget does not know of `multiple`, so that a micro-batch may come out a little above it. Samples that it never
    emits are absent from the epoch.

    Raises:
        BenchmarkError: it is not installed, or a rank of it failed.
    """
    if not is_installed():
        raise BenchmarkError("online-dynamic-batching is not installed; pip install 'odb-factory[bench]' brings it.")
    order = random_order(len(lengths), seed)
    order += order[: -len(order) % world]
    ranks = _run([order[rank::world] for rank in range(world)], lengths, depth, budget)
    micros = ([padded(batch, lengths, multiple) for batch in batches] for batches in ranks)
    # a rank that runs out before the others waits, as under DDP's Join
    return Epoch(tuple(itertools.zip_longest(*micros, fillvalue=IDLE)), tuple(lengths))


def _run(shares: list[list[int]], lengths: Sequence[int], depth: int, budget: int) -> list[list[list[int]]]:
    """[rank][step]: the samples of each micro-batch, out of one thread a rank."""
    from odb.collate import collate_loop_odb

    world = _World(len(shares))
    results: list[list[list[int]]] = [[] for _ in shares]

    def rank_main(rank: int) -> None:
        world.enter(rank)
        read: queue.Queue[Any] = queue.Queue()
        for number, i in enumerate(shares[rank]):
            read.put((number, [{"input_ids": _content(lengths[i]), SAMPLE: i}]))
        read.put((len(shares[rank]), None))
        made: queue.Queue[Any] = queue.Queue()
        try:
            collate_loop_odb(read, made, list, depth, budget, threading.Event(), join_mode=True)
        except BaseException as error:
            world.fail(rank, error)
            return
        batches = sorted((made.get() for _ in range(made.qsize())), key=lambda item: item[0])
        results[rank] = [[sample[SAMPLE] for sample in batch] for _, batch in batches if isinstance(batch, list)]

    with _in_place_of_gloo(world):
        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(len(shares))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    world.raise_failure()
    return results


@functools.cache
def _content(length: int) -> Any:
    """`input_ids` of that length."""
    import torch

    return torch.empty(length, dtype=torch.long, device="meta")


class _World:
    """Stands where the package looks for `torch.distributed`: ranks are threads, a gather meets at a barrier."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._here = threading.local()
        self._barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size
        self._failure: tuple[int, BaseException] | None = None
        self.distributed_c10d = SimpleNamespace()

    def enter(self, rank: int) -> None:
        """This thread is `rank` from now on."""
        self._here.rank = rank

    def fail(self, rank: int, error: BaseException) -> None:
        """Lets nobody wait for this rank."""
        if not isinstance(error, threading.BrokenBarrierError):
            self._failure = self._failure or (rank, error)
        self._barrier.abort()

    def raise_failure(self) -> None:
        if self._barrier.broken:
            rank, error = self._failure or (None, "a rank waited in vain for the others")
            raise BenchmarkError(f"rank {rank} of the public package failed: {error!r}.")

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: Any = None) -> int:
        rank: int = self._here.rank
        return rank

    def get_world_size(self, group: Any = None) -> int:
        return self._size

    def new_group(self, **_: Any) -> object:
        return self

    def destroy_process_group(self, group: Any = None) -> None:
        pass

    def all_gather_into_tensor(self, output: Any, given: Any, group: Any = None) -> None:
        """Each rank's `given`, one after the other, in everybody's `output`."""
        import torch

        self._given[self.get_rank()] = given
        self._barrier.wait(PATIENCE)
        torch.cat(self._given, out=output)
        self._barrier.wait(PATIENCE)


@contextlib.contextmanager
def _in_place_of_gloo(world: _World) -> Iterator[None]:
    """Within it the package talks through `world`; what its loop sets for the whole process is set back after."""
    import torch
    from odb import collate, grouping

    threads, sharing = torch.get_num_threads(), torch.multiprocessing.get_sharing_strategy()
    real = collate.dist, grouping.dist
    collate.dist = grouping.dist = world
    try:
        yield
    finally:
        collate.dist, grouping.dist = real
        torch.set_num_threads(threads)
        torch.multiprocessing.set_sharing_strategy(sharing)
