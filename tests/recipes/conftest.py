"""A tiny model, and the three datasets as `odb-factory data` makes them of small raw files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odb_factory.cli import main
from odb_factory.tools.demo import make_demo
from tests.conftest import ROOT
from tests.llamafactory.conftest import one_thread  # noqa: F401  (the same settings)
from tests.tools.data.raw import (
    llava_row,
    sharegpt4o_row,
    ultrachat_row,
    write_llava,
    write_sharegpt4o,
    write_ultrachat,
)

ROWS = 40


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3-VL."""
    return make_demo(tmp_path_factory.mktemp("model") / "demo", samples=8).model


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three datasets, each with a broken row in its raw file."""
    raw = tmp_path_factory.mktemp("raw")
    texts = [ultrachat_row(n, turns=1 + n % 4) for n in range(ROWS)]
    texts[7]["messages"].pop()
    dialogues = [llava_row(n) for n in range(ROWS)]
    del dialogues[7]["image"]
    captions = [sharegpt4o_row(n) for n in range(ROWS)]
    lines = [json.dumps(row) for row in captions]
    lines[7] = lines[7][:-1]
    write_ultrachat(raw / "ultrachat", texts)
    write_llava(raw / "llava", dialogues, {f"{n:012d}.jpg" for n in range(ROWS)})
    write_sharegpt4o(raw / "sharegpt4o", lines, [row["image"] for row in captions])
    folder = tmp_path_factory.mktemp("prepared") / "data"
    for kind in ("ultrachat", "llava", "sharegpt4o"):
        assert main(["data", kind, "--source", str(raw / kind), "--dir", str(folder)]) == 0
    return folder


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name their DeepSpeed file from the top of the repository."""
    monkeypatch.chdir(ROOT)
