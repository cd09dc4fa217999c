"""The benchmark `plan`: figures of runs and plans, and how they read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.plan.figures import FIELDS, Figures, audited, counted
from benchmarks.plan.view import tables
from benchmarks.rows import Row, read_rows


def line(indices: list[int], lengths: list[int], padded: int, work: int) -> str:
    return json.dumps({"indices": indices, "lengths": lengths, "padded_tokens": padded, "work": work}) + "\n"


def test_figures_of_an_audit(tmp_path: Path) -> None:
    (tmp_path / "odb_audit.rank0.jsonl").write_text(line([0, 1], [10, 8], 20, 40) + line([4], [6], 8, 14))
    (tmp_path / "odb_audit.rank1.jsonl").write_text(line([2], [16], 16, 41) + line([], [], 4, 5))
    (tmp_path / "odb_summary.json").write_text(json.dumps({"attention_length": 10}))
    figures = audited(tmp_path, 2)
    assert figures == Figures(
        steps=2,
        samples_per_step=2.0,
        padding=1 - 40 / 48,
        padded_tokens=48,
        ideal_share=(40 + 45) / (2 * (41 + 14)),
    )
    (tmp_path / "odb_audit.rank1.jsonl").write_text(line([2], [16], 16, 41))
    with pytest.raises(ValueError, match="shorter"):
        audited(tmp_path, 2)


def test_figures_of_the_trainers_counts(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps({"num_input_tokens_seen": 200, "global_step": 5}))
    assert counted(tmp_path, samples=40, tokens=150) == Figures(5, 8.0, 0.25, 200, None)


def row(what: str, settings: dict[str, Any], figures: dict[str, Any]) -> Row:
    return Row(
        benchmark="plan",
        what=what,
        data="demo",
        method="standard",
        ranks=2,
        settings={"rows": 480, **settings},
        figures=figures,
    )


def test_tables() -> None:
    real = {"steps": 30, "samples_per_step": 16.0, "padding": 0.25, "padded_tokens": 168832, "ideal_share": None}
    figures = real | {f"planned_{name}": value for name, value in real.items()} | {"planned_ideal_share": 0.5}
    errors = {f"{name}_{which}_error": 0.02 for name in FIELDS for which in ("mean", "largest")}
    epoch, part = row("epoch", {}, figures), row("part", {"rows_read": 120, "draws": 10}, errors)
    ran = "| demo | 2 | Standard | 30 / 30 | 16.000 / 16.000 | 25.0000% / 25.0000% | 168,832 / 168,832 | - / 0.5000 |"
    assert ran in tables([epoch])
    off = "| demo | 2 | Standard | 120 of 480 | 2.0, at most 2.0 % | 2.0, at most 2.0 % | 2.0, at most 2.0 points |"
    assert off in tables([part])
    assert tables([epoch, part]) == f"{tables([epoch])}\n\n{tables([part])}"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert main(["plan", "--quick", "--json", str(file), "--work-dir", str(tmp_path / "work")]) == 0
    rows = read_rows([file])
    assert [(one.what, one.method) for one in rows] == [("epoch", "odb"), ("part", "standard"), ("part", "odb")]
    for name in (*FIELDS, "padded_tokens"):
        assert rows[0].figures[name] == rows[0].figures[f"planned_{name}"], "the plan is that of the run itself"
    assert "| demo | 1 | ODB |" in tables(rows)
