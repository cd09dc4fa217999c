"""The model: randomly initialised, of the shape of Qwen3-VL-2B, or tiny for CPUs; and what it costs to train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.attention import IMAGES, TEXT
from benchmarks.gpu.data import Image

FULL: dict[str, Any] = {
    # the dimensions of the published configuration of Qwen3-VL-2B-Instruct
    "text_config": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "tie_word_embeddings": True,
}

_TINY: dict[str, Any] = {
    "text_config": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    },
    "vision_start_token_id": 500,
    "vision_end_token_id": 501,
    "image_token_id": 502,
    "video_token_id": 503,
    "tie_word_embeddings": True,
}

MERGE = 2
"""Patches of an image are merged 2 x 2 into one visual token, in both models."""

PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,  # SXM; the PCIe card is slower, and named apart
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}
"""Dense bf16 rate (FLOP/s) by the data sheets, by a part of the device's name; the longest that fits counts."""


def peak_flops(device_name: str) -> float | None:
    """Of a GPU, as `torch.cuda.get_device_name` names it; None: not known."""
    fitting = [name for name in PEAK_FLOPS if all(word in device_name.split() for word in name.split())]
    fitting += [name for name in PEAK_FLOPS if f"{name}-" in device_name]  # NVIDIA A100-SXM4-80GB
    return PEAK_FLOPS[max(fitting, key=len)] if fitting else None


def make_model(tiny: bool, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """A `Qwen3VLForConditionalGeneration`, ready to train as our recipes do: the vision tower is frozen.

    Gradient checkpointing is on. `attention.register` comes first.

    Args:
        tiny: the small shape.
        device: where it is made; nothing is copied.
        dtype: of the parameters.
        seed: of the weights.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    config = Qwen3VLConfig(**(_TINY if tiny else FULL))
    config._attn_implementation = TEXT
    try:
        torch.set_default_dtype(dtype)
        with device:
            model = Qwen3VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    # not in the configuration it is made of: transformers would look for a package of that name
    model.model.visual.config._attn_implementation = IMAGES
    model.model.visual.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


@dataclass(frozen=True, slots=True)
class Work:
    """Model FLOPs of training on real tokens: two a multiply-add, what is recomputed for checkpointing not counted.

    A trained parameter that multiplies each token costs 6 FLOPs a token (forward 2, backward 4), a frozen one 2;
    causal attention 6 x layers x width x tokens^2 a sequence (half of the full square), and the frozen vision tower's
    full attention 4 x layers x width x patches^2 an image.
    """

    per_token: float
    per_square: float
    per_patch: float
    per_patch_square: float

    def of_sample(self, tokens: int, images: Sequence[Image]) -> float:
        """FLOPs of one sample of `tokens` real tokens, visual ones included."""
        patches = [image.tokens * MERGE**2 for image in images]
        vision = sum(self.per_patch * count + self.per_patch_square * count**2 for count in patches)
        return self.per_token * tokens + self.per_square * tokens**2 + vision


def work_of(model: Any) -> Work:
    """Counted on the parameters of the model itself."""
    text, vision = model.config.text_config, model.config.vision_config
    visual = model.model.visual
    mergers = _size(visual.merger) + _size(visual.deepstack_merger_list)
    # embeddings are looked up, not multiplied; the head, whose weights they are, is
    per_token = _size(model.model.language_model.layers) + _size(model.lm_head)
    return Work(
        per_token=6.0 * per_token,
        per_square=6.0 * text.num_hidden_layers * text.num_attention_heads * text.head_dim,
        per_patch=2.0 * (_size(visual.patch_embed) + _size(visual.blocks) + mergers / MERGE**2),
        per_patch_square=4.0 * vision.depth * vision.hidden_size,
    )


def _size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
