"""Other strategies of v1: with the package installed they train as without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from odb_factory.tools.demo import DemoPaths
from tests.llamafactory.v1.helpers import SIZE, data_of, train_v1

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "fields",
    [
        {"batching_strategy": "normal", "num_train_epochs": 1},
        {"batching_strategy": "dynamic_batching", "max_steps": 4, "odb_depth": 3},
    ],
    ids=lambda fields: fields["batching_strategy"],
)
def test_same_numbers_files_and_weights(
    demo: DemoPaths, text_model: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    rows = json.loads((demo.data / "odb_demo_text.json").read_text(encoding="utf-8"))[:SIZE]
    recipe = {
        "model": str(text_model),
        "train_dataset": data_of(tmp_path / "data", rows),
        "template": "qwen3_nothink",
        "cutoff_len": 256,
        "micro_batch_size": 3,
        "batching_workers": 0,
        "bf16": False,
        **fields,
    }
    ours = train_v1({**recipe, "output_dir": str(tmp_path / "ours")})
    recipe.pop("odb_depth", None)
    stock = train_v1({**recipe, "output_dir": str(tmp_path / "stock")}, ODB_FACTORY_DISABLE="1")
    assert ours.files() == stock.files()
    assert ours.lines("trainer_log.jsonl") == stock.lines("trainer_log.jsonl")
    assert len(ours.lines("trainer_log.jsonl")) >= 4
    one, other = (load_file(run.output / "model.safetensors") for run in (ours, stock))
    assert all((one[name] == other[name]).all() for name in other)
