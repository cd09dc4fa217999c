"""A checkpoint on SIGTERM (`enable_jit_checkpoint`) that all ranks take after the same update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from odb_factory.trainer import hf_adapter


class AgreedCheckpoint(JITCheckpointCallback):
    """Stock acts on each rank by its own clock, so one that stops first leaves the others waiting for it.

    An existing callback becomes one of this class, since Trainer holds it: see `hf_adapter.become`. After each update
    all ranks agree, by a reduction of one number over a Gloo group of the callback's own, so that no accelerator is
    waited for, whether any of them was asked to stop.
    """

    world_size: int
    """Number of ranks."""
    before_saving: Callable[[Any, Any], None]
    """Called with the training arguments and the state, to make that fit for another run."""
    _group: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.world_size > 1:
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
        self.before_saving(args, state)
        control.should_save = False
        control.should_training_stop = True
        if state.is_world_process_zero:  # writes and removes a file that says that the checkpoint is incomplete
            manager.execute_jit_checkpoint()
        else:
            manager.is_checkpoint_requested = False
            assert self.trainer is not None
            hf_adapter.save_now(self.trainer)

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
