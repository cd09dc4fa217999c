"""At which row length attention takes as long as all else, against the operations that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
)

from benchmarks.gpu.shape import FULL
from odb_factory.trainer.attention import attention_length

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def length_of(config: Any) -> int | None:
    return attention_length(config, longest=2048)


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
    assert length_of(config) == round(counted(config))


def test_of_a_model_with_images_it_is_that_of_its_language_model() -> None:
    text = {**SMALL, "head_dim": 16}
    assert length_of(Qwen3VLConfig(text_config=text)) == length_of(Qwen3Config(**text))


def test_the_shape_of_qwen3_vl_2b() -> None:
    """1.41 billion weights in 28 layers and 0.31 in the head, over 2 x 28 x 2048."""
    config = Qwen3VLConfig(**FULL)
    assert length_of(config) == 15001
    assert attention_length(config, longest=2048, trained=False) == pytest.approx(15001 * 0.75, abs=1)


def test_of_experts_those_count_that_a_token_meets() -> None:
    dense = Qwen3Config(**SMALL, head_dim=16)
    experts = Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=80)
    assert length_of(experts) == length_of(dense)


def test_experts_that_every_token_meets_count_too() -> None:
    dense = Qwen2Config(**{**SMALL, "intermediate_size": 200})
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 80}
    beside = Qwen2MoeConfig(**SMALL, **experts, shared_expert_intermediate_size=40)
    assert length_of(beside) == length_of(dense)
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 100, "n_shared_experts": 1}
    assert length_of(Glm4MoeConfig(**SMALL, **experts, first_k_dense_replace=0)) == length_of(dense)


def test_latent_attention() -> None:
    """Eager DeepSeek-V3: torch counts the products of queries, keys and values as they are."""
    config = DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4},
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        first_k_dense_replace=2,
    )
    assert length_of(config) == pytest.approx(counted(config), rel=0.001)


WINDOW: dict[str, Any] = {**SMALL, "num_hidden_layers": 6, "head_dim": 16}


def test_a_window_that_holds_every_row_is_none() -> None:
    every = length_of(Qwen3Config(**WINDOW))
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    assert length_of(Gemma3TextConfig(**WINDOW, layer_types=kinds, sliding_window=2048)) == every
    assert length_of(MistralConfig(**WINDOW, sliding_window=4096)) == every
    assert length_of(Phi3Config(**SMALL, sliding_window=262144, pad_token_id=0)) == length_of(LlamaConfig(**SMALL))


def test_layers_with_a_shorter_window_meet_that_many_positions() -> None:
    every = length_of(Qwen3Config(**WINDOW))
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    one = length_of(Gemma3TextConfig(**WINDOW, layer_types=kinds, sliding_window=32))
    assert every is not None
    assert one == pytest.approx(6 * every + 5 * 32, rel=0.001)


def test_layers_with_a_state_count_as_weights() -> None:
    every = length_of(Qwen3Config(**WINDOW))
    kinds = ["linear_attention"] * 3 + ["full_attention"] * 3
    half = Qwen3Config(**WINDOW)
    half.layer_types = kinds
    assert every is not None
    assert length_of(half) == pytest.approx(2 * every, rel=0.01)


class Remote:
    """A configuration of somebody's own code."""

    def get_text_config(self) -> Any:
        raise ValueError("several text configs")


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(MistralConfig(**SMALL, sliding_window=128), id="every layer has a window"),
        pytest.param(GPT2Config(), id="other names"),
        pytest.param(Remote(), id="raises"),
        pytest.param(object(), id="no configuration of transformers"),
    ],
)
def test_a_configuration_that_does_not_tell(config: Any) -> None:
    assert length_of(config) is None
