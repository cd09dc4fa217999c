"""The recipe fields `odb*`, read by LLaMA-Factory's own parser."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from odb_factory.config import OdbConfig
from odb_factory.llamafactory.arguments import OdbFinetuningArguments
from odb_factory.llamafactory.resolve import resolve, resolve_recipe
from odb_factory.option import options_of
from odb_factory.tools.demo import DemoPaths
from odb_factory.trainer.attention import attention_length
from tests.llamafactory.helpers import RECIPE, train_args

FIELDS = tuple(f.name for f in dataclasses.fields(OdbFinetuningArguments) if f.name.startswith("odb"))
ONLY_OURS = ("odb", "odb_audit", "odb_auto_headroom", "odb_memory_limit", "odb_samples_per_update")
"""Fields that `OdbConfig` does not have."""


@pytest.fixture
def recipe(demo: DemoPaths, tmp_path: Path) -> dict[str, Any]:
    paths = {"model_name_or_path": str(demo.model), "dataset_dir": str(demo.data), "output_dir": str(tmp_path / "out")}
    return {**RECIPE, **paths, "odb": True}


def resolved(arguments: Any) -> OdbConfig:
    """The configuration of a run with these arguments; that of the model says nothing."""
    return resolve(arguments, fixed_budget=4096, model_config=PretrainedConfig, longest=2048, trained=True)


def test_a_plain_recipe_gets_the_defaults(recipe: dict[str, Any]) -> None:
    arguments = train_args(recipe)[3]
    assert isinstance(arguments, OdbFinetuningArguments)
    assert resolved(arguments) == OdbConfig(token_budget=4096)
    assert arguments.odb_audit is False
    assert arguments.odb_token_budget is None


def test_every_field_reaches_the_config(recipe: dict[str, Any]) -> None:
    given = {
        "token_budget": 5000,
        "attention_length": 3000,
        "depth": 32,
        "alignment": "max",
        "split": "singleton",
        "join": False,
        "quota": 0.5,
        "overlong": "error",
        "on_bad_sample": "skip",
        "max_bad_samples": 7,
        "assignment": "static",
        "window_bytes": 1 << 20,
        "port": 29400,
        "max_samples": 4,
        "max_patches": 999,
        "idle": "skip",
        "max_wait": 3,
        "capacity": 5,
        "queue_steps": 2,
        "ramp": False,
        "timeout": 12.5,
    }
    assert {f"odb_{name}" for name in given} | set(ONLY_OURS) == set(FIELDS)
    plain = OdbConfig(token_budget=4096)
    assert all(getattr(plain, name) != value for name, value in given.items())
    arguments = train_args({**recipe, **{f"odb_{name}": value for name, value in given.items()}})[3]
    assert resolved(arguments) == OdbConfig(**given)


def of_recipe(recipe: dict[str, Any], model_config: Callable[[], Any]) -> OdbConfig:
    """The configuration of a run of this recipe."""
    _, data, training, tuning, _ = train_args(recipe)
    return resolve_recipe(tuning, data, training, model_config=model_config, pad_to_multiple_of=8, dummy_tokens=6)


def test_what_the_run_knows_reaches_the_config(recipe: dict[str, Any]) -> None:
    fields = {"gradient_accumulation_steps": 3, "seed": 5, "odb_attention_length": None}
    config = of_recipe({**recipe, **fields}, ask)
    assert (config.pad_to_multiple_of, config.dummy_tokens, config.steps_multiple) == (8, 6, 3)
    assert (config.seed, config.shuffle) == (5, True)
    config = of_recipe({**recipe, **fields, "data_seed": 9, "disable_shuffling": True}, ask)
    assert (config.seed, config.shuffle) == (9, False)
    assert not of_recipe({**recipe, **fields, "train_sampling_strategy": "sequential"}, ask).shuffle


@pytest.mark.parametrize(
    ("batch", "cutoff", "given", "expected"),
    [(None, None, None, 8 * 2048), (2, 512, None, 1024), (1, 300, None, 300), (2, 512, 4000, 4000)],
)
def test_default_budget_is_what_the_fixed_batch_needs(
    recipe: dict[str, Any], batch: int | None, cutoff: int | None, given: int | None, expected: int
) -> None:
    fields = {"per_device_train_batch_size": batch, "cutoff_len": cutoff, "odb_token_budget": given}
    given_fields = {name: value for name, value in fields.items() if value is not None}
    assert of_recipe({**recipe, **given_fields}, PretrainedConfig).token_budget == expected


@pytest.mark.parametrize("key", ["odb_tokenbudget", "odb_token_budgets", "odb_", "odb_seed", "odb_pad_to_multiple_of"])
def test_unknown_key_fails(recipe: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=f"not used by the HfArgumentParser.*'{key}'"):
        train_args({**recipe, key: 1})


COUNTS = ("token_budget", "depth", "max_samples", "max_patches", "max_wait", "capacity", "queue_steps", "window_bytes")


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, "x", "2048", 1.5, True])
def test_bad_count(recipe: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        train_args({**recipe, f"odb_{name}": value})
    auto = ", or auto," if name == "token_budget" and isinstance(value, str) else ","
    assert str(error.value) == f"odb_{name} must be a positive integer{auto} got {value!r}."


class Asked(Exception):
    """The model's configuration was asked for."""


def ask() -> Any:
    raise Asked


@pytest.mark.parametrize("value", [None, 3000])
def test_an_attention_length_that_is_given_needs_no_model(recipe: dict[str, Any], value: int | None) -> None:
    assert of_recipe({**recipe, "odb_attention_length": value}, ask).attention_length == value


def test_auto_attention_length_is_the_models(recipe: dict[str, Any], demo: DemoPaths) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(demo.model)
    recipe["cutoff_len"] = 512
    assert train_args(recipe)[3].odb_attention_length == "auto"
    with pytest.raises(Asked):
        of_recipe(recipe, ask)
    expected = attention_length(config, longest=512)
    assert of_recipe(recipe, lambda: config).attention_length == expected is not None
    expected = attention_length(config, longest=512, trained=False)
    assert of_recipe({**recipe, "finetuning_type": "lora"}, lambda: config).attention_length == expected


@pytest.mark.parametrize("value", [0, -1, "x", "2048", 1.5, True])
def test_bad_attention_length(recipe: dict[str, Any], value: Any) -> None:
    with pytest.raises(ValueError) as error:
        train_args({**recipe, "odb_attention_length": value})
    auto = ", auto or null," if isinstance(value, str) else ","
    assert str(error.value) == f"odb_attention_length must be a positive integer{auto} got {value!r}."


@pytest.mark.parametrize("name", ["alignment", "split", "overlong", "idle", "assignment", "on_bad_sample"])
@pytest.mark.parametrize("value", ["nonsense", "", None, 3])
def test_bad_choice(recipe: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        train_args({**recipe, f"odb_{name}": value})
    assert (
        str(error.value)
        == f"odb_{name} must be one of {', '.join(options_of(OdbConfig)[name].choices)}, got {value!r}."
    )


@pytest.mark.parametrize("name", ["odb", "odb_join", "odb_ramp", "odb_audit"])
@pytest.mark.parametrize("value", ["false", "true", 1, None])
def test_bad_switch(recipe: dict[str, Any], name: str, value: Any) -> None:
    """A quoted "false" would otherwise switch on what it means to switch off."""
    with pytest.raises(ValueError) as error:
        train_args({**recipe, name: value})
    assert str(error.value) == f"{name} must be true or false, got {value!r}."


@pytest.mark.parametrize("value", [0, -1, "30", None, float("nan")])
def test_bad_timeout(recipe: dict[str, Any], value: Any) -> None:
    with pytest.raises(ValueError) as error:
        train_args({**recipe, "odb_timeout": value})
    assert str(error.value) == f"odb_timeout must be a number of seconds above 0, got {value!r}."


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_bad_samples", -1, "an integer of at least 0"),
        ("max_bad_samples", "many", "an integer of at least 0"),
        ("quota", 0, "a share above 0 and at most 1"),
        ("quota", 1.5, "a share above 0 and at most 1"),
        ("quota", "all", "a share above 0 and at most 1"),
        ("port", -1, "an integer of at least 0"),
        ("port", 65536, "at most 65535"),
    ],
)
def test_bad_number(recipe: dict[str, Any], name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        train_args({**recipe, f"odb_{name}": value})
    assert str(error.value) == f"odb_{name} must be {allowed}, got {value!r}."


@pytest.mark.parametrize("bound", [None, 0])
def test_bound_of_bad_samples_may_be_none_or_zero(recipe: dict[str, Any], bound: int | None) -> None:
    arguments = train_args({**recipe, "odb_on_bad_sample": "skip", "odb_max_bad_samples": bound})[3]
    assert resolved(arguments).max_bad_samples == bound


@pytest.mark.parametrize("stage", ["pt", "rm", "dpo", "kto"])
def test_other_stages_are_refused(recipe: dict[str, Any], stage: str) -> None:
    with pytest.raises(ValueError, match=f"odb: true supports stage sft, not {stage}; remove odb from this recipe"):
        train_args({**recipe, "stage": stage})


def test_other_trainers_are_refused(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="does not support use_hyper_parallel"):
        train_args({**recipe, "use_hyper_parallel": True})
    for name in ("galore", "apollo"):
        with pytest.raises(ValueError, match="does not support galore_layerwise and apollo_layerwise"):
            OdbFinetuningArguments(odb=True, finetuning_type="full", **{f"use_{name}": True, f"{name}_layerwise": True})
        OdbFinetuningArguments(odb=True, finetuning_type="full", **{f"use_{name}": True})
    monkeypatch.setenv("USE_MCA", "1")
    with pytest.raises(ValueError, match="does not support Megatron training"):
        OdbFinetuningArguments(odb=True)


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_switched_off_the_fields_have_no_effect(recipe: dict[str, Any], stage: str) -> None:
    """So that one line of a recipe switches Online Dynamic Batching on and off."""
    fields = {"odb_token_budget": 2048, "odb_depth": 64, "odb_audit": True, "odb_idle": "skip"}
    arguments = train_args({**recipe, **fields, "odb": False, "stage": stage})[3]
    assert not arguments.odb
    del recipe["odb"]
    assert not train_args({**recipe, **fields, "stage": stage})[3].odb


def test_command_line(recipe: dict[str, Any]) -> None:
    line = [f"--{name}={value}" for name, value in recipe.items()]
    line += ["--odb_token_budget=4096", "--odb_join=false", "--odb_alignment=max", "--odb_timeout=5"]
    arguments = train_args(line)[3]
    assert resolved(arguments) == OdbConfig(token_budget=4096, join=False, alignment="max", timeout=5.0)
    assert arguments.odb_token_budget == 4096


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        (
            "--odb_attention_length=x",
            "argument --odb_attention_length.* must be a number of tokens, auto or null, got 'x'",
        ),
        ("--odb_token_budget=x", "argument --odb_token_budget.* must be a number of tokens, auto or null, got 'x'"),
        ("--odb_alignment=nonsense", "argument --odb_alignment.* invalid choice: 'nonsense'"),
        ("--odb_join=maybe", "argument --odb_join.* Truthy value expected"),
        ("--odb_nonsense=1", None),
    ],
)
def test_bad_command_line(
    recipe: dict[str, Any], capsys: pytest.CaptureFixture[str], option: str, complaint: str | None
) -> None:
    with pytest.raises((SystemExit, ValueError)) as error:
        train_args([f"--{name}={value}" for name, value in recipe.items()] + [option])
    shown = capsys.readouterr().err + str(error.value)
    assert re.search(complaint or re.escape(f"not used by the HfArgumentParser: ['{option}']"), shown)


def test_help_lists_and_explains_every_field() -> None:
    from llamafactory.hparams import parser
    from transformers import HfArgumentParser

    shown = "".join(HfArgumentParser(parser._TRAIN_ARGS).format_help().split())  # lines may break in words
    details = shown[shown.index("--odb[ODB]", shown.index("options:")) :]
    for field in dataclasses.fields(OdbFinetuningArguments):
        if field.name not in FIELDS:
            continue
        assert f"--{field.name}" in details
        text = field.metadata["help"]
        assert text.endswith(".")
        assert "".join(f"{text} (default: {field.default})".split()) in details
        assert field.default is not None or "Default: " in text  # what `None` means
