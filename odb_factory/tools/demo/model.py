"""Tiny random models for the demo: a Qwen3-VL with its full processor, and a text-only Qwen3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odb_factory.tools.demo.tokenizer import CHAT_TEMPLATE, EOS_TOKEN, PAD_TOKEN, VOCAB_SIZE, make_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3VLProcessor

PATCH_SIZE = 16
MERGE_SIZE = 2
TEMPORAL_PATCH_SIZE = 2
# One image token covers 32 x 32 pixels; with this lower bound the token count follows the picture's size.
MIN_PIXELS = (PATCH_SIZE * MERGE_SIZE) ** 2
MAX_PIXELS = 512 * 512
_TEXT_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}


def make_vl_model(path: Path, *, seed: int = 0) -> Path:
    """Write a random Qwen3-VL (about a million parameters) and its processor to ``path``, and return ``path``.

    ``AutoModelForImageTextToText``, ``AutoProcessor``, ``AutoTokenizer`` and ``AutoConfig`` load it from there. The
    weights depend on ``seed`` alone, and the caller's random state is left as it was.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = make_tokenizer()
    ids = _token_ids(tokenizer)
    config = Qwen3VLConfig(
        text_config={
            **_TEXT_SIZES,
            # The three sections share the 16 rotary frequencies of a 32-wide head.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            **ids,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": TEMPORAL_PATCH_SIZE,
            "out_hidden_size": _TEXT_SIZES["hidden_size"],
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=_token_id(tokenizer, "<|image_pad|>"),
        video_token_id=_token_id(tokenizer, "<|video_pad|>"),
        vision_start_token_id=_token_id(tokenizer, "<|vision_start|>"),
        vision_end_token_id=_token_id(tokenizer, "<|vision_end|>"),
        tie_word_embeddings=False,
        **ids,
    )
    _save_model(Qwen3VLForConditionalGeneration, config, tokenizer, path, seed)
    _make_processor(tokenizer).save_pretrained(path)
    return path


def make_text_model(path: Path, *, seed: int = 0) -> Path:
    """Write a random text-only Qwen3 causal language model and the demo's tokenizer to ``path``, and return ``path``.

    ``AutoModelForCausalLM`` and ``AutoTokenizer`` load it from there. The weights depend on ``seed`` alone, and the
    caller's random state is left as it was.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3Config(**_TEXT_SIZES, tie_word_embeddings=False, **_token_ids(tokenizer))
    _save_model(Qwen3ForCausalLM, config, tokenizer, path, seed)
    tokenizer.save_pretrained(path)
    return path


def _make_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLProcessor:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    patches = {"patch_size": PATCH_SIZE, "merge_size": MERGE_SIZE, "temporal_patch_size": TEMPORAL_PATCH_SIZE}
    colours = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    return Qwen3VLProcessor(  # type: ignore[no-untyped-call]
        image_processor=Qwen2VLImageProcessor(size=dict(size), **patches, **colours),
        tokenizer=tokenizer,
        # A video's bounds count the pixels of all its frames together.
        video_processor=Qwen3VLVideoProcessor(size={**size, "shortest_edge": 4 * MIN_PIXELS}, **patches, **colours),
        chat_template=CHAT_TEMPLATE,
    )


def _save_model(
    model_class: Any, config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, path: Path, seed: int
) -> None:
    import torch
    from transformers import GenerationConfig

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = model_class(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=64,
        pad_token_id=_token_id(tokenizer, PAD_TOKEN),
        eos_token_id=[_token_id(tokenizer, EOS_TOKEN), _token_id(tokenizer, PAD_TOKEN)],
    )
    with _quiet():
        model.save_pretrained(path)


def _token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "pad_token_id": _token_id(tokenizer, PAD_TOKEN),
        "bos_token_id": None,
        "eos_token_id": _token_id(tokenizer, EOS_TOKEN),
    }


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bar of saving, which takes no time, and restore the caller's setting afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
