"""The training set of a run with `odb: true`: template, tokens, visual expansion and pixels are made on access."""

from __future__ import annotations

import copy
from typing import Any

import torch
from llamafactory.data.mm_plugin import BasePlugin
from llamafactory.data.processor import SupervisedDatasetProcessor
from llamafactory.extras.constants import AUDIO_PLACEHOLDER, IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER
from torch.utils.data import Dataset

from odb_factory.core.sample import BadSample, DropSample, SampleMeta
from odb_factory.llamafactory.media import (
    UNUSABLE,
    OncePlugin,
    check_plugin,
    describe_error,
    pass_on_machine_error,
    to_dtype,
    visual_tokens,
)
from odb_factory.llamafactory.rows import describe_row, fingerprint_rows
from odb_factory.runtime.errors import SampleError
from odb_factory.runtime.observe import count_loss_tokens, count_patches

INVALID = "invalid conversation"
"""Reason of samples that stock LLaMA-Factory drops: not alternating, or without a single answer at the end."""

AUDIO = "audio"
UNSUPPORTED = "media without a multimodal template"
PLACEHOLDERS = "placeholder mismatch"
TEMPLATE = "template error"
TRUNCATED = "truncated media"
EMPTY = "empty"
UNSUPERVISED = "no supervised token"


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
        template.mm_plugin._validate_input(processor, [], [], [])  # a missing processor is no fault of any sample
        self.rows = rows
        self._processor = processor
        self._tokenizer = tokenizer
        self._cutoff = data_args.cutoff_len
        self._dtype = dtype
        self._takes_placeholders = type(template.mm_plugin) is not BasePlugin
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
            BadSample: media, text or labels that cannot be used.
            Exception: the row cannot be read, or the machine ran out of something.
        """
        row = dict(self.rows[index])
        if len(row["_prompt"]) % 2 != 1 or len(row["_response"]) != 1:
            counts = f"it has {len(row['_prompt'])} prompt and {len(row['_response'])} response messages"
            raise DropSample(INVALID, f"{self.describe_sample(index)}: {counts}")
        for column in ("_images", "_videos"):  # copied, since the plugins append to lists of frames
            row[column] = [list(item) if isinstance(item, list) else item for item in row[column] or ()]
        self._check_row(row)
        self._once.forget()
        images, videos = row["_images"], row["_videos"]
        media = self._once.plugin.get_mm_inputs(
            images, videos, [], [len(images)], [len(videos)], [0], [[]], self._processor
        )
        sample = self._encode(row)
        self._check_tokens(row, sample, media)
        sample.update(n_images=len(images), n_videos=len(videos), mm_inputs=to_dtype(media, self._dtype))
        self._once.forget()
        return sample

    def describe_sample(self, index: int) -> str:
        """Sample `index` as a user finds it in the data: its row, the beginning of its text, its media."""
        return describe_row(self.rows, index)

    def fingerprint(self) -> str:
        """Stands for the content of the data: the same wherever and whenever the same data are loaded."""
        return fingerprint_rows(self.rows)

    def _check_row(self, row: dict[str, Any]) -> None:
        """What can be told before anything is decoded."""
        if row["_audios"]:
            raise BadSample(AUDIO, "it has audio, which odb does not support; remove it from the data")
        contents = [message["content"] for message in (*row["_prompt"], *row["_response"])]
        for content in contents:
            if not isinstance(content, str):
                raise BadSample(TEMPLATE, f"a message has content of type {type(content).__name__} instead of text")
        counts = (
            (IMAGE_PLACEHOLDER, "image", len(row["_images"])),
            (VIDEO_PLACEHOLDER, "video", len(row["_videos"])),
            (AUDIO_PLACEHOLDER, "audio", 0),
        )
        for placeholder, kind, there in counts:
            if there and getattr(self._once.plugin, f"{kind}_token") is None:
                raise BadSample(UNSUPPORTED, f"the template does not support {kind} input; choose another template")
            wanted = sum(content.count(placeholder) for content in contents)
            if wanted != there and self._takes_placeholders:
                raise BadSample(
                    PLACEHOLDERS, f"{kind}s: {there}, {placeholder} in its text: {wanted}; the numbers must agree"
                )

    def _encode(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            encoded = self._encoder.preprocess_dataset({key: [value] for key, value in row.items()})
        except BadSample:
            raise
        except Exception as error:
            pass_on_machine_error(error)
            raise BadSample(TEMPLATE, describe_error(error)) from error
        return {key: encoded[key][0] for key in ("input_ids", "attention_mask", "labels")}

    def _check_tokens(self, row: dict[str, Any], sample: dict[str, Any], media: dict[str, Any]) -> None:
        if not sample["input_ids"]:
            raise BadSample(EMPTY, "it has no tokens")
        for kind in ("image", "video"):
            self._check_placeholders(kind, row, sample["input_ids"], media)
        if count_loss_tokens(sample["labels"]) == 0:
            raise BadSample(
                UNSUPERVISED,
                f"none of its {len(sample['labels'])} tokens is a target: its answer is empty, or was cut off at "
                f"cutoff_len {self._cutoff}",
            )

    def _check_placeholders(self, kind: str, row: dict[str, Any], input_ids: list[int], media: dict[str, Any]) -> None:
        token = getattr(self._once.plugin, f"{kind}_token")
        if token is None:
            return
        component = getattr(self._processor, f"{kind}_processor", None)
        wanted = visual_tokens(media, kind, getattr(component, "merge_size", 1))
        there = input_ids.count(self._tokenizer.convert_tokens_to_ids(token))
        if there == wanted:
            return
        counts = f"{there} {kind} tokens where its media need {wanted}"
        texts = [message["content"] for message in (*row["_prompt"], *row["_response"])]
        if any(token in text for text in (*texts, row["_system"] or "", row["_tools"] or "")):
            raise BadSample(PLACEHOLDERS, f"{counts}: its text holds a literal {token}; remove that")
        if len(input_ids) >= self._cutoff:
            raise BadSample(
                TRUNCATED,
                f"{counts}: it was cut at cutoff_len {self._cutoff}; raise cutoff_len, or lower {kind}_max_pixels",
            )
        raise BadSample(UNUSABLE[kind], f"{counts}: what was decoded differs from what the file announces")

    def show_example(self, *, skip_bad: bool = False, max_bad: int | None = None) -> None:
        """Print the first valid sample as stock LLaMA-Factory does.

        Args:
            skip_bad: pass over bad samples; otherwise the first one before a valid one is an error.
            max_bad: pass over so many at most; None: no bound.

        Raises:
            SampleError: a bad sample, or too many of them.
            RuntimeError: no row is valid.
        """
        bad, last = 0, ""
        for index in range(len(self)):
            try:
                sample = self[index]
            except DropSample:
                continue
            except Exception as error:
                cause = str(error) if isinstance(error, BadSample) else describe_error(error)
                last = f"{self.describe_sample(index)}: {cause}"
                if not skip_bad:
                    raise SampleError(f"sample {index} could not be read: {last}") from error
                pass_on_machine_error(error)
                bad += 1
                if max_bad is not None and bad > max_bad:
                    raise SampleError(
                        f"{bad} samples at the start of the data set are bad and none is valid, more than "
                        f"max_bad_samples (odb_max_bad_samples) {max_bad} allows; mend the data, or raise that number. "
                        f"The last one: {last}"
                    ) from error
                continue
            print("training example:")
            self._encoder.print_data_example(sample)
            return
        more = f" All {bad} rows that LLaMA-Factory would not drop are bad; the last one: {last}" if bad else ""
        raise RuntimeError(f"Cannot find valid samples, check `data/README.md` for the data format.{more}")


def observe_online(index: int, sample: dict[str, Any]) -> SampleMeta:
    """Observe a sample of `OnlineDataset`."""
    return SampleMeta(
        index=index,
        length=len(sample["input_ids"]),
        loss_tokens=count_loss_tokens(sample["labels"]),
        patches=count_patches(sample["mm_inputs"]),
        has_media=sample["n_images"] + sample["n_videos"] > 0,
    )
