"""`OdbTrainerMixin`: Online Dynamic Batching for `transformers.Trainer`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from odb_factory.config import OdbConfig
from odb_factory.runtime.loader import OdbDataLoader
from odb_factory.runtime.observe import Observe, observe_sample
from odb_factory.trainer.bar import HeaderFilter
from odb_factory.trainer.budgeting import BudgetMixin
from odb_factory.trainer.checks import check_arguments, check_label_smoothing
from odb_factory.trainer.options import AutoBudget, with_arguments
from odb_factory.trainer.progress import SampleProgress
from odb_factory.trainer.reporting import ReportingMixin
from odb_factory.trainer.resumable import ResumableMixin
from odb_factory.trainer.schedule import Position, follow, pace_of
from odb_factory.trainer.updates import UpdateMixin

_UNKNOWN_STEPS = 1 << 40
"""Stands for the number of updates of an epoch, which nobody knows before its end."""


class OdbTrainerMixin(ResumableMixin, UpdateMixin, ReportingMixin, BudgetMixin):
    """Put before `transformers.Trainer` in a class's bases: `class MyTrainer(OdbTrainerMixin, Trainer)`.

    `train_dataset` is a map-style data set of processed samples, `data_collator` makes a batch of a list of them. An
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
        self._odb_samples_per_update = odb_samples_per_update
        self._odb_auto = odb_auto_budget
        self.odb_auto_budget = None
        self._odb_observe = odb_observe
        self._odb_check_targets = odb_observe is observe_sample
        self._odb_collate_fn = odb_collate_fn
        self._odb_write_steps = odb_audit
        self.odb_config = with_arguments(odb_config, self.args)
        self.odb_progress = SampleProgress(dataset_size=1, epochs=1, first_guess=1)
        self.odb_summary = {}
        self._odb_loader = None
        self._odb_record = None
        self._odb_pending = deque()
        self._odb_trained = []
        self._odb_current = None
        self._odb_position = None
        self._odb_nothing_left = False
        self._odb_last_infos = []
        self._odb_figures = {}
        self._odb_header = HeaderFilter()
        self._odb_add_callbacks()

    # -- data

    def get_train_dataloader(self) -> OdbDataLoader:
        """The loader of this run; yields `(batch, StepInfo)`."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        if self._odb_loader is not None:
            self._odb_loader.close()
        self._odb_loader = OdbDataLoader(
            self.train_dataset,
            self._odb_collate_fn or self.data_collator,
            self.odb_config,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            observe=self._odb_observe,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )
        self._odb_loader.auto_commit = False
        return self._odb_loader

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """As in Trainer, but counted in samples: the number of steps is a first guess, refined as the run goes."""
        if not isinstance(dataloader, OdbDataLoader):
            return super().set_initial_training_values(args, dataloader)
        size = len(dataloader.dataset)
        batch = self._odb_samples_per_update or self.get_total_train_batch_size(args)
        per_epoch = max(1, -(-size // batch))
        epochs = float(args.num_train_epochs)
        self.odb_progress = SampleProgress(
            dataset_size=size, epochs=epochs, first_guess=max(1, round(per_epoch * epochs))
        )
        if args.max_steps > 0:
            # an epoch has at least one update, so that many epochs are always enough
            return args.max_steps, per_epoch, size, args.max_steps * batch, batch, per_epoch, args.max_steps
        updates = self.odb_progress.first_guess
        return -int(-epochs // 1), per_epoch, size, self.odb_progress.total, batch, per_epoch, updates

    # -- an epoch

    def _run_epoch(self, **kwargs: Any) -> None:
        # The stock loop counts to these; OdbCallback ends the epoch when its last step is done.
        kwargs["num_update_steps_per_epoch"] = _UNKNOWN_STEPS
        kwargs["steps_in_epoch"] = _UNKNOWN_STEPS * self.args.gradient_accumulation_steps
        assert self._odb_record is not None
        self._odb_record.open_epoch()
        super()._run_epoch(**kwargs)
        if self._odb_nothing_left:  # Trainer then takes the run to be over
            self.control.should_training_stop = self._odb_nothing_left = False
        self._odb_record.close_epoch(None)  # of an epoch that max_steps or a callback ended
        if not (self.odb_progress.epoch_over or self.control.should_training_stop):
            self.odb_progress.cut_epoch()

    # -- schedule

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule of the training arguments, by progress in samples unless `max_steps` is given."""
        if self.args.max_steps > 0:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is not None:
            raise ValueError(
                "odb: a learning rate schedule from the DeepSpeed configuration counts steps, whose number is not "
                "known; remove `scheduler` and `optimizer` from it and set lr_scheduler_type and optim."
            )
        try:
            pace = pace_of(self.args)
        except ValueError as error:
            raise ValueError(f"odb: {error}") from None
        given = self.args.lr_scheduler_kwargs
        if given is not None:  # LLaMA-Factory adds lengths to it, here in samples
            self.args.lr_scheduler_kwargs = dict(given)
        try:
            scheduler = super().create_scheduler(self.odb_progress.total, optimizer)
        finally:
            self.args.lr_scheduler_kwargs = given
        if pace is not None:
            warmup = self.args.get_warmup_steps(self.odb_progress.total)
            self._odb_position = Position(self.odb_progress, pace, warmup)
            follow(scheduler, self._odb_position)
        return scheduler
