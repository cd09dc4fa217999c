"""Every recipe means what it says, to LLaMA-Factory's own parser, also with the overrides of the README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.recipes.helpers import FOLDER, PUBLIC, QUICKSTARTS, WAYS, in_turn

UNLIKE = {"ddp_backend", "output_dir", "cutoff_len", "report_to", "include_num_input_tokens_seen", "lora_target"}
"""Fields that were overridden for this test, or that the parser rewrites."""

CPU = ["use_cpu=true", "ddp_backend=gloo"]


def load(recipe: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ROOT / recipe).read_text())
    return values


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """What the parser says, by recipe and override."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        folder = tmp_path_factory.mktemp("parse")
        ways = {**WAYS, "misspelt": ["odb_budget=1"]}
        keys = [(recipe, way) for recipe in (*PUBLIC, *QUICKSTARTS) for way in ways]
        jobs = [[recipe, *CPU, *ways[way], f"output_dir={folder}/none"] for recipe, way in keys]
        results = in_turn(jobs, folder / "turns", ranks=1, parse=True)
    return {key: text for key, (text,) in zip(keys, results, strict=True)}


def values_of(text: str) -> dict[str, Any]:
    state, values, *_ = text.split("\n", 2)
    assert state == "done", text[-3000:]
    found: dict[str, Any] = json.loads(values)
    return found


def test_there_are_twelve() -> None:
    assert list(WAYS)[:5] == ["ODB", "Standard", "Sorted", "packing, text", "ZeRO-3"]
    assert len(PUBLIC) == 12
    assert len(QUICKSTARTS) == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", [*PUBLIC, *QUICKSTARTS])
def test_a_recipe_parses(recipe: str, parsed: dict[tuple[str, str], str]) -> None:
    asked = load(recipe)
    for way, overrides in WAYS.items():
        values = values_of(parsed[recipe, way])
        changes = yaml.safe_load("\n".join(overrides).replace("=", ": ")) or {}
        for key, value in {**asked, **changes, "dataset": [asked["dataset"]], "use_cpu": True}.items():
            if key not in UNLIKE:
                assert values[key] == value, (way, key)
    assert parsed[recipe, "misspelt"].startswith("failed")
    assert "odb_budget" in parsed[recipe, "misspelt"]


@pytest.mark.parametrize("recipe", PUBLIC)
def test_recipes_are_parallel(recipe: str) -> None:
    """They differ in what their names say, and nowhere else."""
    folder, name = Path(recipe).parent.name, Path(recipe).stem
    _, size, kind = name.split("_")
    values, first = load(recipe), load(PUBLIC[0])
    lora = {"lora_target", "lora_rank"}
    assert [key for key in values if key not in lora] == [key for key in first if key not in lora]
    assert (lora <= values.keys()) == (kind == "lora")
    assert values["model_name_or_path"] == f"Qwen/Qwen3-VL-{size.upper()}-Instruct"
    assert values["finetuning_type"] == kind
    assert values["output_dir"] == f"outputs/{folder}/{name}"
    by_data = {"dataset", "image_max_pixels", "cutoff_len", "odb_token_budget", "per_device_train_batch_size"}
    named = {"model_name_or_path", "finetuning_type", "output_dir", "learning_rate", "per_device_eval_batch_size"}
    same = values.keys() - lora - by_data - named
    assert {key: values[key] for key in same} == {key: first[key] for key in same}
    assert values["odb_token_budget"] == (14334 if folder == "sharegpt4o" else 12288)
    # Standard's worst micro-batch is as large as ODB's, and no sample is larger than the budget
    assert abs(values["per_device_train_batch_size"] * values["cutoff_len"] - values["odb_token_budget"]) <= 2
    assert (
        values["dataset"]
        in {"ultrachat": "ultrachat_200k", "llava": "llava_150k", "sharegpt4o": "sharegpt4o_57k"}[folder]
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_leaves_to_the_recipe_what_is_the_recipes(stage: int) -> None:
    config = json.loads((FOLDER / f"deepspeed/zero{stage}.json").read_text())
    assert config["zero_optimization"]["stage"] == stage
    assert config["gradient_clipping"] == "auto"  # left out, DeepSpeed clips to 1.0 whatever the recipe says
    assert config["bf16"] == {"enabled": "auto"}
    assert {"optimizer", "scheduler"} & config.keys() == set()
