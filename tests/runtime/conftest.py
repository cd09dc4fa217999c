"""Every test of the runtime must clean up after itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist import alive, children, describe
from tests.runtime.helpers import wait_until

SERVERS = ("forkserver", "resource_tracker")
"""Processes that `multiprocessing` keeps for the whole test run."""


def _own_children() -> set[int]:
    return {pid for pid in children() if not any(name in describe(pid) for name in SERVERS)}


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    before = _own_children()
    yield
    wait_until(lambda: not _own_children() - before)
    left = [describe(pid) for pid in _own_children() - before if alive(pid)]
    assert not left, f"the test left processes behind: {left}"
