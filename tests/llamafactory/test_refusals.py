"""Recipes that contradict `odb: true` are refused by the wrapper of `run_sft` before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from odb_factory.llamafactory.seams import PREPROCESS, RUN_SFT, TRAINER, registry
from odb_factory.tools.demo import DemoPaths
from tests.llamafactory.helpers import RECIPE, train_args


class FakeStock:
    """In place of LLaMA-Factory's own `run_sft`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.online = False
        """Our data and our trainer stood at the seams."""
        self.dtype: Any = None

    def __call__(self, *arguments: Any) -> str:
        from llamafactory.data import loader

        self.calls.append(arguments)
        self.online = {PREPROCESS, TRAINER} <= set(registry.installed)
        if self.online:
            self.dtype = loader._get_preprocessed_dataset.__self__.dtype  # type: ignore[attr-defined]
        return "done"


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStock]:
    import llamafactory.train.tuner  # noqa: F401

    fake = FakeStock()
    monkeypatch.setitem(registry._originals, RUN_SFT, fake)
    yield fake
    assert PREPROCESS not in registry.installed


@pytest.fixture
def recipe(demo: DemoPaths, tmp_path: Path) -> dict[str, Any]:
    paths = {"model_name_or_path": str(demo.model), "dataset_dir": str(demo.data), "output_dir": str(tmp_path / "out")}
    return {**RECIPE, **paths, "odb": True}


def run(recipe: dict[str, Any]) -> Any:
    """As LLaMA-Factory's tuner calls it."""
    from llamafactory.train import tuner

    return tuner.run_sft(*train_args(recipe), [])


REFUSED = [
    ({"packing": True}, "packing and neat_packing build fixed batches before training; remove them"),
    ({"neat_packing": True}, "packing and neat_packing build fixed batches before training; remove them"),
    ({"streaming": True, "max_steps": 5}, "streaming is not supported, .*; remove streaming"),
    ({"tokenized_path": "somewhere"}, "tokenized_path .*; remove tokenized_path"),
    ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy: group_by_length .*; remove it"),
    ({"dataloader_drop_last": True}, "dataloader_drop_last .*; remove it"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size .*; remove it and lower odb_token_budget instead"),
    ({"ignore_pad_token_for_loss": False}, "ignore_pad_token_for_loss: false makes padding a target, .*; remove it"),
    (
        {"label_smoothing_factor": 0.1},
        "label_smoothing_factor: transformers does not shift the labels of models with images, .*; remove "
        "label_smoothing_factor",
    ),
    (
        {"torch_compile": True, "label_smoothing_factor": 0.1, "template": "qwen3_nothink"},
        "label_smoothing_factor: transformers does not shift the labels of a compiled model, .*, or torch_compile",
    ),
    ({"optim": "lomo", "gradient_accumulation_steps": 2}, "optim lomo changes the weights .*, or use another optim"),
    ({"optim": "galore_adamw_layerwise"}, "optim galore_adamw_layerwise counts the steps .*; use galore_adamw"),
    (
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 3}},
        "lr_scheduler_type warmup_stable_decay with num_decay_steps alone needs the number of updates.*; set max_steps",
    ),
    ({"do_train": False, "do_eval": True, "val_size": 0.5}, "there is no training in this recipe .*; remove odb"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED, ids=[next(iter(f)) for f, _ in REFUSED])
def test_contradiction_is_refused_with_the_remedy(
    recipe: dict[str, Any], stock: FakeStock, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^odb: true contradicts this recipe: {sentence}[^.]*[.]$"):
        run({**recipe, **fields})
    assert not stock.calls  # no model, no data
    assert run({**recipe, **fields, "odb": False}) == "done"  # the field alone is fine
    assert not stock.online


def test_an_optimizer_that_steps_in_backward_cannot_fill_an_update(recipe: dict[str, Any], stock: FakeStock) -> None:
    with pytest.raises(ValueError, match=r"^odb: true contradicts this recipe: optim adalomo changes the weights with"):
        run({**recipe, "optim": "adalomo", "odb_samples_per_update": 8})
    assert run({**recipe, "optim": "adalomo"}) == "done"  # its updates have one micro-batch


def test_label_smoothing_of_text_is_allowed(recipe: dict[str, Any], stock: FakeStock) -> None:
    assert run({**recipe, "label_smoothing_factor": 0.1, "template": "qwen3_nothink"}) == "done"


CHECKPOINTS = {
    "of stock": (
        "checkpoint-3",
        r"the checkpoint \S+checkpoint-3 has no odb_state\.json.*saved without odb.*start anew in",
    ),
    "absent": ("checkpoint-4", r"there is no checkpoint \S+checkpoint-4 .* holds checkpoint-3: "),
    "output_dir": (".", "is no checkpoint, but an output_dir that holds checkpoint-3: "),
    "true": (True, r"resume_from_checkpoint is true, and there is no checkpoint in output_dir \S+out; correct"),
    "a number": (3, "resume_from_checkpoint must be true or the path of a checkpoint, got 3"),
}


@pytest.mark.parametrize(("resume", "sentence"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_what_cannot_be_resumed_is_refused(
    recipe: dict[str, Any], stock: FakeStock, tmp_path: Path, resume: Any, sentence: str
) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
    fields = {"resume_from_checkpoint": str(tmp_path / resume) if isinstance(resume, str) else resume}
    with pytest.raises(ValueError, match=f"^odb: .*{sentence}"):
        run({**recipe, **fields})
    assert not stock.calls  # no model, no data
    assert run({**recipe, **fields, "odb": False}) == "done"


@pytest.mark.parametrize(("batch", "cutoff", "given"), [(1, 4, None), (1, 7, None), (8, 2048, 1), (8, 2048, 7)])
def test_budget_below_the_padding_is_refused(
    recipe: dict[str, Any], stock: FakeStock, batch: int, cutoff: int, given: int | None
) -> None:
    fields = {"per_device_train_batch_size": batch, "cutoff_len": cutoff, "odb_token_budget": given}
    budget = given or batch * cutoff
    text = f"^odb_token_budget {budget} is smaller than pad_to_multiple_of 8, so no sample would fit; raise the budget"
    with pytest.raises(ValueError, match=text):
        run({**recipe, **fields})
    assert not stock.calls


def test_a_sound_recipe_runs_stock_code_with_our_data(recipe: dict[str, Any], stock: FakeStock) -> None:
    fields = {"per_device_train_batch_size": 2, "cutoff_len": 512, "odb_depth": 64, "overwrite_cache": True}
    assert run({**recipe, **fields}) == "done"
    ((model_args, _, training_args, tuning_args, _, callbacks),) = stock.calls
    assert model_args.model_name_or_path == recipe["model_name_or_path"]
    assert training_args.output_dir == recipe["output_dir"]
    assert tuning_args.odb
    assert callbacks == []
    assert stock.online
    assert stock.dtype is None


def test_the_pixel_type_follows_the_recipe(recipe: dict[str, Any], stock: FakeStock) -> None:
    import torch

    run({**recipe, "bf16": True})
    assert stock.dtype == torch.bfloat16


def test_budget_below_the_cutoff_warns(
    recipe: dict[str, Any], stock: FakeStock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from odb_factory.llamafactory import run as module

    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning_rank0", said.append)
    run({**recipe, "odb_token_budget": 1024, "cutoff_len": 1024})
    run({**recipe, "odb_token_budget": 512, "cutoff_len": 1024, "odb_overlong": "drop"})
    assert said == []
    run({**recipe, "odb_token_budget": 512, "cutoff_len": 1024})
    assert len(said) == 1
    assert "odb_token_budget 512 is below cutoff_len 1024" in said[0]


def test_without_odb_stock_runs_with_its_own_arguments(recipe: dict[str, Any], stock: FakeStock) -> None:
    del recipe["odb"]
    assert run({**recipe, "packing": True}) == "done"
    assert not stock.online
    assert len(stock.calls) == 1


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"odb_samples_per_update": 0}, "odb_samples_per_update must be a positive integer, got 0."),
        ({"odb_samples_per_update": "many"}, "odb_samples_per_update must be a positive integer, got 'many'."),
        (
            {"odb_samples_per_update": 64, "gradient_accumulation_steps": 2},
            "odb_samples_per_update 64 and gradient_accumulation_steps 2 both say when an update closes; remove one of "
            "them.",
        ),
    ],
)
def test_updates_of_steady_size_that_cannot_be(
    recipe: dict[str, Any], stock: FakeStock, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError) as caught:
        run({**recipe, **fields})
    assert str(caught.value) == sentence
    assert not stock.calls
