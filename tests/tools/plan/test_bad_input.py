"""Recipes, data files and command lines that are wrong: one sentence that names the place and the remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from odb_factory.cli import main
from odb_factory.tools.plan.sources import fault_of
from tests.tools.plan.helpers import Write, data_set, plan_json, refusal


@pytest.mark.parametrize("name", ["USE_V1", "USE_MCA"])
def test_another_trainer_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], write: Write, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    line = refusal(capsys, write())
    assert f"{name}=1 starts " in line
    assert line.endswith(f"unset {name}.")
    monkeypatch.setenv(name, "0")
    plan_json(capsys, write(), "--samples", "4")


class TestCommandLine:
    def test_overrides_may_stand_behind_options(self, capsys: pytest.CaptureFixture[str], write: Write) -> None:
        path = write()
        made = plan_json(capsys, path, "odb_token_budget=640", "--world-size", "2", "odb_depth=8", "seed=9")
        assert (made["token_budget"], made["depth"], made["seed"], made["world_size"]) == (640, 8, 9, 2)
        made = plan_json(capsys, "--world-size", "3", path, "odb_depth=8")
        assert (made["depth"], made["world_size"]) == (8, 3)

    def test_what_is_none_is_told(self, capsys: pytest.CaptureFixture[str], write: Write) -> None:
        line = refusal(capsys, write(), "--samples", "4", "odb_depth")
        assert "'odb_depth' is not an override; write key=value" in line

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["plan", "r.yaml", "--nope"], "unrecognized arguments: --nope"),
            (["demo", "a=1"], "unrecognized arguments: a=1"),
            (["plan", "r.yaml", "--seed", "9" * 20], "is not an integer from 0 to 4294967295"),
        ],
    )
    def test_unknown_options(self, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
        with pytest.raises(SystemExit) as raised:
            main(arguments)
        assert raised.value.code == 2
        assert told in capsys.readouterr().err


FIELDS: list[tuple[str, Any, str]] = [
    ("val_size", 1.0, r"val_size must be a share below 1 or a number of rows, got 1\.0; correct it"),
    ("val_size", 0.999, r"val_size 0\.999 leaves nothing to train on.*; lower it"),
    ("val_size", 5000, "val_size 5000 leaves nothing to train on, or asks for more rows than there are.*; lower it"),
    ("preprocessing_num_workers", 0, "preprocessing_num_workers must be an integer of at least 1, got 0; correct it"),
    ("preprocessing_batch_size", 0, "preprocessing_batch_size must be an integer of at least 1, got 0; correct it"),
    ("max_samples", -3, "max_samples must be an integer of at least 1, got -3; correct it"),
    ("max_samples", 0, "max_samples must be an integer of at least 1, got 0; correct it"),
    ("ignore_pad_token_for_loss", False, "ignore_pad_token_for_loss: false makes padding a target, .*; remove it"),
    ("label_smoothing_factor", 0.1, "label_smoothing_factor: .* models with images, .*; remove label_smoothing_factor"),
    ("seed", 10**20, "seed must be an integer from 0 to 4294967295, got 1000.*; correct it"),
]


@pytest.mark.parametrize(("field", "value", "sentence"), FIELDS)
def test_a_field_of_the_recipe_is_named(
    capsys: pytest.CaptureFixture[str], write: Write, field: str, value: Any, sentence: str
) -> None:
    line = refusal(capsys, write(**{field: value}))
    assert re.search(sentence, line), line
    assert "fix the data" not in line


ENTRIES: list[tuple[Any, str]] = [
    ({"file_name": 3}, "the entry of dataset rows has the file_name 3, which must be a string; correct it"),
    ("rows.json", "the entry of dataset rows must be a mapping such as .*, got 'rows.json'; correct it"),
    ({}, "the entry of dataset rows does not say where the data is; add file_name"),
    (
        {"file_name": "rows.json", "columns": "foo"},
        "has the columns 'foo', which must map names to strings",
    ),
    (
        {"file_name": "rows.json", "tags": {"role_tag": 3}},
        "has the tags .*, which must map names to strings",
    ),
    ({"file_name": "."}, "."),
]


@pytest.mark.parametrize(("entry", "sentence"), ENTRIES)
def test_an_entry_is_broken(
    capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path, entry: Any, sentence: str
) -> None:
    fields = data_set(tmp_path, [])
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": entry}), encoding="utf-8")
    line = refusal(capsys, write(**fields))
    assert re.search(sentence, line), line


FILES: list[tuple[bytes, str]] = [
    (b"", "it is empty"),
    (b"[]", "it holds no rows"),
    (b'[{"a": 1},\n {"b"}]', "it is not valid JSON at line 2, column 6"),
    (b'{"a": 1}\n{"a": \n', "it is not valid JSON at line 2, column "),
    (b"\xff\xfe[", "it is not UTF-8 (byte 0)"),
    (b"[" * 200_000, "its JSON is nested too deep"),
    (b'[{"a": 1}, "b"]', "row 2 is not a mapping of columns to values"),
    (b"3", "it holds no list of rows"),
]


class TestDataFiles:
    @pytest.mark.parametrize(("content", "fault"), FILES, ids=[fault for _, fault in FILES])
    def test_the_fault_is_found(self, tmp_path: Path, content: bytes, fault: str) -> None:
        file = tmp_path / "rows.json"
        file.write_bytes(content)
        assert (fault_of(file) or "").startswith(fault)

    def test_there_is_none(self, tmp_path: Path) -> None:
        for name, text in (("a.json", '[{"a": 1}]'), ("b.json", '{"a": 1}\n\n{"a": 2}\n'), ("c.txt", "any")):
            (tmp_path / name).write_text(text, encoding="utf-8")
            assert fault_of(tmp_path / name) is None

    @pytest.mark.parametrize("content", [b"", b'[{"instruction": "a"},', b'{"instruction": "a"}\n{'])
    def test_the_command_names_file_and_place(
        self, capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path, content: bytes
    ) -> None:
        fields = data_set(tmp_path, [])
        (tmp_path / "rows.json").write_bytes(content)
        line = refusal(capsys, write(**fields))
        assert f"{tmp_path / 'rows.json'} of dataset rows cannot be used: it is " in line
        assert line.endswith("; fix the file.")

    def test_a_parquet_file_is_none(self, capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path) -> None:
        fields = data_set(tmp_path, [], file_name="rows.parquet")
        (tmp_path / "rows.parquet").write_bytes(b"no parquet at all")
        assert "rows.parquet of dataset rows cannot be used: Parquet" in refusal(capsys, write(**fields))

    def test_a_column_is_missing(self, capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path) -> None:
        rows = [{"talk": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
        info = {"formatting": "sharegpt", "columns": {"messages": "messages"}}
        line = refusal(capsys, write(**data_set(tmp_path, rows, **info)))
        assert "rows.json have no column messages (they have talk); correct columns or formatting" in line
        info["columns"]["messages"] = "talk"  # type: ignore[index]
        line = refusal(capsys, write(**data_set(tmp_path, rows, **info, tags={"role_tag": "role"})))
        assert "a message in " in line
        assert "has no role; fix the file, or correct tags of dataset rows" in line

    def test_anything_else_names_the_file_too(
        self, capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path
    ) -> None:
        line = refusal(capsys, write(**data_set(tmp_path, [{"instruction": 1}, {"instruction": "a"}])))
        assert f"the dataset rows ({tmp_path / 'rows.json'}) could not be loaded: " in line


@pytest.mark.parametrize("there", [True, False])
def test_data_of_our_own_recipes_is_to_be_fetched(
    capsys: pytest.CaptureFixture[str], write: Write, tmp_path: Path, there: bool
) -> None:
    if there:
        (tmp_path / "data").mkdir()
    line = refusal(capsys, write(dataset_dir=str(tmp_path / "data"), dataset="ultrachat_200k"))
    assert line.endswith(" (get the data with: odb-factory data ultrachat).")
