"""Signals that launchers, terminals and schedulers send to a whole process group: the trainer decides what they mean.

The collate process and its workers ignore them. They end when the trainer closes its end of their socket, or dies.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial

FOR_THE_TRAINER = (
    signal.SIGINT,  # a terminal
    signal.SIGTERM,  # torchrun, Slurm, Kubernetes
    signal.SIGHUP,  # a terminal that closes, torchrun
    signal.SIGQUIT,
    signal.SIGUSR1,  # Slurm (--signal), and whatever users have handlers for
    signal.SIGUSR2,
    signal.SIGXCPU,
    signal.SIGABRT,  # LLaMA Board, to stop a run; a process that aborts itself ends all the same
)
"""Ignored by the collate process and its workers."""


def ignore_in_this_process() -> None:
    """Ignore them from now on, those too that came while they were blocked. For a process's main thread."""
    for number in FOR_THE_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_TRAINER)


def block_in_this_thread() -> None:
    """Processes that this thread starts do not get them before they call `ignore_in_this_process`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_TRAINER)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """The same for a while; what came meanwhile takes effect when it is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_TRAINER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def handled_later() -> Iterator[None]:
    """Python's handlers run when this is over: between the start of a process and the moment when it has an owner.

    Such as that of Ctrl-C, which raises wherever the main thread is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[Callable[[], object]] = []
    try:
        with contextlib.ExitStack() as stack:
            for number in FOR_THE_TRAINER:
                handler = signal.getsignal(number)
                if callable(handler):
                    stack.callback(signal.signal, number, handler)
                    signal.signal(number, lambda *call, handler=handler: waiting.append(partial(handler, *call)))
            yield
    finally:
        for call in waiting:
            call()
