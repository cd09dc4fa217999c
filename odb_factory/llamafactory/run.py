"""A supervised fine-tuning run with Online Dynamic Batching: what stands at the seams while it lasts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from llamafactory.extras import logging

from odb_factory.config import check_budget
from odb_factory.llamafactory.checks import below_cutoff, check_recipe, check_sharded
from odb_factory.llamafactory.collator import COLLATOR_PAD_MULTIPLE, OdbCollator, dummy_tokens
from odb_factory.llamafactory.media import pixel_dtype
from odb_factory.llamafactory.online_dataset import OnlineDataset, observe_online
from odb_factory.llamafactory.resolve import fixed_budget, resolve_recipe, token_budget
from odb_factory.llamafactory.seams import PREPROCESS, RUN_SFT, TRAINER, registry
from odb_factory.llamafactory.shapes import auto_budget
from odb_factory.llamafactory.trainer import OdbSeq2SeqTrainer
from odb_factory.option import AUTO
from odb_factory.trainer.options import AutoBudget, check_samples_per_update

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
    check_recipe(data_args, training_args, finetuning_args)
    check_sharded(finetuning_args, training_args)
    check_samples_per_update(finetuning_args.odb_samples_per_update, training_args.gradient_accumulation_steps)
    budget = token_budget(finetuning_args, fixed_budget(data_args, training_args))
    check_budget(budget, COLLATOR_PAD_MULTIPLE, "odb_token_budget")  # before data and model are loaded
    warning = below_cutoff(budget, finetuning_args.odb_overlong, data_args.cutoff_len)
    if warning and finetuning_args.odb_token_budget != AUTO:
        logger.warning_rank0(warning)
    run = _OdbRun(finetuning_args, data_args, training_args, pixel_dtype(model_args.compute_dtype))
    with registry.replaced({PREPROCESS: run.preprocess, TRAINER: run.make_trainer}):
        stock = registry.original(RUN_SFT)
        return stock(model_args, data_args, training_args, finetuning_args, generating_args, callbacks)


@dataclass(frozen=True)
class _OdbRun:
    """What stands at the seams while a run lasts."""

    finetuning_args: Any
    data_args: Any
    training_args: Any
    dtype: torch.dtype | None

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
            given = self.finetuning_args
            online.show_example(skip_bad=given.odb_on_bad_sample == "skip", max_bad=given.odb_max_bad_samples)
        return online

    def make_trainer(self, **arguments: Any) -> Any:
        """In place of `CustomSeq2SeqTrainer`."""
        given, collator = self.finetuning_args, arguments["data_collator"]
        config = resolve_recipe(
            given,
            self.data_args,
            self.training_args,
            model_config=lambda: arguments["model"].config,
            pad_to_multiple_of=collator.pad_to_multiple_of or 1,
            dummy_tokens=dummy_tokens(collator.template, collator.tokenizer, collator.processor),
        )
        collate = OdbCollator(collator, self.dtype)
        return OdbSeq2SeqTrainer(
            odb_config=config,
            odb_auto_budget=self._auto_budget(arguments["train_dataset"], collator, collate),
            odb_audit=given.odb_audit,
            odb_samples_per_update=given.odb_samples_per_update,
            odb_observe=observe_online,
            odb_collate_fn=collate,
            **arguments,
        )

    def _auto_budget(self, dataset: OnlineDataset, collator: Any, collate: OdbCollator) -> AutoBudget | None:
        given = self.finetuning_args
        if given.odb_token_budget != AUTO:
            return None
        return auto_budget(
            dataset,
            collator,
            collate,
            {
                "longest": self.data_args.cutoff_len,
                "headroom": given.odb_auto_headroom,
                "memory_limit": given.odb_memory_limit,
            },
        )
