"""All that leans on private names of transformers: `TrainerAdapter`, and the functions below it.

It follows the Trainer's loop through the private methods that the loop consists of, and says what happens to the run
(`TrainerRun`) in words of our own, so another version of transformers needs another adapter and nothing else. This one
is for transformers 5.5 to 5.8, where `_inner_training_loop` calls `_init_training_state`, `_prepare_for_training`,
`_run_epoch` for each epoch, and `_finalize_training`. In older ones, such as 4.57, all of that lies in
`_inner_training_loop` itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

if TYPE_CHECKING:
    from odb_factory.trainer.run import TrainerRun

UNKNOWN_STEPS = 1 << 40
"""Stands for the number of updates of an epoch, which nobody knows before its end."""

OVERRIDDEN = (
    "_run_epoch",
    "_init_training_state",
    "_save_checkpoint",
    "get_batch_samples",
    "set_initial_training_values",
    "_finalize_training",
    "_prepare_for_training",
)

TrainerBase: Any = object
"""What type checkers take for the base: all that is called is found in `Trainer`, later in the order of resolution."""


def check_layout() -> None:
    """Raise RuntimeError for a Trainer without the methods that are overridden here and in `OdbTrainerMixin`."""
    from transformers import Trainer  # takes a second, and v1 runs, which import this module too, need none of it

    missing = [name for name in OVERRIDDEN if not hasattr(Trainer, name)]
    if missing:
        raise RuntimeError(
            f"odb: this version of transformers has no Trainer.{missing[0]}; tested with transformers 5.6."
        )


class TrainerAdapter(TrainerBase):
    """The private methods of Trainer that are overridden, in the order in which they are called."""

    odb_run: TrainerRun
    args: Any
    state: Any
    control: Any

    def _init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, resume_from_checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """Makes or loads `state`; returns the epoch to begin with, and how many batches of it to skip.

        A run that is resumed goes on with the samples that are left, so no batches are skipped.
        """
        super()._init_training_state(max_steps, per_epoch, epochs, resume_from_checkpoint, trial)
        if self.args.max_steps > 0:  # `epochs` is only a bound
            self.state.num_train_epochs = -(-self.args.max_steps // per_epoch)
        return self.odb_run.restore(resume_from_checkpoint, epochs), 0

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Wraps the model, makes the optimizer and the schedule, and loads both from a checkpoint."""
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self.odb_run.begin(prepared[0])
        return prepared

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """On several CPU ranks Trainer loads to `cpu:0`, which torch does not know as a place to load to."""
        if checkpoint is not None and self.args.device.type == "cpu":
            self.args.__dict__["_setup_devices"] = torch.device("cpu")  # what `args.device` is computed once into
        super()._load_optimizer_and_scheduler(checkpoint)

    def _run_epoch(self, **kwargs: Any) -> None:
        """One epoch. It counts to the two numbers given here; `OdbCallback` ends it when its last step is done."""
        kwargs["num_update_steps_per_epoch"] = UNKNOWN_STEPS
        kwargs["steps_in_epoch"] = UNKNOWN_STEPS * self.args.gradient_accumulation_steps
        self.odb_run.open_epoch()
        super()._run_epoch(**kwargs)
        if self.odb_run.nothing_was_left:  # Trainer then takes the run to be over
            self.control.should_training_stop = False
        self.odb_run.close_epoch(stopped=self.control.should_training_stop)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Counts tokens by a gather over ranks; the exchange has exact counts already, and fillers do not count."""
        what = self.args.include_num_input_tokens_seen
        if what != "no":
            for info in self.odb_run.updates.last_infos:
                self.state.num_input_tokens_seen += (
                    info.global_tokens if what == "non_padding" else info.global_padded_tokens
                )

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """What is done between two updates. It logs if that is due and an update was trained since it last did."""
        self.odb_run.callback.after_step_end(self.args, self.state)
        due = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        with self.odb_run.between_updates(logs=due):
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes a checkpoint, with `trainer_state.json` last: complete when that is there. So ours comes first."""
        folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self.odb_run.save(Path(self._get_output_dir(trial=trial)) / folder)
        super()._save_checkpoint(model, trial)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        """The metrics and the end of the run; `max_steps` and the samples are those of its `train_..._per_second`."""
        if self.args.max_steps <= 0:
            self.state.max_steps = self.state.global_step
        output = super()._finalize_training(trial, self.odb_run.emitted_here, start_time)
        self.odb_run.finish()
        return output


# -- within an update


def set_synchronisation(trainer: Any, wanted: bool) -> None:
    """Say whether the next backward ends an update; accelerate's optimizer steps only then.

    `_run_epoch` says so before each micro-batch, by their number.
    """
    trainer.accelerator.gradient_state._set_sync_gradients(wanted)


@contextlib.contextmanager
def without_synchronisation(trainer: Any, model: Any) -> Iterator[None]:
    """A micro-batch that does not end its update, as `_run_epoch` runs it."""
    accelerator = trainer.accelerator
    set_synchronisation(trainer, False)
    always = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    always = always or accelerator.distributed_type == DistributedType.DEEPSPEED  # which decides for itself
    with contextlib.nullcontext() if always else accelerator.no_sync(model=model):
        yield


def end_substep(trainer: Any) -> None:
    """What `_run_epoch` says behind such a micro-batch."""
    trainer.control = trainer.callback_handler.on_substep_end(trainer.args, trainer.state, trainer.control)


def loss_divisor(trainer: Any) -> int:
    """By what `training_step` divides the loss that `compute_loss` returns, where it got no count of items.

    The number is set by `_run_epoch`: the micro-batches that `get_batch_samples` returned.
    """
    return 1 if trainer.compute_loss_func is not None else int(trainer.current_gradient_accumulation_steps)


@contextlib.contextmanager
def trial_steps(trainer: Any) -> Iterator[None]:
    """Within, `training_step` can be called before `_run_epoch` was, as between the micro-batches of an update."""
    state = trainer.accelerator.gradient_state
    before, had = state.sync_gradients, vars(trainer).get("current_gradient_accumulation_steps")
    set_synchronisation(trainer, False)
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    try:
        yield
    finally:
        set_synchronisation(trainer, before)
        if had is not None:
            trainer.current_gradient_accumulation_steps = had
        else:
            del trainer.current_gradient_accumulation_steps


def save_now(trainer: Any) -> None:
    """Write a checkpoint outside of the loop, as transformers' `JITCheckpointCallback` does on rank 0."""
    trainer._save_checkpoint(trainer.model, trial=None)


# -- what Trainer shows

_EPOCHS = "  Num Epochs"
_UPDATES = "  Total optimization steps"
_DO_NOT_APPLY = (
    "  Num update steps per epoch",
    "  Instantaneous batch size per device",
    "  Total train batch size",
    "  Gradient Accumulation steps",
    _UPDATES,
    "  Fast-forwarding the dataloader",
)
"""Lines of the header that say how many samples or steps there are, which nobody knows."""


class HeaderFilter(logging.Filter):
    """Keeps the lines out of the header of `_inner_training_loop` that do not apply; on from `begin` to `end`.

    With `max_steps` that is true of the epochs, too: the stock loop must not run out of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logger = logging.getLogger("transformers.trainer")
        self._hidden: tuple[str, ...] = _DO_NOT_APPLY

    def begin(self, *, by_steps: bool) -> None:
        """The header is about to be logged; `by_steps`: of a run with `max_steps`."""
        hidden = {*_DO_NOT_APPLY, _EPOCHS} - {_UPDATES} if by_steps else _DO_NOT_APPLY
        self._hidden = tuple(hidden)
        self._logger.addFilter(self)

    def end(self) -> None:
        """It was logged."""
        self._logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._hidden)


def become(callback: Any, kind: type, **attributes: Any) -> None:
    """Make an existing callback one of `kind`, a subclass of its class: others hold the object, so it must stay."""
    callback.__class__ = kind
    for name, value in attributes.items():
        setattr(callback, name, value)
