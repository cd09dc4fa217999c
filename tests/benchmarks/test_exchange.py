"""The benchmark `exchange`: what is counted of both packages, the view, and a quick run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.exchange import public, view
from benchmarks.exchange.ours import count_simulated
from benchmarks.exchange.world import CONFIG
from benchmarks.rows import Row, read_rows
from odb_factory.core.stats import StepTotals


def test_ours_does_not_grow_with_the_world_and_a_gather_does() -> None:
    small, large = count_simulated(2, per_rank=40), count_simulated(64, per_rank=40)
    assert large.received_bytes < 1.5 * small.received_bytes
    assert public.by_formula(64).received_bytes == 32 * public.by_formula(2).received_bytes


def test_bytes_beyond_the_steps_are_what_is_left_of_them() -> None:
    cost = count_simulated(4, per_rank=40)
    assert cost.fixed_bytes == pytest.approx(cost.sent_bytes - 8 * StepTotals.WIDTH * cost.steps)
    assert cost.fixed_bytes > 0


def row(method: str, ranks: int, received: float, seconds: float | None = None) -> Row:
    figures = {
        "steps_per_round": 2.0 if seconds else None,
        "sent_bytes_per_round": 300.0,
        "fixed_bytes_per_round": None,
        "received_bytes_per_round": received,
        "round_s": seconds,
        "first_step_s": seconds,
    }
    settings = {"how": "processes" if seconds else "counted", "samples_per_rank": 60}
    return Row(
        benchmark="exchange",
        what="round",
        data="log-normal",
        method=method,
        ranks=ranks,
        settings=settings,  # type: ignore[arg-type]
        figures=figures,  # type: ignore[arg-type]
    )


def test_times_are_multiples_of_ours_in_the_smallest_world() -> None:
    rows = [row("odb", 64, 310), row("public", 2, 2400, 0.006), row("odb", 4, 305, 0.004), row("odb", 2, 300, 0.002)]
    lines = view.tables(rows).splitlines()
    assert lines[4] == "| 2 | odb-factory | processes | 2.0 | 300 |  | 300 | 1.0 | 1.0 |"
    assert lines[5] == "| 2 | public package | processes | 2.0 | 300 |  | 2,400 | 3.0 | 3.0 |"
    assert lines[6].endswith("| 2.0 | 2.0 |")
    assert lines[7] == "| 64 | odb-factory | counted |  | 300 |  | 310 |  |  |"
    drawn = view.plot(rows).axes[1].lines
    assert list(drawn[0].get_xdata()) == [2, 4, 64]
    assert list(drawn[1].get_xdata()) == [2, 4]
    assert "64" in view.tables([row("odb", 64, 310)]), "without a real world"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_quick(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks", "exchange", "--quick", "--json", str(file)]
    subprocess.run([*command, "--real", "2", "--rounds", "5"], check=True, timeout=230)
    rows = read_rows([file])
    found = {(row.method, row.ranks): row for row in rows}
    assert {ranks for _, ranks in found} == {2, 64}
    assert found["odb", 2].figures["round_s"] > 0  # type: ignore[operator]
    if public.installed():
        figures = found["public", 2].figures
        assert figures["received_bytes_per_round"] == pytest.approx(2 * figures["sent_bytes_per_round"])  # type: ignore[operator]
        assert 8 * public.FIRST <= figures["sent_bytes_per_round"] <= 8 * (public.FIRST + public.SECOND)  # type: ignore[operator]
        assert found["public", 64].figures["sent_bytes_per_round"] == 8 * (2 + 3 * CONFIG.depth)
    view.tables(rows)
    view.plot(rows)
