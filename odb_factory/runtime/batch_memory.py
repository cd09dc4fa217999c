"""Huge pages for batches in the collate process.

The first touch of memory costs once for each page, and for a batch of pixels more than the copying of it. The collate
function is the user's, and gets its memory from the C library, which knows nothing of huge pages. So the end of the
heap is told to be in huge pages, and blocks of all sizes come from the heap while a batch is made. Nothing is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator

from odb_factory.runtime.blocks import HUGE_PAGE
from odb_factory.runtime.memory import BLOCK, M_TRIM_THRESHOLD

_LARGE = 2 * HUGE_PAGE
"""Batches from this size on are worth it (bytes)."""

_MOST = 2**30
"""No more than this is told to be in huge pages (bytes)."""

_M_MMAP_MAX = -4
_MMAP_MAX = 65536
"""The C library's own bound on the number of blocks outside of the heap."""


class _Heap(ctypes.Structure):
    """What `mallinfo2` returns (bytes, but for some counts)."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("used", "free", "keepcost")),
    )


class BatchMemory:
    """For one thread that makes one batch after the other (glibc from 2.33 on; elsewhere nothing happens)."""

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
        library.mallopt(M_TRIM_THRESHOLD, 2 * _MOST - 1)  # also keeps the end that is prepared
        if self._largest >= _LARGE:
            self._prepare(min(_MOST, 2 * self._largest))
        try:
            yield
        finally:
            library.mallopt(_M_MMAP_MAX, _MMAP_MAX)
            library.mallopt(M_TRIM_THRESHOLD, BLOCK)
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
