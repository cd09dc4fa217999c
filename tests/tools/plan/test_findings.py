"""Where a run would fail although a plan can be made: exit status 3, and sentences that say at what."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from odb_factory.runtime.messages import Resumed
from odb_factory.runtime.state import Identity, pack
from odb_factory.tools.plan.command import WOULD_FAIL
from odb_factory.tools.plan.pipeline import open_pipeline
from odb_factory.tools.plan.recipe import load_recipe
from tests.llamafactory.conftest import SAMPLES
from tests.tools.plan.helpers import Write, data_set, plan, plan_json, refusal

ROWS = [
    {"instruction": "See <image>" if i in (2, 5) else f"Count to {i}", "input": "", "output": "one two " * (1 + i % 5)}
    for i in range(30)
]
"""Two of them speak of an image that there is none of."""


def why(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one sentence that a run would fail at; the plan is whole all the same."""
    made = plan_json(capsys, *arguments, "--samples", "all", status=WOULD_FAIL)
    assert made["predictions"]["odb"]["steps_per_epoch"] > 0
    (sentence,) = made["run_would_fail_at"]
    return str(sentence)


BAD = {
    "raise": (
        {},
        r"2 of 30 samples are bad, the first of them sample 2 \(.*\); fix them, or set odb_on_bad_sample: skip\.",
    ),
    "too many": (
        {"odb_on_bad_sample": "skip", "odb_max_bad_samples": 1},
        r"2 of 30 samples are bad, .*\), and odb_max_bad_samples allows 1: fix the data, or raise that number\.",
    ),
}


@pytest.mark.parametrize(("fields", "sentence"), BAD.values(), ids=BAD)
def test_bad_samples(
    capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path, fields: dict[str, Any], sentence: str
) -> None:
    path = write(**data_set(tmp_path, ROWS), **fields)
    found = why(capsys, path)
    assert re.fullmatch(sentence, found), found
    text = " ".join(plan(capsys, path, status=WOULD_FAIL).split())
    assert text.endswith(f"A run would fail: {found}")
    part = plan_json(capsys, path, "--samples", "29", status=WOULD_FAIL)  # at least one of both is among them
    assert ("are expected in an epoch" in part["run_would_fail_at"][0]) is bool(fields)


def test_what_depends_on_the_number_of_ranks(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    path = write(odb_idle="skip")
    plan(capsys, path)
    assert why(capsys, path, "--world-size", "2").startswith("odb_idle: skip is for own training loops")
    assert why(capsys, path, "gradient_accumulation_steps=2").startswith("odb_idle: skip is for own training loops")


def test_fields_that_planning_sets_aside_are_looked_at(
    capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path
) -> None:
    path = write(use_asft_loss=True)
    plan(capsys, path)
    assert "does not support use_asft_loss with DeepSpeed or FSDP" in why(capsys, path, "deepspeed=zero2.json")


CHECKPOINTS: dict[str, tuple[dict[str, Any], str]] = {
    "absent": (
        {"resume_from_checkpoint": "{out}/checkpoint-6"},
        r"there is no checkpoint .* holds checkpoint-5: resume",
    ),
    "output_dir": ({"resume_from_checkpoint": "{out}"}, ".*an output_dir that holds checkpoint-5: resume from"),
    "number": ({"resume_from_checkpoint": 5}, "resume_from_checkpoint must be true or the path"),
    "true, and none": (
        {"resume_from_checkpoint": True, "output_dir": "{out}/none"},
        "resume_from_checkpoint is true, and there is no checkpoint in output_dir",
    ),
    "seed": (
        {"resume_from_checkpoint": "{out}/checkpoint-5", "seed": 7},
        r"\S+-5 \(.*\): .* another seed \(42, here 7\)",
    ),
    "size": ({"resume_from_checkpoint": True, "max_samples": 9}, r".*number of samples \(\d+, here 9\)"),
    "order": ({"resume_from_checkpoint": True, "disable_shuffling": True}, ".*another order"),
    "data": ({"resume_from_checkpoint": True, "dataset": "odb_demo_text"}, ".*another data ?set"),
    "twice": ({"resume_from_checkpoint": True, "ignore_data_skip": True}, "ignore_data_skip would train"),
    "found by LLaMA-Factory": ({"overwrite_output_dir": False, "seed": 7}, r"\S+checkpoint-5 .*another seed"),
}
"""Fields of a recipe, where a run has saved `{out}/checkpoint-5`, and the sentence."""


class TestResume:
    @pytest.fixture
    def saved(self, write: Write, tmp_path: Path) -> Path:
        """A checkpoint of a run of the recipe, in its output_dir."""
        pipeline = open_pipeline(load_recipe(write()))
        nothing = Resumed(done=bytes(SAMPLES), steps=1, emitted=1, bad=0)
        state = {
            "loader": pack(Identity.of(pipeline.dataset, pipeline.config), 0, nothing),
            "progress": {},
            "audit": {},
        }
        folder = tmp_path / "out" / "checkpoint-5"
        folder.mkdir(parents=True)
        (folder / "odb_state.json").write_text(json.dumps(state))
        (folder / "trainer_state.json").write_text("{}")
        return folder

    def test_a_complete_one_is_fine(self, capsys: pytest.CaptureFixture[str], write: Write, saved: Path) -> None:
        for resume in (str(saved), True, False, None):
            plan(capsys, write(resume_from_checkpoint=resume))

    @pytest.mark.parametrize(("fields", "sentence"), CHECKPOINTS.values(), ids=CHECKPOINTS)
    def test_another_one_is_told(
        self, capsys: pytest.CaptureFixture[str], write: Write, saved: Path, fields: dict[str, Any], sentence: str
    ) -> None:
        out = str(saved.parent)
        given = {name: value.format(out=out) if isinstance(value, str) else value for name, value in fields.items()}
        found = why(capsys, write(**{"overwrite_output_dir": True, **given}))
        assert re.match(sentence, found), found

    def test_what_lies_in_output_dir_does_not_matter_where_it_is_overwritten(
        self, capsys: pytest.CaptureFixture[str], write: Write, saved: Path
    ) -> None:
        (saved / "odb_state.json").unlink()
        path = write(overwrite_output_dir=False)
        assert "was saved without odb: true" in why(capsys, path)
        plan(capsys, path, "overwrite_output_dir=true")

    def test_a_model_in_output_dir(self, capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "model.safetensors").write_bytes(b"")
        path = write(overwrite_output_dir=False)
        assert "already holds a model; set overwrite_output_dir: true" in why(capsys, path)
        plan(capsys, path, "overwrite_output_dir=true")


def test_a_recipe_that_cannot_be_used_is_something_else(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    refusal(capsys, write(packing=True))  # status 2


def test_the_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    from odb_factory.cli import main

    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    for status in (0, 2, WOULD_FAIL):
        assert re.search(rf"^  {status}  \w", text, re.MULTILINE)
