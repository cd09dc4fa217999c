"""One optimizer update from beginning to end: its micro-batches, their loss scale, synchronisation, commit.

`Updates` is called in this order for each update: `collect` takes its micro-batches from the loader; `train` runs them,
one at a time or all together, where `loss` scales each one's loss; `commit` counts what it was made of as trained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from odb_factory.core.loss_scale import loss_scale
from odb_factory.runtime.errors import OdbError
from odb_factory.runtime.messages import StepInfo
from odb_factory.runtime.observe import IGNORE_INDEX
from odb_factory.runtime.tensors import map_tensors
from odb_factory.trainer import hf_adapter
from odb_factory.trainer.out_of_memory import FailedStep, explained

if TYPE_CHECKING:
    from odb_factory.trainer.run import TrainerRun


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What is known of a micro-batch that `train` has not got yet."""

    info: StepInfo
    update_loss_tokens: int
    """Supervised targets of the whole update, over ranks and micro-batches."""


@dataclass(frozen=True, slots=True)
class WholeUpdate:
    """All micro-batches of one update, which the stock loop takes for a single one."""

    batches: list[Any]


def closes_update(infos: Sequence[StepInfo], micro_batches: int, samples: int | None) -> bool:
    """Whether these steps make an update; the same on every rank, since it depends on figures of all (G1).

    Args:
        infos: what was handed out since the last update.
        micro_batches: micro-batches of an update, on each rank.
        samples: samples of an update over all ranks, at least; with it, `micro_batches` has no effect.
    """
    if infos and infos[-1].last:
        return True
    if samples is None:
        return len(infos) >= micro_batches
    return sum(info.global_samples for info in infos) >= samples


class Updates:
    """The updates of a Trainer's run, one after another.

    Args:
        trainer: the Trainer.
        run: its run.
        stock_step: the stock `training_step` of the Trainer.
        samples: `odb_samples_per_update`.
        check_targets: targets are counted as `observe_sample` does, so that a batch can be checked by them.
    """

    def __init__(
        self,
        trainer: Any,
        run: TrainerRun,
        *,
        stock_step: Callable[..., torch.Tensor],
        samples: int | None,
        check_targets: bool,
    ) -> None:
        self.samples = samples
        self.check_targets = check_targets
        self.last_infos: list[StepInfo] = []
        """Of the last call of `train`."""
        self._trainer = trainer
        self._run = run
        self._stock_step = stock_step
        self._pending: deque[MicroBatch] = deque()
        """Of the update that runs, what `train` has not got yet."""
        self._trained: list[StepInfo] = []
        """Of the update that runs, what it has got."""
        self._current: MicroBatch | None = None

    def reset(self) -> None:
        """Forget the update that a run ended in the middle of."""
        self._pending.clear()
        self._trained.clear()

    # -- which micro-batches

    def collect(self, steps: Iterator[Any], micro_batches: int, device: torch.device) -> list[Any] | None:
        """The micro-batches of the next update, on `device`; None: the epoch has no more.

        With `odb_samples_per_update` they come as one `WholeUpdate`: the stock loop knows fixed numbers only.
        """
        meter = self._run.record.meter
        meter.begin_update()
        batches: list[Any] = []
        infos: list[StepInfo] = []
        while not closes_update(infos, micro_batches, self.samples):
            with meter.waiting():
                step = next(steps, None)
            if step is None:
                break
            if self.check_targets:
                check_targets(*step)
            # as many as a `WholeUpdate` may have are too many for the device; they go there one by one
            batches.append(step[0] if self.samples is not None else to_device(step[0], device))
            infos.append(step[1])
        if not infos:
            return None
        loss_tokens = sum(info.global_loss_tokens for info in infos)
        self._pending.extend(MicroBatch(info, loss_tokens) for info in infos)
        return batches if self.samples is None else [WholeUpdate(batches)]

    # -- forward and backward, and when gradients are synchronised

    def train(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        """Forward and backward of one micro-batch, around which the stock loop synchronises; or of a `WholeUpdate`."""
        self.last_infos.clear()
        if isinstance(inputs, WholeUpdate):
            return self._whole_update(model, inputs, *args)
        return self._micro_step(model, inputs, *args)

    def _whole_update(self, model: Any, update: WholeUpdate, *args: Any) -> torch.Tensor:
        """What the stock loop does with the micro-batches of an update: the last one synchronises the gradients."""
        losses = []
        for batch in update.batches[:-1]:
            with hf_adapter.without_synchronisation(self._trainer, model):
                losses.append(self._micro_step(model, to_device(batch, self._trainer.args.device), *args))
            hf_adapter.end_substep(self._trainer)
        hf_adapter.set_synchronisation(self._trainer, True)
        losses.append(self._micro_step(model, to_device(update.batches[-1], self._trainer.args.device), *args))
        return torch.stack(losses).sum()

    def _micro_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        self._current = self._pending.popleft()
        try:
            with explained(self._trainer.args.device, lambda: self._failed_step(inputs)):
                loss = self._stock_step(model, inputs, *args)
            self._trained.append(self._current.info)
        finally:
            self.last_infos.append(self._current.info)
            self._current = None
        return loss

    def _failed_step(self, inputs: Any) -> FailedStep:
        assert self._current is not None
        rank, update = self._trainer.args.process_index, self._run.ledger.updates + 1
        return FailedStep.of(self._current.info, inputs, rank, update, self._run.config)

    # -- the loss scale

    def loss(self, model: Any, inputs: Any, stock_loss: Callable[[], Any]) -> Any:
        """In training: the micro-batch's mean loss, scaled so that the update's loss is per supervised token.

        This is the one normaliser that acts: Trainer gets no count of items from `get_batch_samples`, and its division
        by the accumulation steps, which then follows in `training_step`, is undone here.
        """
        micro = self._current
        if micro is None:  # evaluation
            return stock_loss()
        factor = loss_scale(micro.info.loss_tokens, micro.update_loss_tokens, self._trainer.args.world_size)
        if factor == 0.0:
            return zero_loss(model, inputs)
        return stock_loss() * (factor * hf_adapter.loss_divisor(self._trainer))

    # -- what counts as trained

    def commit(self) -> None:
        """The optimizer has stepped: what the update was made of counts as trained, in the loader and in the ledger."""
        self._run.update_done(self._trained)
        self._trained.clear()


def check_targets(batch: Any, info: StepInfo) -> None:
    """Raise OdbError if the batch has more or fewer targets than were counted in its samples.

    The loss is a mean over those in the batch and its weight is the number of those in the samples, so that a collate
    function that pads labels with anything but -100, or masks some, would silently bend the gradient.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if info.idle or not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        return
    there = int((labels[:, 1:] != IGNORE_INDEX).sum())
    if there != info.loss_tokens:
        raise OdbError(
            f"the labels of a micro-batch have {there} targets, but those of its samples {info.loss_tokens} (samples "
            f"{', '.join(map(str, info.indices[:4]))}{', ...' if len(info.indices) > 4 else ''}), so its mean loss "
            f"cannot be weighed; pad labels on the right with {IGNORE_INDEX} in the collate function and mask none "
            "there, or pass an odb_observe that counts as it does."
        )


def zero_loss(model: Any, inputs: Any) -> torch.Tensor:
    """Exactly zero, with a zero gradient for every parameter: the weight of fillers and of batches without targets.

    The model's own loss would be the mean over no target, which is not a number.
    """
    outputs = model(**{key: value for key, value in inputs.items() if key != "labels"})
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    zero: torch.Tensor = (logits.float() * 0.0).sum()
    return zero


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`; copies from page-locked memory do not wait for the device."""
    return map_tensors(batch, lambda t: t.to(device, non_blocking=device.type == "cuda" and t.is_pinned()))
