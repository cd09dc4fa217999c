"""Recipes that contradict `odb: true`: refused before anything is loaded, in one sentence with the remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from odb_factory.config import OdbConfig
from odb_factory.trainer.checks import contradictions, needs_steps, unshifted
from odb_factory.trainer.options import AUTO
from odb_factory.trainer.resume import find_state

COLLATOR_PAD_MULTIPLE = 8
"""LLaMA-Factory pads training batches to a multiple of this (train/sft/workflow.py)."""


def check_recipe(data_args: Any, training_args: Any, finetuning_args: Any) -> None:
    """Raise ValueError for a combination that cannot work, or would silently do something else than asked."""
    problems = (
        (
            data_args.packing or data_args.neat_packing,
            "packing and neat_packing build fixed batches before training; remove them from the recipe.",
        ),
        (
            data_args.streaming,
            "streaming is not supported, since an epoch must be known to emit each sample once; remove streaming.",
        ),
        (
            data_args.tokenized_path is not None,
            "tokenized_path stores batches' input before training, while odb tokenizes online; remove tokenized_path.",
        ),
        (
            not data_args.ignore_pad_token_for_loss,
            "ignore_pad_token_for_loss: false makes padding a target, so the loss would depend on which samples share "
            "a batch; remove it.",
        ),
        (
            bool(training_args.label_smoothing_factor) and _takes_images(data_args.template),
            unshifted("models with images"),
        ),
        *contradictions(training_args, finetuning_args.odb_samples_per_update),
        needs_steps(training_args),
        (
            not training_args.do_train,
            "there is no training in this recipe (do_train); remove odb, which has no effect on evaluation.",
        ),
    )
    for applies, sentence in problems:
        if applies:
            raise ValueError(f"odb: true contradicts this recipe: {sentence}")
    find_state(training_args.resume_from_checkpoint, training_args.output_dir)


def _takes_images(template: str | None) -> bool:
    """Whether a template is one of a model with images; an unknown one is LLaMA-Factory's to refuse."""
    from llamafactory.data.template import TEMPLATES

    known = TEMPLATES.get(template)
    return known is not None and known.mm_plugin.image_token is not None


def check_sharded(finetuning_args: Any, training_args: Any) -> None:
    """Raise ValueError for what would leave ranks waiting for one another where models are split over them."""
    sharded = training_args.deepspeed or training_args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "") == "true"
    if sharded and getattr(finetuning_args, "use_asft_loss", False):
        # its reference model is run in the loss, which a micro-batch of weight zero does not compute
        raise ValueError(
            "odb: true does not support use_asft_loss with DeepSpeed or FSDP; remove one of them, or use DDP."
        )


def token_budget(finetuning_args: Any, data_args: Any, training_args: Any) -> int:
    """The token budget of a recipe: as given, else the worst case of its fixed batches (tokens).

    That also stands in for `auto` until the budget is found, which is when training begins.
    """
    if finetuning_args.odb_token_budget not in (None, AUTO):
        budget: int = finetuning_args.odb_token_budget
        return budget
    worst: int = training_args.per_device_train_batch_size * data_args.cutoff_len
    return worst


def below_cutoff(config: OdbConfig, cutoff_len: int) -> str | None:
    """What a user should know where samples may exceed the budget; None: nothing."""
    if config.token_budget >= cutoff_len or config.overlong != "keep":
        return None
    return (
        f"odb_token_budget {config.token_budget} is below cutoff_len {cutoff_len}: samples longer than the budget are "
        "trained on alone, in micro-batches above it."
    )


def recipe_attention(finetuning_args: Any, data_args: Any, load_config: Callable[[], Any]) -> int | None:
    """`OdbConfig.attention_length` of a recipe; `load_config` gives the configuration of its model."""
    trained = finetuning_args.finetuning_type == "full"
    length: int | None = finetuning_args.attention_length(load_config, longest=data_args.cutoff_len, trained=trained)
    return length


def recipe_config(finetuning_args: Any, data_args: Any, training_args: Any) -> OdbConfig:
    """The `OdbConfig` of a recipe, as far as its fields say it."""
    config: OdbConfig = finetuning_args.odb_config(
        budget=token_budget(finetuning_args, data_args, training_args),
        pad_to_multiple_of=COLLATOR_PAD_MULTIPLE,
        shuffle=not finetuning_args.disable_shuffling,
    )
    return config
