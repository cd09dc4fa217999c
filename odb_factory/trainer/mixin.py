"""`OdbTrainerMixin`: Online Dynamic Batching for `transformers.Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from odb_factory.config import OdbConfig
from odb_factory.runtime.loader import OdbDataLoader
from odb_factory.runtime.observe import Observe, observe_sample
from odb_factory.trainer.auto_budget import BudgetReport
from odb_factory.trainer.callback import OdbCallback
from odb_factory.trainer.checks import check_arguments, check_label_smoothing
from odb_factory.trainer.hf_adapter import TrainerAdapter
from odb_factory.trainer.ledger import Ledger
from odb_factory.trainer.options import AutoBudget
from odb_factory.trainer.resume import find_state
from odb_factory.trainer.run import TrainerRun
from odb_factory.trainer.updates import WholeUpdate


class OdbTrainerMixin(TrainerAdapter):
    """Put before `transformers.Trainer` in a class's bases: `class MyTrainer(OdbTrainerMixin, Trainer)`.

    `train_dataset` is a map-style dataset of processed samples, `data_collator` makes a batch of a list of them. An
    epoch is every sample once; the learning rate follows the samples; the gradient of an update is that of its mean
    loss per supervised token, over all ranks and micro-batches. Evaluation and prediction are the stock ones.

    That takes a loss that is a mean over `labels[:, 1:] != -100`, as of all causal models of transformers. A
    `compute_loss_func` of your own must be such a mean, too; its `num_items_in_batch` is None.

    Args:
        odb_config: see `OdbConfig`; accumulation, seed and order are taken from the training arguments.
        odb_samples_per_update: an update closes when so many samples were emitted since the last one, over all ranks
            (at the latest with the epoch), instead of after `gradient_accumulation_steps` micro-batches.
        odb_auto_budget: find the largest token budget that fits when training begins; that of `odb_config` is not used.
        odb_audit: write `odb_audit.rank{r}.jsonl` into the output directory.
        odb_observe: see `OdbDataLoader`. It must count what the loss is a mean over.
        odb_collate_fn: collate function of training where it differs from `data_collator`.

    Raises:
        ValueError: training arguments that contradict Online Dynamic Batching, in one sentence with the remedy.
    """

    def __init__(
        self,
        *args: Any,
        odb_config: OdbConfig,
        odb_samples_per_update: int | None = None,
        odb_auto_budget: AutoBudget | None = None,
        odb_audit: bool = False,
        odb_observe: Observe = observe_sample,
        odb_collate_fn: Callable[[list[Any]], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_arguments(self.args, odb_config, self.accelerator, odb_samples_per_update)
        check_label_smoothing(self.args, self.model)
        self.odb_run = TrainerRun(
            self,
            odb_config,
            stock_step=super().training_step,
            samples_per_update=odb_samples_per_update,
            auto=odb_auto_budget,
            audit=odb_audit,
            observe=odb_observe,
            collate_fn=odb_collate_fn,
        )

    @property
    def odb_config(self) -> OdbConfig:
        """The settings of the run, as the training arguments and the search for a budget left them."""
        return self.odb_run.config

    @property
    def odb_progress(self) -> Ledger:
        """How far the run is, and what it did."""
        return self.odb_run.ledger

    @property
    def odb_summary(self) -> dict[str, Any]:
        """Figures of the last run, as in `odb_summary.json`."""
        return self.odb_run.summary

    @property
    def odb_callback(self) -> OdbCallback:
        """Keeps what the Trainer shows true; first of its callbacks."""
        return self.odb_run.callback

    @property
    def odb_auto_budget(self) -> BudgetReport | None:
        """How the budget of the last run was found; None: it was given."""
        return self.odb_run.budget

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See Trainer. The loader's processes end with the run, however it ends.

        Raises:
            ValueError, StateError: `resume_from_checkpoint` names no complete checkpoint, or one that was saved without
                ODB, or of a run with another dataset, seed or order.
        """
        resume = args[0] if args else kwargs.get("resume_from_checkpoint")
        find_state(resume, self.args.output_dir)  # better now than after the model was loaded
        self.odb_run.updates.reset()
        try:
            return super().train(*args, **kwargs)
        finally:
            self.odb_run.close()

    def get_train_dataloader(self) -> OdbDataLoader:
        """The loader of this run; yields `(batch, StepInfo)`."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        return self.odb_run.make_loader(self.train_dataset, self.data_collator)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """As in Trainer, but counted in samples: the number of steps is a first guess, refined as the run goes."""
        if not isinstance(dataloader, OdbDataLoader):
            return super().set_initial_training_values(args, dataloader)
        return self.odb_run.expect(len(dataloader.dataset), self.get_total_train_batch_size(args))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule of the training arguments, by progress in samples unless `max_steps` is given."""
        if self.args.max_steps > 0:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is not None:
            raise ValueError(
                "odb: a learning rate schedule from the DeepSpeed configuration counts steps, whose number is not "
                "known; remove `scheduler` and `optimizer` from it and set lr_scheduler_type and optim."
            )
        stock = super().create_scheduler
        return self.odb_run.make_schedule(lambda steps: stock(steps, optimizer))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """The micro-batches of one update. Their loss is scaled by `compute_loss`, so there is no count of items."""
        batches = self.odb_run.updates.collect(epoch_iterator, num_batches, device)
        if batches is None:  # a run that was resumed, and all that was left of the epoch was dropped
            self.control.should_epoch_stop = self.odb_run.nothing_was_left = True
        return batches or [], None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One micro-batch, or all of an update; see Trainer."""
        return self.odb_run.updates.train(model, inputs, num_items_in_batch)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """In training: the micro-batch's mean loss, scaled so that the update's loss is per supervised token."""
        stock = super().compute_loss
        return self.odb_run.updates.loss(model, inputs, lambda: stock(model, inputs, *args, **kwargs))

    def floating_point_ops(self, inputs: Any) -> Any:
        """See Trainer."""
        stock = super().floating_point_ops
        if isinstance(inputs, WholeUpdate):
            return sum(stock(batch) for batch in inputs.batches)
        return stock(inputs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in Trainer; what is logged of a step has the figures since the last time too, see `figures_of`."""
        if "loss" in logs:
            logs.update(self.odb_run.take_figures())
        super().log(logs, *args, **kwargs)
