"""The bound on the window's bytes: measured memory, and its default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory.epoch import MB, measure_epoch
from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.runtime import memory
from tests.runtime.helpers import Lengths, PadCollate


@pytest.mark.slow
@pytest.mark.distributed
def test_peak_memory_stays_within_the_bound_and_the_stated_constant() -> None:
    """`python -m benchmarks memory` does it for several bounds; without a bound the same data take far more."""
    how: dict[str, Any] = {"size": 120, "depth": 128, "workers": 1}
    bounded, free = measure_epoch(100 * MB, **how), measure_epoch(None, **how)
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


def group(directory: Path, limit: str, used: int, files: int, version: int = 2) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(
        f"anon {used - files}\nactive_file {files // 4}\ninactive_file {files * 3 // 4}\n"
    )
    return directory


GB = 2**30


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_control_group_counts_without_the_files_that_it_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """A job's group below one without a limit; reading the data has filled its page cache up to the limit."""
    top = tmp_path if version == 2 else tmp_path / "memory"
    group(top, "max", 0, 0)
    group(top / "jobs", "max", 0, 0)
    group(top / "jobs" / "7", str(3 * GB), 3 * GB, 2 * GB, version)
    own = tmp_path / "own"
    own.write_text("0::/jobs/7\n" if version == 2 else "5:cpu:/other\n4:memory,x:/jobs/7\n")
    found = memory._control_groups(tmp_path, own)
    assert {top, top / "jobs" / "7", top / "jobs"} <= set(found)
    monkeypatch.setattr(memory, "_control_groups", lambda: found)
    monkeypatch.setattr(memory, "_MEMINFO", "/nonexistent")
    assert memory.available_memory() == 2 * GB


def test_a_host_that_says_nothing_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_control_groups", lambda: [])
    monkeypatch.setattr(memory, "_MEMINFO", "/nonexistent")
    assert memory.available_memory() is None
