"""Every recipe runs end to end on two ranks with DeepSpeed ZeRO-2: its own dataset, made small, and a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.llamafactory.cli import SCRIPTS, free_port, launch
from tests.recipes.helpers import OVERRIDES, PUBLIC, SMALL, command_line, in_turn

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(300), pytest.mark.usefixtures("at_root")]

RANKS = 2
FULL = [recipe for recipe in PUBLIC if recipe.endswith("2b_full.yaml")]
"""One recipe of each dataset."""
OTHERS = [(recipe, way) for way in ("Standard", "Sorted", "packing") for recipe in FULL if way != "packing"]
OTHERS += [(recipe, "packing") for recipe in FULL if "ultrachat" in recipe]
ALL = [*((recipe, "ODB") for recipe in PUBLIC), *OTHERS]


def substitutes(model: Path, data: Path, output: Path) -> list[str]:
    return [*SMALL, f"model_name_or_path={model}", f"dataset_dir={data}", f"output_dir={output}"]


@pytest.fixture(scope="module")
def runs(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, str]]:
    """Output folder and rank 0's log, or what went wrong, by recipe and way."""
    folder = tmp_path_factory.mktemp("runs")
    outputs = {key: folder / f"{number}" for number, key in enumerate(ALL)}
    jobs = [[recipe, *substitutes(model, data, outputs[recipe, way]), *OVERRIDES[way]] for recipe, way in ALL]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        results = in_turn(jobs, folder / "turns", ranks=RANKS)
    logs = {
        key: next((text for text in texts if not text.startswith("done")), texts[0])
        for key, texts in zip(ALL, results, strict=True)
    }
    return {key: (outputs[key], logs[key]) for key in ALL}


def check_odb(output: Path) -> None:
    """Two aligned steps on each rank, no sample twice, groups within the budget."""
    audits = [lines(output / f"odb_audit.rank{rank}.jsonl") for rank in range(RANKS)]
    assert [len(audit) for audit in audits] == [2, 2]
    seen = [index for audit in audits for line in audit for index in line["indices"]]
    assert len(seen) == len(set(seen)) > 4
    assert all(line["padded_tokens"] <= 1024 for audit in audits for line in audit if len(line["indices"]) > 1)
    assert json.loads((output / "odb_summary.json").read_text())["samples"] == len(seen)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("recipe", "way"), ALL)
def test_a_recipe_runs(recipe: str, way: str, runs: dict[tuple[str, str], tuple[Path, str]]) -> None:
    output, log = runs[recipe, way]
    assert log.startswith("done"), log[-6000:]
    state = json.loads((output / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert state["num_input_tokens_seen"] > 0
    assert any("eval_loss" in entry for entry in state["log_history"]) or (output / "eval_results.json").exists()
    names = {path.name for path in output.iterdir()}
    assert ("adapter_model.safetensors" if "lora" in recipe else "model.safetensors") in names
    if way == "ODB":
        check_odb(output)
    else:
        assert not [name for name in names if name.startswith("odb_")]


@pytest.mark.parametrize(
    ("recipe", "way"),
    [
        ("yaml_recipes/sharegpt4o/qwen3vl_2b_full.yaml", "Standard"),
        ("yaml_recipes/llava/qwen3vl_2b_full.yaml", "Sorted"),
        ("yaml_recipes/ultrachat/qwen3vl_2b_full.yaml", "packing"),
    ],
)
def test_the_command_line(recipe: str, way: str, model: Path, data: Path, tmp_path: Path) -> None:
    """As a user types it, overrides and all. Without DeepSpeed, which would compile an operator for a minute."""
    output = tmp_path / "out"
    arguments = [recipe, *substitutes(model, data, output), *OVERRIDES[way], "deepspeed=null"]
    command_line(arguments, tmp_path / "log", ranks=1)
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 2
    assert not list(output.glob("odb_*"))


def test_fsdp2(model: Path, data: Path, tmp_path: Path) -> None:
    """The command line of the README, with the launcher's module replaced by one that allows FSDP2 on CPUs."""
    recipe, output = "yaml_recipes/llava/qwen3vl_8b_full.yaml", tmp_path / "out"
    command = [str(SCRIPTS / "accelerate"), "launch", "--config_file", "yaml_recipes/fsdp2/fsdp2.yaml"]
    command += ["--num_processes", "2", "--main_process_port", str(free_port()), "--mixed_precision", "no"]
    command += ["-m", "tests.recipes.fsdp2_on_cpu", recipe, *substitutes(model, data, output), "deepspeed=null"]
    log = launch(command, tmp_path / "log", {"OMP_NUM_THREADS": "1"})
    counts = re.findall(r"sharded: (\d+) of (\d+)", log)
    assert len(counts) == RANKS
    assert all(sharded == parameters != "0" for sharded, parameters in counts)
    check_odb(output)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, output))
    assert {name: tensor.shape for name, tensor in after.items()} == {n: t.shape for n, t in before.items()}
    changed = [name for name in before if not before[name].equal(after[name])]
    assert changed
    assert not any("visual" in name for name in changed)
