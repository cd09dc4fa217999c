"""The trainings that are planned: the demo's quickstart recipe, and real conversations, with and without ODB."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.launch import train
from odb_factory.tools.demo import make_demo

ROOT = Path(__file__).resolve().parent.parent.parent
QUICKSTARTS = {1: "quickstart", 2: "quickstart_2rank"}
"""Ranks -> recipe."""
METHODS = ("odb", "standard")
REAL = {"conversations": 200, "held_out": 0, "cutoff": 1024, "batch_size": 2, "vocabulary": 8192}
"""Real conversations: first questions and answers, a part of Qwen's tokenizer."""


@dataclass(frozen=True)
class Run:
    """A finished training of one epoch."""

    data: str
    ranks: int
    recipe: Path
    """Of ODB."""
    odb: Path
    """Output directory."""
    standard: Path | None = None
    """Likewise; None: was not trained."""


def train_demo(
    place: Path, samples: int, ranks: tuple[int, ...], methods: tuple[str, ...], deadline: float
) -> Iterator[Run]:
    """Make the demo in `place` and train its quickstart recipes for an epoch."""
    make_demo(place / "demo", samples)
    for count in ranks:
        name = QUICKSTARTS[count]
        common = yaml.safe_load((ROOT / "yaml_recipes" / f"{name}.yaml").read_text(encoding="utf-8"))
        common |= {
            "model_name_or_path": str(place / "demo" / "model"),
            "dataset_dir": str(place / "demo" / "data"),
            "num_train_epochs": 1,
            "include_num_input_tokens_seen": "all",  # counts padded tokens over all ranks
            "logging_steps": 1,
        }
        stock = {key: value for key, value in common.items() if not key.startswith("odb")}
        recipes = {"odb": common, "standard": stock}
        yield _run("demo", place, name, count, {method: recipes[method] for method in methods}, deadline)


def train_real(place: Path, ranks: int, seed: int, deadline: float) -> Run:
    """Train on real conversations for an epoch, as the benchmark `train` does."""
    from benchmarks.train.setup import Place, Size, prepare, recipe

    real = Place(place / "real")
    size = Size(**REAL, hidden=64, layers=1, ranks=ranks)
    prepare(real, size, seed)
    recipes = {method: recipe(real, method, size, seed) for method in METHODS}
    return _run("ShareGPT", place, "real", ranks, recipes, deadline)


def _run(data: str, place: Path, name: str, ranks: int, recipes: dict[str, dict[str, Any]], deadline: float) -> Run:
    outputs = {}
    for method, recipe in recipes.items():
        output = outputs[method] = place / f"{name}_{method}"
        file = output.with_suffix(".yaml")
        file.write_text(json.dumps(recipe | {"output_dir": str(output)}, indent=2) + "\n", encoding="utf-8")
        print(f"Training: {data}, {ranks} ranks, {method} ...", flush=True)
        train(
            file,
            name=output.name,
            ranks=ranks,
            output_dir=output,
            cache=place / f"cache_{name}_{method}",
            console=output.with_suffix(".log"),
            deadline=deadline,
        )
    return Run(data, ranks, outputs["odb"].with_suffix(".yaml"), outputs["odb"], outputs.get("standard"))
