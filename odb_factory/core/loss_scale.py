"""Exact per-token loss of an optimizer update over ranks and micro-batches (design.md, loss scale)."""

from __future__ import annotations


def loss_scale(loss_tokens: int, update_loss_tokens: int, world_size: int) -> float:
    """Factor for one rank's *mean* micro-batch loss, so that the update's gradient is that of the per-token loss.

    With `t_r` = `loss_tokens` supervised targets in this micro-batch and `T_tok` = `update_loss_tokens` of them in all
    micro-batches of all ranks of the update, the factor is `W * t_r / T_tok`: the later average of gradients over W
    ranks takes the W away. 0 for a micro-batch (or an update) without targets.

    Raises:
        ValueError: negative counts, or more targets here than in the whole update.
    """
    if loss_tokens < 0 or loss_tokens > update_loss_tokens or world_size < 1:
        raise ValueError(
            f"impossible counts: {loss_tokens} loss tokens here, {update_loss_tokens} in the update, {world_size} ranks"
        )
    if loss_tokens == 0:
        return 0.0
    return world_size * loss_tokens / update_loss_tokens
