"""At which row length a model's attention takes as long as all else in it, by the numbers of its configuration."""

from __future__ import annotations

from typing import Any


def attention_length(config: Any) -> int | None:
    """`OdbConfig.attention_length` of a transformers model, by multiply-adds of its language model (tokens).

    A token meets the weights of each layer and of the head once, and in each layer that attends to the whole row two
    products with each position of it. All positions count, also those that a causal kernel leaves out: such a kernel
    runs below the rate of a plain product, and one that gets a mask leaves nothing out. Layers whose attention reaches
    a fixed distance, or none (`layer_types`), count as weights alone; the vision tower does not count.

    Args:
        config: a `PretrainedConfig` of a model with gated linear units, as those of Qwen, Llama, Mistral, Gemma and
            Phi, with or without experts.

    Returns:
        None: the configuration does not say enough, or no layer attends to the whole row.
    """
    text = config.get_text_config()
    try:
        hidden, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or hidden // heads
        shared_heads = getattr(text, "num_key_value_heads", None) or heads
        projections = 2 * hidden * head_dim * (heads + shared_heads)
        linear = layers * (projections + 3 * hidden * _width_of_feed_forward(text)) + hidden * text.vocab_size
        whole = _layers_that_attend_to_all(text, layers)
        return max(1, round(linear / (2 * whole * heads * head_dim))) if whole else None
    except (AttributeError, TypeError):
        return None


def _width_of_feed_forward(text: Any) -> int:
    """Hidden units that a token meets in a layer's feed-forward part."""
    experts = getattr(text, "num_experts_per_tok", None)
    width: int = text.intermediate_size
    if not experts:
        return width
    each = getattr(text, "moe_intermediate_size", None) or width
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return int(experts) * int(each) + int(shared)


def _layers_that_attend_to_all(text: Any, layers: int) -> int:
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return sum(kind == "full_attention" for kind in kinds)
    sliding = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    return 0 if sliding else layers
