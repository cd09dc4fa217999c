"""One micro-batch on its way through the Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from odb_factory.runtime.errors import OdbError
from odb_factory.runtime.messages import StepInfo
from odb_factory.runtime.observe import IGNORE_INDEX
from odb_factory.runtime.tensors import map_tensors


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch on its way to `training_step`."""

    info: StepInfo
    update_loss_tokens: int
    """Supervised targets of the whole update, over ranks and micro-batches."""


@dataclass(frozen=True, slots=True)
class Update:
    """All micro-batches of one optimizer update, which the stock loop takes for a single one."""

    batches: list[Any]


def closes_update(infos: Sequence[StepInfo], micro_batches: int, samples: int | None) -> bool:
    """Whether these steps make an update; the same on every rank, since it depends on figures of all.

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
