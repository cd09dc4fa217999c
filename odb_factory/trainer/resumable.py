"""The start and the checkpoints of a run: what is saved of the samples, and how a run goes on with the rest."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from odb_factory.config import OdbConfig
from odb_factory.runtime.loader import OdbDataLoader
from odb_factory.runtime.messages import StepInfo
from odb_factory.trainer.bar import HeaderFilter
from odb_factory.trainer.base import TrainerBase
from odb_factory.trainer.micro import MicroBatch
from odb_factory.trainer.progress import SampleProgress
from odb_factory.trainer.record import RunRecord, resumption
from odb_factory.trainer.report import Audit
from odb_factory.trainer.resume import find_state, load_state, save_state
from odb_factory.trainer.schedule import Position

logger = logging.get_logger("transformers.odb_factory")


class ResumableMixin(TrainerBase):
    """Part of `OdbTrainerMixin`: opens the audit, saves which samples are done, and restores it."""

    odb_config: OdbConfig
    odb_progress: SampleProgress
    _odb_loader: OdbDataLoader | None
    _odb_record: RunRecord | None
    _odb_position: Position | None
    _odb_pending: deque[MicroBatch]
    _odb_trained: list[StepInfo]
    _odb_write_steps: bool
    _odb_header: HeaderFilter
    _odb_resumed: dict[str, Any] | None
    """The state that the run goes on from."""
    _odb_progress_saved: dict[str, int]
    """The progress after the last update that is done."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See Trainer. The loader's processes end with the run, however it ends.

        Raises:
            ValueError, StateError: `resume_from_checkpoint` names no complete checkpoint, or one that was saved without
                ODB, or of a run with another data set, seed or order.
        """
        resume = args[0] if args else kwargs.get("resume_from_checkpoint")
        find_state(resume, self.args.output_dir)  # better now than after the model was loaded
        self._odb_pending.clear()  # of a run that ended in the middle of an update
        self._odb_trained.clear()
        try:
            return super().train(*args, **kwargs)
        finally:
            self._odb_header.end()
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
        if self.args.max_steps > 0:  # `epochs` is only a bound
            self.state.num_train_epochs = -(-self.args.max_steps // per_epoch)
        if resume_from_checkpoint is None:
            return result
        if self.args.ignore_data_skip:
            raise ValueError("odb: ignore_data_skip would train on samples twice in an epoch; remove it.")
        assert self._odb_loader is not None
        saved = self._odb_resumed = load_state(resume_from_checkpoint)
        self._odb_loader.load_state_dict(saved["loader"])
        progress = self.odb_progress
        progress.restore(saved["progress"])
        steps = self.args.max_steps
        epoch, over = saved["loader"]["epoch"], progress.finished if steps <= 0 else steps <= self.state.global_step
        logger.info(resumption(progress, epoch, over=over))
        return (epochs if over else epoch), 0

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._odb_choose_budget(prepared[0])
        self._odb_header.begin(by_steps=self.args.max_steps > 0)
        saved, progress = self._odb_resumed, self.odb_progress
        audit = Audit(
            self.args.output_dir,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            dataset_size=progress.dataset_size,
            token_budget=self.odb_config.token_budget,
            write_steps=self._odb_write_steps,
            keep_updates=progress.updates if saved else 0,
        )
        self._odb_record = RunRecord(audit, world_size=self.args.world_size, device=self.args.device)
        self._odb_progress_saved = progress.state()
        if saved is not None:
            self._odb_record.restore(saved["audit"])
            if self._odb_position is not None:
                self._odb_position.restore(saved)
        return prepared

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        # On several CPU ranks Trainer loads to `cpu:0`, which torch does not know as a place to load to.
        if checkpoint is not None and self.args.device.type == "cpu":
            self.args.__dict__["_setup_devices"] = torch.device("cpu")
        super()._load_optimizer_and_scheduler(checkpoint)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As in Trainer, and beside it which samples are done. That first: a checkpoint is complete with Trainer's.

        Of an update that is not done nothing counts: its samples are not in the weights that are saved.
        """
        if self._odb_record is not None and self._odb_loader is not None:
            state = {
                "loader": self._odb_loader.state_dict(),
                "progress": self._odb_progress_saved,
                "audit": self._odb_record.state(),
                **(self._odb_position or Position(self.odb_progress)).state(),
            }
            if self.args.should_save:
                folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
                save_state(Path(self._get_output_dir(trial=trial)) / folder, state)
        super()._save_checkpoint(model, trial)
