"""References to another process's memory, and the reading of it: one copy from its tensors, nothing shared.

Linux lets a process read the memory of its descendants (`process_vm_readv`), unless a stricter setting forbids it
(Yama's `ptrace_scope` of 2 or more, a seccomp filter). Callers must have another way for that case.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from odb_factory.runtime.allocation import allocate
from odb_factory.runtime.serialise import Serialised

Span = tuple[int, int]
"""Address and size (bytes) of a piece of a process's memory."""

_MOST_PIECES = 1024
"""Pieces that one call takes (IOV_MAX)."""


class ReadForbiddenError(Exception):
    """This process may not read that one's memory, or the system has no such call."""


class ProcessGoneError(Exception):
    """The process does not live any more."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a `Serialised` lies in the memory of the process that made it, which must keep it until it was copied."""

    spans: tuple[Span, ...]
    """Its pickle, and the buffers beside it."""


def refer_to(serialised: Serialised) -> Reference:
    """A reference, for another process."""
    return Reference(tuple(spans_of(serialised.parts)))


def copy_from(
    pid: int, references: Sequence[Reference], new: Callable[[int], np.ndarray] = allocate
) -> list[Serialised]:
    """What the references refer to in process `pid`, in private memory of this one. Raises as `read`."""
    blocks = iter(read(pid, [span for reference in references for span in reference.spans], new))
    copies = []
    for reference in references:
        head, *buffers = [next(blocks) for _ in reference.spans]
        copies.append(Serialised(head, tuple(buffers)))
    return copies


def spans_of(parts: Iterable[Any]) -> list[Span]:
    """Where the contents of `parts` lie: buffers of at least one byte, which must be kept until they were read."""
    return [(_address(part), part.nbytes if hasattr(part, "nbytes") else len(part)) for part in parts]


def _address(buffer: Any) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def read(pid: int, spans: Sequence[Span], new: Callable[[int], np.ndarray] = allocate) -> list[memoryview]:
    """The contents of `spans` in process `pid`, each in private memory of its own.

    Args:
        new: allocates so many bytes.

    Raises:
        ReadForbiddenError: there must be another way.
        ProcessGoneError: the process has ended.
        OSError: the process has no such memory.
    """
    blocks = [new(size) for _, size in spans]
    there = np.array(spans, np.uint64).reshape(-1, 2)
    here = np.array([(b.__array_interface__["data"][0], b.nbytes) for b in blocks], np.uint64).reshape(-1, 2)
    row = 0
    while row < len(blocks):
        got = _read_some(pid, here[row : row + _MOST_PIECES], there[row : row + _MOST_PIECES])
        while row < len(blocks) and got >= int(here[row, 1]):
            got -= int(here[row, 1])
            row += 1
        if got:  # one call takes no more than 2 GiB
            for table in (here, there):
                table[row] += np.array((got, -got), np.int64).view(np.uint64)
    return [block.data for block in blocks]


def _find() -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        function.restype = ctypes.c_ssize_t
        pieces = [ctypes.c_void_p, ctypes.c_ulong]
        function.argtypes = [ctypes.c_int, *pieces, *pieces, ctypes.c_ulong]
    return function


_readv = _find()


def _read_some(pid: int, here: np.ndarray, there: np.ndarray) -> int:
    if _readv is None:
        raise ReadForbiddenError
    got: int = _readv(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
    if got > 0:
        return got
    number = ctypes.get_errno() if got < 0 else errno.EFAULT
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        raise ReadForbiddenError
    if number == errno.ESRCH:
        raise ProcessGoneError
    raise OSError(number, f"reading the memory of process {pid}: {os.strerror(number)}")
