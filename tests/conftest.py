"""Settings of all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# torch's stores look up the names of the addresses that connect; a name server that does not answer must not cost 5 s
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# processes that tests start (a fork server, subprocesses) must find the package and the tests from any folder
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


@pytest.fixture(autouse=True)
def _sigchld() -> Iterator[None]:
    """A DataLoader with workers leaves a handler behind that raises in later tests, whenever they kill a worker."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)
