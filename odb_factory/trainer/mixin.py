"""`OdbTrainerMixin`: Online Dynamic Batching for `transformers.Trainer`."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
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
from odb_factory.trainer.record import RunRecord
from odb_factory.trainer.report import Audit
from odb_factory.trainer.resume import load_state, save_state
from odb_factory.trainer.schedule import BY_SAMPLES, Position, follow

logger = logging.get_logger("transformers.odb_factory")

_Base: Any = object
"""The mixin's base for type checkers: all that it calls is found in `Trainer`, later in the order of resolution."""

_UNKNOWN_STEPS = 1 << 40
"""Stands for the number of updates of an epoch, which nobody knows before its end."""


class OdbTrainerMixin(_Base):
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
        self._odb_loader: OdbDataLoader | None = None
        self._odb_record: RunRecord | None = None
        self._odb_pending: deque[MicroBatch] = deque()
        self._odb_current: MicroBatch | None = None
        self._odb_position: Position | None = None
        self._odb_resumed: dict[str, Any] | None = None
        self.odb_callback = OdbCallback(
            lambda: self.odb_progress, lambda: self.callback_handler.callbacks, self._odb_announcement()
        )
        self.odb_callback.on_epoch_over = self._odb_close_epoch
        self.callback_handler.callbacks.insert(0, self.odb_callback)

    def _odb_announcement(self) -> str:
        config = self.odb_config
        return (
            f"Online Dynamic Batching: up to {config.token_budget:,} padded tokens a micro-batch, window of "
            f"{config.depth} samples a rank, rule {config.alignment}, {self.args.world_size} rank(s). The number of "
            "steps is an estimate until the end; batch size and step count above do not apply."
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
        if not infos:
            raise OdbError(self._no_samples())
        loss_tokens = sum(info.global_loss_tokens for info in infos)
        self._odb_pending.extend(MicroBatch(info, loss_tokens) for info in infos)
        self.odb_progress.advance(infos)
        return batches, None

    def _short_windows(self) -> str:
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
        self._odb_record.close_epoch(None)  # of an epoch that max_steps ended

    def _odb_close_epoch(self) -> None:
        assert self._odb_record is not None
        assert self._odb_loader is not None
        self._odb_record.close_epoch(self._odb_loader.epoch_ends[-1])

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One micro-batch; see Trainer."""
        self._odb_current = self._odb_pending.popleft()
        try:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            if self._odb_record is not None:
                self._odb_record.audit.record(self._odb_current.info, self.odb_progress.updates)
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
                "known; remove `scheduler` from it and set lr_scheduler_type."
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

    # -- the run

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See Trainer. The loader's processes end with the run, however it ends.

        Raises:
            ValueError, StateError: `resume_from_checkpoint` names a checkpoint that was saved without ODB, or of a run
                with another data set, seed or order.
        """
        resume = args[0] if args else kwargs.get("resume_from_checkpoint")
        if isinstance(resume, str):
            load_state(resume)  # better now than after the model was loaded
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._odb_loader is not None:
                self._odb_loader.close()
            if self._odb_record is not None:
                self._odb_record.audit.close()

    def _init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, resume_from_checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """As in Trainer; a run that is resumed goes on with the samples that are left, not with a number of steps."""
        result: tuple[int, int] = super()._init_training_state(
            max_steps, per_epoch, epochs, resume_from_checkpoint, trial
        )
        self._odb_resumed = None
        if resume_from_checkpoint is None:
            return result
        if self.args.ignore_data_skip:
            raise ValueError("odb: ignore_data_skip would train on samples twice in an epoch; remove it.")
        assert self._odb_loader is not None
        saved = self._odb_resumed = load_state(resume_from_checkpoint)
        self._odb_loader.load_state_dict(saved["loader"])
        self.odb_progress.restore(saved["progress"])
        if 0 < self.args.max_steps <= self.state.global_step:
            return epochs, 0
        logger.info(
            f"Online Dynamic Batching: {saved['progress']['in_epoch']:,} of {self.odb_progress.dataset_size:,} samples "
            f"of epoch {saved['loader']['epoch'] + 1} are done; they are left out without being read."
        )
        return saved["loader"]["epoch"], 0

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        saved = self._odb_resumed
        audit = Audit(
            self.args.output_dir,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            dataset_size=self.odb_progress.dataset_size,
            token_budget=self.odb_config.token_budget,
            write_steps=self._odb_write_steps,
            keep_updates=saved["progress"]["updates"] if saved else 0,
        )
        self._odb_record = RunRecord(audit, world_size=self.args.world_size, device=self.args.device)
        self._odb_emitted_before = self.odb_progress.emitted
        if saved is not None:
            audit.restore(saved["audit"])
            if self._odb_position is not None:
                self._odb_position.handled_in_warmup = saved["handled_in_warmup"]
        return prepared

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        # On several CPU ranks Trainer loads to `cpu:0`, which torch does not know as a place to load to.
        if checkpoint is not None and self.args.device.type == "cpu":
            self.args.__dict__["_setup_devices"] = torch.device("cpu")
        super()._load_optimizer_and_scheduler(checkpoint)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As in Trainer, and beside it which samples are done. That first: a checkpoint is complete with Trainer's."""
        if self._odb_record is not None and self._odb_loader is not None:
            state = {
                "loader": self._odb_loader.state_dict(),
                "progress": self.odb_progress.state(),
                "audit": self._odb_record.state(),
                "handled_in_warmup": self._odb_position.handled_in_warmup if self._odb_position else 0,
            }
            if self.args.should_save:
                folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
                save_state(Path(self._get_output_dir(trial=trial)) / folder, state)
        super()._save_checkpoint(model, trial)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        if self.args.max_steps <= 0:
            self.state.max_steps = self.state.global_step
        emitted = self.odb_progress.emitted - self._odb_emitted_before
        output = super()._finalize_training(trial, emitted, start_time)
        assert self._odb_record is not None
        self.odb_summary = self._odb_record.finish(write=self.is_world_process_zero())
        if self.odb_summary["short_windows"]:
            logger.warning(self._short_windows())
        output.metrics.update(
            odb_steps=self.odb_summary["steps"],
            odb_fillers=self.odb_summary["fillers"],
            odb_samples=self.odb_summary["samples"],
            odb_unique=self.odb_summary["unique"],
            odb_dropped=len(self.odb_summary["dropped_samples"]),
            odb_padding=self.odb_summary["padding"],
        )
        return output
