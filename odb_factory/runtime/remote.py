"""Reading another process's memory: one copy from its tensors into ours, with nothing shared in between.

Linux lets a process read the memory of its descendants (`process_vm_readv`), unless a stricter setting forbids it
(Yama's `ptrace_scope` of 2 or more, a seccomp filter). Callers must have another way for that case.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from odb_factory.runtime.blocks import allocate

Span = tuple[int, int]
"""Address and size (bytes) of a piece of a process's memory."""

_MOST_PIECES = 1024
"""Pieces that one call takes (IOV_MAX)."""


class Forbidden(Exception):
    """This process may not read that one's memory, or the system has no such call."""


class Gone(Exception):
    """The process does not live any more."""


def _find() -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        function.restype = ctypes.c_ssize_t
        pieces = [ctypes.c_void_p, ctypes.c_ulong]
        function.argtypes = [ctypes.c_int, *pieces, *pieces, ctypes.c_ulong]
    return function


_readv = _find()


def spans_of(parts: Iterable[Any]) -> list[Span]:
    """Where the contents of `parts` lie: buffers of at least one byte, which must be kept until they were fetched."""
    return [(_address(part), part.nbytes if hasattr(part, "nbytes") else len(part)) for part in parts]


def _address(buffer: Any) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def fetch(pid: int, spans: Sequence[Span], new: Callable[[int], np.ndarray] = allocate) -> list[memoryview]:
    """The contents of `spans` in process `pid`, each in private memory of its own.

    Args:
        new: gives memory of so many bytes.

    Raises:
        Forbidden: there must be another way.
        Gone: the process has ended.
        OSError: the process has no such memory.
    """
    blocks = [new(size) for _, size in spans]
    there = np.array(spans, np.uint64).reshape(-1, 2)
    here = np.array([(b.__array_interface__["data"][0], b.nbytes) for b in blocks], np.uint64).reshape(-1, 2)
    row = 0
    while row < len(blocks):
        got = _read(pid, here[row : row + _MOST_PIECES], there[row : row + _MOST_PIECES])
        while row < len(blocks) and got >= int(here[row, 1]):
            got -= int(here[row, 1])
            row += 1
        if got:  # one call takes no more than 2 GiB
            for table in (here, there):
                table[row] += np.array((got, -got), np.int64).view(np.uint64)
    return [block.data for block in blocks]


def _read(pid: int, here: np.ndarray, there: np.ndarray) -> int:
    if _readv is None:
        raise Forbidden
    got: int = _readv(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
    if got > 0:
        return got
    number = ctypes.get_errno() if got < 0 else errno.EFAULT
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        raise Forbidden
    if number == errno.ESRCH:
        raise Gone
    raise OSError(number, f"reading the memory of process {pid}: {os.strerror(number)}")
