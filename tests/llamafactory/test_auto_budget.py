"""`odb_token_budget: auto` in a recipe: how it is given, the synthetic micro-batches, and runs on two ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PretrainedConfig

from odb_factory.core.group_shapes import Bounds, GroupShape, group_shapes
from odb_factory.llamafactory.collator import OdbCollator, dummy_tokens
from odb_factory.llamafactory.resolve import fixed_budget, resolve
from odb_factory.llamafactory.shapes import SyntheticGroups, auto_budget, holds_media
from odb_factory.runtime.observe import count_patches
from odb_factory.tools.demo import DemoPaths
from tests.llamafactory.cli import Finished, train
from tests.llamafactory.conftest import picture
from tests.llamafactory.helpers import RECIPE, Parts, row, train_args

ZERO2 = Path(__file__).resolve().parents[2] / "yaml_recipes" / "deepspeed" / "zero2.json"
CUTOFF = 512


@pytest.fixture
def recipe(demo: DemoPaths, tmp_path: Path) -> dict[str, Any]:
    paths = {"model_name_or_path": str(demo.model), "dataset_dir": str(demo.data), "output_dir": str(tmp_path / "out")}
    return {**RECIPE, **paths, "odb": True, "odb_audit": True, "cutoff_len": 1024}


# -- the fields


def test_auto_is_a_budget_in_yaml_and_as_a_flag(recipe: dict[str, Any]) -> None:
    fields = {"odb_token_budget": "auto", "odb_auto_headroom": 0.2, "odb_memory_limit": 10**9}
    for given in ({**recipe, **fields}, [f"--{name}={value}" for name, value in {**recipe, **fields}.items()]):
        _, data, training, tuning, _ = train_args(given)
        assert (tuning.odb_token_budget, tuning.odb_auto_headroom, tuning.odb_memory_limit) == tuple(fields.values())
        worst = fixed_budget(data, training)
        assert worst == 8 * 1024
        config = resolve(tuning, fixed_budget=worst, model_config=PretrainedConfig, longest=1024, trained=True)
        assert config.token_budget == worst, "stands in until the budget is found"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("odb_token_budget", "Auto", "odb_token_budget must be a positive integer, or auto, got 'Auto'."),
        ("odb_auto_headroom", 1, "odb_auto_headroom must be a share of at least 0 and below 1, got 1."),
        ("odb_auto_headroom", "10 %", "odb_auto_headroom must be a share of at least 0 and below 1, got '10 %'."),
        ("odb_memory_limit", "8 GB", "odb_memory_limit must be a positive integer (bytes), got '8 GB'."),
        ("odb_memory_limit", 0, "odb_memory_limit must be a positive integer (bytes), got 0."),
    ],
)
def test_bad_values(recipe: dict[str, Any], field: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError) as error:
        train_args({**recipe, field: value})
    assert str(error.value) == text


# -- the micro-batches


def groups(parts: Parts) -> tuple[SyntheticGroups, Bounds]:
    parts = parts.with_data_args(cutoff_len=CUTOFF)
    stock = parts.stock_collator()
    dummy = dummy_tokens(stock.template, stock.tokenizer, stock.processor)
    bounds = Bounds(longest=CUTOFF, most_samples=64, pad_to_multiple_of=8, dummy_tokens=dummy, media=dummy > 0)
    return SyntheticGroups(parts.online([row("q", "a")]), stock, OdbCollator(stock, None)), bounds


@pytest.mark.parametrize("budget", [64, 320, 512, 1000, 2048, 4672])
@pytest.mark.parametrize("kind", ["vl", "vl2", "text"])
def test_batches_have_the_shape_that_was_asked_for(kind: str, budget: int, request: pytest.FixtureRequest) -> None:
    make, bounds = groups(request.getfixturevalue(kind))
    for shape in group_shapes(budget, bounds):
        batch = make(shape)
        assert batch["input_ids"].shape[0] == len(shape.lengths)
        assert shape.width - 8 <= batch["input_ids"].shape[1] <= shape.width
        assert batch["labels"].shape == batch["input_ids"].shape
        real = batch["attention_mask"].sum(-1)
        assert real[1:].tolist() == list(shape.lengths[1:])
        if shape.media:
            tokens = count_patches(batch) / 4  # two by two patches become one token
            assert tokens <= shape.padded_tokens
            assert tokens > 0.75 * (shape.padded_tokens - 32 * len(shape.lengths)), "images should fill the rows"
            assert batch["pixel_values"].shape[0] == count_patches(batch)
        elif kind != "text":
            assert len(batch["image_grid_thw"]) == 1, "the dummy image alone"


def test_patches_are_bounded_where_the_recipe_bounds_them(vl: Parts) -> None:
    make, _ = groups(vl)
    bounded = make(GroupShape("media", (512, 512), 512, most_patches=1000))
    assert 700 < count_patches(bounded) <= 1000
    none = make(GroupShape("media", (512, 512), 512, most_patches=4))
    assert count_patches(none) <= 16, "no image is that small: text, and the dummy image"


def test_a_sample_too_short_for_any_image_is_text(vl: Parts) -> None:
    make, _ = groups(vl)
    batch = make(GroupShape("media", (8, 8), 8))
    assert len(batch["image_grid_thw"]) == 1


def test_images_are_tried_where_the_data_have_any(vl: Parts, text: Parts, tmp_path: Path) -> None:
    picture((64, 64), 1).save(tmp_path / "a.png")
    plain, seen = (
        [row("q", "a"), row("q", "a")],
        [row("q", "a"), row("<image>q", "a", images=[str(tmp_path / "a.png")])],
    )
    filmed = [row("<video>q", "a", videos=["film.mp4"])]
    for rows, expected in ((plain, False), (seen, True), (filmed, True)):
        assert holds_media(rows) == holds_media(Dataset.from_list(rows)) == expected
        stock = vl.stock_collator()
        given = {"longest": 64, "headroom": 0.1, "memory_limit": None}
        assert auto_budget(vl.online(rows), stock, OdbCollator(stock, None), given).media == expected
    stock = text.stock_collator()
    assert not auto_budget(text.online(seen), stock, OdbCollator(stock, None), given).media


# -- runs


def check(run: Finished, limit: int) -> None:
    """What every run says of its budget."""
    found = re.findall(r"odb_token_budget: (\d+)  # found by auto: the worst step needs \d+ MiB of (\d+) MiB", run.log)
    assert len(found) == 1, "said once, by rank 0"
    budget = int(found[0][0])
    assert int(found[0][1]) == limit
    summary = run.json("odb_summary.json")
    assert summary["token_budget"] == budget
    assert summary["token_budget_auto"]["memory"] == limit * 2**20
    assert 0 < summary["token_budget_auto"]["needed"] <= limit * 2**20 * 0.9
    assert 1024 <= budget < 8192
    audits = [run.audit(rank) for rank in range(2)]
    assert len(audits[0]) == len(audits[1])
    widest = max(line["padded_tokens"] for lines in audits for line in lines)
    assert budget / 2 < widest <= budget
    assert summary["unique"] == 40


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_find_the_budget(recipe: dict[str, Any]) -> None:
    recipe.update(num_train_epochs=1, ddp_backend="gloo", save_strategy="no", logging_steps=1)
    check(train({**recipe, "odb_token_budget": "auto", "odb_memory_limit": 100 * 2**20}, ranks=2), 100)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_with_zero2_find_the_budget(recipe: dict[str, Any], tmp_path: Path) -> None:
    config = json.loads(ZERO2.read_text())
    config["zero_optimization"]["reduce_bucket_size"] = 2**18  # by default the bucket alone takes 2 GB
    (tmp_path / "zero2.json").write_text(json.dumps(config))
    recipe.update(num_train_epochs=1, ddp_backend="gloo", save_strategy="no", logging_steps=1)
    recipe.update(deepspeed=str(tmp_path / "zero2.json"))
    recipe.update(odb_token_budget="auto", odb_memory_limit=160 * 2**20, gradient_accumulation_steps=2)
    check(train(recipe, ranks=2), 160)


@pytest.mark.slow
def test_a_limit_that_is_too_low_is_one_sentence(recipe: dict[str, Any]) -> None:
    with pytest.raises(AssertionError) as failure:
        train({**recipe, "odb_token_budget": "auto", "odb_memory_limit": 30 * 2**20})
    text = re.search(r"NoBudgetError: (.*)", str(failure.value))
    assert text is not None
    assert re.fullmatch(
        r"odb_token_budget: auto: a sample of 1024 tokens \(cutoff_len\) needs about \d+ MiB, but a rank may use 27 "
        r"MiB \(30 MiB without odb_auto_headroom 0\.1\); lower image_max_pixels, lower cutoff_len, leave longer "
        r"samples out with odb_overlong: drop, or use LoRA, ZeRO-3 or a smaller model\.",
        text[1],
    ), text[1]


def test_pixels_are_of_the_type_of_training(vl: Parts) -> None:
    stock = vl.with_data_args(cutoff_len=CUTOFF).stock_collator()
    dataset = vl.with_data_args(cutoff_len=CUTOFF).online([row("q", "a")], torch.bfloat16)
    make = SyntheticGroups(dataset, stock, OdbCollator(stock, torch.bfloat16))
    assert make(GroupShape("media", (256,), 256))["pixel_values"].dtype == torch.bfloat16
    assert make(GroupShape("long", (256,), 256))["pixel_values"].dtype == torch.bfloat16
