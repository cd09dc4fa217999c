"""Observation: what the batching needs to know of a processed sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from odb_factory.core.sample import SampleMeta

IGNORE_INDEX = -100
"""Label of a token that is not a target (the convention of torch's cross entropy)."""

Observe = Callable[[int, Any], SampleMeta]


def count_loss_tokens(labels: Any) -> int:
    """Supervised targets of one sample, `(labels[1:] != -100).sum()`; `labels` is a list or a 1-D tensor."""
    if isinstance(labels, torch.Tensor):
        return int((labels[1:] != IGNORE_INDEX).sum())
    return len(labels) - 1 - labels[1:].count(IGNORE_INDEX) if len(labels) else 0


def count_patches(sample: Mapping[str, Any]) -> int:
    """Visual patches of one sample, from `image_grid_thw` and `video_grid_thw` of shape (n, 3)."""
    grids = (sample.get("image_grid_thw"), sample.get("video_grid_thw"))
    return sum(int(torch.as_tensor(g).prod(-1).sum()) for g in grids if g is not None)


def observe_sample(index: int, sample: Any) -> SampleMeta:
    """Observe a mapping with `input_ids` and optionally `labels` (both 1-D: list or tensor) and visual grids.

    Without `labels` every token but the first is a target, as in language modelling.

    Raises:
        TypeError: the sample is no such mapping; give the loader an `observe` function of your own.
    """
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        raise TypeError(
            f"sample {index} is a {type(sample).__name__} without `input_ids`; pass OdbDataLoader(observe=...) a "
            "function that returns a SampleMeta for your samples"
        )
    patches = count_patches(sample)
    return SampleMeta(
        index=index,
        length=len(sample["input_ids"]),
        loss_tokens=count_loss_tokens(sample.get("labels", sample["input_ids"])),
        patches=patches,
        has_media=patches > 0,
    )
