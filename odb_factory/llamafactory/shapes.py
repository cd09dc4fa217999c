"""Synthetic micro-batches for `odb_token_budget: auto`, through the very code that makes those of training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

from llamafactory.extras.constants import IMAGE_PLACEHOLDER
from PIL import Image

from odb_factory.core.group_shapes import GroupShape
from odb_factory.llamafactory.media import visual_tokens
from odb_factory.llamafactory.online_dataset import OnlineDataset
from odb_factory.runtime.observe import count_patches
from odb_factory.trainer.options import AutoBudget

DEFAULT_PIXELS = 768 * 768
"""What LLaMA-Factory takes where the processor has no bound (data/mm_plugin.py)."""

_TEXT = "a"


def auto_budget(
    dataset: OnlineDataset, collator: Any, collate: Callable[..., Any], given: Mapping[str, Any]
) -> AutoBudget:
    """The search for this run.

    Args:
        dataset: the training set.
        collator: LLaMA-Factory's collator of the run.
        collate: ours, which training uses.
        given: `longest`, `headroom` and `memory_limit`; see `AutoBudget`.
    """
    media = collator.template.mm_plugin.image_token is not None and holds_media(dataset.rows)
    return AutoBudget(make_batch=SyntheticGroups(dataset, collator, collate), media=media, **given)


class SyntheticGroups:
    """Makes the micro-batch of a `GroupShape`: text of that length, or images as many and as large as go into it.

    Images go through template, processor and collate function as real ones do, so the micro-batch has all that training
    has: grids, positions, the dummy image, the type of pixels.

    Args:
        dataset: gives the processing; its rows are not read.
        collator: LLaMA-Factory's collator, for its tokenizer and processor.
        collate: makes a batch of samples of `dataset`.
    """

    def __init__(self, dataset: OnlineDataset, collator: Any, collate: Callable[..., Any]) -> None:
        self._dataset = copy.copy(dataset)
        self._collate = collate
        self._token = collator.tokenizer.encode(_TEXT, add_special_tokens=False)[0]
        self._processor = collator.processor
        self._plugin = collator.template.mm_plugin
        self._made: dict[tuple[int, int | None], dict[str, Any]] = {}

    def __call__(self, shape: GroupShape) -> Any:
        """The micro-batch, on the CPU."""
        if not shape.media:
            return self._collate([self._text(length) for length in shape.lengths])
        most = shape.most_patches
        share = None if most is None else most // len(shape.lengths)
        return self._collate([self._media(length, share) for length in shape.lengths])

    def _text(self, length: int) -> dict[str, Any]:
        sample = self._process(0)
        return {**sample, **self._of_length(sample, length)}

    def _media(self, length: int, most_patches: int | None) -> dict[str, Any]:
        """A sample of that length with images, as many patches as it can hold; of text alone if it holds none."""
        key = (length, most_patches)
        if key not in self._made:
            sample = self._fullest(length, most_patches)
            self._made[key] = self._text(length) if sample is None else {**sample, **self._of_length(sample, length)}
        return self._made[key]

    def _fullest(self, length: int, most_patches: int | None) -> dict[str, Any] | None:
        """As few images as large as the processor leaves them, of a size that fills the length; None: not even one."""
        component = self._processor.image_processor
        merge = component.merge_size
        unit = component.patch_size * merge
        largest = self._largest(merge)
        empty, one = self._process(0), self._process(1, 4 * unit, 4 * unit)
        room = length - len(empty["input_ids"])
        # an image also takes the tokens that open and close it
        around = len(one["input_ids"]) - len(empty["input_ids"]) - visual_tokens(one["mm_inputs"], "image", merge)
        number = max(1, math.ceil(room / (largest + around)))
        tokens = min(largest, room // number - around)
        if most_patches is not None:
            tokens = min(tokens, most_patches // merge**2 // number)
        while tokens >= 1:
            height = math.isqrt(tokens)
            sample = self._process(number, tokens // height * unit, height * unit)
            patches = count_patches(sample["mm_inputs"])
            if len(sample["input_ids"]) <= length and (most_patches is None or patches <= most_patches):
                return sample
            tokens -= max(1, tokens // 16)
        return None

    def _largest(self, merge: int) -> int:
        """Tokens of the largest image that LLaMA-Factory and the processor let pass."""
        side = math.isqrt(getattr(self._processor, "image_max_pixels", DEFAULT_PIXELS))
        images = [Image.new("RGB", (side, side), (127, 127, 127))]
        inputs = self._plugin.get_mm_inputs(images, [], [], [1], [0], [0], [[]], self._processor)
        return max(1, visual_tokens(inputs, "image", merge))

    def _process(self, number: int, width: int = 0, height: int = 0) -> dict[str, Any]:
        """A sample with so many images of that size (pixels), as the data set makes it.

        Raises:
            BadSample: it is longer than the cutoff.
        """
        images = [Image.new("RGB", (width, height), (127, 127, 127)) for _ in range(number)]
        self._dataset.rows = [
            {
                "_prompt": [{"role": "user", "content": IMAGE_PLACEHOLDER * number + _TEXT}],
                "_response": [{"role": "assistant", "content": _TEXT}],
                "_system": "",
                "_tools": "",
                "_images": images or None,
                "_videos": None,
                "_audios": None,
            }
        ]
        return self._dataset[0]

    def _of_length(self, sample: dict[str, Any], length: int) -> dict[str, Any]:
        """`sample`'s tokens, cut or filled up with text to this length; all of them are targets, but for images."""
        ids, labels, mask = sample["input_ids"], sample["labels"], sample["attention_mask"]
        more = max(0, length - len(ids))
        return {
            "input_ids": ids[:length] + [self._token] * more,
            "labels": labels[:length] + [self._token] * more,
            "attention_mask": mask[:length] + [1] * more,
        }


def holds_media(rows: Any) -> bool:
    """Whether any row of an aligned data set has images or videos; no file is opened."""
    columns = ("_images", "_videos")
    if not hasattr(rows, "with_format"):
        return any(row[column] for row in rows for column in columns)
    for table in rows.with_format("arrow").iter(batch_size=4096):
        for column in columns:
            if any(value for value in table.column(column).to_pylist()):
                return True
    return False
