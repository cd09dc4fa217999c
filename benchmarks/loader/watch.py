"""Memory of all processes of a run, from outside, sampled by a thread while the run goes on.

Looking at a process's pages costs milliseconds, more for larger ones, so that runs that are watched are not timed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.dist import session_members

PRIVATE_SECONDS = 0.25
SHARED_SECONDS = 0.02


@dataclass
class Peak:
    """Most that a run took over what there was before it (bytes)."""

    private: int = 0
    """Anonymous memory of all its processes; a page that several of them share counts once."""
    shared: int = 0
    """Shared memory of the machine (Shmem): also files without a name, and other programs'."""
    mapped: int = 0
    """Of the shared memory, what its processes have mapped when they are looked at: no other program's."""
    shm_files: int = 0
    """Of these, what lies in /dev/shm."""
    processes: int = 0
    looks: int = 0


@contextlib.contextmanager
def watched(folder: Path, ranks: int) -> Iterator[Peak]:
    """Watch `ranks` ranks that say in `folder` that they are ready; the peak is complete when the block ends."""
    peak, stop = Peak(), threading.Event()
    thread = threading.Thread(target=_watch, args=(folder, ranks, peak, stop), daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def _watch(folder: Path, ranks: int, peak: Peak, stop: threading.Event) -> None:
    ready = [folder / f"rank-{rank}" for rank in range(ranks)]
    while not all(file.exists() for file in ready):
        if stop.wait(0.01):
            return
    leaders = [int(file.read_text()) for file in ready]
    private, mapped = _pages(_members(leaders))
    shared, files = shared_memory(), shm_files()
    (folder / "go").touch()
    due = 0.0
    while not stop.wait(SHARED_SECONDS):
        peak.shared = max(peak.shared, shared_memory() - shared)
        peak.shm_files = max(peak.shm_files, shm_files() - files)
        if time.monotonic() < due:
            continue
        members = _members(leaders)
        now = _pages(members)
        peak.private, peak.mapped = max(peak.private, now[0] - private), max(peak.mapped, now[1] - mapped)
        peak.processes = max(peak.processes, len(members))
        peak.looks += 1
        due = time.monotonic() + PRIVATE_SECONDS


def _members(leaders: list[int]) -> list[int]:
    return [pid for leader in leaders for pid in session_members(leader)]


def _pages(pids: list[int]) -> tuple[int, int]:
    """Bytes of anonymous and of shared memory; a page of several processes is divided among them."""
    anonymous = shared = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            anonymous += _field(text, "Pss_Anon:")
            shared += _field(text, "Pss_Shmem:")
    return anonymous, shared


def shared_memory() -> int:
    """Bytes of shared memory on this machine."""
    return _field(Path("/proc/meminfo").read_text(), "Shmem:")


def shm_files() -> int:
    """Bytes in /dev/shm, also of files that have no name any more."""
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _field(text: str, key: str) -> int:
    """A figure in kB of a file in /proc, as bytes; 0 where the line is not there."""
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(key)), 0)
