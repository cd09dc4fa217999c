"""What one rank does and sees: an epoch of one loader, behind a trainer that only sleeps."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from benchmarks.loader.kinds import Material, dataset_of
from benchmarks.loader.methods import Setting, batches
from tests.dist import descendants

WATCH_SECONDS = 30.0
LEAVE_SECONDS = 1.0
PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY_DAEMON = "torch_shm_manag"
"""Torch's, where tensors travel as named files (the public package); it stays as long as the rank."""
TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds of a unit in /proc/PID/stat."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One epoch."""

    method: str
    material: Material
    setting: Setting
    seconds_per_token: float = 0.0
    """The trainer takes so long for each padded token."""
    watched: str | None = None
    """Folder in which the rank says that it is ready, and waits to be let go (see benchmarks.loader.watch)."""


@dataclass
class Seen:
    """What one rank saw; times of the machine's monotonic clock (seconds)."""

    began: float = 0.0
    first: float = 0.0
    """The first batch was there."""
    ended: float = 0.0
    """The last step of the trainer was done."""
    waited: float = 0.0
    """Time in which the trainer had nothing to do, before the first batch and after."""
    cpu: float = 0.0
    """Processor time of the rank and of all processes that the loader started (seconds)."""
    indices: list[int] = field(default_factory=list)
    first_samples: int = 0
    batches: int = 0
    fillers: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    nbytes: int = 0
    """Of the batches' tensors."""


def run_epoch(rank: int, world: int, job: Job) -> Seen:
    """One epoch, alone in its process."""
    # what a user on Linux has; a process that comes out of a fork server would start its workers through that
    multiprocessing.set_start_method("fork", force=True)
    _adopt_orphans()
    data = dataset_of(job.material)
    if job.method == "public":
        import odb  # noqa: F401  (not part of what is measured)

        warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, about calls that it makes
    if job.watched is not None:
        _wait_for_the_watcher(rank, Path(job.watched))
    if world > 1:
        dist.barrier()
    seen = Seen(began=time.monotonic())
    before = _own_seconds() + _seconds_below()
    _consume(job, data, seen)
    own = _own_seconds()
    _collect_the_ended()
    seen.cpu = own + _seconds_below() - before
    if world > 1:
        dist.barrier()
    return seen


def _consume(job: Job, data: object, seen: Seen) -> None:
    free = seen.began
    for batch, filler in batches(job.method, data, job.setting):  # type: ignore[arg-type]
        now = time.monotonic()
        seen.waited += now - free
        padded = batch["input_ids"].numel()
        indices = [] if filler else batch["index"].tolist()
        if not seen.batches:
            seen.first, seen.first_samples = now, len(indices)
        if not filler:
            seen.indices += indices
            seen.tokens += int(batch["attention_mask"].sum())
        seen.batches += 1
        seen.fillers += filler
        seen.padded_tokens += padded
        seen.nbytes += sum(tensor.nbytes for tensor in batch.values())
        del batch
        if job.seconds_per_token:
            time.sleep(padded * job.seconds_per_token)
        free = seen.ended = time.monotonic()


def _adopt_orphans() -> None:
    """Make this process the parent of those that its children leave behind.

    A collate process that ends before its workers does not collect them: their processor time would be lost.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process cannot adopt orphans")


def _collect_the_ended() -> None:
    """Wait for what the loader started, a second at most: what has been waited for is in RUSAGE_CHILDREN."""
    end = time.monotonic() + LEAVE_SECONDS
    while any(_name(pid) != SHARED_MEMORY_DAEMON for pid in descendants()) and time.monotonic() < end:
        multiprocessing.active_children()
        time.sleep(0.1)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _name(pid: int) -> str:
    """Of a process, as far as the kernel keeps it; empty if it has gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _own_seconds() -> float:
    """Processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _seconds_below() -> float:
    """Of all processes below this one: those that have ended, and those that still live."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime + sum(map(_cpu_of, descendants()))


def _cpu_of(pid: int) -> float:
    """Seconds of a living process and of its children that have ended; 0 if it has gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) * TICK


def _wait_for_the_watcher(rank: int, folder: Path) -> None:
    (folder / f"rank-{rank}.tmp").write_text(str(os.getpid()))
    (folder / f"rank-{rank}.tmp").rename(folder / f"rank-{rank}")
    end = time.monotonic() + WATCH_SECONDS
    while not (folder / "go").exists():
        if time.monotonic() > end:
            raise TimeoutError(f"rank {rank} was not let go by the watcher")
        time.sleep(0.01)
