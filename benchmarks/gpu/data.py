"""Samples made at random with given lengths, and the two ways to make a batch of them: padded and padding-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

IGNORE = -100

PROMPT_SHARE = 0.3
"""Share of a sample's text that is no target."""

_POOL_PATCHES = 4096


@dataclass(frozen=True, slots=True)
class Content:
    """What samples of a profile hold, where they have images."""

    visual: float
    """Share of the length that is visual tokens."""
    largest: int
    """Most visual tokens of one image; more of them are several images."""


CONTENTS = {
    # from our recipes: at most 589,824 and 4,194,304 pixels an image, of which 32 x 32 make a token
    "ultrachat": Content(visual=0.0, largest=1),
    "llava": Content(visual=0.5, largest=576),
    "sharegpt4o": Content(visual=0.75, largest=4096),
    "mm_mix": Content(visual=0.6, largest=1024),
}


@dataclass(frozen=True, slots=True)
class Image:
    """A grid of visual tokens."""

    height: int
    width: int

    @property
    def tokens(self) -> int:
        return self.height * self.width


@dataclass(frozen=True, slots=True)
class Sample:
    """What a sample is made of, before its tensors are."""

    length: int
    """Observed length (tokens): text, visual tokens, and two marks around each image."""
    images: tuple[Image, ...] = ()

    @property
    def visual_tokens(self) -> int:
        return sum(image.tokens for image in self.images)


def lay_out(length: int, content: Content) -> Sample:
    """A sample of this length with about `content.visual` of it in images of one size; a short one has none."""
    visual = int(content.visual * length)
    count = -(-visual // content.largest)
    each = visual // count - 2 if count else 0
    if each < 4 or length - visual < 4:
        return Sample(length)
    height = math.isqrt(each)
    return Sample(length, (Image(height, each // height),) * count)


@dataclass(frozen=True, slots=True)
class Ids:
    """Special token ids of the model, and what its patches are."""

    start: int
    end: int
    image: int
    patch_values: int
    """Numbers in a patch."""
    merge: int

    @classmethod
    def of(cls, config: Any) -> Ids:
        """Those of a Qwen3-VL configuration."""
        vision = config.vision_config
        return cls(
            start=config.vision_start_token_id,
            end=config.vision_end_token_id,
            image=config.image_token_id,
            patch_values=3 * vision.temporal_patch_size * vision.patch_size**2,
            merge=vision.spatial_merge_size,
        )


class MadeSamples(torch.utils.data.Dataset[dict[str, Any]]):
    """Map-style data set of processed samples: token ids, labels, positions, and for images patches and their grid.

    Sample i depends on the seed and i alone. Patches are copied out of a pool of random numbers, which stands for an
    image that was decoded and processed: that cost, the same for every method, is not part of this benchmark.
    """

    def __init__(self, samples: Sequence[Sample], ids: Ids, dtype: torch.dtype, seed: int) -> None:
        self.samples = list(samples)
        self._ids = ids
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        most = max((sample.visual_tokens for sample in self.samples), default=0) * ids.merge**2
        size = most + _POOL_PATCHES if most else 0
        # in the model's dtype, as our collator hands it over
        self._pool = torch.randn(size, ids.patch_values, generator=generator).to(dtype)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        rng = np.random.default_rng((self._seed, index))
        ids = rng.integers(0, self._ids.start, sample.length)  # special tokens come last in the vocabulary
        place = 1
        for image in sample.images:
            ids[place] = self._ids.start
            ids[place + 1 : place + 1 + image.tokens] = self._ids.image
            ids[place + 1 + image.tokens] = self._ids.end
            place += image.tokens + 2
        text = sample.length - place
        labels = ids.copy()
        labels[: place + math.floor(PROMPT_SHARE * text)] = IGNORE
        made: dict[str, Any] = {
            "index": index,
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions(sample)),
        }
        if sample.images:
            count = sample.visual_tokens * self._ids.merge**2
            first = (index * 131) % _POOL_PATCHES
            made["pixel_values"] = self._pool[first : first + count].clone()
            merge = self._ids.merge
            made["image_grid_thw"] = torch.tensor([[1, i.height * merge, i.width * merge] for i in sample.images])
        return made


def positions(sample: Sample) -> np.ndarray:
    """(3, length) time, height and width of each token, as Qwen3-VL counts them.

    Text counts up in all three; an image's tokens share the time and take height and width from their place in the
    grid, and what follows goes on from the largest of them.
    """
    parts = [np.zeros((3, 1), np.int64)]
    current = 1
    for image in sample.images:
        parts.append(np.full((3, 1), current))
        current += 1
        grid = np.indices((1, image.height, image.width)).reshape(3, -1)
        parts.append(grid + current)
        current += max(image.height, image.width)
        parts.append(np.full((3, 1), current))
        current += 1
    rest = sample.length - sum(part.shape[1] for part in parts)
    parts.append(np.tile(np.arange(current, current + rest), (3, 1)))
    return np.concatenate(parts, axis=1)


@dataclass(frozen=True, slots=True)
class Padded:
    """Collate function: samples become rows, padded on the right to the longest.

    Padding on the right is never seen by a real token under causal attention, and is no target: no mask is needed for
    the same loss. `mask` adds the mask that LLaMA-Factory's collator makes.
    """

    mask: bool = False

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """`input_ids`, `labels` (B, S); `position_ids` (3, B, S); patches, grids; `indices`, a list of B numbers."""
        size, width = len(samples), max(len(sample["input_ids"]) for sample in samples)
        batch: dict[str, Any] = {
            "input_ids": torch.zeros(size, width, dtype=torch.long),
            "labels": torch.full((size, width), IGNORE),
            "position_ids": torch.zeros(3, size, width, dtype=torch.long),
        }
        for row, sample in enumerate(samples):
            length = len(sample["input_ids"])
            batch["input_ids"][row, :length] = sample["input_ids"]
            batch["labels"][row, :length] = sample["labels"]
            batch["position_ids"][:, row, :length] = sample["position_ids"]
        if self.mask:
            lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
            batch["attention_mask"] = (torch.arange(width) < lengths[:, None]).long()
        return batch | _images(samples) | {"indices": [sample["index"] for sample in samples]}


def packed(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collate function: one row (1, T) of all samples behind each other, without padding.

    `sequences` is (n + 1,) int32, where each begins, and `longest` the most tokens of one: for the attention kernel.
    """
    lengths = [len(sample["input_ids"]) for sample in samples]
    batch: dict[str, Any] = {
        "input_ids": torch.cat([sample["input_ids"] for sample in samples])[None],
        # the first token of a sample is no target, so that none is predicted from the sample before
        "labels": torch.cat([sample["labels"] for sample in samples])[None],
        "position_ids": torch.cat([sample["position_ids"] for sample in samples], dim=1)[:, None],
        "sequences": torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        "longest": max(lengths),
    }
    return batch | _images(samples) | {"indices": [sample["index"] for sample in samples]}


def _images(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    with_images = [sample for sample in samples if "pixel_values" in sample]
    if not with_images:
        return {}
    return {name: torch.cat([sample[name] for sample in with_images]) for name in ("pixel_values", "image_grid_thw")}
