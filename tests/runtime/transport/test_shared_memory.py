"""Batches in shared memory: they arrive whole, are the trainer's alone, and nothing depends on there being room."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.runtime import session
from odb_factory.runtime.transport import process_memory, shared_memory
from odb_factory.runtime.transport.shared_memory import JoinInSlot, SharedSlots, make_slots
from tests.runtime.helpers import Lengths, PadCollate

VALUES = 2**20


class Images(Lengths):
    """Samples with 4 MB of pixels."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "pixels": torch.full((2, VALUES // 2), float(index))}


class Join:
    """Pads, and puts pixels one after the other.

    Args:
        cached: each batch also has a tensor that is kept for the next ones.
        overlapping: each batch also has a view of its pixels.
    """

    def __init__(self, *, cached: bool = False, overlapping: bool = False) -> None:
        self.cached = cached
        self.overlapping = overlapping
        self.cache: list[torch.Tensor] = []

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = PadCollate()(samples)
        batch["pixels"] = torch.cat([sample["pixels"] for sample in samples])
        if self.overlapping:
            batch["first"] = batch["pixels"][:2]
        if self.cached:
            if len(self.cache) < 3:  # the first batch is not made in shared memory, the others are
                self.cache.append(torch.cat([samples[0]["pixels"] * 0] * 2))
            batch["cached"] = self.cache[-1]
        return batch


def in_shared_memory(tensor: torch.Tensor) -> bool:
    """Whether it lies in a slot."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:odb-batches" in line:
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            if start <= tensor.data_ptr() < end:
                return True
    return False


def descriptors() -> list[str]:
    """What this process has open."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return names


def check(batch: dict[str, torch.Tensor], indices: tuple[int, ...]) -> None:
    for row, index in enumerate(indices):
        assert (batch["pixels"][2 * row : 2 * row + 2] == index).all()


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_batches_lie_in_shared_memory_and_are_the_trainers_own(start_method: str) -> None:
    shared = total = 0
    config = OdbConfig(token_budget=40, depth=20, queue_steps=1, start_method=start_method)
    with OdbDataLoader(Images([10] * 60), Join(), config, num_workers=1) as loader:
        for batch, info in loader:
            check(batch, info.indices)
            shared += in_shared_memory(batch["pixels"])
            total += 1
            batch["pixels"] += 1000.0
            assert sum("memfd:" in name for name in descriptors()) <= 1
    assert shared >= total - 2, "slots are used again and again"


def test_batches_that_are_kept_for_ever_are_copied_once_no_slot_is_free() -> None:
    kept = []
    config = OdbConfig(token_budget=20, depth=20, queue_steps=1)
    with OdbDataLoader(Images([10] * 40), Join(), config, num_workers=1) as loader:
        for batch, info in loader:
            batch["pixels"] += 1000.0
            kept.append((batch, info.indices))
    shared = [in_shared_memory(batch["pixels"]) for batch, _ in kept]
    assert 1 <= sum(shared) <= config.queue_steps + session.MORE_SLOTS
    for batch, indices in kept:
        batch["pixels"] -= 1000.0
        check(batch, indices)


def test_tensors_that_the_collate_function_keeps_are_copied() -> None:
    config = OdbConfig(token_budget=20, depth=20, queue_steps=1)
    with OdbDataLoader(Images([10] * 40), Join(cached=True), config, num_workers=1) as loader:
        for batch, info in loader:
            check(batch, info.indices)
            assert (batch["cached"] == 0).all(), "what the trainer wrote does not come back"
            batch["cached"] += 1
            batch["pixels"] += 1000.0


def test_tensors_of_a_batch_that_share_memory_are_separate_in_the_trainer() -> None:
    config = OdbConfig(token_budget=20, depth=20, queue_steps=1)
    with OdbDataLoader(Images([10] * 20), Join(overlapping=True), config, num_workers=1) as loader:
        for batch, info in loader:
            batch["first"] += 1000.0
            check(batch, info.indices)


def test_without_such_memory_batches_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError("no such call")

    monkeypatch.setattr(shared_memory.os, "memfd_create", refuse)
    with OdbDataLoader(Images([10] * 20), Join(), OdbConfig(token_budget=20, depth=20), num_workers=1) as loader:
        for batch, info in loader:
            check(batch, info.indices)
            assert not in_shared_memory(batch["pixels"])


# --- slots


@pytest.fixture
def slots() -> SharedSlots:
    made = make_slots(2)
    assert made is not None
    made.close_file()
    return made


def test_a_slot_is_free_when_nobody_has_a_part_of_it(slots: SharedSlots) -> None:
    found = slots.reserve()
    assert found is not None
    slot, memory = found
    tensor = torch.frombuffer(memory[:4096], dtype=torch.uint8)[5:]
    del found, memory
    assert slots.is_reserved(slot)
    del tensor
    assert not slots.is_reserved(slot)
    slots.hand_over(slot)
    room = slots.take_over(slot)
    tensor = torch.frombuffer(room[64:128], dtype=torch.float32).reshape(4, 4)[1]
    del room
    assert all_free(slots) == [1 - slot]
    pid = os.fork()
    if pid == 0:
        del tensor  # a copy of it, whose end says nothing
        os._exit(0)
    os.waitpid(pid, 0)
    assert all_free(slots) == [1 - slot]
    del tensor
    assert all_free(slots) == [0, 1]


def all_free(slots: SharedSlots) -> list[int]:
    """All that can be reserved now."""
    found = []
    while (one := slots.reserve()) is not None:
        found.append(one)
    return sorted(slot for slot, _ in found)


LARGE_ROWS = [torch.arange(VALUES, dtype=torch.float32).reshape(4, -1), torch.ones(4, VALUES // 4)]


@pytest.mark.parametrize(
    "join",
    [
        lambda: torch.cat(LARGE_ROWS),
        lambda: torch.cat(LARGE_ROWS, 1),
        lambda: torch.concat(tuple(LARGE_ROWS), dim=-1),
        lambda: torch.stack(LARGE_ROWS, dim=1),
        lambda: torch.cat([LARGE_ROWS[0].to(torch.bfloat16), LARGE_ROWS[1].to(torch.bfloat16)]),
    ],
)
def test_tensors_that_are_joined_in_a_slot_are_those_of_torch(slots: SharedSlots, join: Any) -> None:
    with JoinInSlot(slots) as mode:
        joined, other = join(), join()
    expected = join()
    assert mode.slot == 0
    for tensor in (joined, other):
        assert torch.equal(tensor, expected)
        assert tensor.dtype == expected.dtype
        assert tensor.stride() == expected.stride()
        assert in_shared_memory(tensor)
    assert joined.data_ptr() != other.data_ptr()


@pytest.mark.parametrize(
    "join",
    [
        lambda: torch.cat([torch.ones(10), torch.ones(10)]),
        lambda: torch.cat([LARGE_ROWS[0].clone().requires_grad_(), LARGE_ROWS[1]]),
        lambda: torch.cat([LARGE_ROWS[0], LARGE_ROWS[1].to(torch.float64)]),
        lambda: torch.cat([torch.empty(0), LARGE_ROWS[0]]),
        lambda: torch.cat([row.t() for row in LARGE_ROWS]),
        lambda: torch.cat(LARGE_ROWS, out=torch.empty(8, VALUES // 4)),
    ],
)
def test_others_are_joined_elsewhere(slots: SharedSlots, join: Any) -> None:
    with JoinInSlot(slots) as mode:
        assert not in_shared_memory(join())
    assert mode.slot == -1


def test_errors_of_joining_are_those_of_torch(slots: SharedSlots) -> None:
    with JoinInSlot(slots), pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([LARGE_ROWS[0], torch.ones(3, 3)])


@pytest.mark.parametrize("workers", [0, 1])
def test_shared_memory_serves_also_where_processes_may_not_read_each_others(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "_readv", None)
    shared = 0
    config = OdbConfig(token_budget=20, depth=20, queue_steps=1)
    with OdbDataLoader(Images([10] * 30), Join(), config, num_workers=workers) as loader:
        for batch, info in loader:
            check(batch, info.indices)
            batch["pixels"] += 1000.0
            shared += in_shared_memory(batch["pixels"])
    assert shared > 5
