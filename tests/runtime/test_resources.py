"""What the loader holds: samples within the depth, few descriptors, nothing in /dev/shm."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from typing import Any

import pytest

from odb_factory import OdbConfig, OdbDataLoader
from tests.dist import run_ranks
from tests.runtime.helpers import Counted, Lengths, PadCollate, open_files, shared_memory_files


class Watch:
    """A collate function that notes the most samples that were read and not yet emitted."""

    def __init__(self, data: Counted) -> None:
        self.data = data
        context = multiprocessing.get_context("fork")
        self.emitted = context.Value("l", 0)
        self.most = context.Value("l", 0)

    def __call__(self, samples: list[Any]) -> int:
        self.emitted.value += len(samples)
        self.most.value = max(self.most.value, self.data.reads.value - self.emitted.value)
        return len(samples)


@pytest.mark.parametrize("alignment", ["carry", "max"])
@pytest.mark.parametrize(("workers", "in_flight"), [(0, 1), (2, 2 * 2 + 1)])
def test_no_more_than_depth_samples_are_held(workers: int, in_flight: int, alignment: str) -> None:
    depth = 24
    data = Counted([10 + i % 30 for i in range(300)])
    watch = Watch(data)
    config = OdbConfig(token_budget=100, depth=depth, alignment=alignment, ramp=False, queue_steps=1)
    with OdbDataLoader(data, watch, config, num_workers=workers, prefetch_factor=2 if workers else None) as loader:
        for _ in loader:
            time.sleep(0.005)
    assert data.reads.value == 300, "each sample is read once"
    assert watch.emitted.value == 300
    assert depth - 12 <= watch.most.value <= depth + 1 + in_flight


def test_a_consumer_that_stops_stops_the_reading() -> None:
    data = Counted([10] * 2000, extra=1)
    config = OdbConfig(token_budget=10, depth=8, queue_steps=2)
    with OdbDataLoader(data, _Fat(), config) as loader:
        steps = iter(loader)
        next(steps)
        time.sleep(0.3)
        before = data.reads.value
        time.sleep(0.3)
        assert data.reads.value == before
        assert before <= 1 + config.queue_steps + 2 + config.depth + 2
        steps.close()  # type: ignore[attr-defined]


class _Fat:
    """Batches of 2 MB: none fits into a socket's buffer."""

    def __call__(self, samples: list[Any]) -> bytes:
        return bytes(2_000_000)


class _Look:
    """A collate function that returns what its process holds: (descriptors, files in /dev/shm)."""

    def __call__(self, samples: list[Any]) -> tuple[int, set[str]]:
        return open_files(), shared_memory_files()


def _with_few_descriptors(
    rank: int, world: int, start_method: str, descriptors: int = 256, depth: int = 512
) -> tuple[int, int, set[str], int, int, int]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    data = Lengths([20] * 1300, extra=4)  # with input_ids and labels 6 tensors a sample
    config = OdbConfig(token_budget=2000, depth=depth, ramp=False, start_method=start_method)
    memory, most, samples = shared_memory_files(), 0, 0
    before = open_files()
    new_files: set[str] = set()
    with OdbDataLoader(data, _Look(), config, num_workers=2) as loader:
        for (files, in_memory), info in loader:
            most = max(most, files)
            new_files |= in_memory - memory
            samples += info.samples
        during = open_files()
    return samples, most, new_files, before, during, open_files()


@pytest.mark.distributed
@pytest.mark.parametrize(("descriptors", "depth"), [(256, 512), (1024, 1024)])
def test_a_deep_window_needs_few_descriptors_and_no_shared_memory(descriptors: int, depth: int) -> None:
    [(samples, most, new_files, before, during, after)] = run_ranks(
        1, _with_few_descriptors, "fork", descriptors, depth, init_group=False
    )
    assert samples == 1300
    assert most < 80
    assert new_files == set()
    assert during - before <= 6
    assert after == before


def _with_many_descriptors(rank: int, world: int) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    held = [os.dup(0) for _ in range(1100)]
    with OdbDataLoader(Lengths([20] * 100), PadCollate(), OdbConfig(token_budget=200), num_workers=1) as loader:
        count = sum(info.samples for _, info in loader)
    for file in held:
        os.close(file)
    return count


@pytest.mark.distributed
def test_a_training_process_with_more_than_1024_descriptors_is_no_obstacle() -> None:
    assert run_ranks(1, _with_many_descriptors, init_group=False) == [100]
