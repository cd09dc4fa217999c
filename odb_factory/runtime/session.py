"""Stage 4, batches out: the trainer's side of one collate process. Starts it, receives from it, watches it, stops it.

In: batches as the collate process sends them. Out: a bounded queue of (batch, `StepInfo`), page-locked if that is
wanted. Runs in the trainer process: a thread receives, the training loop takes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import select
import signal
import socket
import threading
import time
from multiprocessing.util import Finalize
from typing import Any

import torch

from odb_factory.runtime.allocation import ReusedBlocks
from odb_factory.runtime.collate_process import main
from odb_factory.runtime.errors import CollateError, ExchangeError, OdbError, SampleError, other_rank
from odb_factory.runtime.messages import (
    EpochEnd,
    Failure,
    Meet,
    Phase,
    Resumed,
    StartEpoch,
    StepInfo,
    Stop,
)
from odb_factory.runtime.rendezvous import Rendezvous
from odb_factory.runtime.rounds import CollateJob
from odb_factory.runtime.signals import blocked
from odb_factory.runtime.tensors import map_tensors
from odb_factory.runtime.transport.batches import Offer, accept
from odb_factory.runtime.transport.connection import receive, send
from odb_factory.runtime.transport.shared_memory import SharedSlots, make_slots

POLL_SECONDS = 0.5
"""How often a waiting thread looks whether the collate process lives."""

GRACE_SECONDS = 3.0
"""How long after its time-out the collate process may still report it: it knows best what it waited for."""

UP_SECONDS = (5.0, 15.0, 45.0)
"""How long a forked collate process has to come up, in the first attempt, the second, ...

With many ranks the first one is likely to fail on some rank, and all wait for it; a busy machine needs the later ones.
"""

SPARE_BLOCKS = 2
"""Large tensors that the trainer has dropped and whose memory is kept for those to come, at most."""

MORE_SLOTS = 4
"""Batches in shared memory beside those queued: made, received, and with the training loop."""

_ERRORS: dict[str, type[OdbError]] = {"sample": SampleError, "exchange": ExchangeError, "collate": CollateError}


def _launch(job: CollateJob, slots: SharedSlots | None) -> tuple[socket.socket, multiprocessing.process.BaseProcess]:
    """Start the collate process, and wait until it is up where it was forked.

    A process that was forked while another thread held a lock in torch or in the C library may hang with that lock for
    ever (see `try_gloo`): it is ended, and forked again.
    """
    forked = job.config.start_method == "fork"
    context: Any = multiprocessing.get_context(job.config.start_method)
    for seconds in UP_SECONDS:
        sock, child_sock = socket.socketpair()
        process = context.Process(
            target=main, args=(job, child_sock, sock if forked else None, slots), name=f"odb-collate-{job.rank}"
        )
        try:
            with blocked():
                process.start()
            child_sock.close()
            if not forked or _wait_readable(sock, seconds):
                return sock, process
        except BaseException:
            sock.close()
            _end(process)
            raise
        sock.close()
        _end(process)
    raise CollateError(
        f"rank {job.rank}: {len(UP_SECONDS)} collate processes in a row were forked and did not come up within "
        f"{', '.join(f'{seconds:g}' for seconds in UP_SECONDS)} s; in a loop of your own, set start_method: spawn."
    )


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """Kill a process that may or may not have been started."""
    if process.pid is not None:
        process.kill()
        process.join()


def _wait_readable(sock: socket.socket, seconds: float) -> bool:
    """Whether something, or the end, can be read from `sock` within so many seconds."""
    poll = select.poll()  # not select(): a training process may well have 1024 descriptors open
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Session:
    """One running collate process and the thread that receives from it; to be made under `handled_later`.

    Args:
        job: what the process does.
        pin_memory: page-lock the tensors of received batches (needs CUDA).
    """

    def __init__(self, job: CollateJob, *, pin_memory: bool) -> None:
        self._job = job
        self._rank = job.rank
        self._owner = os.getpid()
        self._timeout = job.config.timeout
        self._device = torch.cuda.current_device() if pin_memory else None
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=job.config.queue_steps)
        self._closing = threading.Event()
        self._closed = False
        self._phase = Phase("starting")
        self._heard = time.monotonic()
        self._slots = make_slots(job.config.queue_steps + MORE_SLOTS)
        try:
            self._sock, self.process = _launch(job, self._slots)
        finally:
            if self._slots is not None:
                self._slots.close_file()
        self._thread = threading.Thread(target=self._receive, name="odb-receive", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # no more threads
            self._sock.close()
            _end(self.process)
            raise
        # multiprocessing would wait for ever at exit for a collate process that nobody closed
        self._at_exit = Finalize(None, self.close, exitpriority=10)

    def meet(self, rendezvous: Rendezvous) -> None:
        """Tell the process where to meet those of the other ranks; once, before the first epoch."""
        self._command(Meet(rendezvous))

    def start_epoch(self, epoch: int, resumed: Resumed | None = None) -> None:
        """Tell the process to run `epoch`, without what was done of it before."""
        self._command(StartEpoch(epoch, resumed))

    def _command(self, command: Meet | StartEpoch) -> None:
        try:
            send(self._sock, command)
        except OSError:
            self.next()  # raises what the process died of

    def next(self) -> tuple[Any, StepInfo] | EpochEnd:
        """The next step, or the end of the epoch; waits for it.

        Raises:
            SampleError, CollateError, ExchangeError: what the collate process failed with, or that it died, or that
                nothing came within the time-out.
        """
        begun = time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=min(POLL_SECONDS, self._timeout))
            except queue.Empty:
                if time.monotonic() > max(begun, self._heard) + self._timeout + GRACE_SECONDS:
                    raise self._late() from None
                continue
            if isinstance(item, Failure):
                text = item.message + (f"\n{item.traceback}" if item.traceback else "")
                raise _ERRORS[item.kind](text)
            result: tuple[Any, StepInfo] | EpochEnd = item
            return result

    def close(self, patience: float = 5.0) -> None:
        """End the process and its workers, within `patience` seconds or by force. May be called more than once."""
        if self._closed or self._owner != os.getpid():  # the latter: a copy in a process that was forked off
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._sock.settimeout(0.2)
            send(self._sock, Stop())
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(patience)
        self._thread.join(patience)
        self._sock.close()
        self._at_exit.cancel()
        self._closed = True

    @property
    def phase(self) -> str:
        """What the process was about to do at its last message."""
        return self._phase.name

    def _late(self) -> OdbError:
        world = self._job.world_size
        if self._phase.for_others and world > 1:
            two = world == 2
            others, one = (other_rank(self._rank, 2), "it") if two else ("the other ranks", "one of them")
            look = f"look at what {others} says" if two else "look for the rank that says otherwise"
            return ExchangeError(
                f"rank {self._rank} waited for more than {self._timeout:g} s (odb_timeout) for {others} in "
                f"{self.phase}: {one} stalled, or is that much slower; {look}."
            )
        return CollateError(
            f"rank {self._rank}: nothing came from the collate process for {self._timeout:g} s (odb_timeout); it was "
            f"last at: {self.phase}. A stalled worker or dataset is the usual cause."
        )

    def _receive(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        memory = ReusedBlocks(SPARE_BLOCKS)
        try:
            while not self._closing.is_set():
                if not self._readable():
                    continue
                message = receive(self._sock)
                self._heard = time.monotonic()
                if isinstance(message, Phase):
                    self._phase = message
                    continue
                if isinstance(message, Offer):
                    answer, message = accept(message, self.process.pid or 0, memory, self._slots)
                    # No lock against `Stop`, since Ctrl-C can leave one locked: both are small, and go in one piece.
                    send(self._sock, answer)
                    if not answer.done:
                        continue
                if self._device is not None and isinstance(message, tuple):
                    message = (map_tensors(message[0], torch.Tensor.pin_memory), message[1])
                self._put(message)
        except (OSError, EOFError):
            self._put(self._end_of_process())
        except Exception as error:
            self._put(Failure("collate", f"rank {self._rank}: receiving failed: {type(error).__name__}: {error}"))

    def _readable(self) -> bool:
        ready = _wait_readable(self._sock, POLL_SECONDS)
        if not ready and not self.process.is_alive():
            # workers forked by the process may hold its end of the socket open: do not wait for an end of file
            raise EOFError
        return ready

    def _put(self, item: Any) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=POLL_SECONDS)
                return

    def _end_of_process(self) -> Failure:
        self.process.join(POLL_SECONDS * 4)
        code = self.process.exitcode
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name} (out of memory is the usual cause of SIGKILL)"
        else:
            how = f"ended with exit code {code}"
        return Failure("collate", f"rank {self._rank}: the collate process {how} during: {self.phase}.")
