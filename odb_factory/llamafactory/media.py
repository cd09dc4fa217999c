"""Media of a sample: decoded and processed once, then joined to the media of a batch."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from llamafactory.data.mm_plugin import BasePlugin, Qwen2VLPlugin, Qwen3VLPlugin

from odb_factory.core.sample import BadSample
from odb_factory.llamafactory.rows import media_name, media_names, one_line
from odb_factory.runtime.errors import is_of_the_machine

SUPPORTED = (BasePlugin, Qwen2VLPlugin, Qwen3VLPlugin)
"""Plugins whose media inputs of a batch are those of its samples, one after the other."""


def check_plugin(plugin: Any) -> None:
    """Raise ValueError for a template whose media cannot be processed sample by sample."""
    if type(plugin) not in SUPPORTED:
        raise ValueError(
            f"odb: the template's multimodal plugin {type(plugin).__name__} is not supported; use a text-only template "
            "or one of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."
        )


def pixel_dtype(compute_dtype: torch.dtype | None) -> torch.dtype | None:
    """The type to which pixels are cast in the worker: the model's, where that is smaller; None: they are not."""
    return compute_dtype if compute_dtype in (torch.bfloat16, torch.float16) else None


UNUSABLE = {"image": "corrupt image", "video": "undecodable video"}
MISSING = {"image": "missing image", "video": "missing video"}
REFUSED = {"images": "image refused by the processor", "videos": "video refused by the processor"}


def describe_error(error: Exception) -> str:
    """An exception on one line."""
    return one_line(f"{type(error).__name__}: {error}").removesuffix(":")


def pass_on_machine_error(error: Exception) -> None:
    """Raise `error` again if the machine ran out of something, so that no sample is to blame."""
    if is_of_the_machine(error):
        raise error


def _blame(kind: str, item: Any, error: Exception) -> BadSample:
    """The bad sample that `error` makes of a sample with this image or video."""
    pass_on_machine_error(error)
    name = media_name(item)
    if isinstance(error, BadSample):  # of a frame
        return BadSample(UNUSABLE[kind], error.detail if isinstance(item, list) else f"{name}: {error.detail}")
    frames = item if isinstance(item, list) else ()
    gone = next((f for f in frames if isinstance(f, str) and not os.path.exists(f)), None)
    if gone is not None or isinstance(error, FileNotFoundError):
        return BadSample(MISSING[kind], f"there is no file {gone or name}")
    if isinstance(error, StopIteration):  # LLaMA-Factory takes the first stream that is a video
        return BadSample(UNUSABLE[kind], f"{name}: it holds no video stream")
    text = describe_error(error)
    return BadSample(UNUSABLE[kind], text if name in text else f"{name}: {text}")


class OncePlugin:
    """Stands for a plugin while one sample is prepared: what was decoded to count tokens is kept for the model input.

    Stock LLaMA-Factory decodes and processes every image twice, once in each place. An image or video that cannot be
    used raises `BadSample`, which names it.
    """

    def __init__(self, plugin: Any) -> None:
        self._class = type(plugin)
        self.plugin = copy.copy(plugin)
        self.plugin._get_mm_inputs = self._get_mm_inputs  # found before the class's method by all its other methods
        self.plugin._regularize_images = self._regularize_images
        self.plugin._regularize_videos = self._regularize_videos
        self._memo: dict[tuple[Any, ...], Mapping[str, Any]] = {}

    def forget(self) -> None:
        """The next sample begins."""
        self._memo.clear()

    def _get_mm_inputs(
        self, images: Sequence[Any], videos: Sequence[Any], audios: Sequence[Any], processor: Any, **more: Any
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for kind, items in (("images", images), ("videos", videos), ("audios", audios)):
            if len(items) == 0:
                continue
            key = (kind, *map(id, items))
            if key not in self._memo:
                self._memo[key] = self._process(kind, items, processor, **more)
            result.update(self._memo[key])
        return result

    def _process(self, kind: str, items: Sequence[Any], processor: Any, **more: Any) -> Mapping[str, Any]:
        parts = {"images": [], "videos": [], "audios": [], kind: list(items)}
        try:
            result: Mapping[str, Any] = self._class._get_mm_inputs(self.plugin, *parts.values(), processor, **more)
        except BadSample:
            raise
        except Exception as error:
            pass_on_machine_error(error)
            raise BadSample(REFUSED[kind], f"{media_names(items)}: {describe_error(error)}") from error
        return result

    def _regularize_images(self, images: Sequence[Any], **options: Any) -> dict[str, list[Any]]:
        """The stock method, one image at a time."""
        found: list[Any] = []
        for image in images:
            try:
                (ready,) = self._class._regularize_images(self.plugin, [image], **options)["images"]
                ready.load()  # PIL decodes late: here it is known which one cannot be
            except Exception as error:
                raise _blame("image", image, error) from error
            found.append(ready)
        return {"images": found}

    def _regularize_videos(self, videos: Sequence[Any], **options: Any) -> dict[str, list[Any]]:
        """The stock method, one video at a time."""
        joined: dict[str, list[Any]] = {}
        for video in videos:
            try:
                one = self._class._regularize_videos(self.plugin, [video], **options)
            except Exception as error:
                raise _blame("video", video, error) from error
            for key, values in one.items():
                joined.setdefault(key, []).extend(values)
        return joined


def join_media(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The media inputs of a batch, out of those of its samples: tensors and lists one after the other."""
    keys = list(dict.fromkeys(key for inputs in samples for key in inputs))
    return {key: _join([inputs[key] for inputs in samples if key in inputs]) for key in keys}


def _join(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values, dim=0)
    return [item for value in values for item in value]


def to_dtype(inputs: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """`inputs` with floating-point pixels in `dtype` (the model casts them there anyway); None leaves them."""
    if dtype is None:
        return dict(inputs)
    return {
        key: value.to(dtype)
        if key.startswith("pixel_values") and isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for key, value in inputs.items()
    }


def visual_tokens(inputs: Mapping[str, Any], kind: str, merge_size: int) -> int:
    """Tokens that the model makes of a sample's media of `kind` (`image`, `video`), from grids of shape (n, 3)."""
    grid = inputs.get(f"{kind}_grid_thw")
    return 0 if grid is None else int(torch.as_tensor(grid).prod(-1).sum()) // merge_size**2
