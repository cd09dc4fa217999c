"""What a worker does before its first sample."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from odb_factory.runtime.memory import keep_freed_memory
from odb_factory.runtime.signals import ignore_in_this_process


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that forked it ends (Linux; elsewhere nothing happens)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return


@dataclass(frozen=True)
class WorkerInit:
    """Runs in each worker before its first sample."""

    parent: int
    user_init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        die_with_parent()
        if os.getppid() != self.parent:  # the parent died before the kernel was told
            os._exit(1)
        ignore_in_this_process()  # torch has just set its own handler of SIGTERM
        keep_freed_memory()
        if self.user_init is not None:
            self.user_init(worker)
