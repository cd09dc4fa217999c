"""`odb-factory plan` as a user calls it: what it prints, and what bad input gets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from odb_factory.tools.plan.command import WOULD_FAIL
from tests.llamafactory.conftest import SAMPLES
from tests.tools.plan.helpers import Write, data_set, failure, plan, plan_json, refusal

PREDICTION = {
    "method",
    "batch_size",
    "token_budget",
    "depth",
    "padding",
    "samples_per_step",
    "steps_per_epoch",
    "updates_per_epoch",
    "ideal_time_share",
    "samples",
    "tokens",
    "padded_tokens",
    "slowest_rank_work",
    "fillers",
    "short_windows",
    "dropped_overlong",
    "exact",
}


def test_json_holds_all_figures(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    made = plan_json(capsys, write(), "--world-size", "2", "--samples", "all")
    assert made["world_size"] == 2
    assert made["token_budget"] == 1280
    assert made["samples"]["rows"] == made["samples"]["usable"] == SAMPLES
    assert sum(made["lengths"]["histogram"]["counts"]) == SAMPLES
    assert 0 < made["lengths"]["share_with_media"] < 1
    assert made["lengths"]["share_above_cutoff"] == made["lengths"]["share_above_budget"] == 0
    assert 0 < made["lengths"]["loss_token_share"] < 1
    predictions = made["predictions"]
    assert predictions["packing"] is None  # images
    for prediction in (predictions["standard"], predictions["sorted"], predictions["odb"]):
        assert set(prediction) == PREDICTION
    assert [p["token_budget"] for p in predictions["odb_by_budget"]] == [640, 1280, 2560, 5120]
    assert [p["depth"] for p in predictions["odb_by_depth"]] == [16, 64, 256, 1024]
    assert predictions["odb"] in predictions["odb_by_budget"]
    assert predictions["odb"] in predictions["odb_by_depth"]
    assert predictions["odb"]["exact"] is predictions["standard"]["exact"] is True
    assert predictions["standard"]["steps_per_epoch"] == SAMPLES / 4
    assert made["memory"]["window_bytes_per_host"] == pytest.approx(
        2 * 16 * made["memory"]["bytes_per_sample"], rel=0.01
    )
    assert made["verdict"] == "worth it"
    assert made["gain_over_standard"] > 1.15
    assert made["warnings"] == []


def test_a_sample_plans_the_whole_epoch(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    path = write()
    part, again = (plan_json(capsys, path, "--samples", "20", "--seed", "3") for _ in range(2))
    free = [made["memory"].pop("odb_window_bytes") for made in (part, again)]  # by default, of the memory there is now
    assert min(free) > 0
    assert part == again
    assert part["samples"]["measured"] == 20
    assert part["predictions"]["odb"]["samples"] == part["predictions"]["standard"]["samples"] == SAMPLES
    assert part["predictions"]["odb"]["exact"] is False
    other = plan_json(capsys, path, "--samples", "20", "--seed", "4")
    assert other["lengths"] != part["lengths"]


def test_worker_processes_read_the_same(
    capsys: pytest.CaptureFixture[str], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(odb_window_bytes=10**9)
    alone = plan_json(capsys, path)
    monkeypatch.setattr("odb_factory.tools.plan.pipeline.WORKER_SECONDS", 0.0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert plan_json(capsys, path) == alone


def test_overrides_and_the_number_of_ranks(
    capsys: pytest.CaptureFixture[str], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    monkeypatch.setenv("NNODES", "2")
    made = plan_json(capsys, write(), "odb_token_budget=2048", "bf16=true", "gradient_accumulation_steps=3")
    assert made["world_size"] == 4
    assert made["memory"]["ranks_per_host"] == 2
    assert made["token_budget"] == 2048
    odb = made["predictions"]["odb"]
    assert odb["steps_per_epoch"] == 3 * odb["updates_per_epoch"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"odb_token_budget": None}, "the worst case"),
        ({"odb_token_budget": "auto"}, "auto finds it before the training"),
    ],
    ids=["default", "auto"],
)
def test_without_a_budget_the_worst_case_of_the_fixed_batches_stands_for_it(
    capsys: pytest.CaptureFixture[str], write: Write, fields: dict[str, Any], name: str
) -> None:
    made = plan_json(capsys, write(**fields))
    assert made["token_budget"] == 2 * 1024
    assert name in made["token_budget_is"]
    assert any("is auto: the run finds its budget" in w for w in made["warnings"]) is (name != "the worst case")


def test_text_only_data_can_be_packed(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    made = plan_json(capsys, write(dataset="odb_demo_text"))
    assert made["predictions"]["packing"]["samples"] == made["samples"]["usable"]


def test_the_text_is_compact_and_complete(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    text = plan(capsys, write(odb_depth=1000), "--world-size", "2")
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) < 50
    text = " ".join(text.split())
    for part in (
        "CV",
        "short",
        "truncated",
        "above the budget",
        "Loss tokens",
        "Standard, batch 2",
        "Sorted",
        "ODB, budget",
    ):
        assert part in text
    for part in ("Memory:", "Budget:", "Depth:", "Result: ODB is worth it", "a model, not a measurement"):
        assert part in text


def test_even_lengths_are_not_worth_it(capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path) -> None:
    rows = [{"instruction": f"Say {i % 7} and no more", "input": "", "output": "Fine, that is it."} for i in range(200)]
    path = write(**data_set(tmp_path, rows), template="qwen3_nothink", odb_token_budget=None)
    made = plan_json(capsys, path)
    assert made["verdict"] == "not worth it"
    assert made["lengths"]["cv"] < 0.1
    assert "differ too little" in made["verdict_reason"]


def test_the_figure_is_drawn(capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path) -> None:
    for name, fields in (("images.png", {}), ("text.png", {"dataset": "odb_demo_text", "odb_token_budget": None})):
        plan(capsys, write(**fields), "--plot", tmp_path / name)
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 600
            colors = picture.convert("RGB").getcolors(1 << 24)
        assert colors is not None
        assert len(colors) > 50
        assert max(count for count, _ in colors) < 0.95 * picture.size[0] * picture.size[1]  # not an empty page


ROWS = [
    {"instruction": "See <image>" if i in (2, 5) else f"Count to {i}", "input": "", "output": "one two " * (1 + i % 5)}
    for i in range(30)
]
"""Two of them speak of an image that there is none of; so each of them ends a run."""


class TestBadSamples:
    def test_they_are_counted_and_named(self, capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path) -> None:
        path = write(**data_set(tmp_path, ROWS))
        made = plan_json(capsys, path, "odb_on_bad_sample=skip", "odb_max_bad_samples=2")
        assert made["samples"]["usable"] == 28
        assert [d["index"] for d in made["samples"]["dropped_samples"]] == [2, 5]
        warning = made["warnings"][0]
        assert warning.startswith("2 of 30 samples are bad, the first of them sample 2 (")
        assert warning.endswith("; a run skips and names them.")

    def test_invalid_conversations_are_dropped_as_in_a_run(
        self, capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path
    ) -> None:
        turns = [{"from": "human", "value": "Is anybody there?"}, {"from": "gpt", "value": "Yes."}]
        rows = [{"conversations": turns[:1] if i in (1, 4, 7) else turns} for i in range(9)]
        columns = {"messages": "conversations"}
        made = plan_json(capsys, write(**data_set(tmp_path, rows, formatting="sharegpt", columns=columns)))
        assert made["samples"]["dropped"] == {"invalid conversation": 3}
        assert made["samples"]["bad"] == 0
        assert made["predictions"]["odb"]["samples"] == made["predictions"]["standard"]["samples"] == 6
        assert "3 of 9 rows are invalid conversations" in made["warnings"][0]

    def test_none_is_usable(self, capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path) -> None:
        rows = [{**row, "instruction": "See <image>"} for row in ROWS]
        line = failure(capsys, write(**data_set(tmp_path, rows)))
        assert "none of the 30 rows that were read is usable (the first: " in line
        assert "fix the data" in line


class TestOverlong:
    def test_an_error_names_the_budget_that_is_needed(self, capsys: pytest.CaptureFixture[str], write: Write) -> None:
        made = plan_json(capsys, write(odb_token_budget=64, odb_overlong="error"), status=WOULD_FAIL)
        (line,) = made["run_would_fail_at"]
        assert "samples are longer than the token budget 64" in line
        assert "raise odb_token_budget to at least" in line
        needed = int(line.split("to at least ")[1].split(",")[0])
        plan(capsys, write(odb_token_budget=needed, odb_overlong="error"))

    def test_otherwise_it_is_a_warning(self, capsys: pytest.CaptureFixture[str], write: Write) -> None:
        for policy, fate in (("keep", "trained on alone"), ("drop", "dropped")):
            path = write(odb_token_budget=200, odb_overlong=policy)
            made = plan_json(capsys, path)
            (warning,) = made["warnings"]
            assert fate in warning
            count = round(made["lengths"]["share_above_budget"] * SAMPLES)
            assert warning.startswith(f"{count} of the {SAMPLES} samples that were read (")
            needed = int(warning.split("raise odb_token_budget to ")[1].split(",")[0])
            assert plan_json(capsys, path, f"odb_token_budget={needed}")["warnings"] == []
            assert len(plan_json(capsys, path, f"odb_token_budget={needed - 8}")["warnings"]) == 1
            assert made["recommended"]["token_budget"] >= made["lengths"]["max"]
            assert (made["predictions"]["odb"]["samples"] < SAMPLES) is (policy == "drop")

    def test_the_warning_stands_below_the_table(self, capsys: pytest.CaptureFixture[str], write: Write) -> None:
        text = " ".join(plan(capsys, write(odb_token_budget=200, cutoff_len=4096)).split())
        assert "are longer than the token budget 200: each is trained on alone" in text.split("Result: ")[1]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "missing model",
        {"model_name_or_path": "/nowhere/model"},
        "no model directory /nowhere/model .*; correct the path",
    ),
    ("demo not made", {"model_name_or_path": "odb_demo/none"}, "no model directory odb_demo/none .*odb-factory demo"),
    (
        "no hub",
        {"model_name_or_path": "nobody/no-such-model"},
        "no tokenizer in nobody/no-such-model: .*; correct model",
    ),
    ("no directory", {"model_name_or_path": "a/b/c"}, "no model directory a/b/c .*; correct the path"),
    ("missing data", {"dataset_dir": "/nowhere/data"}, "no directory /nowhere/data .*; correct the path"),
    ("unknown dataset", {"dataset": "odb_dmo"}, r"dataset odb_dmo is not in .* \(did you mean odb_demo\?\); correct"),
    (
        "unlike any dataset",
        {"dataset": "xyz"},
        r"dataset xyz is not in .* \(it describes odb_demo, odb_demo_eval, .*\)",
    ),
    ("no odb", {"odb": False}, "has no `odb: true`, .* add it to the recipe, or run: odb-factory plan .* odb=true"),
    ("stage", {"stage": "dpo"}, "stage dpo is not supported by odb; plan a recipe of stage sft"),
    ("misspelt", {"odb_depht": 4}, r"no field odb_depht \(did you mean odb_depth\?\); correct or remove it"),
    ("wrong type", {"cutoff_len": "long"}, "cutoff_len must be a positive integer, got 'long'; correct it"),
    ("bad value", {"odb_alignment": "best"}, "odb_alignment must be one of carry, max, got 'best'; fix the recipe"),
    ("zero budget", {"odb_token_budget": 0}, "odb_token_budget must be a positive integer, got 0; fix the recipe"),
    ("contradiction", {"packing": True}, "odb: true contradicts this recipe: packing .* remove them from the recipe"),
    ("no template", {"template": "qwen33"}, "template qwen33: .*; correct template"),
    ("no such type", {"finetuning_type": "lorra"}, "Invalid fine-tuning method.*; fix the recipe"),
    ("no dataset", {"dataset": None}, "Please specify dataset for training; fix the recipe"),
]


@pytest.mark.parametrize(("fields", "sentence"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_bad_recipes_get_a_sentence(
    capsys: pytest.CaptureFixture[str], write: Write, fields: dict[str, Any], sentence: str
) -> None:
    line = refusal(capsys, write(**fields))
    assert re.search(sentence, line), line
    assert line.endswith("odb=true" if "odb-factory plan" in line else ".")


class TestFiles:
    def test_there_is_no_recipe(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert "there is no recipe" in refusal(capsys, tmp_path / "none.yaml")
        assert "does not end in .yaml or .yml" in refusal(capsys, tmp_path)

    @pytest.mark.parametrize(
        ("content", "what"),
        [
            (b"a: [1, 2\nb: 3\n", "cannot be read as YAML (line 2, column 2"),
            (b"\xff\xfe\x00\x01", "cannot be read as YAML"),
            (b"- a\n- b\n", "is not a recipe"),
            (b"", "has no `odb: true`"),
        ],
        ids=["yaml", "encoding", "list", "empty"],
    )
    def test_it_is_unreadable(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, what: str
    ) -> None:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(content)
        assert what in refusal(capsys, path)

    def test_an_override_is_none(self, capsys: pytest.CaptureFixture[str], write: Write) -> None:
        assert "'odb_depth' is not an override; write key=value" in refusal(capsys, write(), "odb_depth")

    def test_the_figure_cannot_be_written(self, capsys: pytest.CaptureFixture[str], write: Write) -> None:
        assert "ends in .png" in refusal(capsys, write(), "--plot", "figure.pdf")
        assert "no directory" in refusal(capsys, write(), "--plot", "/nowhere/figure.png")

    def test_the_description_of_the_data_is_broken(
        self, capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path
    ) -> None:
        fields = data_set(tmp_path, [])
        assert "rows.json of dataset rows cannot be used: it holds no rows; fix" in refusal(capsys, write(**fields))
        (tmp_path / "rows.json").unlink()
        assert "rows.json of dataset rows does not exist; put it there" in refusal(capsys, write(**fields))
        (tmp_path / "dataset_info.json").write_text("{", encoding="utf-8")
        assert "dataset_info.json cannot be read" in refusal(capsys, write(**fields))
        (tmp_path / "dataset_info.json").unlink()
        assert "dataset_info.json, which must describe the datasets" in refusal(capsys, write(**fields))

    def test_the_columns_are_wrong(self, capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path) -> None:
        line = refusal(capsys, write(**data_set(tmp_path, [{"question": "a", "answer": "b"}])))
        assert "rows.json have no column instruction (they have question, answer); correct columns" in line


@pytest.mark.slow
def test_a_process_of_its_own_prints_nothing_else(write: Write) -> None:
    """Not even what the libraries print while they are imported; and it needs no rank of anything."""
    environment = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-m", "odb_factory.cli", "plan", str(write()), "--json", "--samples", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 4
    assert "Traceback" not in done.stderr


def test_the_command_imports_nothing_heavy() -> None:
    heavy = ("torch", "llamafactory", "transformers", "matplotlib", "datasets")
    code = f"import sys; import odb_factory.tools.plan.command; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
