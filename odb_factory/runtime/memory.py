"""How many bytes of samples the window may hold where the configuration does not say."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

WINDOW_SHARE = 0.25
"""Share of the host's available memory that the windows of all its ranks may take together."""

_LEAST = 64 * 2**20


def available_memory() -> int | None:
    """Bytes that new processes may take on this host, within the limit of the control group; None: unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        found += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # version 2 says "max" where there is no limit
            found.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
    return min(found, default=None)


def default_window_bytes(world_size: int) -> int | None:
    """`WINDOW_SHARE` of the available memory, over the ranks of this host; None (no bound): it is not known.

    Without `LOCAL_WORLD_SIZE` (as torchrun sets it) all ranks are taken to be on this host.
    """
    available = available_memory()
    if available is None:
        return None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return max(_LEAST, int(available * WINDOW_SHARE) // max(1, ranks))


_M_MMAP_THRESHOLD = -3


def return_freed_memory() -> None:
    """Have the C library give large blocks back to the system once they are freed (glibc; elsewhere nothing happens).

    By default glibc keeps blocks of up to 32 MB for later once it has seen some of that size, and samples come and go
    in all sizes: a process would end up with far more memory than it holds samples.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
