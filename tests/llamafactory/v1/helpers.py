"""What several tests of v1 share."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from tests.llamafactory.cli import Finished, train

SIZE = 37
"""Not divisible by the ranks or by batch sizes."""


def data_of(folder: Path, rows: list[dict[str, Any]]) -> str:
    """Rows in ShareGPT form, as a `train_dataset` of v1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    listed = f"texts:\n  path: {folder / 'rows.json'}\n  source: local\n  converter: sharegpt\n"
    (folder / "data.yaml").write_text(listed, encoding="utf-8")
    return str(folder / "data.yaml")


def train_v1(recipe: dict[str, Any], *, ranks: int = 1, **environment: str) -> Finished:
    """`USE_V1=1 llamafactory-cli train`."""
    return train(recipe, ranks=ranks, USE_V1="1", **environment)


def audits(run: Finished, ranks: int) -> list[list[dict[str, Any]]]:
    """[rank][step]"""
    return [run.audit(rank) for rank in range(ranks)]


def check_exactly_once(run: Finished, *, ranks: int, epochs: int, size: int = SIZE) -> list[list[dict[str, Any]]]:
    """Each sample once an epoch over all ranks, as many steps on each; returns the audits."""
    of_ranks = audits(run, ranks)
    for epoch in range(epochs):
        lines = [line for rank in of_ranks for line in rank if line["epoch"] == epoch]
        assert Counter(i for line in lines for i in line["indices"]) == Counter(range(size))
    keys = [[(line["epoch"], line["step"], line["update"]) for line in rank] for rank in of_ranks]
    assert all(key == keys[0] for key in keys)
    assert {line["epoch"] for rank in of_ranks for line in rank} == set(range(epochs))
    return of_ranks


def continued(run: Finished, checkpoint: int, folder: Path) -> dict[str, Any]:
    """A copy of a run's output up to a checkpoint, and the fields to go on from there."""
    shutil.copytree(run.output, folder)
    return {"output_dir": str(folder), "resume_from_checkpoint": str(folder / f"checkpoint-{checkpoint}")}
