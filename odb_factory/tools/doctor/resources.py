"""Checks of system resources: shared memory, open files, memory, processes and disk space."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from odb_factory.runtime.memory import available_memory, size_in_words
from odb_factory.tools.doctor.machine import Machine
from odb_factory.tools.doctor.result import Check, fail, ok, warn

MIB, GIB = 2**20, 2**30

# Measured with the demo on 2 ranks of 4 workers each: 0.2 MiB of shared memory, 45 open files in a process, 66 threads
# in 14 processes; a process that has imported LLaMA-Factory takes 1.0 GiB.
LEAST_SHARED = 1 * MIB
"""For Python's queues between a collate process and its workers; samples go through pipes."""
GOOD_SHARED = 64 * MIB
"""For evaluation, whose stock loaders pass batches in shared memory. Docker's default size."""
GOOD_SHARED_NCCL = 1 * GIB
"""For several GPUs: NCCL's transport within a node takes tens of megabytes per pair."""
SLACK = 0.9
"""Sufficient share of a good size: there are always some files of other programs."""
LEAST_FILES, GOOD_FILES = 64, 1024
LEAST_MEMORY, GOOD_MEMORY = 1 * GIB, 4 * GIB
LEAST_TASKS, GOOD_TASKS = 64, 512


def check_shared_memory(machine: Machine) -> Iterator[Check]:
    """`/dev/shm` exists, is writable and has space."""
    name, path = "shared_memory", machine.shared_memory
    grow = "docker run --shm-size=1g (or --ipc=host); elsewhere: mount -o remount,size=1g /dev/shm"
    if not path.is_dir():
        yield fail(name, f"{path} is missing, so that no loader can have workers", f"mount -t tmpfs tmpfs {path}")
        return
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            os.posix_fallocate(file.fileno(), 0, LEAST_SHARED)
    except OSError as error:
        yield fail(
            name,
            f"{path} has no room for {size_in_words(LEAST_SHARED)}: {error.strerror}",
            f"Delete what is left there; {grow}",
        )
        return
    free = shutil.disk_usage(path).free
    gpus = len(list(machine.devices.glob("nvidia[0-9]*")))
    good, reason = (GOOD_SHARED_NCCL, f"NCCL on {gpus} GPUs") if gpus > 1 else (GOOD_SHARED, "evaluation with workers")
    found = f"{size_in_words(free)} free in {path}"
    if free < SLACK * good:
        yield warn(name, f"{found}: enough for odb, but {reason} may need {size_in_words(good)}", grow)
    else:
        yield ok(name, found)


def check_files(machine: Machine) -> Iterator[Check]:
    """The limit of open files per process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield ok("files", "no limit of open files")
        return
    found = f"{soft} open files in a process"
    raisable = hard == resource.RLIM_INFINITY or hard >= GOOD_FILES
    remedy = (
        f"ulimit -n {GOOD_FILES}" if raisable else f"Have the hard limit ({hard}) raised, then ulimit -n {GOOD_FILES}"
    )
    if soft < LEAST_FILES:
        yield fail("files", f"{found}, a run needs {LEAST_FILES} at least", remedy)
    elif soft < GOOD_FILES:
        yield warn("files", f"{found}: many workers or GPUs need up to {GOOD_FILES}", remedy)
    else:
        yield ok("files", found)


def check_memory(machine: Machine) -> Iterator[Check]:
    """Memory available to new processes."""
    free = available_memory()
    if free is None:
        yield warn("memory", "the system does not say how much is available", "Set odb_window_bytes in the recipe.")
        return
    found = f"{size_in_words(free)} available"
    remedy = "End what else runs here, or raise the container's memory limit; fewer ranks and workers need less."
    if free < LEAST_MEMORY:
        yield fail(
            "memory", f"{found}: a single process with LLaMA-Factory takes {size_in_words(LEAST_MEMORY)}", remedy
        )
    elif free < GOOD_MEMORY:
        yield warn("memory", f"{found}: enough for a tiny model only", remedy)
    else:
        yield ok("memory", found)


def check_processes(machine: Machine) -> Iterator[Check]:
    """How many more processes and threads may be started."""
    left = {limit: room for limit, room in (_user_room(), _group_room(machine.control_groups)) if room is not None}
    if not left:
        yield ok("processes", f"no limit, {os.cpu_count()} cores")
        return
    limit = min(left, key=lambda one: left[one])
    found = f"{left[limit]} more processes and threads are allowed ({limit})"
    remedy = "ulimit -u (user) or docker run --pids-limit (container): raise it, or end what else runs."
    if left[limit] < LEAST_TASKS:
        yield fail("processes", f"{found}, two ranks need {LEAST_TASKS}", remedy)
    elif left[limit] < GOOD_TASKS:
        yield warn("processes", f"{found}: many workers or ranks need {GOOD_TASKS}", remedy)
    else:
        yield ok("processes", found)


def _user_room() -> tuple[str, int | None]:
    """How many more tasks the user may start; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:  # does not apply to root
        return "ulimit -u", None
    import psutil

    tasks = (task.info for task in psutil.process_iter(["uids", "num_threads"]))
    used = sum(task["num_threads"] or 0 for task in tasks if task["uids"] and task["uids"].real == os.getuid())
    return "ulimit -u", max(0, soft - used)


def _group_room(root: Path) -> tuple[str, int | None]:
    """The same for the control group (version 1 or 2) and its ancestors."""
    rooms = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "pids" not in controllers.split(","):
            continue
        top = root / "pids" if controllers else root
        place = top / path.lstrip("/")
        for folder in (place, *(parent for parent in place.parents if parent.is_relative_to(top))):
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                allowed = int((folder / "pids.max").read_text())
                rooms.append(max(0, allowed - int((folder / "pids.current").read_text())))
    return "control group", min(rooms, default=None)


LONGEST_TEMPORARY = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""Characters: the maximum for a socket's path, less what multiprocessing appends to the folder."""

GOOD_FREE = 5 * 2**30
"""Bytes of free space for the cache: an 8B model alone takes 16 GB, but may be elsewhere."""


def check_storage(machine: Machine) -> Iterator[Check]:
    """The folders for temporary files and for the cache of `datasets`."""
    yield _check_temporary(machine)
    yield _check_cache(cache_folder(machine))


def _check_temporary(machine: Machine) -> Check:
    wanted = machine.environ.get("TMPDIR", "")
    if wanted and (reason := _unwritable(Path(wanted))):
        return warn(
            "storage", f"TMPDIR={wanted} cannot be used: {reason}", "Set TMPDIR to a folder that can be written."
        )
    folder = Path(wanted or tempfile.gettempdir())
    if len(str(folder)) > LONGEST_TEMPORARY:
        return warn(
            "storage",
            f"the path of {folder} has {len(str(folder))} characters: an evaluation with workers would end with "
            "'AF_UNIX path too long'",
            "export TMPDIR=/tmp",
        )
    if reason := _unwritable(folder):
        return fail(
            "storage", f"no temporary files in {folder}: {reason}", "Set TMPDIR to a folder that can be written."
        )
    return ok("storage", f"temporary files in {folder}, {_free(folder)} free")


def cache_folder(machine: Machine) -> Path:
    """The cache folder of `datasets`."""
    environ = machine.environ
    if environ.get("HF_DATASETS_CACHE"):
        return Path(environ["HF_DATASETS_CACHE"])
    home = Path(environ.get("HOME") or Path.home())
    base = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    return Path(environ.get("HF_HOME") or base / "huggingface").expanduser() / "datasets"


def _check_cache(folder: Path) -> Check:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    move = "Set HF_HOME to a folder that can be written and has room, or cache_dir in the recipe."
    if reason := _unwritable(there):
        return fail("storage", f"datasets cannot be cached in {folder}: {reason}", move)
    found = f"datasets are cached in {folder}, {_free(there)} free"
    return ok("storage", found) if shutil.disk_usage(there).free >= GOOD_FREE else warn("storage", found, move)


def _unwritable(folder: Path) -> str | None:
    """Why no file can be created in a folder; None if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"doctor")
    except OSError as error:
        return error.strerror or str(error)
    return None


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB"
