"""Processes that are asked: whatever they do, there is an answer or a ProbeError, and nothing is left."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from odb_factory.tools.doctor.process import MARK, ProbeError, Processes
from tests.dist import alive
from tests.tools.doctor.helpers import clean


def ask(code: str, deadline: float = 30.0) -> object:
    return Processes().ask([sys.executable, "-c", code], clean(), deadline)


def test_an_answer_among_other_output() -> None:
    assert ask(f"print('noise'); print('{MARK}[1, 2]'); print('more')") == [1, 2]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('no room')", "ended with exit status 1: no room"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by signal SIGSEGV, without a message"),
        ("print('no answer')", "ended with exit status 0, without a message"),
    ],
)
def test_no_answer_says_why(code: str, said: str) -> None:
    with pytest.raises(ProbeError, match=said):
        ask(code)


def test_no_such_program() -> None:
    with pytest.raises(ProbeError, match="/no/such/python cannot be started"):
        Processes().ask(["/no/such/python"], clean(), 10)


def test_a_late_process_ends_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    with pytest.raises(ProbeError, match="no answer within 2 s"):
        ask(code, deadline=2.0)
    child = int(note.read_text())
    end = time.monotonic() + 5
    while alive(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(child)


def test_the_end_ends_what_runs() -> None:
    processes, said = Processes(), []

    def ask_for_ever() -> None:
        with pytest.raises(ProbeError) as raised:
            processes.ask([sys.executable, "-c", "import time; time.sleep(600)"], clean(), 600.0)
        said.append(str(raised.value))

    thread = threading.Thread(target=ask_for_ever)
    thread.start()
    while not processes._running:
        time.sleep(0.01)
    processes.close()
    thread.join(30)
    assert said == ["ended by signal SIGKILL, without a message"]


def test_nothing_starts_after_the_end() -> None:
    processes = Processes()
    processes.close()
    with pytest.raises(ProbeError, match="interrupted"):
        processes.ask([sys.executable, "-c", "pass"], clean(), 10)
