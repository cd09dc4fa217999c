"""The training set of a run with `odb: true`: template, tokens, visual expansion and pixels are made on access."""

from __future__ import annotations

import copy
from typing import Any

import torch
from llamafactory.data.processor import SupervisedDatasetProcessor
from torch.utils.data import Dataset

from odb_factory.core.sample import DropSample, SampleMeta
from odb_factory.llamafactory.media import OncePlugin, check_plugin, to_dtype, visual_tokens
from odb_factory.runtime.observe import count_loss_tokens, count_patches

INVALID = "invalid conversation"
"""Reason of samples that stock LLaMA-Factory drops: not alternating, or without a single answer at the end."""


class OnlineDataset(Dataset[dict[str, Any]]):
    """Rows of a dataset in LLaMA-Factory's aligned format, processed when asked for.

    A sample has `input_ids`, `attention_mask`, `labels` (lists of int), `n_images`, `n_videos`, and `mm_inputs`, the
    media inputs of the model (pixels in `dtype`).

    Args:
        rows: aligned rows (`_prompt`, `_response`, `_images`, ...).
        template, tokenizer, processor, data_args: as LLaMA-Factory hands them to its own preprocessing.
        dtype: floating-point type of pixels; None: as the processor makes them.

    Raises:
        ValueError: a template whose media cannot be processed sample by sample.
    """

    def __init__(
        self, rows: Any, *, template: Any, tokenizer: Any, processor: Any, data_args: Any, dtype: torch.dtype | None
    ) -> None:
        check_plugin(template.mm_plugin)
        self.rows = rows
        self._processor = processor
        self._tokenizer = tokenizer
        self._cutoff = data_args.cutoff_len
        self._dtype = dtype
        self._once = OncePlugin(template.mm_plugin)
        template = copy.copy(template)
        template.mm_plugin = self._once.plugin
        self._encoder = SupervisedDatasetProcessor(
            template=template, tokenizer=tokenizer, processor=processor, data_args=data_args
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Process row `index`.

        Raises:
            DropSample: a conversation that stock LLaMA-Factory drops.
            ValueError: media that do not fit the text, or truncation through an image.
        """
        row = self.rows[index]
        prompt, response = row["_prompt"], row["_response"]
        if len(prompt) % 2 != 1 or len(response) != 1:
            raise DropSample(INVALID, f"row {index} has {len(prompt)} prompt and {len(response)} response messages")
        if row["_audios"]:
            raise ValueError(f"row {index} has audio, which odb does not support; remove the sample")
        self._once.forget()
        encoded = self._encoder.preprocess_dataset({key: [value] for key, value in row.items()})
        if not encoded["input_ids"]:
            raise DropSample(INVALID, f"row {index} was dropped by LLaMA-Factory's own preprocessing")
        sample: dict[str, Any] = {key: encoded[key][0] for key in ("input_ids", "attention_mask", "labels")}
        images, videos = row["_images"] or [], row["_videos"] or []
        media = self._once.plugin.get_mm_inputs(
            images, videos, [], [len(images)], [len(videos)], [0], [sample["input_ids"]], self._processor
        )
        self._check_placeholders(index, sample["input_ids"], media)
        sample.update(n_images=len(images), n_videos=len(videos), mm_inputs=to_dtype(media, self._dtype))
        self._once.forget()
        return sample

    def _check_placeholders(self, index: int, input_ids: list[int], media: dict[str, Any]) -> None:
        for kind in ("image", "video"):
            token = getattr(self._once.plugin, f"{kind}_token")
            if token is None:
                continue
            component = getattr(self._processor, f"{kind}_processor", None)
            wanted = visual_tokens(media, kind, getattr(component, "merge_size", 1))
            there = input_ids.count(self._tokenizer.convert_tokens_to_ids(token))
            if there != wanted:
                raise ValueError(
                    f"row {index} has {there} {kind} tokens where its media need {wanted}: it was cut at cutoff_len "
                    f"{self._cutoff}, or its text holds a literal {token}; raise cutoff_len, lower {kind}_max_pixels, "
                    "or remove the row"
                )

    def show_example(self) -> None:
        """Print the first valid sample as stock LLaMA-Factory does.

        Raises:
            RuntimeError: no row is valid.
        """
        for index in range(len(self)):
            try:
                sample = self[index]
            except DropSample:
                continue
            print("training example:")
            self._encoder.print_data_example(sample)
            return
        raise RuntimeError("Cannot find valid samples, check `data/README.md` for the data format.")


def observe_online(index: int, sample: dict[str, Any]) -> SampleMeta:
    """Observe a sample of `OnlineDataset`."""
    return SampleMeta(
        index=index,
        length=len(sample["input_ids"]),
        loss_tokens=count_loss_tokens(sample["labels"]),
        patches=count_patches(sample["mm_inputs"]),
        has_media=sample["n_images"] + sample["n_videos"] > 0,
    )
