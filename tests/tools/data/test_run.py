"""The whole command on local copies: every row is either written or named, and images are what they are said to be."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odb_factory.cli import main
from odb_factory.tools.data import run as run_module
from odb_factory.tools.data.output import locked
from tests.tools.data.raw import (
    INSIDE_ZIP,
    lines_of,
    llava_row,
    sharegpt4o_row,
    ultrachat_row,
    write_llava,
    write_sharegpt4o,
    write_ultrachat,
)

Command = Callable[..., str]

NAME = "ultrachat_200k"


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`odb-factory data ...` in a folder of its own, with small chunks; returns what it printed, or the one error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_module, "CHUNK", 4)

    def run(*arguments: Any, status: int = 0) -> str:
        assert main(["data", *map(str, arguments)]) == status
        printed = capsys.readouterr()
        if status:
            (error,) = [line for line in printed.err.splitlines() if line.startswith("odb-factory: ")]
            assert "Traceback" not in printed.err
            assert printed.out == ""
            return error
        return printed.out

    return run


def report_of(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(Path("data", f"{name}_report.json").read_text())
    return report


def check_account(name: str, rows: int) -> list[dict[str, Any]]:
    """Rows read = written + dropped, in the report and in the files; returns the dropped ones."""
    report, data = report_of(name), Path("data")
    dropped = lines_of(data / f"{name}_dropped.jsonl") if report["dropped"] else []
    assert report["rows"] == rows == report["written"] + sum(report["dropped"].values())
    assert len(lines_of(data / f"{name}.jsonl")) == report["written"]
    assert len(dropped) == sum(report["dropped"].values())
    assert {one["reason"] for one in dropped} == set(report["dropped"])
    assert not list(data.glob("*.part"))
    assert not list(data.glob("*_state.json"))
    return dropped


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_ultrachat(command: Command) -> None:
    rows = [ultrachat_row(n, turns=1 + n % 3) for n in range(23)]
    rows[3]["messages"][0]["role"] = "tool"
    rows[9]["messages"][1]["content"] = ""
    rows[14]["messages"].pop()
    rows[21]["messages"][0]["content"] = "What does <image> mean?"
    out = command("ultrachat", "--source", write_ultrachat(Path("raw"), rows))
    dropped = check_account("ultrachat_200k", 23)
    assert [one["row"] for one in dropped] == [3, 9, 14, 21]
    assert [one["id"] for one in dropped] == ["id-00003", "id-00009", "id-00014", "id-00021"]
    kept = [row for n, row in enumerate(rows) if n not in (3, 9, 14, 21)]
    written = lines_of(Path("data/ultrachat_200k.jsonl"))
    assert [[turn["value"] for turn in one["conversations"]] for one in written] == [
        [turn["content"] for turn in row["messages"]] for row in kept
    ]
    assert all(set(one) == {"conversations"} for one in written)
    assert "23 rows read, 19 written, 4 dropped" in out
    assert "1  empty turn" in out
    assert out.splitlines()[-1].endswith("llamafactory-cli train yaml_recipes/ultrachat/qwen3vl_2b_full.yaml")
    info = json.loads(Path("data/dataset_info.json").read_text())
    assert info == {
        "ultrachat_200k": {
            "file_name": "ultrachat_200k.jsonl",
            "formatting": "sharegpt",
            "columns": {"messages": "conversations"},
        }
    }


def test_llava(command: Command) -> None:
    rows: list[Any] = [llava_row(n) for n in range(30)]
    images = {row["image"] for row in rows}
    del rows[5]["conversations"]
    rows[10]["conversations"][0]["value"] += " <image>"
    rows[20] = "not a row"
    source = write_llava(Path("raw"), rows, images)
    (source / "train2017/000000000002.jpg").unlink()  # rows 6, 7, 8
    whole = (source / "train2017/000000000004.jpg").read_bytes()
    (source / "train2017/000000000004.jpg").write_bytes(whole[: len(whole) // 2])  # rows 12, 13, 14
    (source / "train2017/000000000009.jpg").write_bytes(b"<html>gone</html>")  # rows 27, 28, 29

    out = command("llava", "--source", source)
    dropped = check_account("llava_150k", 30)
    reasons = {one["row"]: one["reason"] for one in dropped}
    assert reasons == {
        5: "no conversations",
        10: "more than one <image> for one image",
        20: "not an object",
        **dict.fromkeys((6, 7, 8), "image not found"),
        **dict.fromkeys((12, 13, 14, 27, 28, 29), "image that cannot be decoded"),
    }
    assert "images:   7 files for 18 placeholders, all readable" in out
    for one in lines_of(Path("data/llava_150k.jsonl")):
        (image,) = one["images"]  # a local folder is not copied: it stays where it is
        assert Path(image).parent == (source / "train2017").absolute()
        assert Path(image).is_file()

    # what lacked is there now: the same command takes it up
    (source / "train2017/000000000004.jpg").write_bytes(whole)
    command("llava", "--source", source)
    assert {one["row"] for one in check_account("llava_150k", 30)} == {5, 10, 20, 6, 7, 8, 27, 28, 29}


def test_sharegpt4o(command: Command) -> None:
    rows = [sharegpt4o_row(n) for n in range(12)]
    lines = [json.dumps(row) for row in rows]
    lines[4] = lines[4][:30]
    source = write_sharegpt4o(Path("raw"), lines, [row["image"] for row in rows if row["image"] != "7.jpg"])
    damage(source / "images.zip", "9.jpg")
    command("sharegpt4o", "--source", source)
    dropped = check_account("sharegpt4o_57k", 12)
    assert {one["row"]: one["reason"] for one in dropped} == {
        4: "line that is not valid JSON",
        7: "image not found",
        9: "image that is damaged in the archive",
    }
    assert dropped[0]["text"] == lines[4]
    written = lines_of(Path("data/sharegpt4o_57k.jsonl"))
    assert [one["images"] for one in written[:2]] == [["sharegpt4o_57k_images/0.jpg"], ["sharegpt4o_57k_images/1.jpg"]]
    assert all(one["conversations"][0]["value"].count("<image>") == 1 for one in written)
    assert len(list(Path("data/sharegpt4o_57k_images").iterdir())) == 9
    assert report_of("sharegpt4o_57k")["images"] == 9


def damage(archive: Path, name: str) -> None:
    """Change bytes of a member, which its check sum notices."""
    with zipfile.ZipFile(archive) as file:
        member = file.getinfo(f"{INSIDE_ZIP}/{name}")
    content = bytearray(archive.read_bytes())
    start = member.header_offset + 30 + len(member.filename) + 200
    content[start : start + 8] = bytes(255 - byte for byte in content[start : start + 8])
    archive.write_bytes(content)


def test_an_unpacked_archive_will_do(command: Command) -> None:
    rows = [sharegpt4o_row(n) for n in range(5)]
    source = write_sharegpt4o(Path("raw"), [json.dumps(row) for row in rows], [row["image"] for row in rows])
    with zipfile.ZipFile(source / "images.zip") as archive:
        archive.extractall(source)
    (source / "images.zip").unlink()
    command("sharegpt4o", "--source", source / "image_conversations/gpt-4o.jsonl")
    assert check_account("sharegpt4o_57k", 5) == []
    assert not Path("data/sharegpt4o_57k_dropped.jsonl").exists()


def test_limit_takes_the_first_rows(command: Command) -> None:
    source = write_ultrachat(Path("raw"), [ultrachat_row(n) for n in range(20)])
    command("ultrachat", "--source", source, "--limit", 9)
    check_account("ultrachat_200k", 9)
    first = Path("data/ultrachat_200k.jsonl").read_bytes()
    command("ultrachat", "--source", source)
    check_account("ultrachat_200k", 20)
    assert Path("data/ultrachat_200k.jsonl").read_bytes().startswith(first)


def test_what_is_done_is_not_done_again(command: Command) -> None:
    source = write_ultrachat(Path("raw"), [ultrachat_row(n) for n in range(6)])
    command("ultrachat", "--source", source)
    data = Path("data/ultrachat_200k.jsonl")
    made = data.stat().st_mtime_ns
    assert "6 written, 0 dropped (from an earlier run)" in command("ultrachat", "--source", source)
    assert data.stat().st_mtime_ns == made
    data.write_bytes(data.read_bytes()[:-10])
    assert "earlier" not in command("ultrachat", "--source", source)
    check_account("ultrachat_200k", 6)


def test_other_data_sets_stay(command: Command) -> None:
    Path("data").mkdir()
    ours = {"file_name": "ultrachat_200k.jsonl", "num_samples": 5}
    mine = {"mine": {"hf_hub_url": "me/mine", "split": "train"}, "ultrachat_200k": ours}
    Path("data/dataset_info.json").write_text(json.dumps(mine))
    command("ultrachat", "--source", write_ultrachat(Path("raw"), [ultrachat_row(0)], shards=1))
    info = json.loads(Path("data/dataset_info.json").read_text())
    assert list(info) == ["mine", "ultrachat_200k"]
    assert info["mine"] == mine["mine"]
    assert info["ultrachat_200k"].items() > ours.items()
    assert info["ultrachat_200k"]["columns"] == {"messages": "conversations"}


@pytest.mark.parametrize(
    "entry",
    [{"hf_hub_url": "me/mine"}, {"file_name": "mine.json"}, {"file_name": f"{NAME}.jsonl", "script_url": "x"}, 3],
)
def test_an_entry_of_somebody_else_stays(command: Command, entry: Any) -> None:
    info = Path("data/dataset_info.json")
    info.parent.mkdir()
    info.write_text(json.dumps({NAME: entry}))
    source = write_ultrachat(Path("raw"), [ultrachat_row(0)], shards=1)
    error = command("ultrachat", "--source", source, status=2)
    assert f"dataset_info.json has an entry {NAME} that this command did not make; rename or remove it" in error
    assert json.loads(info.read_text()) == {NAME: entry}
    assert visible(Path("data")) == ["dataset_info.json"]  # it is said before anything is converted


def test_bad_input(command: Command) -> None:
    rows = [llava_row(n) for n in range(6)]
    source = write_llava(Path("raw"), rows, [row["image"] for row in rows])
    assert "--source nowhere is not there; give a folder with" in command("llava", "--source", "nowhere", status=2)
    assert "has no train_sft-*.parquet; give a folder" in command("ultrachat", "--source", source, status=2)
    assert "--limit must be at least 1, got 0" in command("llava", "--limit", 0, status=2)
    other = write_ultrachat(Path("other"), [ultrachat_row(n) for n in range(9)])
    next((other / "data").glob("*-00001-*")).unlink()
    assert "has 2 of 3 files train_sft-*.parquet" in command("ultrachat", "--source", other, status=2)

    for image in (source / "train2017").iterdir():
        image.unlink()
    error = command("llava", "--source", source, status=2)
    assert "none of the first 4 images is there; give a folder with llava_instruct_150k.json and COCO's" in error
    (source / "llava_instruct_150k.json").write_text(json.dumps([{"id": 1}] * 3))
    error = command("llava", "--source", source, status=2)
    assert "none of the 3 rows can be used (3 x no conversations)" in error
    (source / "train2017").rmdir()
    (source / "train2017.zip").write_bytes(b"PK\3\4 cut off")
    assert "train2017.zip is not a whole zip file" in command("llava", "--source", source, status=2)
    assert visible(Path("data")) == []

    Path("data/dataset_info.json").write_text("{")
    error = command("ultrachat", "--source", next((other / "data").iterdir()), status=2)
    assert "dataset_info.json is not valid JSON" in error
    with locked(Path("data/.ultrachat_200k.lock")):
        assert "another process prepares ultrachat_200k" in command("ultrachat", status=2)
