"""At which row length attention takes as long as all else, against the operations that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
)

from odb_factory.trainer.attention import attention_length

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def counted(config: PretrainedConfig) -> float:
    """Row length at which the operations that grow with its square are as many as the others, from three lengths."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    flops = []
    for length in (64, 128, 256):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.zeros(1, length, dtype=torch.long))
        flops.append(counter.get_total_flops() / length)
    square = (flops[2] - flops[0]) / (256 - 64)
    assert (flops[1] - flops[0]) / 64 == pytest.approx(square, rel=1e-6), "something else grows with the length"
    return (flops[0] - 64 * square) / square


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Qwen3Config(**SMALL, head_dim=32), id="heads wider than the model"),
        pytest.param(LlamaConfig(**SMALL), id="head_dim not given"),
        pytest.param(Qwen2Config(**{**SMALL, "num_key_value_heads": 4}, sliding_window=8), id="window switched off"),
    ],
)
def test_it_is_what_torch_counts(config: PretrainedConfig) -> None:
    assert attention_length(config) == round(counted(config))


def test_of_a_model_with_images_it_is_that_of_its_language_model() -> None:
    text = {**SMALL, "head_dim": 16}
    assert attention_length(Qwen3VLConfig(text_config=text)) == attention_length(Qwen3Config(**text))


def test_the_shape_of_qwen3_vl_2b() -> None:
    """1.41 billion weights in 28 layers and 0.31 in the head, over 2 x 28 x 2048."""
    text = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    assert attention_length(Qwen3VLConfig(text_config=text)) == 15001


def test_of_experts_those_count_that_a_token_meets() -> None:
    dense = Qwen3Config(**SMALL, head_dim=16)
    experts = Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=80)
    assert attention_length(experts) == attention_length(dense)


def test_layers_with_a_window_count_as_weights() -> None:
    base = {**SMALL, "num_hidden_layers": 6, "head_dim": 16}
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    every, one = attention_length(Qwen3Config(**base)), attention_length(Gemma3TextConfig(**base, layer_types=kinds))
    assert every is not None
    assert one == pytest.approx(6 * every, rel=0.001)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(MistralConfig(**SMALL, sliding_window=128), id="every layer has a window"),
        pytest.param(GPT2Config(), id="other names"),
    ],
)
def test_a_configuration_that_does_not_tell(config: PretrainedConfig) -> None:
    assert attention_length(config) is None
