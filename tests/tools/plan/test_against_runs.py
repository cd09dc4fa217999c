"""What the planner predicts is what `llamafactory-cli train` then does: the same steps, to the sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from odb_factory.tools.demo import DemoPaths
from odb_factory.tools.plan.planner import Plan, make_plan
from odb_factory.tools.plan.recipe import load_recipe
from tests.llamafactory.cli import Finished, train, train_in_turn, write
from tests.llamafactory.conftest import SAMPLES
from tests.llamafactory.helpers import RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def recipe(demo: DemoPaths, tmp_path: Path) -> dict[str, Any]:
    return {
        **RECIPE,
        "model_name_or_path": str(demo.model),
        "dataset_dir": str(demo.data),
        "output_dir": str(tmp_path / "out"),
        "cutoff_len": 1024,
        "per_device_train_batch_size": 3,
        "num_train_epochs": 1,
        "include_num_input_tokens_seen": "all",
        "save_strategy": "no",
        "seed": 7,
    }


def odb(recipe: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The recipe with ODB: a window that does not hold all, so that what is read when matters."""
    return {**recipe, "odb": True, "odb_token_budget": 768, "odb_depth": 12, "odb_audit": True, **more}


def plan(recipe: dict[str, Any], ranks: int) -> Plan:
    made = make_plan(load_recipe(write(recipe)), samples=None, world_size=ranks)
    assert made.own.exact
    return made


def check_odb(plan: Plan, run: Finished, ranks: int) -> None:
    """Against the audit."""
    audits = [run.audit(rank) for rank in range(ranks)]
    padded = [[line["padded_tokens"] for line in step] for step in zip(*audits, strict=True)]
    summary, own = run.json("odb_summary.json"), plan.own
    assert own.steps == len(padded) == summary["steps"]
    assert own.padded_tokens == sum(map(sum, padded)) == summary["padded_tokens"]
    assert plan.config.attention_length == summary["attention_length"] is not None
    assert own.slowest_work == sum(max(line["work"] for line in step) for step in zip(*audits, strict=True))
    assert own.samples == summary["samples"]
    assert own.tokens == summary["tokens"]
    assert own.fillers == summary["fillers"]
    assert own.padding == pytest.approx(summary["padding"], abs=1e-6)
    seen = {i: n for audit in audits for line in audit for i, n in zip(line["indices"], line["lengths"], strict=True)}
    assert {meta.index: meta.length for meta in plan.observed.metas} == seen


def check_standard(plan: Plan, run: Finished) -> None:
    """Against the trainer's counts: padded tokens over all ranks, and steps (no accumulation here)."""
    state = run.json("trainer_state.json")
    assert plan.standard.exact
    assert plan.standard.padded_tokens == state["num_input_tokens_seen"]
    assert plan.standard.steps == state["global_step"]


@pytest.fixture
def mixed(demo: DemoPaths, tmp_path: Path) -> dict[str, Any]:
    """Recipe fields of a dataset with rows that stock LLaMA-Factory drops: the demo's, and some without an answer."""
    rows = json.loads((demo.data / "odb_demo.json").read_text(encoding="utf-8"))[:27]
    for place in (4, 11, 20):
        rows.insert(place, {"conversations": [{"from": "human", "value": "Nobody answers."}], "images": []})
    columns = {"messages": "conversations", "images": "images"}
    info = {"mixed": {"file_name": "mixed.json", "formatting": "sharegpt", "columns": columns}}
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "mixed.json").write_text(json.dumps(rows), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    (folder / "images").symlink_to(demo.data / "images")
    return {"dataset": "mixed", "dataset_dir": str(folder)}


def test_on_one_rank(recipe: dict[str, Any], mixed: dict[str, Any], tmp_path: Path) -> None:
    """With rows that are dropped, and windows that bytes keep short of the depth, in ODB's case."""
    recipe |= mixed
    with_odb = odb(recipe, odb_window_bytes=2_500_000)
    predicted = plan(with_odb, 1)
    standard, run = train_in_turn([{**recipe, "output_dir": str(tmp_path / "standard")}, with_odb])
    assert isinstance(standard, Finished), standard
    assert isinstance(run, Finished), run
    check_standard(predicted, standard)
    check_odb(predicted, run, 1)
    assert predicted.observed.reasons() == run.json("odb_summary.json")["dropped"] == {"invalid conversation": 3}
    assert predicted.own.short_windows == run.json("odb_summary.json")["short_windows"] > 0


@pytest.mark.distributed
def test_on_two_ranks(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Repeated samples in Standard's last step, fillers in ODB's last update."""
    with_odb = odb(recipe, gradient_accumulation_steps=3)
    predicted = plan(with_odb, 2)
    run = train(with_odb, ranks=2)
    check_odb(predicted, run, 2)
    assert predicted.own.updates == run.json("trainer_state.json")["global_step"]
    check_standard(predicted, train({**recipe, "output_dir": str(tmp_path / "standard")}, ranks=2))
    assert predicted.standard.samples > SAMPLES
