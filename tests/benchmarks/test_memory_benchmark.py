"""The benchmark `memory`: the bound, the view, and a quick run."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory import view
from benchmarks.memory.epoch import LARGEST, MB, QUEUE_STEPS, Peak
from benchmarks.rows import Row, read_rows
from odb_factory.runtime.session import MORE_SLOTS


def test_a_peak_is_within_the_window_the_finished_batches_one_more_and_four_samples() -> None:
    assert (QUEUE_STEPS, MORE_SLOTS) == (1, 4)
    most = 100 * MB + 6 * 40 * MB + 4 * LARGEST
    peak = Peak(100 * MB, most, 40 * MB, padding=0.1, steps=3, rounds=2, short=1, samples=9)
    assert peak.within
    assert not dataclasses.replace(peak, peak=most + 1).within
    assert dataclasses.replace(peak, limit=None, peak=most + 1).within


def row(window: int | None, peak: float, within: bool = True) -> Row:
    figures = {
        "peak_mib": peak,
        "constant_mib": 180.0,
        "largest_batch_mib": 40.0,
        "padding": 0.25,
        "steps": 8,
        "rounds": 4,
        "short_windows": 3,
        "within": within,
        "emitted": 9,
    }
    settings = {"window_mib": window, "samples": 9, "workers": 1}
    return Row(
        benchmark="memory",
        what="epoch",
        data="pixels",
        method="odb",
        depth=128,
        settings=settings,  # type: ignore[arg-type]
        figures=figures,  # type: ignore[arg-type]
    )


def test_the_table_says_when_the_bound_was_not_kept() -> None:
    text = view.tables([row(100, 281.0, within=False), row(200, 300.0), row(None, 900.0)])
    assert "| 100 | 281 | 280 | 40 | 25.0% | 8 | 3 of 4 | **no** |" in text
    assert "| 200 | 300 | 380 |" in text
    assert "| none | 900 | none |" in text
    bound, peaks = view.plot([row(200, 300.0), row(100, 250.0), row(None, 900.0)]).axes[0].lines[:2]
    assert list(bound.get_ydata()) == [280.0, 380.0]
    assert list(peaks.get_ydata()) == [250.0, 300.0]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_quick(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks", "memory", "--quick", "--json", str(file), "--samples", "40"]
    subprocess.run([*command, "--workers", "1"], check=True, timeout=230)
    bounded, free = read_rows([file])
    assert bounded.settings["window_mib"] == 100
    assert bounded.figures["emitted"] == free.figures["emitted"] == 40
    assert bounded.figures["peak_mib"] < free.figures["peak_mib"]  # type: ignore[operator]
    assert bounded.figures["short_windows"] > 0  # type: ignore[operator]
    assert "none" in view.tables([bounded, free])
    view.plot([bounded, free])
