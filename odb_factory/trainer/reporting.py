"""What a run shows: the line at its start, progress, figures in each log, and the summary at its end."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ProgressCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.utils import logging

from odb_factory.config import OdbConfig
from odb_factory.runtime.loader import OdbDataLoader
from odb_factory.trainer.auto_budget import BudgetReport
from odb_factory.trainer.bar import HeaderFilter, SamplesBar
from odb_factory.trainer.base import TrainerBase
from odb_factory.trainer.callback import OdbCallback
from odb_factory.trainer.jit_checkpoint import AgreedCheckpoint
from odb_factory.trainer.progress import SampleProgress
from odb_factory.trainer.record import RunRecord, advice, announcement, in_words, known_of
from odb_factory.trainer.schedule import Position, unfinished_warmup
from odb_factory.trainer.telemetry import PREFIX

logger = logging.get_logger("transformers.odb_factory")


class ReportingMixin(TrainerBase):
    """Part of `OdbTrainerMixin`: callbacks, logs and the end of the run."""

    odb_config: OdbConfig
    odb_progress: SampleProgress
    odb_summary: dict[str, Any]
    """Figures of the last run, as in `odb_summary.json`."""
    odb_callback: OdbCallback
    control: Any
    odb_auto_budget: BudgetReport | None
    _odb_samples_per_update: int | None
    _odb_loader: OdbDataLoader | None
    _odb_record: RunRecord | None
    _odb_position: Position | None
    _odb_header: HeaderFilter
    _odb_figures: dict[str, float]
    """What the next log gets."""

    def _odb_add_callbacks(self) -> None:
        self.odb_callback = OdbCallback(
            lambda: self.odb_progress, lambda: self.callback_handler.callbacks, self._odb_announcement
        )
        self.odb_callback.on_update = self._odb_commit
        callbacks = self.callback_handler.callbacks
        for place, callback in enumerate(callbacks):
            if type(callback) is ProgressCallback:
                callbacks[place] = SamplesBar(
                    lambda: self.odb_progress,
                    lambda: self._odb_record.audit.totals if self._odb_record is not None else {},
                    callback.max_str_len,
                )
            elif type(callback) is JITCheckpointCallback:
                AgreedCheckpoint.adopt(callback, self.args.world_size, self.odb_callback.after_step_end)
        callbacks.insert(0, self.odb_callback)

    def _odb_announcement(self) -> str:
        self._odb_header.end()
        return announcement(
            self.odb_config,
            ranks=self.args.world_size,
            window_bytes=self._odb_loader.window_bytes if self._odb_loader is not None else None,
            micro_batches=self.args.gradient_accumulation_steps,
            samples=self._odb_samples_per_update,
        )

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        assert self._odb_record is not None
        meter = self._odb_record.meter
        self.odb_callback.after_step_end(self.args, self.state)
        due = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if due and self.args.device.type == "cuda":
            torch.cuda.synchronize()  # Trainer's own log waits for the device, too: that time belongs to the update
        with meter.paused():
            if due:  # here and not in `log`, which anybody may call on one rank alone
                self._odb_figures = {PREFIX + name: value for name, value in meter.figures().items()}
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in Trainer; what is logged of a step has the figures since the last time too, see `figures_of`."""
        if "loss" in logs:
            logs.update(self._odb_figures)
            self._odb_figures = {}
        super().log(logs, *args, **kwargs)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        if self.args.max_steps <= 0:
            self.state.max_steps = self.state.global_step
        assert self._odb_record is not None
        emitted = self.odb_progress.emitted - self._odb_record.before["samples"]
        output = super()._finalize_training(trial, emitted, start_time)
        known = known_of(
            self.odb_config,
            self.odb_progress,
            ranks=self.args.world_size,
            samples=self._odb_samples_per_update,
            auto=self.odb_auto_budget.summary() if self.odb_auto_budget is not None else None,
        )
        self.odb_summary = self._odb_record.finish(known, write=self.is_world_process_zero())
        if self.is_world_process_zero():
            logger.info(in_words(self.odb_summary, self._odb_record.audit.directory))
            late = unfinished_warmup(self._odb_position) if self._odb_position is not None else []
            for sentence in (*advice(self.odb_summary, self.odb_config, self._odb_loader), *late):
                logger.warning(f"Online Dynamic Batching: {sentence}")
        return output
