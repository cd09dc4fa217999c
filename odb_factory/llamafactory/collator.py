"""The padding stage: stock LLaMA-Factory's collator, fed with media that the workers have processed already."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from llamafactory.extras.constants import IMAGE_PLACEHOLDER
from PIL import Image

from odb_factory.llamafactory.media import join_media, to_dtype

COLLATOR_PAD_MULTIPLE = 8
"""LLaMA-Factory pads training batches to a multiple of this (train/sft/workflow.py)."""

_READY = object()
"""Stands for one image or video whose model input is there already."""


class _ReadyPlugin:
    """A plugin that hands out the media inputs of the current batch; for anything else it is the stock one."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin
        self.ready: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask before there is a plugin to ask
            raise AttributeError(name)
        return getattr(self._plugin, name)

    def get_mm_inputs(self, images: Sequence[Any], videos: Sequence[Any], *more: Any, **named: Any) -> dict[str, Any]:
        if all(item is _READY for item in (*images, *videos)):
            return dict(self.ready)
        inputs: dict[str, Any] = self._plugin.get_mm_inputs(images, videos, *more, **named)
        return inputs


class OdbCollator:
    """Makes a batch of samples of `OnlineDataset`, equal to the stock collator's for the same samples in that order.

    Padding, the dummy image and the rope indices are stock code; only decoding and processing of media are left out.

    Args:
        stock: LLaMA-Factory's collator of this run; it is not changed.
        dtype: floating-point type of pixels, as in `OnlineDataset`.
    """

    def __init__(self, stock: Any, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._plugin = _ReadyPlugin(stock.template.mm_plugin)
        self._stock = copy.copy(stock)
        self._stock.template = copy.copy(stock.template)
        self._stock.template.mm_plugin = self._plugin

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate; `samples` shortest first, since the dummy image goes to the first."""
        self._plugin.ready = join_media([sample["mm_inputs"] for sample in samples])
        features = [
            {
                "input_ids": sample["input_ids"],
                "attention_mask": sample["attention_mask"],
                "labels": sample["labels"],
                "images": [_READY] * sample["n_images"],
                "videos": [_READY] * sample["n_videos"],
            }
            for sample in samples
        ]
        return to_dtype(self._stock(features), self._dtype)


def dummy_tokens(template: Any, tokenizer: Any, processor: Any) -> int:
    """Tokens that the stock collator adds to the first row of a batch without media; 0 for text-only templates."""
    plugin = template.mm_plugin
    if plugin.image_token is None:
        return 0
    images = [Image.new("RGB", (64, 64), (255, 255, 255))]
    messages = plugin.process_messages([{"role": "user", "content": IMAGE_PLACEHOLDER}], images, [], [], processor)
    ids = tokenizer.encode(messages[0]["content"], add_special_tokens=False)
    ids, _ = plugin.process_token_ids(ids, None, images, [], [], tokenizer, processor)
    return len(ids)
