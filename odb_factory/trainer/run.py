"""A Trainer's run with Online Dynamic Batching: its loader, its updates and its record, from the first to the last."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from odb_factory.config import OdbConfig
from odb_factory.runtime.loader import OdbDataLoader
from odb_factory.runtime.messages import StepInfo
from odb_factory.runtime.observe import Observe, observe_sample
from odb_factory.trainer.auto_budget import BudgetReport
from odb_factory.trainer.budgeting import find_budget
from odb_factory.trainer.callback import OdbCallback, add_callbacks
from odb_factory.trainer.hf_adapter import HeaderFilter
from odb_factory.trainer.ledger import Ledger
from odb_factory.trainer.options import AutoBudget, with_arguments
from odb_factory.trainer.record import RunRecord, advice, announcement, in_words, known_of, resumption
from odb_factory.trainer.resume import load_state, save_state
from odb_factory.trainer.schedule import Position, follow, pace_of, unfinished_warmup
from odb_factory.trainer.telemetry import PREFIX
from odb_factory.trainer.updates import Updates

logger = logging.get_logger("transformers.odb_factory")


class TrainerRun:
    """What `OdbTrainerMixin` holds; the methods are in the order in which they are called.

    Args:
        trainer: the Trainer.
        config: as `OdbTrainerMixin` got it, and the others likewise.
        stock_step: the stock `training_step` of the Trainer.
    """

    def __init__(
        self,
        trainer: Any,
        config: OdbConfig,
        *,
        stock_step: Callable[..., torch.Tensor],
        samples_per_update: int | None,
        auto: AutoBudget | None,
        audit: bool,
        observe: Observe,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.config = with_arguments(config, trainer.args)
        self.updates = Updates(
            trainer, self, stock_step=stock_step, samples=samples_per_update, check_targets=observe is observe_sample
        )
        self.ledger = Ledger(dataset_size=1, epochs=1, first_guess=1)
        self.summary: dict[str, Any] = {}
        """Figures of the last run, as in `odb_summary.json`."""
        self.budget: BudgetReport | None = None
        """How the token budget of the last run was found; None: it was given."""
        self.callback = OdbCallback(lambda: self.ledger, lambda: trainer.callback_handler.callbacks, self._announcement)
        self.callback.on_update = self.updates.commit
        add_callbacks(trainer, self.callback)
        self.nothing_was_left = False
        """All that was left of the epoch, in a run that was resumed, was dropped."""
        self._trainer = trainer
        self._stock_step = stock_step
        self._auto, self._write_steps, self._observe, self._collate_fn = auto, audit, observe, collate_fn
        self._loader: OdbDataLoader | None = None
        self._record: RunRecord | None = None
        self._position: Position | None = None
        self._header = HeaderFilter()
        self._figures: dict[str, float] = {}
        """What the next log gets."""
        self._saved: dict[str, Any] | None = None
        """The state that the run goes on from."""

    @property
    def loader(self) -> OdbDataLoader:
        """That of the run."""
        assert self._loader is not None
        return self._loader

    @property
    def record(self) -> RunRecord:
        """That of the run, once the model is prepared."""
        assert self._record is not None
        return self._record

    # -- its start

    def make_loader(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> OdbDataLoader:
        """A new loader, in place of that of the last run."""
        if self._loader is not None:
            self._loader.close()
        args = self._trainer.args
        self._loader = OdbDataLoader(
            dataset,
            self._collate_fn or collate_fn,
            self.config,
            rank=args.process_index,
            world_size=args.world_size,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            observe=self._observe,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
        )
        self._loader.auto_commit = False
        return self._loader

    def expect(self, size: int, batch: int) -> tuple[Any, ...]:
        """What `Trainer.set_initial_training_values` returns, for `size` samples and updates of `batch` of them.

        Counted in samples; the number of updates is a first guess, refined as the run goes.
        """
        args = self._trainer.args
        batch = self.updates.samples or batch
        per_epoch = max(1, -(-size // batch))
        epochs = float(args.num_train_epochs)
        updates = max(1, round(per_epoch * epochs))
        self.ledger = Ledger(
            dataset_size=size,
            epochs=epochs,
            first_guess=updates,
            rank=args.process_index,
            world_size=args.world_size,
        )
        if args.max_steps > 0:
            # an epoch has at least one update, so that many epochs are always enough
            return args.max_steps, per_epoch, size, args.max_steps * batch, batch, per_epoch, args.max_steps
        return -int(-epochs // 1), per_epoch, size, self.ledger.total, batch, per_epoch, updates

    def restore(self, checkpoint: Any, epochs: int) -> int:
        """Load what was done until `checkpoint`, if there is one; returns the epoch to go on with (0-based).

        That is `epochs` if nothing is left to do.
        """
        self._saved = None
        args, ledger = self._trainer.args, self.ledger
        if checkpoint is None:
            return 0
        if args.ignore_data_skip:
            raise ValueError("odb: ignore_data_skip would train on samples twice in an epoch; remove it.")
        saved = self._saved = load_state(checkpoint)
        self.loader.load_state_dict(saved["loader"])
        ledger.restore(saved)
        epoch: int = saved["loader"]["epoch"]
        over = ledger.finished if args.max_steps <= 0 else args.max_steps <= self._trainer.state.global_step
        logger.info(resumption(ledger, epoch, over=over))
        return epochs if over else epoch

    def make_schedule(self, make: Callable[[int], Any]) -> Any:
        """The schedule that `make` makes for a number of steps, by progress in samples."""
        args = self._trainer.args
        try:
            pace = pace_of(args)
        except ValueError as error:
            raise ValueError(f"odb: {error}") from None
        given = args.lr_scheduler_kwargs
        if given is not None:  # LLaMA-Factory adds lengths to it, here in samples
            args.lr_scheduler_kwargs = dict(given)
        try:
            scheduler = make(self.ledger.total)
        finally:
            args.lr_scheduler_kwargs = given
        if pace is not None:
            self._position = Position(self.ledger, pace, args.get_warmup_steps(self.ledger.total))
            follow(scheduler, self._position)
        return scheduler

    def begin(self, model: Any) -> None:
        """The model is prepared, and the checkpoint is loaded: find the token budget, and open the record."""
        args, ledger = self._trainer.args, self.ledger
        if self._auto is not None:
            self.budget = find_budget(
                self._trainer,
                model,
                self._stock_step,
                auto=self._auto,
                config=self.config,
                dataset_size=ledger.dataset_size,
                varies=self.updates.samples is not None,
            )
            self.config = dataclasses.replace(self.config, token_budget=self.budget.token_budget)
            self.loader.set_token_budget(self.budget.token_budget)
        self._header.begin(by_steps=args.max_steps > 0)
        ledger.token_budget = self.config.token_budget
        self._record = RunRecord(
            ledger, args.output_dir, device=args.device, write_steps=self._write_steps, saved=self._saved
        )
        if self._saved is not None and self._position is not None:
            self._position.restore(self._saved)

    def _announcement(self) -> str:
        """The line behind Trainer's header."""
        self._header.end()
        return announcement(
            self.config,
            ranks=self._trainer.args.world_size,
            window_bytes=self.loader.window_bytes,
            micro_batches=self._trainer.args.gradient_accumulation_steps,
            samples=self.updates.samples,
        )

    # -- its epochs and updates

    def open_epoch(self) -> None:
        """An epoch begins, or goes on."""
        self.nothing_was_left = False
        self.record.open_epoch()

    def update_done(self, infos: Sequence[StepInfo]) -> None:
        """An update is done that was made of these steps: they count as trained from now on."""
        self.record.add_update(infos)
        self.loader.commit()
        if self.ledger.epoch_over:
            self.record.close_epoch(self.loader.epoch_ends[-1])

    @contextlib.contextmanager
    def between_updates(self, *, logs: bool) -> Iterator[None]:
        """Logging, saving and evaluation; `logs`: the figures are due, on every rank."""
        meter = self.record.meter
        if logs and self._trainer.args.device.type == "cuda":
            torch.cuda.synchronize()  # Trainer's own log waits for the device, too: that time belongs to the update
        with meter.paused():
            if logs:  # here and not in `Trainer.log`, which anybody may call on one rank alone
                self._figures = {PREFIX + name: value for name, value in meter.figures().items()}
            yield

    def take_figures(self) -> dict[str, float]:
        """Those since the last log, once."""
        figures, self._figures = self._figures, {}
        return figures

    def save(self, directory: Path) -> None:
        """Write which samples are done into a checkpoint. Every rank calls it.

        Of an update that is not done nothing counts: its samples are not in the weights that are saved.
        """
        if self._record is None or self._loader is None:
            return
        state = {
            "loader": self._loader.state_dict(),
            **self._record.state(),
            **(self._position or Position(self.ledger)).state(),
        }
        if self._trainer.args.should_save:
            save_state(directory, state)

    def close_epoch(self, *, stopped: bool) -> None:
        """The epoch is over; `stopped`: and the run with it."""
        self.record.close_epoch(None)  # of an epoch that max_steps or a callback ended
        if not (self.ledger.epoch_over or stopped):
            self.ledger.cut_epoch()

    # -- its end

    @property
    def emitted_here(self) -> int:
        """Samples that this process and those of the other ranks trained on, since they began."""
        return self.ledger.emitted - self.record.before["samples"]

    def finish(self) -> None:
        """The run is done: its summary, written and logged on rank 0."""
        first = self._trainer.is_world_process_zero()
        known = known_of(
            self.config,
            self.ledger,
            ranks=self._trainer.args.world_size,
            samples=self.updates.samples,
            auto=self.budget.summary() if self.budget is not None else None,
        )
        self.summary = self.record.finish(known, write=first)
        if first:
            logger.info(in_words(self.summary, self.record.audit.directory))
            late = unfinished_warmup(self._position) if self._position is not None else []
            for sentence in (*advice(self.summary, self.config, self._loader), *late):
                logger.warning(f"Online Dynamic Batching: {sentence}")

    def close(self) -> None:
        """End the loader's processes and close the files, however the run ended."""
        self._header.end()
        if self._loader is not None:
            self._loader.close()
        if self._record is not None:
            self._record.audit.close()
