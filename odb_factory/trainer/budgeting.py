"""The Trainer's side of `odb_token_budget: auto`: its own training step, run on trial."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from odb_factory.config import OdbConfig
from odb_factory.core.group_shapes import Bounds
from odb_factory.trainer import hf_adapter
from odb_factory.trainer.auto_budget import BudgetReport, Run, choose_budget
from odb_factory.trainer.no_trace import is_deepspeed
from odb_factory.trainer.options import AutoBudget

logger = logging.get_logger("transformers.odb_factory")


def find_budget(
    trainer: Any,
    model: Any,
    stock_step: Callable[..., Any],
    *,
    auto: AutoBudget,
    config: OdbConfig,
    dataset_size: int,
    varies: bool,
) -> BudgetReport:
    """Search between the preparation of the model and the first batch; every rank calls it.

    Args:
        trainer: the Trainer.
        model: as it was prepared.
        stock_step: its own `training_step`.
        auto: what the search needs to know.
        config: of the run; its token budget has no effect.
        dataset_size: samples of the dataset.
        varies: the number of micro-batches of an update does.

    Raises:
        ValueError, OdbError: see `choose_budget`; an optimizer that steps during the backward.
    """
    if trainer.args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
        raise ValueError(
            f"odb_token_budget: auto cannot try steps with optim {trainer.args.optim.value}, which changes the "
            "weights during the backward; set a number of tokens."
        )
    first = trainer.is_world_process_zero()
    if first:
        logger.info(
            "Online Dynamic Batching: looking for the largest token budget that fits; this may take some minutes."
        )
    bounds = Bounds(
        longest=auto.longest,
        most_samples=min(config.depth, config.max_samples or config.depth, dataset_size),
        pad_to_multiple_of=config.pad_to_multiple_of,
        dummy_tokens=config.dummy_tokens,
        max_patches=config.max_patches,
        media=auto.media,
    )
    accumulation = max(trainer.args.gradient_accumulation_steps, 2 if varies else 1)
    run = _run_of(trainer, model, stock_step, accumulation)
    with hf_adapter.trial_steps(trainer):
        report = choose_budget(auto, bounds, run, keep_overlong=config.overlong == "keep")
    if first:
        logger.info(report.recipe_line)
    return report


def _run_of(trainer: Any, model: Any, stock_step: Callable[..., Any], accumulation: int) -> Run:
    args = trainer.args

    def step(batch: Any) -> Any:
        # gradients stay on their rank, as in all micro-batches of an update but the last
        alone = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        with model.no_sync() if alone else contextlib.nullcontext():
            return stock_step(model, batch)

    whole = 0
    if trainer.is_fsdp_enabled and accumulation > 1:  # Trainer then keeps them unsharded until the last one
        world = 1 if trainer.accelerator.is_fsdp2 else args.world_size
        whole = sum(p.numel() * p.element_size() * world for p in model.parameters() if p.requires_grad)
    return Run(
        model=model,
        optimizer=trainer.optimizer,
        device=args.device,
        rank=args.process_index,
        world_size=args.world_size,
        step=step,
        sharded=is_deepspeed(model) or bool(trainer.is_fsdp_enabled),
        accumulation=accumulation,
        tell=logger.info if trainer.is_world_process_zero() else lambda text: None,
        counted=whole,
    )
