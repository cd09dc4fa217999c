"""The exact per-token loss of an update."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_factory.core.loss_scale import loss_scale

# losses of the supervised tokens of one micro-batch; empty: a filler, or every target masked
micro_batches = st.lists(st.floats(0, 20), max_size=12)


@given(
    st.integers(1, 6).flatmap(
        lambda w: st.lists(st.lists(micro_batches, min_size=w, max_size=w), min_size=1, max_size=4)
    )
)
def test_scaled_means_averaged_over_ranks_are_the_mean_per_token_of_the_update(update: list[list[list[float]]]) -> None:
    """update[step][rank]: token losses; gradients are linear in the loss, so the same holds for them."""
    world_size = len(update[0])
    tokens = [loss for step in update for rank in step for loss in rank]
    total = 0.0
    for step in update:
        for rank in step:
            mean = sum(rank) / len(rank) if rank else math.nan
            scale = loss_scale(len(rank), len(tokens), world_size)
            total += mean * scale / world_size if scale else 0.0
    assert total == pytest.approx(sum(tokens) / len(tokens) if tokens else 0.0, rel=1e-12)


def test_equal_micro_batches_of_one_step_are_not_scaled() -> None:
    assert loss_scale(10, 40, 4) == 1.0


def test_the_scale_is_the_world_size_times_the_share_of_loss_tokens() -> None:
    assert loss_scale(3, 12, 8) == 2.0


@pytest.mark.parametrize("update", [0, 12])
def test_a_micro_batch_without_targets_has_scale_zero(update: int) -> None:
    assert loss_scale(0, update, 4) == 0.0


@pytest.mark.parametrize(("here", "update", "world_size"), [(-1, 5, 2), (6, 5, 2), (1, 0, 2), (0, -1, 2), (1, 5, 0)])
def test_impossible_counts_are_refused(here: int, update: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="impossible counts"):
        loss_scale(here, update, world_size)
