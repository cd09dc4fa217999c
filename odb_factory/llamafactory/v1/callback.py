"""What a v1 run shows: the line at its start, figures in each log, the audit, and the summary at its end."""

from __future__ import annotations

from typing import Any

from llamafactory.v1.accelerator.interface import DistributedInterface
from llamafactory.v1.utils import logging
from llamafactory.v1.utils.callbacks import TrainerCallback

from odb_factory.llamafactory.v1 import LOGGER
from odb_factory.llamafactory.v1.generator import OdbBatchGenerator
from odb_factory.trainer.record import advice, announcement, in_words, known_of, resumption
from odb_factory.trainer.telemetry import PREFIX

logger = logging.get_logger(LOGGER)


class OdbCallback(TrainerCallback):
    """Keeps the record of a run. It must come before v1's `LoggingCallback`, which writes what this one adds.

    Args:
        generator: of the trainer.
    """

    def __init__(self, generator: OdbBatchGenerator) -> None:
        self._generator = generator

    def on_train_begin(self, args: Any, state: Any, **_: Any) -> None:
        generator = self._generator
        generator.begin()
        logger.info_rank0(
            announcement(
                generator.config,
                ranks=generator.loader.world_size,
                window_bytes=generator.loader.window_bytes,
                micro_batches=generator.num_micro_batch,
                samples=args.odb_samples_per_update,
            )
        )
        if generator.resumed:
            over = generator.ledger.updates >= generator.trainer.num_training_steps
            logger.info_rank0(resumption(generator.ledger, state.epoch, over=over))

    def on_epoch_begin(self, args: Any, state: Any, **_: Any) -> None:
        self._record.open_epoch()

    def on_step_end(self, args: Any, state: Any, **_: Any) -> None:
        self._generator.update_done()

    def on_log(self, args: Any, state: Any, logs: dict[str, Any], **_: Any) -> None:
        logs.update({PREFIX + name: value for name, value in self._record.meter.figures().items()})
        logs[PREFIX + "epoch"] = round(self._generator.ledger.epoch, 6)

    def on_epoch_end(self, args: Any, state: Any, **_: Any) -> None:
        self._record.close_epoch(None)  # of an epoch that max_steps ended

    def on_train_end(self, args: Any, state: Any, **_: Any) -> None:
        generator = self._generator
        known = known_of(
            generator.config,
            generator.ledger,
            ranks=generator.loader.world_size,
            samples=args.odb_samples_per_update,
        )
        first = DistributedInterface().get_rank() == 0
        summary = self._record.finish(known, write=first)
        logger.info_rank0(in_words(summary, self._record.audit.directory))
        for sentence in advice(summary, generator.config, generator.loader):
            logger.warning_rank0(f"Online Dynamic Batching: {sentence}")

    @property
    def _record(self) -> Any:
        assert self._generator.record is not None
        return self._generator.record
