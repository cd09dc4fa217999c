"""Keeps what a Trainer shows in line with what really happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.utils import logging

from odb_factory.trainer import hf_adapter
from odb_factory.trainer.bar import SamplesBar
from odb_factory.trainer.jit_checkpoint import AgreedCheckpoint
from odb_factory.trainer.ledger import Ledger
from odb_factory.trainer.shares import Shares

logger = logging.get_logger("transformers.odb_factory")  # below transformers' own: same handler and verbosity


class OdbCallback(TrainerCallback):
    """Ends epochs and the run on the loader's word, and keeps `epoch`, `max_steps` and the progress bar true.

    It must come before the stock callbacks: those read what this one sets.

    Args:
        ledger: returns the run's ledger.
        bars: returns the handler's callbacks, to find progress bars among them.
        announcement: gives what rank 0 logs when training begins.
    """

    def __init__(
        self,
        ledger: Callable[[], Ledger],
        bars: Callable[[], list[TrainerCallback]],
        announcement: Callable[[], str] = str,
    ) -> None:
        self.ledger = ledger
        self._announcement = announcement
        self._bars = bars
        self._shares = Shares()
        self.on_update: Callable[[], None] = lambda: None
        """Called on every rank when the optimizer has stepped, before the schedule does: that reads the ledger."""
        self.on_total: list[Callable[[int], None]] = []
        """Called with the number of updates of the run whenever its estimate changes."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.max_steps <= 0:
            state.max_steps = self.ledger().estimated_updates()
        self._shares.begin(args, state, self.ledger().share)
        text = self._announcement()
        if state.is_world_process_zero:
            logger.info(text)

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        self.on_update()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        ledger = self.ledger()
        state.epoch = ledger.epoch
        if ledger.epoch_over:
            control.should_epoch_stop = True
        if args.max_steps <= 0:
            self._show_total(state, state.global_step if ledger.finished else ledger.estimated_updates())
            self._shares.ask(args, state, control, ledger.share)
            self._shares.hide(args, state)  # from the stock callback, which comes next

    def after_step_end(self, args: TrainingArguments, state: TrainerState) -> None:
        """All callbacks had their `on_step_end`; what is saved from now on must be fit for another run."""
        if args.max_steps <= 0:
            self._shares.show(args, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._show_total(state, state.global_step)

    def _show_total(self, state: TrainerState, total: int) -> None:
        if total == state.max_steps:
            return
        state.max_steps = total
        for callback in self._bars():
            if isinstance(callback, ProgressCallback) and not isinstance(callback, SamplesBar):
                bar = callback.training_bar  # of a user's own class
                if bar is not None:
                    bar.total = total  # shown by the callback's own update, which follows
        for listener in self.on_total:
            listener(total)


def add_callbacks(trainer: Any, ours: OdbCallback) -> None:
    """Put ours before the stock callbacks of a Trainer, two of which give way to those that count in samples."""
    callbacks = trainer.callback_handler.callbacks
    for place, callback in enumerate(callbacks):
        if type(callback) is ProgressCallback:
            callbacks[place] = SamplesBar(ours.ledger, callback.max_str_len)
        elif type(callback) is JITCheckpointCallback:
            hf_adapter.become(
                callback, AgreedCheckpoint, world_size=trainer.args.world_size, before_saving=ours.after_step_end
            )
    callbacks.insert(0, ours)
