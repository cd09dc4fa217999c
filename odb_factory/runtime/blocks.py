"""Private memory for samples and batches.

The first touch of memory costs as much as the copy into it does, in a virtual machine several times that, and it costs
that once for each page: so large blocks lie in huge pages, and are used again where that is possible.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import numpy as np

from odb_factory.runtime.memory import BLOCK

HUGE_PAGE = 2 * 2**20
"""Bytes of a huge page, where the system has them."""


def allocate(nbytes: int) -> np.ndarray:
    """Memory with any content, as an array of bytes; given back to the system with the last reference to it."""
    if nbytes < BLOCK:
        return np.empty(nbytes, np.uint8)
    room = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(room, np.uint8)
    start = -int(whole.__array_interface__["data"][0]) % HUGE_PAGE
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the rest is not asked for, or more would be held than is used
            room.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return whole[start : start + nbytes]


class Pool:
    """Blocks that are used again once nobody has them any more.

    `allocate` is for one thread; the last reference to a block may go in any.

    Args:
        most: how many unused blocks are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._unused: list[np.ndarray] = []

    def allocate(self, nbytes: int) -> np.ndarray:
        """As the function of this name.

        Whoever hands the array on must do so as a memoryview: numpy's views of it would not keep it from being used
        again.
        """
        if nbytes < BLOCK:
            return allocate(nbytes)
        block = self._find(nbytes)
        if block is None:
            block = allocate(nbytes)
        lent = block[:nbytes]
        weakref.finalize(lent, self._take_back, block).atexit = False
        return lent

    def _find(self, nbytes: int) -> np.ndarray | None:
        """The smallest that is large enough and not far too large."""
        fitting = [block for block in self._unused if nbytes <= block.nbytes <= nbytes + nbytes // 2]
        if not fitting:
            return None
        best = min(fitting, key=len)
        self._unused = [block for block in self._unused if block is not best]
        return best

    def _take_back(self, block: np.ndarray) -> None:
        self._unused = [*self._unused[-(self._most - 1) :], block] if self._most > 1 else [block]
