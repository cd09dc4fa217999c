"""Harness for tests with several ranks: real processes, a gloo group, a deadline, and every rank's traceback."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel", "odb_factory.runtime.loader"]


class RankFailure(AssertionError):
    """One or more ranks failed, were killed or did not finish; the text has each rank's story."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, deadline: float = 50.0, init_group: bool = True
) -> list[Any]:
    """Run `function(rank, world_size, *args)` in `world_size` fresh processes; returns the results by rank.

    `function` and its arguments must pickle. Whatever happens, no process that a rank started is left behind.

    Raises:
        RankFailure: a rank raised, died, or was not done within `deadline` seconds.
    """
    import torch.distributed as dist

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore(
        "127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=deadline), wait_for_workers=False
    )
    ranks = []
    for rank in range(world_size):
        reader, writer = context.Pipe(duplex=False)
        port = store.port if init_group else None
        process = context.Process(target=_child, args=(rank, world_size, port, deadline, function, args, writer))
        process.start()
        writer.close()
        ranks.append((process, reader))
    try:
        return _collect(ranks, deadline)
    finally:
        for process, reader in ranks:
            _kill_session(process.pid)
            process.join(5)
            reader.close()


def _collect(ranks: list[tuple[Any, Connection]], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    stories: dict[int, str] = {}
    end = time.monotonic() + deadline
    pending = {reader: rank for rank, (_, reader) in enumerate(ranks)}
    while pending and time.monotonic() < end:
        for ready in wait(list(pending), timeout=0.2):
            rank = pending.pop(ready)  # type: ignore[call-overload]
            try:
                ok, value = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
                (results if ok else stories)[rank] = value
            except EOFError:
                ranks[rank][0].join(5)
                stories[rank] = f"ended with exit code {ranks[rank][0].exitcode} and no result"
    for rank in pending.values():
        stories[rank] = f"was not done after {deadline:g} s"
    if stories:
        raise RankFailure("\n".join(f"--- rank {rank}: {stories[rank]}" for rank in sorted(stories)))
    return [results[rank] for rank in range(len(ranks))]


def _child(
    rank: int, world: int, port: int | None, deadline: float, function: Callable[..., Any], args: Any, pipe: Connection
) -> None:
    os.setsid()  # a session of its own: the harness can end all that this rank started
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if port is not None:
            store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=deadline))
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=deadline)
            )
        message = (True, function(rank, world, *args))
    except BaseException as error:
        message = (False, "".join(traceback.format_exception(error)))
    pipe.send_bytes(pickle.dumps(message))
    pipe.close()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _kill_session(leader: int | None) -> None:
    if leader is None:
        return
    for pid in session_members(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def session_members(leader: int) -> list[int]:
    """Living processes of the session that `leader` leads."""
    members = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = open(f"/proc/{entry}/stat").read().rsplit(")", 1)[1].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                members.append(int(entry))
    return members
