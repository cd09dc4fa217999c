"""Harness for tests with several ranks: real processes, a gloo group, a deadline, and every rank's traceback.

Ranks come out of a fork server that has torch loaded, so that a world costs tenths of a second instead of seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = ["torch", "torch.distributed", "torch.utils.data", "odb_factory.runtime.loader", "odb_factory.trainer.mixin"]

STACKS = signal.SIGVTALRM
"""Makes a process of a rank write its stacks; none that the collate process ignores."""

GRACE_SECONDS = 15.0
"""Once a rank has failed, how long the others may take to end by themselves."""

LEAVE_SECONDS = 5.0
"""How long the processes that a rank started may outlive it."""


class RankFailure(AssertionError):
    """One or more ranks failed, were killed, did not finish or left processes behind; the text has each one's story."""


@dataclass(frozen=True)
class _Rank:
    process: Any
    reader: Connection
    stacks: str
    """File for the Python stacks of all its processes, written when it does not end in time."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline: float = 45.0,
    init_group: bool = True,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Run `function(rank, world_size, *args)` in `world_size` fresh processes; returns the results by rank.

    `function` and its arguments must pickle. Whatever happens, no process that a rank started is left behind.

    Args:
        deadline: seconds that the whole world has.
        init_group: let the ranks form a default gloo group first.
        may_die: ranks that may end without a result, which then is None.

    Raises:
        RankFailure: a rank raised, died, was not done within `deadline`, or one of its processes outlived it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="odb-ranks-") as folder, _ended(ranks := []):
        store = os.path.join(folder, "store") if init_group else None
        for rank in range(world_size):
            stacks = os.path.join(folder, f"stacks-{rank}")
            reader, writer = context.Pipe(duplex=False)
            child_args = (rank, world_size, store, deadline, function, args, writer, stacks)
            process = context.Process(target=_child, args=child_args)
            process.start()
            writer.close()
            ranks.append(_Rank(process, reader, stacks))
        results, stories = _collect(ranks, deadline)
        for rank in may_die:
            if stories.get(rank, "").startswith("ended with exit code"):
                results[rank] = None
                del stories[rank]
        for rank in set(results) - set(stories):
            if left := _leftovers(ranks[rank].process):
                stories[rank] = "left these processes behind: " + "; ".join(left)
    if stories:
        raise RankFailure("\n".join(f"--- rank {rank}: {stories[rank]}" for rank in sorted(stories)))
    return [results[rank] for rank in range(world_size)]


@contextlib.contextmanager
def _ended(ranks: list[_Rank]) -> Iterator[None]:
    try:
        yield
    finally:
        for rank in ranks:
            for pid in {rank.process.pid, *session_members(rank.process.pid)}:
                kill(pid)
            rank.process.join(5)
            rank.reader.close()


def _collect(ranks: list[_Rank], deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Results and stories (why there is no result) by rank."""
    results: dict[int, Any] = {}
    stories: dict[int, str] = {}
    end = time.monotonic() + deadline
    pending = {one.reader: rank for rank, one in enumerate(ranks)}
    while pending and time.monotonic() < end:
        for ready in wait(list(pending), timeout=0.2):
            assert isinstance(ready, Connection)
            rank = pending.pop(ready)
            try:
                ok, value = pickle.loads(ready.recv_bytes())
            except EOFError:
                ranks[rank].process.join(5)
                ok, value = False, f"ended with exit code {ranks[rank].process.exitcode} and no result"
            if ok:
                results[rank] = value
            else:
                stories[rank] = value
                end = min(end, time.monotonic() + GRACE_SECONDS)
    for rank in pending.values():
        stories[rank] = f"was not done in time (deadline {deadline:g} s)\n{_stacks(ranks[rank])}"
    return results, stories


def _stacks(rank: _Rank) -> str:
    """The Python stacks of all processes of a rank that hangs."""
    for pid in session_members(rank.process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS)
    time.sleep(0.5)
    with contextlib.suppress(OSError), open(rank.stacks) as file:
        return file.read()
    return ""


def _child(
    rank: int,
    world: int,
    store: str | None,
    deadline: float,
    function: Callable[..., Any],
    args: Any,
    pipe: Connection,
    stacks: str,
) -> None:
    os.setsid()  # a session of its own: the harness can end all that this rank started
    file = open(stacks, "w")  # noqa: SIM115  (open as long as the process)
    faulthandler.register(STACKS, file=file)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if store is not None:
            os.environ["MASTER_ADDR"] = "127.0.0.1"  # as a launcher would
            limit = timedelta(seconds=deadline)
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=limit
            )
        message = pickle.dumps((True, function(rank, world, *args)))
    except BaseException as error:
        message = pickle.dumps((False, "".join(traceback.format_exception(error))))
    pipe.send_bytes(message)
    pipe.close()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _leftovers(process: Any) -> list[str]:
    """What is left of a rank that has given its result, some seconds later: [] if it and all it started has ended."""
    end = time.monotonic() + LEAVE_SECONDS
    while time.monotonic() < end:
        process.join(0.05)
        if process.exitcode is not None and not session_members(process.pid):
            return []
        time.sleep(0.05)
    return [describe(pid) for pid in session_members(process.pid)]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def session_members(leader: int) -> list[int]:
    """Living processes of the session that `leader` leads."""
    return [pid for pid, stat in _processes() if int(stat[3]) == leader]


def children(parent: int | None = None) -> list[int]:
    """Living direct children of `parent`, by default of this process."""
    return [pid for pid, stat in _processes() if int(stat[1]) == (parent or os.getpid())]


def descendants(parent: int | None = None) -> list[int]:
    """Living children of `parent` and all below them."""
    found = children(parent)
    for pid in found:  # grows while it is walked
        found.extend(children(pid))
    return found


def describe(pid: int) -> str:
    """A process in words."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
        return f"pid {pid}: {file.read().replace(chr(0), ' ')[:200]}"
    return f"pid {pid}"


def alive(pid: int) -> bool:
    """Whether the process lives (a zombie does not)."""
    return any(pid == other for other, _ in _processes())


def _processes() -> Iterator[tuple[int, list[str]]]:
    """(process id, fields of /proc/PID/stat from the state on) of all processes but zombies."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
            if fields[0] not in "ZX":
                yield int(entry), fields
