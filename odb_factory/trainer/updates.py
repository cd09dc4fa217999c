"""One optimizer update: the micro-batches that make it, and how their losses are scaled."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import DistributedType

from odb_factory.config import OdbConfig
from odb_factory.core.loss_scale import loss_scale
from odb_factory.runtime.loader import OdbDataLoader
from odb_factory.runtime.messages import StepInfo
from odb_factory.trainer.base import TrainerBase
from odb_factory.trainer.micro import MicroBatch, Update, check_targets, closes_update, to_device, zero_loss
from odb_factory.trainer.out_of_memory import FailedStep, explained
from odb_factory.trainer.progress import SampleProgress
from odb_factory.trainer.record import RunRecord


class UpdateMixin(TrainerBase):
    """Part of `OdbTrainerMixin`: closes updates, and scales losses so that an update's is per supervised token."""

    odb_config: OdbConfig
    odb_progress: SampleProgress
    _odb_samples_per_update: int | None
    _odb_check_targets: bool
    """Whether the targets of samples are counted as `observe_sample` does, so that a batch can be checked by them."""
    _odb_loader: OdbDataLoader | None
    _odb_record: RunRecord | None
    _odb_pending: deque[MicroBatch]
    """Of the update that runs, what `training_step` has not got yet."""
    _odb_trained: list[StepInfo]
    """Of the update that runs, what it has got."""
    _odb_current: MicroBatch | None
    _odb_last_infos: list[StepInfo]
    _odb_progress_saved: dict[str, int]
    _odb_nothing_left: bool
    control: Any

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """The micro-batches of one update. Their loss is scaled by `compute_loss`, so there is no item count.

        With `odb_samples_per_update` they come as one `Update`: the stock loop knows fixed numbers only.
        """
        assert self._odb_record is not None
        meter = self._odb_record.meter
        meter.begin_update()
        batches: list[Any] = []
        infos: list[StepInfo] = []
        while not closes_update(infos, num_batches, self._odb_samples_per_update):
            with meter.waiting():
                step = next(epoch_iterator, None)
            if step is None:
                break
            if self._odb_check_targets:
                check_targets(*step)
            # as many as an `Update` may have are too many for the device; they go there one by one
            batches.append(step[0] if self._odb_samples_per_update is not None else to_device(step[0], device))
            infos.append(step[1])
        if not infos:  # a run that was resumed, and all that was left of the epoch was dropped
            self.control.should_epoch_stop = self._odb_nothing_left = True
            return [], None
        loss_tokens = sum(info.global_loss_tokens for info in infos)
        self._odb_pending.extend(MicroBatch(info, loss_tokens) for info in infos)
        self.odb_progress.advance(infos)
        return (batches if self._odb_samples_per_update is None else [Update(batches)]), None

    def _odb_commit(self) -> None:
        """An update is done: what it was made of counts as trained from now on."""
        assert self._odb_record is not None
        assert self._odb_loader is not None
        self._odb_record.add_update(self._odb_trained, self.odb_progress.updates)
        self._odb_trained.clear()
        self._odb_loader.commit()
        self._odb_progress_saved = self.odb_progress.state()
        if self.odb_progress.epoch_over:
            self._odb_record.close_epoch(self._odb_loader.epoch_ends[-1])

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One micro-batch, or all of an `Update`; see Trainer."""
        self._odb_last_infos.clear()
        if isinstance(inputs, Update):
            return self._odb_whole_update(model, inputs, num_items_in_batch)
        return self._odb_micro_step(model, inputs, num_items_in_batch)

    def _odb_whole_update(self, model: Any, update: Update, num_items_in_batch: Any) -> torch.Tensor:
        """What the stock loop does with the micro-batches of an update, gradients synchronised with the last one."""
        state, losses = self.accelerator.gradient_state, []
        always = state.plugin_kwargs.get("sync_each_batch", False)
        always = always or self.accelerator.distributed_type == DistributedType.DEEPSPEED
        for batch in update.batches[:-1]:
            batch = to_device(batch, self.args.device)
            state._set_sync_gradients(False)
            with contextlib.nullcontext() if always else self.accelerator.no_sync(model=model):
                losses.append(self._odb_micro_step(model, batch, num_items_in_batch))
            self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
        state._set_sync_gradients(True)
        batch = to_device(update.batches[-1], self.args.device)
        losses.append(self._odb_micro_step(model, batch, num_items_in_batch))
        return torch.stack(losses).sum()

    def floating_point_ops(self, inputs: Any) -> Any:
        """See Trainer."""
        if isinstance(inputs, Update):
            return sum(super(UpdateMixin, self).floating_point_ops(batch) for batch in inputs.batches)
        return super().floating_point_ops(inputs)

    def _odb_micro_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        self._odb_current = self._odb_pending.popleft()
        try:
            with explained(self.args.device, lambda: self._odb_failed_step(inputs)):
                loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            self._odb_trained.append(self._odb_current.info)
        finally:
            self._odb_last_infos.append(self._odb_current.info)
            self._odb_current = None
        return loss

    def _odb_failed_step(self, inputs: Any) -> FailedStep:
        assert self._odb_current is not None
        info = self._odb_current.info
        return FailedStep.of(info, inputs, self.args.process_index, self.odb_progress.updates, self.odb_config)

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
            for info in self._odb_last_infos:
                self.state.num_input_tokens_seen += (
                    info.global_tokens if what == "non_padding" else info.global_padded_tokens
                )
