"""Memory that the collate process and the trainer share: a batch that is made in it need not be copied.

It is one anonymous file for each pair of processes, with no name and nothing in `/dev/shm`, divided into slots, each
for one batch. A slot is used again once neither process has a tensor in it, and holds no more memory than the largest
batch that was made in it. Where no slot is free, or the system has no such files, batches are made in private memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from odb_factory.runtime.allocation import BLOCK, HUGE_PAGE
from odb_factory.runtime.transport.process_memory import Span

SLOT_BYTES = 256 * 2**20
"""Most of a batch that can lie in a slot."""

_ALIGNMENT = 64

_JOINING = (torch.cat, torch.concat, torch.concatenate, torch.stack)


def make_slots(count: int) -> SharedSlots | None:
    """Slots for so many batches, to be made by the trainer before it starts the collate process; None: impossible."""
    try:
        fd = os.memfd_create("odb-batches")
        os.ftruncate(fd, HUGE_PAGE + count * SLOT_BYTES)  # memory is taken when it is written to
        return SharedSlots(fd, count)
    except (OSError, AttributeError):
        return None


class SharedSlots:
    """The slots, as either process has them."""

    def __init__(self, fd: int, count: int) -> None:
        self._fd = fd
        self._owner = os.getpid()
        memory = mmap.mmap(fd, HUGE_PAGE + count * SLOT_BYTES)
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(memory, np.uint8)
        self._at_trainer = np.frombuffer(memory, np.int64, count)
        """In the page before the slots: for each, whether the trainer has it."""
        self._reserved: set[int] = set()
        """Those in which this process, the collate process, has tensors."""

    def __reduce__(self) -> Any:  # to a collate process that is spawned
        return _attach, (reduction.DupFd(self._fd), len(self._at_trainer))

    def close_file(self) -> None:
        """Once the collate process has started, in both; the memory lives on as long as it is used."""
        os.close(self._fd)

    def reserve(self) -> tuple[int, memoryview] | None:
        """For the collate process: a slot that nobody uses, and its memory; None: all are used."""
        for slot, at_trainer in enumerate(self._at_trainer):
            if not at_trainer and slot not in self._reserved:
                self._reserved.add(slot)
                return slot, self._memory_of(slot, partial(self._reserved.discard, slot))
        return None

    def is_reserved(self, slot: int) -> bool:
        """Whether the collate process has a tensor in it."""
        return slot in self._reserved

    def hand_over(self, slot: int) -> None:
        """Give it to the trainer."""
        self._at_trainer[slot] = 1

    def memory(self, slot: int) -> np.ndarray:
        """All of it; keeps nobody from using it."""
        start = HUGE_PAGE + slot * SLOT_BYTES
        return self._bytes[start : start + SLOT_BYTES]

    def take_over(self, slot: int) -> memoryview:
        """For the trainer: the memory of a slot that it was given; the slot is free when nobody has a part of it."""

        def give_back() -> None:
            if os.getpid() == self._owner:  # not a copy in a process that the trainer forked
                self._at_trainer[slot] = 0

        return self._memory_of(slot, give_back)

    def _memory_of(self, slot: int, when_unused: Callable[[], object]) -> memoryview:
        whole = self.memory(slot)
        weakref.finalize(whole, when_unused).atexit = False
        return whole.data  # of which views keep `whole`; those of an array do not


def _attach(fd: Any, count: int) -> SharedSlots:
    return SharedSlots(fd.detach(), count)


class JoinInSlot(TorchFunctionMode):
    """While this is active, large tensors that torch joins from others (`cat`, `stack`) are made in one free slot."""

    def __init__(self, slots: SharedSlots) -> None:
        super().__init__()
        self.slot = -1
        """Where they are; -1: there were none, or no slot was free."""
        self._slots = slots
        self._memory: memoryview | None = None
        self._address = self._used = 0

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _JOINING and args and "out" not in kwargs:
            out = self._place_for(func, *args, **kwargs)
            kwargs = kwargs if out is None else {**kwargs, "out": out}
        return func(*args, **kwargs)

    def _place_for(self, func: Any, tensors: Any, dim: Any = 0, **other: Any) -> torch.Tensor | None:
        usual = not other and isinstance(dim, int) and isinstance(tensors, list | tuple) and len(tensors) > 0
        if not usual or not all(map(_is_plain, tensors)) or sum(tensor.nbytes for tensor in tensors) < BLOCK:
            return None
        first, stacked = tensors[0], func is torch.stack
        dim += (first.dim() + stacked) * (dim < 0)
        rests = {
            (t.dtype, *t.shape) if stacked else (t.dtype, *t.shape[:dim], -1, *t.shape[dim + 1 :]) for t in tensors
        }
        if len(rests) > 1 or not 0 <= dim < first.dim() + stacked:  # other types, or an error, which torch will raise
            return None
        shape = list(first.shape)
        shape[dim : dim + (not stacked)] = [len(tensors) if stacked else sum(t.shape[dim] for t in tensors)]
        memory = self._allocate(sum(tensor.nbytes for tensor in tensors))
        return None if memory is None else torch.frombuffer(memory, dtype=first.dtype).reshape(shape)

    def _allocate(self, nbytes: int) -> memoryview | None:
        if self._memory is None:
            found = self._slots.reserve()
            if found is None:
                return None
            self.slot, self._memory = found
            self._address = np.frombuffer(self._memory, np.uint8).__array_interface__["data"][0]
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > SLOT_BYTES:
            return None
        self._used = start + nbytes
        return self._memory[start : self._used]

    def places_of(self, spans: Sequence[Span]) -> tuple[Span | None, ...]:
        """For each span of this process's memory, its offset in the slot and its size; None: it lies elsewhere."""
        offsets = [(address - self._address, size) for address, size in spans]
        return tuple(place if self._memory is not None and 0 <= place[0] < self._used else None for place in offsets)


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.is_contiguous()
    )
