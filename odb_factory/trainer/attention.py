"""At which row length a model's attention takes as long as all else in it, by the numbers of its configuration."""

from __future__ import annotations

from typing import Any

FROZEN = 0.75
"""Work of a frozen weight over that of a trained one, with gradient checkpointing: it has no gradient to compute."""

_WHOLE = ("full_attention", "attention", "hybrid")
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of `layer_types`: the configuration's name for how far their attention reaches."""


def attention_length(config: Any, *, longest: int, trained: bool = True) -> int | None:
    """`OdbConfig.attention_length` (tokens) of a transformers model, estimated by multiply-adds of its language model.

    A token meets the weights of each layer and of the head once, and in each layer that attends to the whole row two
    products with each position of it. All positions count, also those that a causal kernel leaves out: such a kernel
    runs below the rate of a plain product, and one that gets a mask leaves nothing out. A vision tower does not count.

    Args:
        config: a `PretrainedConfig` of a model with gated linear units, as most are since Llama: dense or with experts,
            with plain or latent attention (MLA).
        longest: no row is longer (tokens). Layers whose attention does not reach as far (`layer_types`,
            `sliding_window`) meet a fixed number of positions; those with a state instead of attention none.
        trained: the weights get a gradient, which takes as long as one more product; adapters beside frozen ones do not
            count.

    Returns:
        None: the configuration does not say enough, or no layer attends to the whole row.
    """
    try:
        text = config.get_text_config()
        reaches = [_reach(text, kind) for kind in _kinds(text)]
        whole = sum(reach >= longest for reach in reaches)
        near = sum(reach for reach in reaches if reach < longest)
        projections, position = _attention(text)
        weights = len(reaches) * projections + 3 * text.hidden_size * _feed_forward(text, len(reaches))
        weights += text.hidden_size * text.vocab_size
        linear = weights * (1.0 if trained else FROZEN) + near * position
        return max(1, round(linear / (whole * position))) if whole else None
    except (AttributeError, TypeError, ValueError, ZeroDivisionError):  # other names than these, or none
        return None


def _kinds(text: Any) -> list[str]:
    """What each layer is."""
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return list(kinds)
    sliding = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    return ["sliding_attention" if sliding else "full_attention"] * int(text.num_hidden_layers)


def _reach(text: Any, kind: str) -> float:
    """Positions that a token of such a layer attends to, at most."""
    if kind in _WINDOWS:
        return float(getattr(text, _WINDOWS[kind], None) or "inf")
    return float("inf") if kind in _WHOLE else 0.0


def _attention(text: Any) -> tuple[int, int]:
    """Of a layer: weights of the projections, and multiply-adds of a token with one position."""
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    latent = getattr(text, "kv_lora_rank", None)
    if not latent:
        width = getattr(text, "head_dim", None) or hidden // heads
        shared = getattr(text, "num_key_value_heads", None) or heads
        return 2 * hidden * width * (heads + shared), 2 * heads * width
    rope, value = text.qk_rope_head_dim, text.v_head_dim
    query = text.qk_nope_head_dim + rope
    rank = getattr(text, "q_lora_rank", None)
    queries = rank * (hidden + heads * query) if rank else hidden * heads * query
    keys_and_values = hidden * (latent + rope) + latent * heads * (text.qk_nope_head_dim + value)
    return queries + keys_and_values + heads * value * hidden, heads * (query + value)


def _feed_forward(text: Any, layers: int) -> int:
    """Hidden units that a token meets in the feed-forward parts of all layers."""
    given = text.intermediate_size  # some give one for each layer
    width = sum(given) // len(given) if isinstance(given, list | tuple) else int(given)
    experts = getattr(text, "num_experts_per_tok", None)
    if not experts:
        return layers * width
    each = getattr(text, "moe_intermediate_size", None) or width
    names = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    shared = next((count for name in names if (count := getattr(text, name, None))), 0)
    beside = getattr(text, "shared_expert_intermediate_size", None) or 0
    dense = getattr(text, "first_k_dense_replace", None) or 0
    return int(dense * width + (layers - dense) * ((experts + shared) * each + beside))
