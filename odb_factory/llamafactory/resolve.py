"""From a recipe and the model that it trains to the one `OdbConfig` of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from odb_factory.config import OdbConfig
from odb_factory.llamafactory.fields import OF_CONFIG, PREFIX
from odb_factory.option import AUTO
from odb_factory.trainer.attention import attention_length
from odb_factory.trainer.options import fields_of


def resolve(
    given: Any, *, fixed_budget: int, model_config: Callable[[], Any], longest: int, trained: bool, **more: Any
) -> OdbConfig:
    """The `OdbConfig` of a run.

    Args:
        given: LLaMA-Factory's arguments with our fields, which were checked.
        fixed_budget: the worst case of the recipe's fixed batches (tokens). It is the budget where none is given, and
            stands in for `auto` until the trainer has found that.
        model_config: gives the `PretrainedConfig` of the model that is trained; called where it is needed.
        longest, trained: see `attention_length`.
        more: fields of `OdbConfig` that are no recipe fields.

    Raises:
        ValueError: values that contradict each other; the text names the recipe field.
    """
    values = {name: getattr(given, field.name) for name, field in OF_CONFIG.items()}
    values["token_budget"] = token_budget(given, fixed_budget)
    if values["attention_length"] == AUTO:
        values["attention_length"] = attention_length(model_config(), longest=longest, trained=trained)
    try:
        return OdbConfig(**values, **more)
    except ValueError as error:
        raise ValueError(f"{PREFIX}{error}") from None


def resolve_recipe(
    finetuning_args: Any,
    data_args: Any,
    training_args: Any,
    *,
    model_config: Callable[[], Any],
    pad_to_multiple_of: int,
    dummy_tokens: int,
) -> OdbConfig:
    """The `OdbConfig` of a recipe with `odb: true`; see `resolve`, and `OdbConfig` for the last two."""
    return resolve(
        finetuning_args,
        fixed_budget=fixed_budget(data_args, training_args),
        model_config=model_config,
        longest=data_args.cutoff_len,
        trained=finetuning_args.finetuning_type == "full",
        pad_to_multiple_of=pad_to_multiple_of,
        dummy_tokens=dummy_tokens,
        **fields_of(training_args, shuffle=not finetuning_args.disable_shuffling),
    )


def token_budget(given: Any, fixed_budget: int) -> int:
    """The budget of a run, or what stands in for `auto`; see `resolve` for the arguments."""
    budget: int = fixed_budget if given.odb_token_budget in (None, AUTO) else given.odb_token_budget
    return budget


def fixed_budget(data_args: Any, training_args: Any) -> int:
    """The worst case of a recipe's fixed batches (tokens)."""
    worst: int = training_args.per_device_train_batch_size * data_args.cutoff_len
    return worst
