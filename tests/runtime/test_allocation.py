"""Private memory for samples and batches: how much is held, and when it is used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from odb_factory.runtime.allocation import HUGE_PAGE, ReusedBlocks, allocate
from odb_factory.runtime.transport.process_memory import spans_of


@pytest.mark.parametrize("nbytes", [0, 1, 2**20 - 1, 2**20, HUGE_PAGE - 1, HUGE_PAGE, 5 * HUGE_PAGE + 17])
def test_memory_has_the_size_asked_for_and_can_be_written_to(nbytes: int) -> None:
    block = allocate(nbytes)
    assert block.nbytes == nbytes
    block[:] = 7
    assert int(block.sum(dtype=np.int64)) == 7 * nbytes


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_no_more_memory_is_held_than_asked_for_and_none_after_it() -> None:
    before = resident()
    blocks = [allocate(HUGE_PAGE + 2**20 + 1) for _ in range(20)]
    for block in blocks:
        block[:] = 1
    assert 0.9 < (resident() - before) / (20 * (HUGE_PAGE + 2**20)) < 1.1
    del blocks, block
    assert resident() - before < 2 * HUGE_PAGE


def address(buffer: Any) -> int:
    return spans_of([buffer])[0][0]


@pytest.mark.parametrize("view", [lambda m: torch.frombuffer(m, dtype=torch.uint8)[5:], lambda m: np.frombuffer(m)[1:]])
def test_memory_is_used_again_only_when_nobody_has_it(view: Callable[[memoryview], Any]) -> None:
    pool = ReusedBlocks(most=2)
    first = pool.allocate(4 * 2**20).data
    held, where = view(first), address(first)
    del first
    other = pool.allocate(4 * 2**20)
    assert address(other) != where, "a part of it is still held"
    del held
    again = pool.allocate(4 * 2**20 - 5)
    assert address(again) == where
    assert again.nbytes == 4 * 2**20 - 5
    del again
    assert address(pool.allocate(2**20)) != where, "far too large for that"


def test_few_unused_blocks_are_kept() -> None:
    pool = ReusedBlocks(most=2)
    blocks = [pool.allocate(2**20) for _ in range(5)]
    del blocks
    assert len(pool._unused) == 2
