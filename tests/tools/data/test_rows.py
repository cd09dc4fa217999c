"""Reading raw files: whatever the kind, every row comes, once, also when the first ones are skipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odb_factory.tools.data import rows as rows_module
from odb_factory.tools.data.rows import Broken, read_rows
from tests.tools.data.raw import ultrachat_row, write_ultrachat


@pytest.mark.parametrize("block", [3, 50, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_list_comes_item_by_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, indent: int | None
) -> None:
    monkeypatch.setattr(rows_module, "BLOCK", block)
    items = [{"n": n, "text": "[]{},\"'é" * n} for n in range(40)] + [12, 345]
    path = tmp_path / "list.json"
    path.write_text(json.dumps(items, indent=indent) + "\n", encoding="utf-8")
    assert list(read_rows(path, [])) == items
    assert list(read_rows(path, [], skip=38)) == items[38:]


def test_an_empty_list(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(" [ ] ")
    assert list(read_rows(path, [])) == []


def test_a_list_that_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([{"n": n} for n in range(10)])[:-12])
    with pytest.raises(ValueError, match=r"list\.json is not valid JSON after row 8; .*download it again"):
        list(read_rows(path, []))


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_lines(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(b'{"n": 0}\n\n{"n": 1\n{"n": "\xff"}\n{"n": 3}')
    first, broken, not_utf8, last = read_rows(path, [])
    assert (first, last) == ({"n": 0}, {"n": 3})
    assert isinstance(broken, Broken)
    assert isinstance(not_utf8, Broken)
    assert broken.text == '{"n": 1'
    assert list(read_rows(path, [], skip=3)) == [{"n": 3}]


@pytest.mark.parametrize("skip", [0, 1, 5, 6, 7, 20])
def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skip: int) -> None:
    monkeypatch.setattr(rows_module, "PARQUET_ROWS", 3)
    rows = [ultrachat_row(n) for n in range(20)]
    (path,) = (write_ultrachat(tmp_path, rows, shards=1) / "data").iterdir()
    read = list(read_rows(path, ["prompt_id", "messages"], skip))
    assert [row["prompt_id"] for row in read] == [row["prompt_id"] for row in rows[skip:]]
    assert all(row["messages"] == rows[skip + n]["messages"] for n, row in enumerate(read))


def test_files_that_are_something_else(tmp_path: Path) -> None:
    (path,) = (write_ultrachat(tmp_path / "raw", [ultrachat_row(0)], shards=1) / "data").iterdir()
    with pytest.raises(ValueError, match=r"has no column conversations \(it has prompt, prompt_id, messages\)"):
        list(read_rows(path, ["conversations"]))
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"broken\.parquet is not a readable Parquet file"):
        list(read_rows(broken, ["messages"]))
    with pytest.raises(ValueError, match=r"none of \.parquet, \.json, \.jsonl"):
        list(read_rows(tmp_path / "rows.csv", []))
