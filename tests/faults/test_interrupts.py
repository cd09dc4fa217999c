"""Ctrl-C at every single line that the trainer runs while its collate process comes up."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from types import FrameType
from typing import Any

import pytest

from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.runtime import loader, session, signals
from tests.dist import descendants, kill, run_ranks
from tests.runtime.helpers import Lengths, PadCollate, open_files, wait_until

FILES = (loader.__file__, session.__file__, signals.__file__)
MOST_LINES = 200


class Interrupter:
    """Sends SIGINT at the `number`-th line of this thread in the trainer's side of the runtime."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""
        self._process = os.getpid()

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if os.getpid() != self._process:  # the collate process, forked with all this
            sys.settrace(None)
            return None
        if frame.f_code.co_filename not in FILES or self.where:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
                signal.raise_signal(signal.SIGINT)
        return self._trace


def _interrupt_everywhere(rank: int, world: int) -> tuple[int, list[str]]:
    """(lines tried, what was left where)."""
    data = Lengths([10] * 40)
    config = OdbConfig(token_budget=100, depth=8, timeout=30.0)
    left: list[str] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in range(1, MOST_LINES):
        files = open_files()
        interrupter = Interrupter(number)
        with OdbDataLoader(data, PadCollate(), config) as loader:
            steps = iter(loader)
            with contextlib.suppress(KeyboardInterrupt), interrupter:
                next(steps)
            del steps
        del loader
        if not interrupter.where:
            return number, left
        gc.collect()
        wait_until(lambda: not descendants(), 3.0)
        if found := descendants():
            left.append(f"{interrupter.where}: {len(found)} processes")
            for pid in found:
                kill(pid)
            wait_until(lambda: not descendants(), 5.0)
        elif open_files() > files:
            left.append(f"{interrupter.where}: {open_files() - files} descriptors")
    raise AssertionError("the start never ended")


@pytest.mark.slow
@pytest.mark.distributed
def test_an_interrupt_at_any_line_of_the_start_leaves_nothing() -> None:
    [(lines, left)] = run_ranks(1, _interrupt_everywhere, init_group=False, deadline=100.0)
    assert lines > 30, "the lines of the start were not found"
    assert not left, "an interrupt there leaves this behind:\n" + "\n".join(left)
