"""Media of a sample: decoded and processed once, then joined to the media of a batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from llamafactory.data.mm_plugin import BasePlugin, Qwen2VLPlugin, Qwen3VLPlugin

SUPPORTED = (BasePlugin, Qwen2VLPlugin, Qwen3VLPlugin)
"""Plugins whose media inputs of a batch are those of its samples, one after the other."""


def check_plugin(plugin: Any) -> None:
    """Raise ValueError for a template whose media cannot be processed sample by sample."""
    if type(plugin) not in SUPPORTED:
        raise ValueError(
            f"odb: the template's multimodal plugin {type(plugin).__name__} is not supported; use a text-only template "
            "or one of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."
        )


class OncePlugin:
    """Stands for a plugin while one sample is prepared: what was decoded to count tokens is kept for the model input.

    Stock LLaMA-Factory decodes and processes every image twice, once in each place.
    """

    def __init__(self, plugin: Any) -> None:
        self._process = plugin._get_mm_inputs
        self.plugin = copy.copy(plugin)
        self.plugin._get_mm_inputs = self._get_mm_inputs  # found before the class's method by all its other methods
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
                parts = {"images": [], "videos": [], "audios": [], kind: list(items)}
                self._memo[key] = self._process(parts["images"], parts["videos"], parts["audios"], processor, **more)
            result.update(self._memo[key])
        return result


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
