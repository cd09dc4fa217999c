"""`USE_V1=1 llamafactory-cli train` with `batching_strategy: odb`, as a user runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from odb_factory.tools.demo import DemoPaths
from odb_factory.trainer.attention import attention_length
from tests.llamafactory.cli import Finished
from tests.llamafactory.v1.helpers import SIZE, audits, check_exactly_once, continued, data_of, train_v1

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def data(demo: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = json.loads((demo.data / "odb_demo_text.json").read_text(encoding="utf-8"))
    return data_of(tmp_path_factory.mktemp("v1"), rows[:SIZE])


@pytest.fixture(scope="module")
def recipe(data: str, text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        "model": str(text_model),
        "train_dataset": data,
        "template": "qwen3_nothink",
        "output_dir": str(tmp_path_factory.mktemp("runs") / "out"),
        "batching_strategy": "odb",
        "odb_token_budget": 1024,
        "odb_depth": 8,
        "odb_audit": True,
        "odb_timeout": 60,
        "cutoff_len": 512,
        "batching_workers": 1,
        "num_train_epochs": 2,
        "enable_activation_checkpointing": False,
        "bf16": False,
    }


@pytest.fixture(scope="module")
def two_ranks(recipe: dict[str, Any]) -> Finished:
    """Two epochs on two ranks, two micro-batches an update, a checkpoint every second update."""
    more = {"output_dir": recipe["output_dir"] + "-2", "micro_batch_size": 2, "global_batch_size": 8, "save_steps": 2}
    return train_v1({**recipe, **more}, ranks=2)


def check_end(run: Finished, updates: int) -> None:
    """The log and the summary end where the run does."""
    log, summary = run.lines("trainer_log.jsonl"), run.json("odb_summary.json")
    assert [line["step"] for line in log] == list(range(1, updates + 1))
    assert log[-1]["total_steps"] == updates
    assert log[-1]["odb/epoch"] == 2
    assert log[-1]["odb/samples_per_second"] > 0
    assert summary["updates"] == updates
    model = AutoConfig.from_pretrained(run.output)
    assert summary["attention_length"] == attention_length(model, longest=summary["token_budget"]) is not None
    assert (summary["samples"], summary["repeated"], summary["epochs"]) == (2 * SIZE, 0, 2)
    assert (run.output / "odb_report.png").stat().st_size > 10_000
    assert run.log.count("Online Dynamic Batching: up to") == 1
    assert run.log.count("Online Dynamic Batching, all ranks:") == 1
    assert (run.output / "model.safetensors").exists()


@pytest.fixture(scope="module")
def one_rank(recipe: dict[str, Any]) -> Finished:
    """Two epochs on one rank, a checkpoint at the end of each."""
    return train_v1({**recipe, "output_dir": recipe["output_dir"] + "-1", "save_epochs": 1.0})


def checkpoints(run: Finished) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in run.output.glob("checkpoint-*"))


def test_one_rank(one_rank: Finished) -> None:
    """Checkpoints follow the samples with `save_epochs`, since nobody knows the number of updates."""
    (lines,) = check_exactly_once(one_rank, ranks=1, epochs=2)
    check_end(one_rank, lines[-1]["update"])
    assert checkpoints(one_rank) == [max(line["update"] for line in lines if line["epoch"] == e) for e in (0, 1)]


def test_two_ranks_with_several_micro_batches_an_update(two_ranks: Finished) -> None:
    first, _ = check_exactly_once(two_ranks, ranks=2, epochs=2)
    check_end(two_ranks, first[-1]["update"])
    for rank in audits(two_ranks, 2):
        assert [line["update"] for line in rank] == [1 + k // 2 for k in range(len(rank))]
        assert all(line["padded_tokens"] <= 1024 or len(line["indices"]) == 1 for line in rank)


def test_fsdp2_on_two_ranks(recipe: dict[str, Any]) -> None:
    more = {"output_dir": recipe["output_dir"] + "-fsdp2", "dist_config": {"name": "fsdp2"}, "num_train_epochs": 2}
    run = train_v1({**recipe, **more}, ranks=2)
    check_exactly_once(run, ranks=2, epochs=2)


@pytest.mark.parametrize("ranks", [2, 1, 3])
def test_resumed_by_other_ranks_too(recipe: dict[str, Any], two_ranks: Finished, tmp_path: Path, ranks: int) -> None:
    """A run that stopped after its second update goes on with exactly the samples that are left."""
    more = {"micro_batch_size": 2, "global_batch_size": 4 * ranks, "num_train_epochs": 2}
    of_second = continued(two_ranks, 2, tmp_path / "out")
    # as a run that once went on from there with fewer ranks would have left it
    stale = tmp_path / "out" / "checkpoint-4" / "dataloader" / "rank_1.pt"
    shutil.copy(stale, tmp_path / "out" / "checkpoint-2" / "dataloader")
    run = train_v1({**recipe, **more, **of_second}, ranks=ranks)
    before = [line for rank in audits(two_ranks, 2) for line in rank if line["update"] <= 2]
    summary = run.json("odb_summary.json")
    assert (summary["samples"], summary["repeated"], summary["unique"], summary["epochs"]) == (2 * SIZE, 0, SIZE, 2)
    if ranks == 2:
        check_exactly_once(run, ranks=2, epochs=2)
    after = [line for rank in audits(run, ranks) for line in rank if line["update"] > 2]
    kept = {i for line in before for i in line["indices"]}
    again = [i for line in after if line["epoch"] == 0 for i in line["indices"]]
    assert sorted([*kept, *again]) == list(range(SIZE))


@pytest.mark.parametrize("epochs_done", [1, 2])
def test_resumed_between_epochs_and_after_the_last(
    recipe: dict[str, Any], one_rank: Finished, tmp_path: Path, epochs_done: int
) -> None:
    saved = checkpoints(one_rank)[epochs_done - 1]
    run = train_v1({**recipe, **continued(one_rank, saved, tmp_path / "out")})
    (lines,) = check_exactly_once(run, ranks=1, epochs=2)
    assert lines[:saved] == one_rank.audit()[:saved]
    summary = run.json("odb_summary.json")
    assert (summary["samples"], summary["repeated"], summary["epochs"]) == (2 * SIZE, 0, 2)
    over = "the run was over at this checkpoint; nothing is left to train on."
    said = "the run goes on at the beginning of epoch 2." if epochs_done == 1 else over
    assert f"Online Dynamic Batching: {said}" in run.log
    if epochs_done == 2:
        assert summary["updates"] == saved == lines[-1]["update"], "nothing was left to do"


def test_max_steps_end_a_run(recipe: dict[str, Any]) -> None:
    more = {"output_dir": recipe["output_dir"] + "-steps", "max_steps": 3, "odb_samples_per_update": 6}
    run = train_v1({**recipe, **more, "odb_token_budget": 256})
    assert (
        "odb_token_budget 256 is below cutoff_len 512: samples longer than the budget are trained on alone" in run.log
    )
    lines = run.audit()
    assert lines[-1]["update"] == 3
    for update in (1, 2, 3):
        assert sum(len(line["indices"]) for line in lines if line["update"] == update) >= 6
    assert run.lines("trainer_log.jsonl")[-1]["total_steps"] == 3
    assert run.json("odb_summary.json")["updates"] == 3
