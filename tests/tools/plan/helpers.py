"""`odb-factory plan` as a user calls it, and datasets for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odb_factory.cli import main
from odb_factory.tools.plan.command import WOULD_FAIL

Write = Callable[..., Path]
"""Writes a recipe with these fields, and gives its path."""


def plan(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0) -> str:
    """What the command prints; it ends with this status."""
    capsys.readouterr()
    ended = main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    assert ended == status, captured.err
    return captured.out


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(plan(capsys, *arguments, "--json", status=status))
    assert result["run_would_fail"] is bool(result["run_would_fail_at"]) is (status == WOULD_FAIL)
    return result


def failure(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Why there is no plan of a run that would fail: the one line on stderr, which the JSON holds, too."""
    (reason,) = plan_json(capsys, *arguments, status=WOULD_FAIL)["run_would_fail_at"]
    assert main(["plan", *map(str, arguments)]) == WOULD_FAIL
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"odb-factory: a run would fail: {reason}\n"
    return str(reason)


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
    """Recipe fields of a dataset of these rows."""
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    (folder / "dataset_info.json").write_text(
        json.dumps({"rows": {"file_name": "rows.json", **info}}), encoding="utf-8"
    )
    return {"dataset": "rows", "dataset_dir": str(folder)}
