"""The bound on the window's bytes: measured memory, and its default."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.memory import MB, measure
from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.runtime import memory
from tests.runtime.helpers import Lengths, PadCollate


@pytest.mark.slow
@pytest.mark.distributed
def test_peak_memory_stays_within_the_bound_and_the_stated_constant() -> None:
    """`python -m benchmarks.memory` does it for several bounds; without a bound the same data take far more."""
    how: dict[str, Any] = {"size": 120, "depth": 128, "workers": 1}
    bounded, free = measure(100 * MB, **how), measure(None, **how)
    assert bounded.limit is not None
    assert bounded.peak <= bounded.limit + bounded.constant < free.peak
    assert bounded.short > 0
    assert bounded.samples == free.samples == 120


def test_the_default_is_a_share_of_what_the_host_has_for_each_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 40 * 2**30)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert memory.default_window_bytes(1) == 10 * 2**30
    assert memory.default_window_bytes(8) == 10 * 2**30 // 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.default_window_bytes(64) == 10 * 2**30 // 4
    loader = OdbDataLoader(Lengths([3]), PadCollate(), OdbConfig(token_budget=10))
    assert loader.window_bytes == 10 * 2**30 // 4
    loader = OdbDataLoader(Lengths([3]), PadCollate(), OdbConfig(token_budget=10, window_bytes=5))
    assert loader.window_bytes == 5
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    assert memory.default_window_bytes(1) == 64 * MB, "never so little that windows are single samples"
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    assert memory.default_window_bytes(1) is None


def test_what_the_host_has_is_known_here() -> None:
    available = memory.available_memory()
    assert available is not None
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 0 < available <= total
