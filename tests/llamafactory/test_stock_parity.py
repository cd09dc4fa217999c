"""Without `odb: true` the installed package changes nothing: not a number, not a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from odb_factory.tools.demo import DemoPaths
from tests.llamafactory.cli import Finished, train
from tests.llamafactory.helpers import RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TIMES = ("runtime", "per_sec", "elapsed_time", "remaining_time", "throughput")
"""Parts of the names of figures that no two runs share."""


@pytest.fixture(scope="module")
def both(demo: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Finished]:
    """A run with the package active, its fields there but switched off, and one with the package disabled."""
    recipe = {
        **RECIPE,
        "model_name_or_path": str(demo.model),
        "dataset_dir": str(demo.data),
        "max_samples": 24,
        "val_size": 0.25,
        "eval_strategy": "epoch",
        "freeze_vision_tower": False,
        "freeze_multi_modal_projector": False,
        "cutoff_len": 1024,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "epoch",
        "save_only_model": True,
        "include_num_input_tokens_seen": True,
        "include_effective_tokens_per_second": True,
    }
    folder = tmp_path_factory.mktemp("parity")
    switched_off = {"odb": False, "odb_token_budget": 512, "odb_audit": True}
    active = train({**recipe, **switched_off, "output_dir": str(folder / "active" / "out")})
    stock = train({**recipe, "output_dir": str(folder / "stock" / "out")}, ODB_FACTORY_DISABLE="1")
    return active, stock


def without_times(value: Any) -> Any:
    """`value` without what the clock decides."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not any(part in k for part in TIMES)}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return value


def test_same_files(both: tuple[Finished, Finished]) -> None:
    active, stock = both
    assert active.files() == stock.files()
    assert not any("odb" in name for name in active.files())
    assert "trainer_log.jsonl" in stock.files()


def test_same_numbers(both: tuple[Finished, Finished]) -> None:
    active, stock = both
    assert len(stock.history("loss")) == 3  # 18 samples in batches of 3, two of them an update
    assert len(stock.history("eval_loss")) == 1
    for name in ("trainer_state.json", "all_results.json"):
        assert without_times(active.json(name)) == without_times(stock.json(name))
    assert without_times(active.lines("trainer_log.jsonl")) == without_times(stock.lines("trainer_log.jsonl"))
    assert set(active.json("all_results.json")) == set(stock.json("all_results.json"))


def test_same_weights(both: tuple[Finished, Finished]) -> None:
    active, stock = both
    names = [name for name in stock.files() if Path(name).suffix == ".safetensors"]
    assert len(names) == 2  # the checkpoint and the final model
    for name in names:
        assert (active.output / name).read_bytes() == (stock.output / name).read_bytes()


def test_nothing_is_said(both: tuple[Finished, Finished]) -> None:
    for run in both:
        assert "Online Dynamic Batching" not in run.log
        assert "odb-factory" not in run.log
