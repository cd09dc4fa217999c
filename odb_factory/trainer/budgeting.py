"""The Trainer's side of `odb_token_budget: auto`: its own training step, run on trial."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from odb_factory.config import OdbConfig
from odb_factory.core.group_shapes import Bounds
from odb_factory.runtime.loader import OdbDataLoader
from odb_factory.trainer.auto_budget import BudgetReport, Run, choose_budget
from odb_factory.trainer.base import TrainerBase
from odb_factory.trainer.no_trace import is_deepspeed
from odb_factory.trainer.options import AutoBudget

logger = logging.get_logger("transformers.odb_factory")


class BudgetMixin(TrainerBase):
    """Part of `OdbTrainerMixin`: finds the token budget where the recipe leaves that to us."""

    odb_config: OdbConfig
    odb_auto_budget: BudgetReport | None
    """How the budget of the last run was found; None: it was given."""
    _odb_auto: AutoBudget | None
    _odb_loader: OdbDataLoader | None
    _odb_samples_per_update: int | None
    current_gradient_accumulation_steps: int

    def _odb_choose_budget(self, model: Any) -> None:
        """Between the preparation of the model and the first batch; every rank calls it. Nothing without `AutoBudget`.

        Raises:
            ValueError, OdbError: see `choose_budget`; an optimizer that steps during the backward.
        """
        if self._odb_auto is None:
            return
        if self.args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
            raise ValueError(
                f"odb_token_budget: auto cannot try steps with optim {self.args.optim.value}, which changes the "
                "weights during the backward; set a number of tokens."
            )
        assert self._odb_loader is not None
        if self.is_world_process_zero():
            logger.info(
                "Online Dynamic Batching: looking for the largest token budget that fits; this may take some minutes."
            )
        auto, config = self._odb_auto, self.odb_config
        bounds = Bounds(
            longest=auto.longest,
            most_samples=min(config.depth, config.max_samples or config.depth, len(self._odb_loader.dataset)),
            pad_to_multiple_of=config.pad_to_multiple_of,
            dummy_tokens=config.dummy_tokens,
            max_patches=config.max_patches,
            media=auto.media,
        )
        with self._odb_within_update():
            report = choose_budget(auto, bounds, self._odb_run(model), keep_overlong=config.overlong == "keep")
        self.odb_auto_budget = report
        self.odb_config = dataclasses.replace(config, token_budget=report.token_budget)
        self._odb_loader.set_token_budget(report.token_budget)
        if self.is_world_process_zero():
            logger.info(report.recipe_line)

    def _odb_run(self, model: Any) -> Run:
        args = self.args
        varies = 2 if self._odb_samples_per_update is not None else 1
        accumulation = max(args.gradient_accumulation_steps, varies)
        train = super().training_step

        def step(batch: Any) -> Any:
            # gradients stay on their rank, as in all micro-batches of an update but the last
            alone = isinstance(model, torch.nn.parallel.DistributedDataParallel)
            with model.no_sync() if alone else contextlib.nullcontext():
                return train(model, batch)

        whole = 0
        if self.is_fsdp_enabled and accumulation > 1:  # Trainer then keeps them unsharded until the last one
            world = 1 if self.accelerator.is_fsdp2 else args.world_size
            whole = sum(p.numel() * p.element_size() * world for p in model.parameters() if p.requires_grad)
        return Run(
            model=model,
            optimizer=self.optimizer,
            device=args.device,
            rank=args.process_index,
            world_size=args.world_size,
            step=step,
            sharded=is_deepspeed(model) or bool(self.is_fsdp_enabled),
            accumulation=accumulation,
            tell=logger.info if self.is_world_process_zero() else lambda text: None,
            counted=whole,
        )

    @contextlib.contextmanager
    def _odb_within_update(self) -> Iterator[None]:
        """As between the micro-batches of an update: no step of the optimizer follows."""
        state = self.accelerator.gradient_state
        before, had = state.sync_gradients, "current_gradient_accumulation_steps" in vars(self)
        steps = self.current_gradient_accumulation_steps if had else 0
        state._set_sync_gradients(False)
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        try:
            yield
        finally:
            state._set_sync_gradients(before)
            if had:
                self.current_gradient_accumulation_steps = steps
            else:
                del self.current_gradient_accumulation_steps
