"""`odb-factory plan` as a user calls it, and data sets for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odb_factory.cli import main

Write = Callable[..., Path]
"""Writes a recipe with these fields, and gives its path."""


def plan(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What the command prints."""
    capsys.readouterr()
    status = main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(plan(capsys, *arguments, "--json"))
    return result


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line on stderr of a command that ends with 2."""
    capsys.readouterr()
    assert main(["plan", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("odb-factory: ")
    return line


def data_set(folder: Path, rows: list[dict[str, Any]], **info: Any) -> dict[str, Any]:
    """Recipe fields of a data set of these rows."""
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    (folder / "dataset_info.json").write_text(
        json.dumps({"rows": {"file_name": "rows.json", **info}}), encoding="utf-8"
    )
    return {"dataset": "rows", "dataset_dir": str(folder)}
