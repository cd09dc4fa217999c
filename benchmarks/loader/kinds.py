"""The samples that the loaders deliver: made (cheap, so that the loader itself shows) and real (text, photos)."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from benchmarks.lengths import draw

PATCH = 16
"""Pixels of a patch's side."""
MERGE = 2
"""Patches of a visual token's side."""
PATCH_VALUES = 2 * 3 * PATCH * PATCH
"""Numbers of a patch: an image counts as two equal frames, as in Qwen3-VL."""
PATCHES_PER_TOKEN = 1.14
"""Of made pixel samples, over all their tokens: some 4 MB of float32 where a sample has 600 tokens."""
CUTOFF = 2048
"""Tokens at which real conversations are cut off."""
IGNORED = -100

Sample = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of samples."""

    profile: str | None
    """Profile of the lengths (see benchmarks.lengths); None: as the real data have them."""
    pixels: bool
    dtype: torch.dtype = torch.float32
    real: bool = False


KINDS = {
    "text": Kind("ultrachat", pixels=False),
    "pixels": Kind("llava", pixels=True),
    "pixels_bf16": Kind("llava", pixels=True, dtype=torch.bfloat16),
    "text_real": Kind(None, pixels=False, real=True),
    "images_real": Kind("llava", pixels=True, real=True),
}


@dataclass(frozen=True)
class Material:
    """What a data set is made of; small, as each process gets a copy."""

    kind: str
    lengths: tuple[int, ...]
    """Tokens of each sample; of real text unknown before it is read, so all 0."""
    folder: str
    """Where real conversations and images lie."""


def prepare(kind: str, size: int, seed: int, folder: Path) -> Material:
    """Draw the lengths; write conversations and tokenizer, or images, to `folder` where the kind needs them.

    Raises:
        BenchmarkError: a package that holds the real data is missing.
    """
    what = KINDS[kind]
    if what.real and not what.pixels:
        _write_conversations(size, folder)
    elif what.real:
        _write_images(folder, seed)
    lengths = tuple(draw(what.profile, size, seed)) if what.profile else (0,) * size
    return Material(kind, lengths, str(folder))


def dataset_of(material: Material) -> Dataset[Sample]:
    """The data set; its samples hold their own number as `index`."""
    what = KINDS[material.kind]
    if not what.real:
        return MadeSamples(material.lengths, what)
    return ImageSamples(material) if what.pixels else TextSamples(material)


class MadeSamples(Dataset[Sample]):
    """Three tensors a sample, with pixels five; making them costs as little as it can.

    Args:
        lengths: (N,) tokens.
    """

    def __init__(self, lengths: Sequence[int], kind: Kind) -> None:
        self._lengths = lengths
        self._kind = kind

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Sample:
        length = self._lengths[index]
        sample = _text_sample(index, torch.full((length,), index), masked=length // 3)
        if self._kind.pixels:
            tokens = max(1, round(length * PATCHES_PER_TOKEN / MERGE**2))
            values = torch.full((tokens * MERGE**2, PATCH_VALUES), 0.5)
            sample["pixel_values"] = values.to(self._kind.dtype)
            sample["image_grid_thw"] = torch.tensor([[1, MERGE, MERGE * tokens]])
        return sample


class TextSamples(Dataset[Sample]):
    """Conversations that are templated and tokenized when they are read, with the Qwen tokenizer."""

    def __init__(self, material: Material) -> None:
        from tokenizers import Tokenizer

        folder = Path(material.folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._conversations = json.loads((folder / "conversations.json").read_text(encoding="utf-8"))

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index: int) -> Sample:
        ids: list[int] = []
        labels: list[int] = []
        for turn in self._conversations[index]:
            asked = turn["from"] == "human"
            head = self._encode(f"<|im_start|>{'user' if asked else 'assistant'}\n")
            body = self._encode(f"{turn['value']}<|im_end|>\n")
            ids += head + body
            labels += [IGNORED] * (len(head) + len(body)) if asked else [IGNORED] * len(head) + body
            if len(ids) >= CUTOFF:
                break
        sample = _text_sample(index, torch.tensor(ids[:CUTOFF]), masked=0)
        return sample | {"labels": torch.tensor(labels[:CUTOFF])}

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


class ImageSamples(Dataset[Sample]):
    """Images that are decoded, normalized and cut into patches when they are read; text of the drawn lengths."""

    def __init__(self, material: Material) -> None:
        self._lengths = material.lengths
        self._files = sorted(Path(material.folder).glob("*.jpg"))

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Sample:
        patches, grid = read_patches(self._files[index % len(self._files)])
        length = max(self._lengths[index], grid[1] * grid[2] // MERGE**2 + 16)
        sample = _text_sample(index, torch.full((length,), index), masked=length // 3)
        return sample | {"pixel_values": torch.from_numpy(patches), "image_grid_thw": torch.tensor([grid])}


def read_patches(file: Path) -> tuple[np.ndarray, tuple[int, int, int]]:
    """An image as ((patches, PATCH_VALUES) float32 in -1 to 1, grid of frames, rows and columns of patches)."""
    from PIL import Image

    with Image.open(file) as image:
        pixels = np.asarray(image.convert("RGB"), np.float32) / 127.5 - 1
    rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    # (rows / 2, 2, PATCH, columns / 2, 2, PATCH, color) -> the four patches of a visual token stand together
    blocks = pixels.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, PATCH, PATCH)
    return np.repeat(blocks, 2, axis=2).reshape(rows * columns, PATCH_VALUES), (1, rows, columns)


def collate(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Padded token tensors, all patches one after the other, and the samples' numbers; the same for every loader."""
    batch = {
        name: pad_sequence([s[name] for s in samples], batch_first=True, padding_value=value)
        for name, value in (("input_ids", 0), ("attention_mask", 0), ("labels", IGNORED))
    }
    if "pixel_values" in samples[0]:
        batch["pixel_values"] = torch.cat([s["pixel_values"] for s in samples])
        batch["image_grid_thw"] = torch.cat([s["image_grid_thw"] for s in samples])
    batch["index"] = torch.tensor([s["index"] for s in samples])
    return batch


def _text_sample(index: int, ids: torch.Tensor, masked: int) -> Sample:
    """A sample whose first `masked` tokens are no targets."""
    labels = ids.clone()
    labels[:masked] = IGNORED
    return {"index": index, "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _write_conversations(size: int, folder: Path) -> None:
    from benchmarks.qwen_tokenizer import make_qwen_tokenizer
    from benchmarks.sharegpt import read_conversations

    conversations = read_conversations(size)
    (folder / "conversations.json").write_text(json.dumps(conversations), encoding="utf-8")
    make_qwen_tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))


def _write_images(folder: Path, seed: int, count: int = 48) -> None:
    """Photo-like images (smooth, with edges and grain), of 256 to 576 pixels a side."""
    from PIL import Image, ImageDraw

    rng = random.Random(seed)
    noise = np.random.default_rng(seed)
    for number in range(count):
        width, height = (rng.randrange(256, 577, PATCH * MERGE) for _ in range(2))
        coarse = noise.integers(0, 256, (4, 4, 3), np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        pen = ImageDraw.Draw(image)
        for _ in range(12):
            x, y, side = rng.randrange(width), rng.randrange(height), rng.randrange(8, 120)
            pen.ellipse((x, y, x + side, y + side // 2), fill=tuple(rng.randrange(256) for _ in range(3)))
        grain = noise.normal(0, 6, (height, width, 1))
        grained = np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8)
        Image.fromarray(grained).save(folder / f"{number:03d}.jpg", quality=90)
