"""Runs go on from states that older versions saved, with exactly the samples that are left: see fixtures/README.md."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from odb_factory.tools.demo.model import make_text_model
from tests.resume.runs import DROPPED, EPOCHS, SIZE, Stage, audit, reads, run

pytestmark = pytest.mark.distributed

FIXTURES = Path(__file__).with_name("fixtures")
VALID = set(range(SIZE)) - DROPPED

SAVED = {
    "one_rank": Stage(1, stop="clean", at=4),
    "two_ranks_second_epoch": Stage(2, stop="clean", at=12),
    "warm_up_and_samples_per_update": Stage(
        1, stop="clean", at=3, samples_per_update=9, budget=60, arguments={"warmup_steps": 0.3}
    ),
}
"""How the runs were started that saved the states."""


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("name", "world"), zip(SAVED, (2, 1, 1), strict=True))
def test_a_run_goes_on_from_an_old_state(text_model: Path, tmp_path: Path, name: str, world: int) -> None:
    saved = SAVED[name]
    run(saved, text_model, tmp_path)  # weights and optimizer of a checkpoint after as many updates
    checkpoint = tmp_path / f"checkpoint-{saved.at}"
    shutil.copy(FIXTURES / name / "odb_state.json", checkpoint)
    before: dict[str, Any] = json.loads((FIXTURES / name / "trained.json").read_text())
    old = json.loads((FIXTURES / name / "odb_state.json").read_text())

    more = {"samples_per_update": saved.samples_per_update, "arguments": saved.arguments}
    results = run(Stage(world, resume=saved.at, depth=11, **more), text_model, tmp_path)

    rest: dict[int, Counter[int]] = {}
    for line in audit(tmp_path):
        if line["update"] > saved.at:
            rest.setdefault(line["epoch"], Counter()).update(line["indices"])
    done = set(before["trained"]) | set(before["dropped"])
    expected = {before["epoch"]: Counter(VALID - done)}
    expected |= {epoch: Counter(VALID) for epoch in range(before["epoch"] + 1, EPOCHS)}
    assert rest == expected
    left = EPOCHS * SIZE - before["epoch"] * SIZE - len(done)
    assert len(reads(tmp_path)) <= left + world, (
        "but for a filler of a rank without samples, nothing that is done is read"
    )
    summary = results[0]["summary"]
    assert (summary["samples"], summary["unique"], summary["repeated"]) == (EPOCHS * len(VALID), len(VALID), 0)
    assert (summary["epochs"], summary["left"], summary["dropped"]) == (EPOCHS, 0, {"unwanted": 2 * EPOCHS})
    assert {sample["index"] for sample in summary["dropped_samples"]} == DROPPED
    assert summary["steps"] - old["audit"]["totals"]["steps"] == len(
        {(line["epoch"], line["step"]) for line in audit(tmp_path) if line["update"] > saved.at}
    )
    assert results[0]["rates"][-1] == pytest.approx(0.0, abs=1e-9)
    assert results[0]["seen"]["epoch"] == EPOCHS
