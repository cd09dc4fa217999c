"""A supervised fine-tuning run with Online Dynamic Batching: what stands at the seams while it lasts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from llamafactory.extras import logging

from odb_factory.config import OdbConfig
from odb_factory.llamafactory.checks import below_cutoff, check_recipe, check_sharded, recipe_attention, recipe_config
from odb_factory.llamafactory.collator import OdbCollator, dummy_tokens
from odb_factory.llamafactory.media import pixel_dtype
from odb_factory.llamafactory.online_dataset import OnlineDataset, observe_online
from odb_factory.llamafactory.seams import PREPROCESS, RUN_SFT, TRAINER, registry
from odb_factory.llamafactory.shapes import auto_budget
from odb_factory.llamafactory.trainer import OdbSeq2SeqTrainer
from odb_factory.trainer.options import AUTO, check_samples_per_update

logger = logging.get_logger(__name__)


def run_online(
    model_args: Any,
    data_args: Any,
    training_args: Any,
    finetuning_args: Any,
    generating_args: Any,
    callbacks: Any = None,
) -> Any:
    """LLaMA-Factory's `run_sft` with our data and our trainer.

    Raises:
        ValueError: the recipe contradicts `odb: true`.
        SeamError: this LLaMA-Factory does not fit.
    """
    check_recipe(data_args, training_args)
    check_sharded(finetuning_args, training_args)
    check_samples_per_update(finetuning_args.odb_samples_per_update, training_args.gradient_accumulation_steps)
    config = recipe_config(finetuning_args, data_args, training_args)
    auto = finetuning_args.odb_token_budget == AUTO
    if not auto and (warning := below_cutoff(config, data_args.cutoff_len)):
        logger.warning_rank0(warning)
    run = _OdbRun(
        config,
        functools.partial(recipe_attention, finetuning_args, data_args),
        pixel_dtype(model_args.compute_dtype),
        audit=bool(finetuning_args.odb_audit),
        samples_per_update=finetuning_args.odb_samples_per_update,
        auto=(
            {
                "longest": data_args.cutoff_len,
                "headroom": finetuning_args.odb_auto_headroom,
                "memory_limit": finetuning_args.odb_memory_limit,
            }
            if auto
            else None
        ),
    )
    with registry.replaced({PREPROCESS: run.preprocess, TRAINER: run.make_trainer}):
        stock = registry.original(RUN_SFT)
        return stock(model_args, data_args, training_args, finetuning_args, generating_args, callbacks)


@dataclass(frozen=True)
class _OdbRun:
    """What stands at the seams while a run lasts."""

    config: OdbConfig
    attention_length: Callable[[Callable[[], Any]], int | None]
    """Asks for the model's configuration where it needs it."""
    dtype: torch.dtype | None
    audit: bool
    samples_per_update: int | None
    auto: dict[str, Any] | None
    """What `AutoBudget` gets from the recipe."""

    def preprocess(
        self,
        dataset: Any,
        data_args: Any,
        training_args: Any,
        stage: str,
        template: Any,
        tokenizer: Any,
        processor: Any = None,
        is_eval: bool = False,
    ) -> Any:
        """In place of `_get_preprocessed_dataset`: the training split is processed online, the others as ever."""
        if dataset is None or is_eval:
            stock = registry.original(PREPROCESS)
            return stock(dataset, data_args, training_args, stage, template, tokenizer, processor, is_eval)
        online = OnlineDataset(
            dataset,
            template=template,
            tokenizer=tokenizer,
            processor=processor,
            data_args=data_args,
            dtype=self.dtype,
        )
        if training_args.should_log:
            online.show_example(skip_bad=self.config.on_bad_sample == "skip", max_bad=self.config.max_bad_samples)
        return online

    def make_trainer(self, **arguments: Any) -> Any:
        """In place of `CustomSeq2SeqTrainer`."""
        collator = arguments["data_collator"]
        config = dataclasses.replace(
            self.config,
            pad_to_multiple_of=collator.pad_to_multiple_of or 1,
            dummy_tokens=dummy_tokens(collator.template, collator.tokenizer, collator.processor),
            attention_length=self.attention_length(lambda: arguments["model"].config),
        )
        collate = OdbCollator(collator, self.dtype)
        auto = auto_budget(arguments["train_dataset"], collator, collate, self.auto) if self.auto else None
        return OdbSeq2SeqTrainer(
            odb_config=config,
            odb_auto_budget=auto,
            odb_audit=self.audit,
            odb_samples_per_update=self.samples_per_update,
            odb_observe=observe_online,
            odb_collate_fn=collate,
            **arguments,
        )
