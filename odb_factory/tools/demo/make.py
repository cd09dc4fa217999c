"""Writes the whole demo, model and data, to one directory."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from odb_factory.tools.demo.data import make_data
from odb_factory.tools.demo.model import make_vl_model

MARKER = "odb_demo.json"


@dataclass(frozen=True)
class DemoPaths:
    """The paths of a demo: root, model directory, data directory and ``dataset_info.json``."""

    root: Path
    model: Path
    data: Path
    dataset_info: Path


def make_demo(directory: Path, samples: int = 480, seed: int = 0) -> DemoPaths:
    """Write a tiny Qwen3-VL and a dataset of ``samples`` conversations to ``directory``, and return their paths.

    The counts are in ``directory/odb_demo.json``. An earlier demo there is replaced; other files are kept.
    Raises ValueError for fewer than 8 samples, FileExistsError if ``directory`` holds something other than a demo.
    """
    paths = DemoPaths(directory, directory / "model", directory / "data", directory / "data" / "dataset_info.json")
    if samples < 8:
        raise ValueError(f"A demo needs at least 8 samples, but {samples} were asked for: pass samples=8 or more.")
    _prepare(paths)
    counts = make_data(paths.data, samples, seed)
    make_vl_model(paths.model, seed=seed)
    _write_marker(paths.root, {**counts, "seed": seed, "complete": True})
    return paths


def _prepare(paths: DemoPaths) -> None:
    root = paths.root
    if root.exists() and not root.is_dir():
        raise FileExistsError(f"{root} is a file, not a directory: choose another directory for the demo.")
    if root.is_dir() and any(root.iterdir()) and not (root / MARKER).is_file():
        raise FileExistsError(
            f"{root} is not empty and holds no demo (it has no {MARKER}): choose a new or empty directory."
        )
    root.mkdir(parents=True, exist_ok=True)
    # The marker is written first, so that an interrupted run can be repeated in the same place.
    _write_marker(root, {"complete": False})
    for made in (paths.model, paths.data):
        if made.exists():
            shutil.rmtree(made)


def _write_marker(root: Path, facts: dict[str, int]) -> None:
    (root / MARKER).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
