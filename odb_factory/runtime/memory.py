"""Memory of this host: how much there is, and how much of it the window may take where nobody says."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

WINDOW_SHARE = 0.25
"""Share of the host's available memory that the windows of all its ranks may take together."""

_LEAST = 64 * 2**20
_MEMINFO = "/proc/meminfo"


def available_memory() -> int | None:
    """Bytes that new processes may take on this host, within the limits of the control group; None: unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError), open(_MEMINFO) as file:
        found += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    for directory in _control_groups():
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # version 2 says "max" where there is no limit
                free = int((directory / limit).read_text()) - int((directory / usage).read_text())
                found.append(max(0, free + _page_cache(directory)))
    return min(found, default=None)


def _control_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """The directories of this process's control group and of those above it, in versions 1 and 2."""
    directories = [root, root / "memory"]
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / "memory" if controllers else root
            place = top / path.lstrip("/")
            while place != top and top in place.parents:
                directories.append(place)
                place = place.parent
    return directories


def _page_cache(directory: Path) -> int:
    """Bytes of files that a control group holds in memory: counted as used, but given up when they are needed."""
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return int(fields.get("active_file", 0)) + int(fields.get("inactive_file", 0))
    return 0


def default_window_bytes(world_size: int) -> int | None:
    """`WINDOW_SHARE` of the available memory, over the ranks of this host; None (no bound): it is not known.

    See `local_ranks`.
    """
    available = available_memory()
    if available is None:
        return None
    return max(_LEAST, int(available * WINDOW_SHARE) // max(1, local_ranks(world_size)))


def local_ranks(world_size: int) -> int:
    """Ranks of this host; without `LOCAL_WORLD_SIZE` (as torchrun sets it) all are taken to be on it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def size_in_words(nbytes: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.0f} MiB"
