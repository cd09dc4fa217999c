"""The recipe fields of v1, read by its own parser: ours, and stock ones as they were."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from odb_factory.config import OdbConfig
from odb_factory.llamafactory.fields import FIELDS
from odb_factory.llamafactory.v1.arguments import OdbTrainingArguments
from odb_factory.trainer.attention import attention_length


def parsed(args: Any) -> Any:
    from llamafactory.v1.config import get_args

    return get_args(args)[2]


def flags(**values: Any) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


ODB = {"batching_strategy": "odb"}
MODEL = Qwen3ForCausalLM(
    Qwen3Config(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
)
LENGTH = attention_length(MODEL.config, longest=2048)


@pytest.mark.parametrize("read", [dict, lambda values: flags(**values)], ids=["yaml", "command line"])
def test_odb_parses_with_its_fields(read: Any) -> None:
    arguments = parsed(read({**ODB, "odb_token_budget": 512, "odb_depth": 32, "odb_samples_per_update": 8, "seed": 7}))
    assert arguments.batching_strategy == "odb"
    config = arguments.recipe_config(1, MODEL)
    assert config == OdbConfig(token_budget=512, depth=32, seed=7, attention_length=LENGTH)


def test_defaults() -> None:
    arguments = parsed({**ODB, "micro_batch_size": 3, "cutoff_len": 100})
    assert arguments.recipe_config(4, MODEL) == OdbConfig(
        token_budget=300, seed=42, steps_multiple=4, attention_length=LENGTH
    )
    assert parsed({**ODB, "odb_attention_length": None}).recipe_config(1, MODEL).attention_length is None
    assert parsed({**ODB, "odb_attention_length": 70}).recipe_config(1, MODEL).attention_length == 70


@pytest.mark.parametrize("name", ["normal", "padding_free", "dynamic_padding_free"])
@pytest.mark.parametrize("read", [dict, lambda values: flags(**values)], ids=["yaml", "command line"])
def test_other_strategies_are_what_stock_makes_of_them(read: Any, name: str) -> None:
    from llamafactory.v1.config.arg_utils import BatchingStrategy
    from llamafactory.v1.config.training_args import TrainingArguments
    from transformers import HfArgumentParser

    values = {"batching_strategy": name, "micro_batch_size": 2, "output_dir": "out"}
    ours, stock = parsed(read(values)), HfArgumentParser([TrainingArguments])
    (theirs,) = stock.parse_dict(values) if read is dict else stock.parse_args_into_dataclasses(flags(**values))
    assert type(ours.batching_strategy) is type(theirs.batching_strategy)
    for field in dataclasses.fields(TrainingArguments):
        assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert list(BatchingStrategy) == ["normal", "padding_free", "dynamic_batching", "dynamic_padding_free"]


def test_help_explains_every_field() -> None:
    """Those that recipes without v1 have, but for the switch and what belongs to a budget of `auto`."""
    from transformers import HfArgumentParser

    ours = [field for field in dataclasses.fields(OdbTrainingArguments) if field.name.startswith("odb_")]
    missing = {field.name for field in FIELDS} - {field.name for field in ours}
    assert missing == {"odb", "odb_auto_headroom", "odb_memory_limit"}
    shown = "".join(HfArgumentParser(OdbTrainingArguments).format_help().split())
    for field in ours:
        assert "".join(f"{field.metadata['help']} (default: {field.default})".split()) in shown, field.name
        assert "gradient_accumulation_steps" not in field.metadata["help"], "which v1 does not have"
        assert field.name == "odb_attention_length" or "auto:" not in field.metadata["help"]


def test_an_unknown_strategy_is_refused_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(flags(batching_strategy="obd"))
    said = capsys.readouterr().err
    assert "argument --batching_strategy/--batching-strategy: invalid choice: 'obd'" in said
    assert "'odb'" in said
    assert "'dynamic_padding_free'" in said


def test_what_stock_refuses_is_refused_alike() -> None:
    with pytest.raises(ValueError, match="`dynamic_batching` requires `max_steps`"):
        parsed({"batching_strategy": "dynamic_batching"})
    with pytest.raises(ValueError, match="odb_dept"):
        parsed({**ODB, "odb_dept": 3})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"odb_token_budget": "auto"}, "odb_token_budget must be a number of tokens in v1, got 'auto'"),
        ({"odb_token_budget": 0}, "odb_token_budget must be a positive integer, got 0"),
        ({"odb_depth": 0}, "odb_depth must be a positive integer, got 0"),
        ({"odb_audit": "false"}, "odb_audit must be true or false, got 'false'"),
        ({"odb_idle": "skip"}, "odb needs as many micro-batches on each rank; remove odb_idle: skip"),
        (
            {"lr_scheduler_config": {"name": "cosine"}},
            "has no number of updates to make a schedule of (lr_scheduler_config) before the run ends; set max_steps",
        ),
        ({"save_epochs": 0}, "needs save_epochs above 0, not 0; remove it"),
        ({"odb_samples_per_update": 0}, "odb_samples_per_update must be a positive integer, got 0"),
        ({"dist_config": {"name": "fsdp2", "cp_size": 2}}, "dist_config must not have a cp_size above 1; set it to 1"),
        (
            {"dist_config": {"name": "deepspeed", "config_file": "x"}, "odb_samples_per_update": 4},
            "with DeepSpeed has a fixed number of micro-batches an update; remove odb_samples_per_update",
        ),
    ],
)
def test_bad_fields(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parsed({**ODB, **fields})
    parsed({key: value for key, value in fields.items() if key != "dist_config"})  # without odb nobody asks


def test_a_schedule_with_max_steps_is_v1s_business() -> None:
    assert parsed({**ODB, "lr_scheduler_config": {"name": "cosine"}, "max_steps": 5}).lr_scheduler_config is not None


def test_two_ways_to_close_an_update() -> None:
    arguments = parsed({**ODB, "odb_samples_per_update": 4, "global_batch_size": 8})
    with pytest.raises(ValueError, match="odb_samples_per_update 4 and global_batch_size 8 both say when an update"):
        arguments.recipe_config(2, MODEL)
