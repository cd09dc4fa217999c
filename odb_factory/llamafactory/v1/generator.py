"""v1's batch generator with Online Dynamic Batching: epochs, updates, progress, and what is saved of them."""

from __future__ import annotations

import math
from typing import Any

from llamafactory.v1.accelerator.interface import Dim, DistributedInterface
from llamafactory.v1.core.utils.batching import BatchGenerator
from llamafactory.v1.plugins.trainer_plugins.batching import BatchingPlugin

from odb_factory.llamafactory.v1.arguments import STRATEGY
from odb_factory.llamafactory.v1.dataset import Collate, RenderedDataset
from odb_factory.llamafactory.v1.strategy import KEY, MicroBatchProvider, UpdateInMaking
from odb_factory.runtime.loader import OdbDataLoader
from odb_factory.runtime.messages import StepInfo
from odb_factory.trainer.ledger import Ledger
from odb_factory.trainer.record import RunRecord

SAVED = ("loader", "progress", "audit")
"""Keys of a state, beside those of stock v1."""


class OdbBatchGenerator(BatchGenerator):
    """Yields the micro-batches of one update at a time, through the strategy `odb` of v1's registry.

    An epoch is every sample once over all ranks; nothing is dropped for even numbers, since fillers make them even.

    Args:
        trainer: the v1 trainer, whose `num_training_steps` and `args.save_steps` follow the samples.
        args, kwargs: as of v1's `BatchGenerator`.

    Raises:
        ValueError: a streamed dataset, or a recipe that contradicts itself.
    """

    def __init__(self, *args: Any, trainer: Any, **kwargs: Any) -> None:
        self.trainer = trainer
        self.infos: list[StepInfo] = []
        """Of the update that is being trained."""
        self.record: RunRecord | None = None
        self._saved: dict[str, Any] | None = None
        self._handed_out = False
        """This epoch had an update, in this process."""
        super().__init__(*args, **kwargs)

    def _init_data_provider(self) -> None:
        if getattr(self.dataset, "streaming", False):
            raise ValueError(
                f"batching_strategy: {STRATEGY} does not support streaming, since an epoch must be known to train on "
                "each sample once; remove streaming."
            )
        args, world = self.trainer.args, DistributedInterface()
        self.config = args.recipe_config(self.num_micro_batch, self.trainer.model)
        self.loader = OdbDataLoader(
            RenderedDataset(self.dataset, self.renderer, self.cutoff_len),
            Collate(self.cutoff_len),
            self.config,
            rank=world.get_rank(Dim.DP),
            world_size=world.get_world_size(Dim.DP),
            num_workers=self.batching_workers,
            pin_memory=self.pin_memory and world.current_device.type == "cuda",
        )
        self._update = UpdateInMaking(self.num_micro_batch, args.odb_samples_per_update)
        self._batch_info[KEY] = self._update
        self._data_provider = MicroBatchProvider(self.loader, self._update)
        strategy = BatchingPlugin(STRATEGY)
        assert strategy.get_data_provider_batch_size(self._batch_info) == 1
        self._length = strategy.compute_length(self._data_provider, self._batch_info)
        self.ledger = Ledger(
            dataset_size=len(self._data_provider),
            epochs=args.num_train_epochs,
            first_guess=self._length * args.num_train_epochs,
            rank=self.loader.rank,
            world_size=self.loader.world_size,
        )
        self.ledger.token_budget = self.config.token_budget

    # -- a run

    def begin(self) -> None:
        """A run begins, or goes on: opens its record. Every rank calls it."""
        args = self.trainer.args
        self.record = RunRecord(
            self.ledger,
            args.output_dir,
            device=self.trainer.device,
            write_steps=args.odb_audit,
            saved=self._saved,
        )

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch (0-based)."""
        self.loader.set_epoch(epoch)
        self._handed_out = False

    def __next__(self) -> Any:
        assert self.record is not None
        meter = self.record.meter
        meter.skip()  # logging and saving
        meter.begin_update()
        with meter.waiting():
            self._fill_buffer()
            batch = self._generate_batch()
        self.infos = self._update.take()
        if batch is None:
            self._end_epoch()
            raise StopIteration
        self._handed_out = True
        return batch

    def _end_epoch(self) -> None:
        if not self._handed_out:
            # a run that was resumed, and all that was left of the epoch was dropped
            assert self.record is not None
            self.record.close_epoch(self.loader.epoch_ends[-1])
            self.ledger.cut_epoch()
            self._tell_trainer(self.ledger.epoch)

    def _tell_trainer(self, epoch_before: float) -> None:
        """How many updates the run has, as is known now, and whether this one is followed by a checkpoint."""
        trainer, args = self.trainer, self.trainer.args
        if not args.max_steps or args.max_steps <= 0:
            trainer.num_training_steps = self.ledger.estimated_updates()
            if hasattr(trainer, "state"):  # not yet when it resumes
                trainer.state.num_training_steps = trainer.num_training_steps
        if args.save_epochs is not None:
            # v1 turned it into a number of updates, of which an epoch has as many as it turns out to have
            one, other = (math.floor(epoch / args.save_epochs + 1e-9) for epoch in (epoch_before, self.ledger.epoch))
            args.save_steps = 1 if other > one else None

    def update_done(self) -> None:
        """The update that was handed out is trained. Every rank calls it."""
        assert self.record is not None
        before = self.ledger.epoch
        self.record.add_update(self.infos)
        self._tell_trainer(before)
        if self.ledger.epoch_over:
            self.record.close_epoch(self.loader.epoch_ends[-1])

    def close(self) -> None:
        """End the loader's processes, and close the files."""
        self.loader.close()
        if self.record is not None:
            self.record.audit.close()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Which samples are done. Every rank calls it, after the same update, and each gets the whole state."""
        assert self.record is not None
        return {
            "loader": self.loader.state_dict(),
            **self.record.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with exactly the samples that are left; the number of ranks, the budget and the depth may differ.

        Raises:
            ValueError: it was saved with another strategy.
            StateError: it is of another dataset, seed or order.
        """
        if not set(SAVED) <= set(state):
            raise ValueError(
                f"the checkpoint was saved without batching_strategy: {STRATEGY}, so it does not say which samples are "
                "done; resume it with the strategy that saved it, or start anew."
            )
        self.loader.load_state_dict(state["loader"])
        self.ledger.restore(state)
        self._saved = state
        self.trainer._resume_epoch = state["loader"]["epoch"]
        self._tell_trainer(self.ledger.epoch)

    @property
    def resumed(self) -> bool:
        """A state was loaded."""
        return self._saved is not None
