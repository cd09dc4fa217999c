"""A checkpoint on SIGTERM (`enable_jit_checkpoint`) that all ranks take after the same update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer_jit_checkpoint import JITCheckpointCallback


class AgreedCheckpoint(JITCheckpointCallback):
    """See `adopt`. Stock acts on each rank by its own clock, so one that stops first leaves the others waiting for it.

    After each update all ranks agree, by a reduction of one number over a Gloo group of the callback's own, so that no
    accelerator is waited for, whether any of them was asked to stop.
    """

    _group: Any
    _world_size: int
    _before_saving: Callable[[Any, Any], None]

    @classmethod
    def adopt(cls, callback: Any, world_size: int, before_saving: Callable[[Any, Any], None]) -> None:
        """Make an existing `JITCheckpointCallback` one of this class; the object stays, since Trainer holds it.

        Args:
            world_size: number of ranks.
            before_saving: called with the training arguments and the state, to make that fit for another run.
        """
        callback.__class__ = cls
        callback._group = None
        callback._world_size = world_size
        callback._before_saving = before_saving

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._world_size > 1:
            self._group = dist.new_group(backend="gloo")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nothing: the update has begun, and its samples count when it is done."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nothing, likewise."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nothing: it follows an update."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        manager = self.jit_manager
        if manager is None or not self._any(manager.is_checkpoint_requested):
            return
        self._before_saving(args, state)
        control.should_save = False
        control.should_training_stop = True
        if state.is_world_process_zero:  # writes and removes a file that says that the checkpoint is incomplete
            manager.execute_jit_checkpoint()
        else:
            manager.is_checkpoint_requested = False
            assert self.trainer is not None
            self.trainer._save_checkpoint(self.trainer.model, trial=None)

    def _any(self, here: bool) -> bool:
        asked = torch.tensor([int(here)])
        if self._group is not None:
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group)
        return bool(asked)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
