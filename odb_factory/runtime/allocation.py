"""Private memory for samples and batches, and what the C library does with freed memory.

The first touch of memory costs as much as the copy into it does, in a virtual machine several times that, and it costs
that once for each page: so large blocks lie in huge pages, and are used again where that is possible.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref

import numpy as np

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""

BLOCK = 2**20
"""Blocks of this size and above do not lie in the heap (bytes)."""

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
        with contextlib.suppress(OSError):  # whole pages only, or more would be held than is used
            room.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return whole[start : start + nbytes]


class ReusedBlocks:
    """Blocks that are used again once nobody has them any more.

    `allocate` is for one thread; the last reference to a block may go in any.

    Args:
        most: how many unused blocks are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._unused: dict[int, np.ndarray] = {}  # each change is one operation: another thread may come between two

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
        view = block[:nbytes]
        weakref.finalize(view, self._take_back, block).atexit = False
        return view

    def _find(self, nbytes: int) -> np.ndarray | None:
        """The smallest that is large enough and not far too large."""
        unused = list(self._unused.items())
        fitting = [(block.nbytes, key) for key, block in unused if nbytes <= block.nbytes <= nbytes + nbytes // 2]
        return self._unused.pop(min(fitting)[1], None) if fitting else None

    def _take_back(self, block: np.ndarray) -> None:
        self._unused[id(block)] = block
        for key in list(self._unused)[: -self._most]:
            self._unused.pop(key, None)


def return_freed_memory() -> None:
    """Have the C library give large blocks back to the system once they are freed (glibc; elsewhere nothing happens).

    By default glibc keeps blocks of up to 32 MB for later once it has seen some of that size, and samples come and go
    in all sizes: a process would end up with far more memory than it holds samples.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, BLOCK)


def keep_freed_memory() -> None:
    """Have the C library keep what one sample took for the next (glibc), as by default after a large one.

    For the workers, which hold few samples at a time, and are forked from a process that called `return_freed_memory`.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
        library.mallopt(_M_TRIM_THRESHOLD, 64 * 2**20)
