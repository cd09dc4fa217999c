"""What is advised and judged where budget, bytes, policy or data are not as they should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from odb_factory.tools.plan.advice import candidates
from odb_factory.tools.plan.command import WOULD_FAIL
from odb_factory.tools.plan.text import VERDICTS
from tests.llamafactory.conftest import SAMPLES
from tests.tools.plan.helpers import Write, data_set, failure, plan, plan_json

MIXED = [
    {"instruction": f"Count to {i}", "input": "", "output": "one two " * (40 if i % 6 == 0 else 1 + i % 5)}
    for i in range(240)
]
"""Short and long samples."""


def test_budgets_are_halved_down_to_the_longest_sample() -> None:
    assert candidates(262_144, 872, 8) == [262_144 >> k for k in range(9)]
    assert candidates(1000, 200, 8) == [1000, 496, 248]
    assert candidates(100, 100, 8) == [100]


class TestTooLargeABudget:
    """The default one, with a cutoff far above the lengths."""

    @pytest.mark.parametrize("budget", [None, "auto"])
    def test_a_smaller_one_is_advised_and_judged(
        self, capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path, budget: str | None
    ) -> None:
        fields: dict[str, Any] = {"cutoff_len": 32768, "odb_token_budget": budget, "odb_depth": 256}
        made = plan_json(capsys, write(**data_set(tmp_path, MIXED), template="qwen3_nothink", **fields))
        assert made["token_budget"] == 2 * 32768
        assert made["predictions"]["odb"]["ideal_time_share"] < made["predictions"]["standard"]["ideal_time_share"]
        advised = made["recommended"]
        assert made["lengths"]["max"] <= advised["token_budget"] <= 4096
        assert "65,536 (" in advised["token_budget_reason"]
        assert "is larger than this data fills evenly" in advised["token_budget_reason"]
        assert advised["prediction"]["token_budget"] == advised["token_budget"]
        assert advised["prediction"]["depth"] == advised["depth"] > advised["token_budget"] / made["lengths"]["mean"]
        assert made["verdict"] == "worth it"
        gain = advised["prediction"]["ideal_time_share"] / made["predictions"]["standard"]["ideal_time_share"]
        assert made["gain_over_standard"] == pytest.approx(gain, abs=1e-3)
        assert not any("raise odb_depth" in warning for warning in made["warnings"])


class TestOverlongSamplesAreDropped:
    def test_all_of_them(self, capsys: pytest.CaptureFixture[str], write: Write) -> None:
        line = failure(capsys, write(odb_token_budget=10, odb_overlong="drop"))
        assert f"each of the {SAMPLES} samples is longer than the token budget 10, so that there is nothing" in line
        assert "raise odb_token_budget (the shortest sample takes " in line

    def test_some_are_told_and_not_ranked(self, capsys: pytest.CaptureFixture[str], write: Write) -> None:
        path = write(odb_token_budget=200, odb_overlong="drop")
        made = plan_json(capsys, path)
        own = made["predictions"]["odb"]
        assert own["samples"] + own["dropped_overlong"] == SAMPLES
        assert own["dropped_overlong"] > 0
        assert any(f"ODB trains on {own['samples']} of {SAMPLES}" in warning for warning in made["warnings"])
        assert made["recommended"]["prediction"]["dropped_overlong"] == 0
        text = plan(capsys, path)
        (row,) = [line for line in text.splitlines() if line.endswith("recipe")]
        assert row.split()[-2:] == ["-", "recipe"]
        assert "-: odb_overlong drops samples there" in " ".join(text.split())


def test_bytes_that_bind_are_named_not_the_budget(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    bound = 1_000_000
    made = plan_json(capsys, write(odb_window_bytes=bound, odb_token_budget=1024, odb_depth=32))
    assert made["predictions"]["odb"]["short_windows"] > 0
    advised = made["recommended"]
    assert advised["token_budget"] == 1024
    assert "odb_window_bytes (977 KiB) keeps steps small" in advised["token_budget_reason"]
    assert "raise odb_window_bytes" in advised["depth_reason"]
    assert advised["depth"] == 32
    assert made["memory"]["window_bytes_per_rank"] <= bound


class TestBadSamples:
    @pytest.mark.parametrize(("every", "verdict"), [(3, "cannot tell"), (60, "worth it")])
    def test_they_leave_nothing_exact(
        self, capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path, every: int, verdict: str
    ) -> None:
        rows = [{**row, "instruction": "See <image>"} if i % every == 0 else row for i, row in enumerate(MIXED)]
        path = write(**data_set(tmp_path, rows), odb_token_budget=1024, odb_depth=256)
        made = plan_json(capsys, path, status=WOULD_FAIL)
        bad = made["samples"]["bad"]
        assert bad == len(MIXED) // every
        assert made["predictions"]["standard"]["exact"] is made["predictions"]["odb"]["exact"] is False
        assert made["verdict"] == verdict
        assert (f"{bad} of the 240 rows that were read are bad" in made["verdict_reason"]) is (every == 3)
        assert (f"the {bad} bad samples" in made["verdict_reason"]) is (every == 60)
        text = " ".join(plan(capsys, path, status=WOULD_FAIL).split())
        assert f"The {bad} bad samples are left out of all figures" in text
        assert VERDICTS[verdict] in text
        skipped = plan_json(capsys, path, "odb_on_bad_sample=skip")["predictions"]
        assert skipped["odb"]["exact"] is True  # the run does leave them out
        assert skipped["standard"]["exact"] is False


def test_an_epoch_that_closes_early_is_told(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    made = plan_json(capsys, write(odb_join=False, odb_quota=0.5))
    emitted = made["predictions"]["odb"]["samples"]
    assert emitted < SAMPLES
    (warning,) = made["warnings"]
    assert f"an epoch of ODB emits {emitted} of {SAMPLES} samples" in warning
    assert "do not compare with Standard's" in warning


class TestTooLittleToTell:
    def test_a_tiny_epoch(self, capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path) -> None:
        path = write()
        made = plan_json(capsys, path, "max_samples=3", "--world-size", "8", "--plot", tmp_path / "tiny.png")
        assert made["verdict"] == "cannot tell"
        assert "an epoch of 3 usable samples on 8 ranks is too little to tell" in made["verdict_reason"]
        assert plan_json(capsys, path, "--world-size", "8")["verdict"] == "cannot tell"  # 3 steps of 16 samples
        assert plan_json(capsys, path, "--world-size", "2")["verdict"] == "worth it"

    def test_one_sampled_row(self, capsys: pytest.CaptureFixture[str], write: Write) -> None:
        path = write()
        made = plan_json(capsys, path, "--samples", "1")
        assert made["samples"]["error_of_mean_length"] is None
        assert made["verdict"] == "cannot tell"
        text = " ".join(plan(capsys, path, "--samples", "1").split())
        assert "how good they are cannot be told from one sample" in text
        assert "Result: it cannot be told whether ODB is worth it for this data: the number of usable" in text

    def test_columns_keep_apart(self, capsys: pytest.CaptureFixture[str], write: Write) -> None:
        """A batch size of Standard that makes ODB thousands of times as fast."""
        made = plan(capsys, write(per_device_train_batch_size=64), "max_samples=1", "--world-size", "64")
        rows = [line for line in made.splitlines() if line.startswith("  ODB, budget")]
        assert rows
        for row in rows:
            speed = row.split("depth")[1].split()[5]
            assert float(speed.replace(",", "")) > 50


def test_packing_is_compared_at_the_same_cutoff() -> None:
    """Another cutoff_len would be other data."""
    from tests.recipes.helpers import WAYS

    assert not any(override.startswith("cutoff_len") for override in WAYS["packing, text"])
