"""`OdbTrainerMixin`: Online Dynamic Batching for `transformers.Trainer`."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.utils import logging

from odb_factory.config import OdbConfig
from odb_factory.core.loss_scale import loss_scale
from odb_factory.runtime.errors import OdbError
from odb_factory.runtime.loader import OdbDataLoader
from odb_factory.runtime.messages import StepInfo
from odb_factory.runtime.observe import Observe, observe_sample
from odb_factory.trainer.callback import OdbCallback
from odb_factory.trainer.checks import check_arguments, needs_steps, schedule_kind
from odb_factory.trainer.micro import MicroBatch, to_device, zero_loss
from odb_factory.trainer.progress import SampleProgress
from odb_factory.trainer.resumable import ResumableMixin
from odb_factory.trainer.schedule import BY_SAMPLES, Position, follow

logger = logging.get_logger("transformers.odb_factory")

_UNKNOWN_STEPS = 1 << 40
"""Stands for the number of updates of an epoch, which nobody knows before its end."""


class OdbTrainerMixin(ResumableMixin):
    """Put before `transformers.Trainer` in a class's bases: `class MyTrainer(OdbTrainerMixin, Trainer)`.

    `train_dataset` is a map-style data set of processed samples, `data_collator` makes a batch of a list of them. An
    epoch is every sample once; the learning rate follows the samples; the gradient of an update is that of its mean
    loss per supervised token, over all ranks and micro-batches. Evaluation and prediction are the stock ones.

    Args:
        odb_config: see `OdbConfig`; accumulation, seed and order are taken from the training arguments.
        odb_audit: write `odb_audit.rank{r}.jsonl` into the output directory.
        odb_observe: see `OdbDataLoader`.
        odb_collate_fn: collate function of training where it differs from `data_collator`.

    Raises:
        ValueError: training arguments that contradict Online Dynamic Batching, in one sentence with the remedy.
    """

    def __init__(
        self,
        *args: Any,
        odb_config: OdbConfig,
        odb_audit: bool = False,
        odb_observe: Observe = observe_sample,
        odb_collate_fn: Callable[[list[Any]], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        check_arguments(self.args, odb_config, self.accelerator)
        self._odb_observe = odb_observe
        self._odb_collate_fn = odb_collate_fn
        self._odb_write_steps = odb_audit
        self.odb_config = dataclasses.replace(
            odb_config,
            steps_multiple=self.args.gradient_accumulation_steps,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            shuffle=odb_config.shuffle and self.args.train_sampling_strategy != "sequential",
        )
        self.odb_progress = SampleProgress(dataset_size=1, epochs=1, first_guess=1)
        self.odb_summary: dict[str, Any] = {}
        """Totals of the last run, as in `odb_summary.json`."""
        self._odb_loader = None
        self._odb_record = None
        self._odb_pending = deque()
        self._odb_trained = []
        self._odb_current: MicroBatch | None = None
        self._odb_position = None
        self._odb_nothing_left = False
        self.odb_callback = OdbCallback(
            lambda: self.odb_progress, lambda: self.callback_handler.callbacks, self._odb_announcement
        )
        self.odb_callback.on_update = self._odb_commit
        self.callback_handler.callbacks.insert(0, self.odb_callback)

    def _odb_window_bytes(self) -> str:
        nbytes = self._odb_loader.window_bytes if self._odb_loader is not None else None
        return f" or {nbytes >> 20:,} MB (odb_window_bytes)" if nbytes is not None else ""

    def _odb_announcement(self) -> str:
        config = self.odb_config
        return (
            f"Online Dynamic Batching: up to {config.token_budget:,} padded tokens a micro-batch, window of "
            f"{config.depth} samples{self._odb_window_bytes()} a rank, rule {config.alignment}, {self.args.world_size} "
            "rank(s). The number of steps is an estimate until the end; batch size and step count above do not apply."
        )

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
        batch = self.get_total_train_batch_size(args)
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

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """The micro-batches of one update. Their loss is scaled by `compute_loss`, so there is no item count."""
        batches: list[Any] = []
        infos: list[StepInfo] = []
        while len(batches) < num_batches and not (infos and infos[-1].last):
            step = next(epoch_iterator, None)
            if step is None:
                break
            batches.append(to_device(step[0], device))
            infos.append(step[1])
        if not infos and not self.odb_progress.in_epoch:
            raise OdbError(self._no_samples())
        if not infos:  # a run that was resumed, and all that was left of the epoch was dropped
            self.control.should_epoch_stop = self._odb_nothing_left = True
            return [], None
        loss_tokens = sum(info.global_loss_tokens for info in infos)
        self._odb_pending.extend(MicroBatch(info, loss_tokens) for info in infos)
        self.odb_progress.advance(infos)
        return batches, None

    def _odb_short_windows(self) -> str:
        assert self._odb_loader is not None
        rounds = self.odb_summary["rounds"] * self.args.world_size
        return (
            f"Online Dynamic Batching: odb_window_bytes ({(self._odb_loader.window_bytes or 0) >> 20:,} MB) kept "
            f"{self.odb_summary['short_windows']:,} of {rounds:,} windows below odb_depth, which costs padding; raise "
            "it if the host has the memory."
        )

    def _no_samples(self) -> str:
        assert self._odb_loader is not None
        ends = self._odb_loader.epoch_ends
        examples = "; ".join(f"{d.index}: {d.reason}" for d in (ends[-1].dropped[:3] if ends else ()))
        return (
            f"this epoch has no valid sample: all {len(self._odb_loader.dataset)} were dropped ({examples}); "
            "check the data set."
        )

    # -- one update

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

    def _odb_commit(self) -> None:
        """An update is done: what it was made of counts as trained from now on."""
        assert self._odb_record is not None
        assert self._odb_loader is not None
        for info in self._odb_trained:
            self._odb_record.audit.record(info, self.odb_progress.updates)
        self._odb_trained.clear()
        self._odb_loader.commit()
        self._odb_progress_saved = self.odb_progress.state()
        if self.odb_progress.epoch_over:
            self._odb_record.close_epoch(self._odb_loader.epoch_ends[-1])

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One micro-batch; see Trainer."""
        self._odb_current = self._odb_pending.popleft()
        try:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            self._odb_trained.append(self._odb_current.info)
        finally:
            self._odb_last_info, self._odb_current = self._odb_current.info, None
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """In training: the micro-batch's mean loss, scaled so that the update's loss is per supervised token.

        This is the one normaliser that acts: transformers' item count is switched off in `get_batch_samples`, and its
        division by the accumulation steps, which then follows in `training_step`, is undone here.
        """
        micro = self._odb_current
        if micro is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        factor = loss_scale(micro.info.loss_tokens, micro.update_loss_tokens, self.args.world_size)
        if factor == 0.0:
            return zero_loss(model, inputs)
        if self.compute_loss_func is None:
            factor *= self.current_gradient_accumulation_steps
        return super().compute_loss(model, inputs, *args, **kwargs) * factor

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Exact counts over all ranks, from the exchange: no gather, and fillers do not count."""
        what = self.args.include_num_input_tokens_seen
        if what != "no":
            info = self._odb_last_info
            self.state.num_input_tokens_seen += (
                info.global_tokens if what == "non_padding" else info.global_padded_tokens
            )

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
        unknown, sentence = needs_steps(self.args)
        if unknown:
            raise ValueError(f"odb: {sentence}")
        by_samples = schedule_kind(self.args) in BY_SAMPLES
        scheduler = super().create_scheduler(self.odb_progress.total if by_samples else num_training_steps, optimizer)
        if by_samples:
            warmup = int(self.args.warmup_steps) if self.args.warmup_steps >= 1 else 0
            self._odb_position = Position(self.odb_progress, warmup)
            follow(scheduler, self._odb_position)
        return scheduler

    # -- the end

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        if self.args.max_steps <= 0:
            self.state.max_steps = self.state.global_step
        emitted = self.odb_progress.emitted - self._odb_emitted_before
        output = super()._finalize_training(trial, emitted, start_time)
        assert self._odb_record is not None
        self.odb_summary = self._odb_record.finish(write=self.is_world_process_zero())
        if self.odb_summary["short_windows"]:
            logger.warning(self._odb_short_windows())
        output.metrics.update(
            odb_steps=self.odb_summary["steps"],
            odb_fillers=self.odb_summary["fillers"],
            odb_samples=self.odb_summary["samples"],
            odb_unique=self.odb_summary["unique"],
            odb_dropped=len(self.odb_summary["dropped_samples"]),
            odb_padding=self.odb_summary["padding"],
        )
        return output
