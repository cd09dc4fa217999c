"""v1's data engine and renderer as one data set: a sample is rendered, and its length known, when it is read."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from llamafactory.v1.utils.helper import pad_and_truncate
from torch.utils.data import Dataset, default_collate

from odb_factory.core.sample import BadSample
from odb_factory.llamafactory.media import describe_error, pass_on_machine_error
from odb_factory.llamafactory.online_dataset import EMPTY, TEMPLATE
from odb_factory.llamafactory.rows import TEXT_SHOWN, one_line, raw_row, sampled
from odb_factory.runtime.observe import IGNORE_INDEX

MEDIA = ("image_url", "video_url", "audio_url")
"""Types of content that are not text."""

NO_MEDIA = "media in v1"
"""Reason of samples with media."""

TEXT_KEYS = {"input_ids", "attention_mask", "labels", "loss_weights", "position_ids", "token_type_ids"}
"""What a sample without media has."""


class RenderedDataset(Dataset[dict[str, Any]]):
    """Samples as v1's renderer makes them, cut to `cutoff_len`: lists of numbers by name.

    Args:
        engine: v1's `DataEngine`.
        renderer: v1's `Renderer`.
        cutoff_len: most tokens of a sample.
    """

    def __init__(self, engine: Any, renderer: Any, cutoff_len: int) -> None:
        self._engine = engine
        self._renderer = renderer
        self._cutoff = cutoff_len

    def __len__(self) -> int:
        return len(self._engine)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Render sample `index`.

        Raises:
            BadSample: it cannot be rendered, or has media, of which this version of v1 makes no batches.
            Exception: the row cannot be read, or the machine ran out of something.
        """
        sample = self._engine[index]
        media = sorted(media_types(sample))
        try:
            (rendered,) = self._renderer.process_samples([sample])
        except Exception as error:
            if media:
                raise _no_media(media) from error
            pass_on_machine_error(error)
            raise BadSample(TEMPLATE, describe_error(error)) from error
        rendered = {key: value for key, value in rendered.items() if not isinstance(value, str)}
        if not set(rendered) <= TEXT_KEYS:
            raise _no_media(media or sorted(set(rendered) - TEXT_KEYS))
        if not len(rendered["input_ids"]):
            raise BadSample(EMPTY, "it has no tokens")
        cut = {key: self._cut(value) for key, value in rendered.items()}
        if cut.get("labels"):
            # nothing predicts the first token; v1 takes its label out of the loss, but not out of a batch's weight
            cut["labels"] = [IGNORE_INDEX, *cut["labels"][1:]]
        return cut

    def _cut(self, value: Any) -> Any:
        flat = isinstance(value, list) and value and isinstance(value[0], int | float)
        return value[: self._cutoff] if flat else value  # whatever has more dimensions is cut when it is collated

    def describe_sample(self, index: int) -> str:
        """Sample `index` as a user finds it in the data: its data set, its row, the beginning of its text."""
        name, row = self._engine.data_index[index]
        place = f"row {row} of the data set {name!r}"
        try:
            text = one_line(json.dumps(raw_row(self._engine.datasets[name], row), ensure_ascii=False, default=str))
        except Exception:  # the row itself may be what is broken; its place is known all the same
            return place
        return f"{place}, {text[: 2 * TEXT_SHOWN]}..."

    def fingerprint(self) -> str:
        """A hash of the order and of the content of up to 64 samples, evenly spread."""
        places = self._engine.data_index
        digest = hashlib.sha256(repr(places).encode())
        for index in sampled(len(places)):
            name, row = places[index]
            digest.update(json.dumps(raw_row(self._engine.datasets[name], row), sort_keys=True, default=str).encode())
        return digest.hexdigest()[:32]


class Collate:
    """Makes a micro-batch of rendered samples, by v1's own functions: (samples, longest) for each name.

    Args:
        cutoff_len: most tokens of a sample.
    """

    def __init__(self, cutoff_len: int) -> None:
        self._cutoff = cutoff_len

    def __call__(self, samples: list[Any]) -> Any:
        return default_collate(pad_and_truncate(samples, self._cutoff))


def media_types(sample: Any) -> set[str]:
    """Types of content in a sample of v1 that are not text."""
    contents = (content for message in sample.get("messages") or () for content in message["content"])
    return {content["type"] for content in contents if isinstance(content, dict)} & set(MEDIA)


def _no_media(what: list[str]) -> BadSample:
    return BadSample(
        NO_MEDIA,
        f"it has {', '.join(what)}, of which this version of LLaMA-Factory's v1 makes no batches; train on it without "
        "USE_V1, with odb: true",
    )
