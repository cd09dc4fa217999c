"""v1's SFT trainer with Online Dynamic Batching."""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from llamafactory.v1.core.utils.checkpoint import CHECKPOINT_COMPLETE_MARKER, resolve_resume_checkpoint_path
from llamafactory.v1.utils import logging

from odb_factory.llamafactory.checks import below_cutoff
from odb_factory.llamafactory.seams import V1_GENERATOR, V1_SYNCHRONIZE, registry, untested_version
from odb_factory.llamafactory.v1 import LOGGER
from odb_factory.llamafactory.v1.arguments import STRATEGY
from odb_factory.llamafactory.v1.callback import OdbCallback
from odb_factory.llamafactory.v1.generator import OdbBatchGenerator
from odb_factory.trainer.checkpoints import as_output_dir

if TYPE_CHECKING:
    from llamafactory.v1.trainers.sft_trainer import SFTTrainer
else:  # it is not imported here, since its own import leads to this module: see `extend_sft_trainer`
    SFTTrainer = object

logger = logging.get_logger(LOGGER)


class OdbSFTMixin(SFTTrainer):
    """Online Dynamic Batching for v1's `SFTTrainer` where `batching_strategy` is `odb`; else it does nothing more.

    v1 weighs each micro-batch by its targets among those of the update over all ranks, which is the loss per target
    whatever the sizes of micro-batches, and zero for a filler; nothing of that is touched.
    """

    train_batch_generator: OdbBatchGenerator

    def __init__(self, args: Any, *rest: Any, **kwargs: Any) -> None:
        self._online = args.batching_strategy == STRATEGY
        if not self._online:
            super().__init__(args, *rest, **kwargs)
            return
        if untested := untested_version():
            logger.warning_rank0(f"batching_strategy: {STRATEGY} was {untested}; check what it does.")
        _check_complete(args.resume_from_checkpoint)
        super().__init__(args, *rest, **kwargs)
        if args.resume_from_checkpoint and self.global_step:
            self._resume_samples()
        self.callback_handler.callbacks.insert(0, OdbCallback(self.train_batch_generator))

    def _create_batch_generator(self) -> None:
        if not self._online:
            super()._create_batch_generator()
            return
        ours = partial(OdbBatchGenerator, trainer=self)
        with registry.replaced({V1_GENERATOR: ours}):
            super()._create_batch_generator()
        config = self.train_batch_generator.config
        if warning := below_cutoff(config.token_budget, config.overlong, self.args.cutoff_len):
            logger.warning_rank0(warning)

    def _resume_samples(self) -> None:
        """v1 loads the file of each rank; that of rank 0 has all of it, and others may be missing or of another run."""
        directory = resolve_resume_checkpoint_path(self.args.resume_from_checkpoint, self.args.output_dir)
        path = os.path.join(directory, "dataloader", "rank_0.pt")
        if not os.path.exists(path):
            raise ValueError(
                f"the checkpoint {directory} has no {path}, so it does not say which samples are done; resume from "
                "another one, or start anew."
            )
        self.train_batch_generator.load_state_dict(torch.load(path, map_location="cpu", weights_only=False))
        self.state.epoch = self._resume_epoch
        self.state.num_training_steps = self.num_training_steps

    def fit(self) -> None:
        """Train the model. The loader's processes end with it, however it ends."""
        if not self._online:
            super().fit()
            return
        # torch.accelerator.synchronize looks for the GPU that torch was built for, and fails on several ranks of CPUs
        on_cpus = {V1_SYNCHRONIZE: lambda: None} if self.device.type == "cpu" else {}
        try:
            with registry.replaced(on_cpus):
                super().fit()
        finally:
            self.train_batch_generator.close()


@cache
def extend_sft_trainer(stock: type) -> type:
    """`OdbSFTTrainer`: v1's `SFTTrainer` with Online Dynamic Batching."""
    return type("OdbSFTTrainer", (OdbSFTMixin, stock), {"__module__": __name__, "__doc__": OdbSFTMixin.__doc__})


def _check_complete(checkpoint: str | None) -> None:
    """v1 says itself that a directory does not exist; it takes any other one, which then fails at some file or other.

    Raises:
        ValueError: it is an output_dir, or no complete checkpoint.
    """
    if not checkpoint or not os.path.isdir(checkpoint):  # `auto` chooses among complete ones
        return
    marker = CHECKPOINT_COMPLETE_MARKER
    if not os.path.exists(os.path.join(checkpoint, marker)):
        what = as_output_dir(Path(checkpoint), [marker])
        what = what or f"no complete checkpoint, for it has no {marker}; resume from another one, or start anew"
        raise ValueError(f"{checkpoint} (resume_from_checkpoint) is {what}.")
