"""Private memory for samples and batches, and what the C library does with freed memory.

The first touch of memory costs as much as the copy into it does, in a virtual machine several times that, and it costs
that once for each page: so large blocks lie in huge pages, and are used again where that is possible.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Iterator

import numpy as np

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
"""Parameters of glibc's `mallopt`."""

BLOCK = 2**20
"""Blocks of this size and above do not lie in the heap (bytes)."""

HUGE_PAGE = 2 * 2**20
"""Bytes of a huge page, where the system has them."""

_LARGE = 2 * HUGE_PAGE
"""Batches from this size on are made in huge pages (bytes)."""

_MOST = 2**30
"""Most of the heap that is asked to be in huge pages (bytes)."""

_MMAP_MAX = 65536
"""The C library's own bound on the number of blocks outside of the heap."""


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
        view = block[:nbytes]
        weakref.finalize(view, self._take_back, block).atexit = False
        return view

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


class _Heap(ctypes.Structure):
    """What `mallinfo2` returns (bytes, but for some counts)."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("used", "free", "keepcost")),
    )


class BatchMemory:
    """Huge pages for the batches that one thread makes (glibc from 2.33 on; elsewhere nothing happens).

    The collate function is the user's, and gets its memory from the C library, which knows nothing of huge pages. So
    the end of the heap is asked to be in huge pages, and blocks of all sizes come from the heap meanwhile.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._library = library if hasattr(library, "mallinfo2") and hasattr(mmap, "MADV_HUGEPAGE") else None
        self._largest = self._batch = 0
        if self._library is not None:
            library.mallinfo2.restype = _Heap
            library.malloc.restype = ctypes.c_void_p
            library.malloc.argtypes = [ctypes.c_size_t]
            library.free.argtypes = [ctypes.c_void_p]
            library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Around the making of a batch."""
        library = self._library
        if library is None:
            yield
            return
        before = library.mallinfo2().used
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _MOST - 1)  # also keeps the end that was prepared
        if self._largest >= _LARGE:
            self._prepare(min(_MOST, 2 * self._largest))
        try:
            yield
        finally:
            library.mallopt(_M_MMAP_MAX, _MMAP_MAX)
            library.mallopt(_M_TRIM_THRESHOLD, BLOCK)
            self._batch = max(0, library.mallinfo2().used - before)
            self._largest = max(self._largest, self._batch)

    def _prepare(self, nbytes: int) -> None:
        """Have huge pages at the end of the heap, when they are touched."""
        assert self._library is not None
        block = self._library.malloc(nbytes)
        if block:
            start = -(-block // HUGE_PAGE) * HUGE_PAGE
            self._library.madvise(start, (block + nbytes - start) // HUGE_PAGE * HUGE_PAGE, mmap.MADV_HUGEPAGE)
            self._library.free(block)

    def settle(self) -> None:
        """After a batch has been freed: give back what others, above it in the heap, have kept there."""
        if self._library is not None and self._batch >= _LARGE:
            self._library.malloc_trim(0)
