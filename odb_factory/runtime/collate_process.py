"""The collate process, in which the window and the rounds run: one per rank, started once, serves every epoch.

In: a `CollateJob`, and the trainer's commands. Out: batches, and one `Failure` if something fails.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import select
import socket
import sys
import threading
import traceback

import torch

from odb_factory.core.protocol import ProtocolError
from odb_factory.runtime.allocation import return_freed_memory
from odb_factory.runtime.errors import CollateError, ExchangeError, OdbError, SampleError
from odb_factory.runtime.exchange import Exchange, connect, try_gloo
from odb_factory.runtime.messages import Failure, Meet, Phase, StartEpoch, Stop
from odb_factory.runtime.rounds import CollateJob, RankEpoch
from odb_factory.runtime.signals import ignore_in_this_process
from odb_factory.runtime.transport.batches import BatchSender, StopRequested
from odb_factory.runtime.transport.connection import receive, send
from odb_factory.runtime.transport.shared_memory import SharedSlots
from odb_factory.runtime.window import WindowReader

WATCH_SECONDS = 0.5
"""How often the collate process looks whether its parent lives."""

_KEPT: list[object] = []
"""What must live as long as the process."""

_HUNG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP


def main(job: CollateJob, sock: socket.socket, other_end: socket.socket | None, slots: SharedSlots | None) -> None:
    """Entry point of the process: serves `StartEpoch` commands from `sock` until `Stop`, an error, or the parent's end.

    Sends, for each epoch, the steps as (batch, StepInfo) and then an `EpochEnd`; in case of error one `Failure`.
    """
    if other_end is not None:  # a forked copy of the trainer's end would hide the trainer's death
        other_end.close()
    if slots is not None:
        slots.close_file()
    _settle(job.parent, sock)
    try:
        _serve(job, sock, slots)
    except (BrokenPipeError, ConnectionResetError, EOFError, StopRequested):
        leave(0)
    except BaseException as error:
        failure = _failure(error, job.rank)
        with contextlib.suppress(OSError):
            send(sock, failure)
            sock.shutdown(socket.SHUT_WR)
        leave(1)
    leave(0)


def _settle(parent: int, sock: socket.socket) -> None:
    ignore_in_this_process()
    torch.set_num_threads(1)  # an OpenMP pool inherited through fork would hang
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return_freed_memory()
    threading.Thread(target=_watch_parent, args=(parent, sock), name="odb-watch", daemon=True).start()


def _watch_parent(parent: int, sock: socket.socket) -> None:
    """End this process when the trainer closed its end (also while the main thread waits for other ranks) or died."""
    poll = select.poll()
    poll.register(sock, _HUNG_UP)
    while os.getppid() == parent:
        if poll.poll(WATCH_SECONDS * 1000):
            leave(0)
    leave(1)


def leave(code: int) -> None:
    """End this process at once, and its workers with it: they hold nothing worth keeping."""
    end_workers()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a pipe whose reader is gone must not keep us here
            stream.flush()
    os._exit(code)


def end_workers() -> None:
    """Kill the workers."""
    for worker in multiprocessing.active_children():
        worker.kill()


def _failure(error: BaseException, rank: int) -> Failure:
    if isinstance(error, SampleError):
        kind = "sample"
    elif isinstance(error, ExchangeError | ProtocolError):
        kind = "exchange"
    else:
        kind = "collate"
    text = str(error) if isinstance(error, OdbError | ProtocolError) else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error)) if kind == "collate" else ""
    if not re.match(rf"rank {rank}\b", text):  # such as a failed meeting's, which has more to say of this rank
        text = f"rank {rank}: {text}"
    return Failure(kind, text, trace)


def _join_world(job: CollateJob, sock: socket.socket) -> Exchange:
    """Report to the trainer that this process is up, and connect with the other ranks."""
    kept = try_gloo() if job.world_size > 1 else None
    send(sock, Phase("waiting for the rendezvous"))
    if kept is None:
        return connect(None, job.config.timeout)
    _KEPT.append(kept)
    command = receive(sock)
    if isinstance(command, Stop):
        leave(0)
    if not isinstance(command, Meet):
        raise CollateError(f"unknown command {command!r}")
    send(sock, Phase("the meeting of all ranks", for_others=True))
    return connect(command.rendezvous, job.config.timeout, on_lost=end_workers)


def _serve(job: CollateJob, sock: socket.socket, slots: SharedSlots | None) -> None:
    exchange = _join_world(job, sock)
    reader = WindowReader(
        job.dataset,
        job.observe,
        job.config,
        num_workers=job.num_workers,
        prefetch_factor=job.prefetch_factor,
        worker_init_fn=job.worker_init_fn,
        window_bytes=job.window_bytes,
    )
    sender = BatchSender(sock, slots)
    while True:
        send(sock, Phase("waiting for the next epoch"))
        command = receive(sock)
        if isinstance(command, Stop):
            leave(0)  # not a return: it would wait for the end of torch's own threads
        if not isinstance(command, StartEpoch):
            raise CollateError(f"unknown command {command!r}")
        RankEpoch(job, sock, sender, exchange, reader, command.epoch, command.resumed).run()
