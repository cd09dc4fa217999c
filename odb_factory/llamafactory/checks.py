"""Recipes that contradict `odb: true`: refused before anything is loaded, in one sentence with the remedy."""

from __future__ import annotations

import os
from typing import Any

from odb_factory.trainer.checks import contradictions, needs_steps, unshifted
from odb_factory.trainer.resume import find_state


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


def below_cutoff(budget: int, overlong: str, cutoff_len: int) -> str | None:
    """What a user should know where samples may exceed the budget; None: nothing."""
    if budget >= cutoff_len or overlong != "keep":
        return None
    return (
        f"odb_token_budget {budget} is below cutoff_len {cutoff_len}: samples longer than the budget are trained on "
        "alone, in micro-batches above it."
    )
