"""The window's reader alone: order, bounds, drops, errors and cancelling."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.core.sample import SampleMeta
from odb_factory.runtime.errors import SampleError
from odb_factory.runtime.observe import observe_sample
from odb_factory.runtime.transport.process_memory import Reference
from odb_factory.runtime.transport.samples import Chunk, ObservedSample
from odb_factory.runtime.window import Taken, WindowReader
from odb_factory.runtime.worker import ChunkSampler
from tests.dist import children, kill
from tests.runtime.helpers import Counted, Lengths, PadCollate, all_of, run_epoch, wait_until


def reader_of(
    data: Lengths, *, depth: int = 4, workers: int = 0, window_bytes: int | None = None, **values: Any
) -> WindowReader:
    config = OdbConfig(token_budget=100, depth=depth, **values)
    return WindowReader(
        data,
        observe_sample,
        config,
        num_workers=workers,
        prefetch_factor=None,
        worker_init_fn=None,
        window_bytes=window_bytes,
    )


@pytest.fixture(autouse=True)
def _end_workers() -> Iterator[None]:
    """A reader ends with its process; here that is the test run, so its workers are ended by hand."""
    before = set(children())
    yield
    for pid in set(children()) - before:
        kill(pid)


def indices(samples: tuple[ObservedSample, ...]) -> list[int]:
    return [held.meta.index for held in samples]


def metas_of(taken: Taken) -> list[SampleMeta]:
    return [held.meta for held in taken.samples]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 3])
def test_samples_come_in_the_order_of_the_indices_whatever_the_timing(workers: int) -> None:
    order = [5, 0, 19, 3, 7, 12, 11, 1]
    reader = reader_of(Lengths(range(1, 21), sleep=0.02), depth=8, workers=workers)
    for epoch in range(2):
        reader.start_epoch(epoch, order)
        taken = reader.take(5)
        assert indices(taken.samples) == order[:5]
        assert reader.unread == 1
        rest = reader.take(100)
        assert indices(rest.samples) == order[5:]
        assert reader.unread == 0
        assert [h.meta.length for h in rest.samples] == [i + 1 for i in order[5:]]
        assert taken.samples[0].load()["input_ids"].tolist() == [5] * 6
        assert taken.samples[0].meta.nbytes == taken.samples[0].content.nbytes
        reader.cancel()


def test_no_more_than_depth_and_one_are_held_until_they_are_released() -> None:
    data = Counted([3] * 50)
    reader = reader_of(data, depth=4)
    reader.start_epoch(0, range(50))
    taken = reader.take(4)
    assert indices(taken.samples) == [0, 1, 2, 3]
    assert wait_until(lambda: data.reads.value == 6)  # 4 taken, 1 known to follow, 1 in the hand of the thread
    assert not wait_until(lambda: data.reads.value > 6, seconds=0.3)
    reader.release(metas_of(taken)[:3])
    assert wait_until(lambda: data.reads.value == 9)
    assert not wait_until(lambda: data.reads.value > 9, seconds=0.3)
    assert indices(reader.take(3).samples) == [4, 5, 6]
    reader.cancel()


def test_drops_come_with_the_samples_around_them_and_do_not_count_against_the_depth() -> None:
    reader = reader_of(Lengths([3] * 30, drop=set(range(30)) - {5, 20}), depth=1)
    reader.start_epoch(0, range(30))
    first = reader.take(1)
    assert indices(first.samples) == [5]
    assert [d.index for d in first.dropped] == [*range(5), *range(6, 20)]
    assert reader.unread == 1
    reader.release(metas_of(first))
    second = reader.take(1)
    assert indices(second.samples) == [20]
    assert [d.index for d in second.dropped] == list(range(21, 30))
    assert reader.unread == 0
    reader.cancel()


def test_no_indices_at_all_are_an_epoch_that_is_over() -> None:
    reader = reader_of(Lengths([3]))
    reader.start_epoch(0, [])
    taken = reader.take(4)
    assert (taken.samples, taken.dropped, reader.unread) == ((), (), 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_can_be_cancelled_at_any_time_and_the_next_one_starts_clean(workers: int) -> None:
    reader = reader_of(Lengths([3] * 40, drop={8}), depth=3, workers=workers)
    for count in (0, 1, 3):
        reader.start_epoch(count, range(40))
        assert indices(reader.take(count).samples) == list(range(count))
        reader.cancel()
    reader.start_epoch(9, [7, 8, 9])
    taken = reader.take(3)
    assert indices(taken.samples) == [7, 9]
    assert [d.index for d in taken.dropped] == [8]


def test_an_error_beyond_what_was_needed_does_not_spoil_the_next_epoch() -> None:
    data = Counted([3] * 10, fail={3})
    reader = reader_of(data, depth=2)
    reader.start_epoch(0, range(10))
    taken = reader.take(1)
    assert indices(taken.samples) == [0]
    reader.release(metas_of(taken))
    assert wait_until(lambda: data.reads.value == 4)  # sample 3 was read ahead, and failed
    reader.cancel()
    reader.start_epoch(1, [4, 5])
    assert indices(reader.take(2).samples) == [4, 5]


def test_an_error_is_raised_by_every_take_after_it() -> None:
    reader = reader_of(Lengths([3] * 10, fail={1}))
    reader.start_epoch(0, range(10))
    for _ in range(2):
        with pytest.raises(SampleError, match="sample 1 could not be read"):
            reader.take(3)


def test_a_second_epoch_is_refused_while_one_is_open() -> None:
    reader = reader_of(Lengths([3] * 10), depth=2)
    reader.start_epoch(0, range(10))
    with pytest.raises(RuntimeError, match="still being read"):
        reader.start_epoch(1, range(10))
    reader.cancel()


class Random(Lengths):
    """Samples out of random numbers."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {**sample, "drawn": (random.random(), float(np.random.rand()), float(torch.rand(())))}


def drawn(workers: int, order: list[int], *, epoch: int = 0, seed: int = 0) -> dict[int, Any]:
    reader = reader_of(Random([3] * 12), depth=20, workers=workers, seed=seed)
    reader.start_epoch(epoch, order)
    samples = reader.take(20).samples
    return {held.meta.index: held.load()["drawn"] for held in samples}


def test_random_numbers_of_a_sample_depend_on_seed_epoch_and_index_only() -> None:
    first = drawn(0, list(range(12)))
    assert len(set(first.values())) == 12
    assert drawn(2, list(range(12))) == first
    assert drawn(1, list(range(11, -1, -1))) == first
    assert drawn(1, [4, 9]) == {4: first[4], 9: first[9]}, "as after a resumption"
    for other in (drawn(0, list(range(12)), epoch=1), drawn(0, list(range(12)), seed=2**62), drawn(0, [3], seed=-5)):
        assert set(other.values()).isdisjoint(first.values())


# --- chunks, as the shared assignment hands them out


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_may_come_in_chunks(workers: int) -> None:
    reader = reader_of(Lengths([3] * 40, drop={6, 7}), depth=8, workers=workers)
    for epoch in range(2):
        reader.start_epoch(epoch, [1, 2])
        first = reader.take(8)
        assert (indices(first.samples), reader.unread) == ([1, 2], 0)
        reader.extend([])
        reader.extend([3, 6])
        reader.extend([7])
        second = reader.take(8)
        assert (indices(second.samples), [d.index for d in second.dropped], reader.unread) == ([3], [6, 7], 0)
        reader.extend([9, 10, 11])
        assert indices(reader.take(1).samples) == [9]
        assert reader.unread == 1
        assert indices(reader.take(8).samples) == [10, 11]
        reader.cancel()


def test_chunks_that_follow_an_error_are_not_read() -> None:
    data = Counted([3] * 10, fail={1})
    reader = reader_of(data)
    reader.start_epoch(0, [0, 1])
    reader.extend([2, 3])
    with pytest.raises(SampleError, match="sample 1"):
        reader.take(3)
    reader.cancel()
    assert data.reads.value == 2


# --- the bound on bytes


def sized(reader: WindowReader) -> int:
    """Bytes of one sample of 3 tokens."""
    reader.start_epoch(0, [0])
    (held,) = reader.take(1).samples
    reader.cancel()
    return held.meta.nbytes


@pytest.mark.parametrize("workers", [0, 2])
def test_no_more_bytes_are_held_than_allowed_whatever_the_timing(workers: int) -> None:
    one = sized(reader_of(Lengths([3])))
    for _ in range(3):
        reader = reader_of(Lengths([3] * 30, sleep=0.01), depth=20, workers=workers, window_bytes=4 * one + one // 2)
        reader.start_epoch(0, range(10))
        first = reader.take(20)
        assert (indices(first.samples), reader.unread) == ([0, 1, 2, 3], 1)
        assert indices(reader.take(20).samples) == []
        reader.release(metas_of(first)[:2])
        assert indices(reader.take(20).samples) == [4, 5]
        reader.cancel()


def test_a_sample_above_the_bound_is_taken_where_nothing_else_is_held() -> None:
    reader = reader_of(Lengths([3, 3000, 3, 3000, 3000]), depth=20, window_bytes=2000)
    reader.start_epoch(0, range(5))
    first = reader.take(20)
    assert indices(first.samples) == [0]
    assert indices(reader.take(20).samples) == []
    reader.release(metas_of(first))
    second = reader.take(20, needed=True)
    assert (indices(second.samples), reader.unread) == ([1], 1)
    reader.release(metas_of(second))
    third = reader.take(20, needed=True)
    assert (indices(third.samples), reader.unread) == ([2], 1)
    # a group that waits to be collated still counts, but the window is empty and needs something
    assert indices(reader.take(20, needed=True).samples) == [3]
    reader.cancel()


def test_the_bound_holds_for_the_window_of_a_whole_epoch() -> None:
    """The loader emits everything, with windows that the bytes keep small."""
    from odb_factory import OdbDataLoader

    data = Lengths([3 + i % 40 for i in range(120)])
    config = OdbConfig(token_budget=200, depth=64, window_bytes=6000, ramp=False)
    with OdbDataLoader(data, PadCollate(), config) as loader:
        epoch = run_epoch(loader, data)
    assert all_of([epoch]) == list(range(120))
    assert epoch.end is not None
    assert epoch.end.short_windows > 0


def test_a_window_that_waits_for_a_step_is_not_short_of_bytes() -> None:
    """A step that is held back takes a place in the count: no more bytes would help."""
    reader = reader_of(Lengths([3] * 9), depth=2, window_bytes=10**9)
    reader.start_epoch(0, range(9))
    taken = reader.take(2)
    assert (len(taken.samples), taken.short) == (2, False)
    again = reader.take(2)
    assert (len(again.samples), again.short) == (1, False)
    reader.cancel()


class Alone(Lengths):
    """Notices if two threads read at once."""

    inside = 0
    met = False

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.inside += 1
        self.met = self.met or self.inside > 1
        time.sleep(0.01)
        sample = super().__getitem__(index)
        self.inside -= 1
        return sample


def test_without_workers_a_data_set_is_read_by_one_thread_at_a_time() -> None:
    """The collate process itself reads a filler for a rank that never had a sample."""
    data = Alone([3] * 30)
    reader = reader_of(data, depth=40)
    reader.start_epoch(0, range(20))
    for index in range(20, 30):
        assert isinstance(reader.observed[0, index], ObservedSample)
    assert len(reader.take(40).samples) == 20
    assert not data.met


# --- chunks


def chunk_of(seconds: float, nbytes: int) -> Chunk:
    meta = SampleMeta(index=0, length=1, loss_tokens=0, nbytes=nbytes)
    return Chunk([ObservedSample(meta, Reference(()))], seconds, 1, 0, 1, (0, 8))


@pytest.mark.parametrize(
    ("seconds", "nbytes", "size"),
    [(1e-5, 100, 16), (1e-3, 100, 5), (1.0, 100, 1), (1e-5, 64 * 2**10, 4), (1e-5, 30 * 2**20, 1)],
)
def test_small_and_quick_samples_are_read_several_at_a_time(seconds: float, nbytes: int, size: int) -> None:
    sampler = ChunkSampler(most=16)
    sampler.indices.extend(range(40))
    chunks = iter(sampler)
    assert next(chunks) == ((0, 0),), "one, until something is known of them"
    sampler.learn(chunk_of(seconds, nbytes))
    assert len(next(chunks)) == size
    assert [index for chunk in chunks for _, index in chunk] == list(range(1 + size, 40))


def test_one_large_sample_among_small_ones_is_remembered() -> None:
    sampler = ChunkSampler(most=16)
    sampler.indices.extend(range(100))
    chunks = iter(sampler)
    sampler.learn(chunk_of(1e-5, 20 * 2**20))
    sampler.learn(chunk_of(1e-5, 100))
    assert len(next(chunks)) == 1
    for _ in range(300):
        sampler.learn(chunk_of(1e-5, 100))
    assert len(next(chunks)) == 16


def test_an_epoch_with_small_samples_is_complete_with_many_workers() -> None:
    data = Lengths([3 + i % 20 for i in range(2000)], drop={7, 500})
    with OdbDataLoader(data, PadCollate(), OdbConfig(token_budget=100, depth=256), num_workers=2) as loader:
        epochs = [run_epoch(loader, data) for _ in range(2)]
    for epoch in epochs:
        assert all_of([epoch]) == sorted(set(range(2000)) - {7, 500})
