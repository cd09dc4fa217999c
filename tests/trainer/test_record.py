"""What a run says of itself in its log."""

from __future__ import annotations

from typing import Any

import pytest

from odb_factory import OdbConfig
from odb_factory.trainer.ledger import Ledger
from odb_factory.trainer.record import advice, announcement, resumption

SUMMARY = {
    "odb_samples_per_update": None,
    "samples_per_step": 8.0,
    "short_windows": 0,
    "padding": 0.1,
    "rounds": 4,
    "world_size": 2,
    "dataset_size": 1000,
}


@pytest.mark.parametrize(
    ("done", "epoch", "over", "text"),
    [
        (0, 1, False, "the run goes on at the beginning of epoch 2."),
        (1, 0, False, "1 of 1,500 samples of epoch 1 is done; it is left out without being read."),
        (1200, 0, False, "1,200 of 1,500 samples of epoch 1 are done; they are left out without being read."),
        (0, 2, True, "the run was over at this checkpoint; nothing is left to train on."),
    ],
)
def test_where_a_resumed_run_goes_on(done: int, epoch: int, over: bool, text: str) -> None:
    ledger = Ledger(dataset_size=1500, epochs=2, first_guess=1)
    ledger.in_epoch = done
    assert resumption(ledger, epoch, over=over) == f"Online Dynamic Batching: {text}"


@pytest.mark.parametrize(
    ("depth", "samples", "micro_batches", "ranks", "texts"),
    [
        (1, 1, 1, 1, ("windows of 1 sample a rank", "; 1 rank; an update is 1 sample, and")),
        (4096, None, 1, 2, ("windows of 4,096 samples a rank (", "; 2 ranks; an update is 1 micro-batch a rank.")),
        (16, None, 3, 2, ("windows of 16 samples a rank", "an update is 3 micro-batches a rank.")),
    ],
)
def test_the_announcement_counts_in_singular_and_plural(
    depth: int, samples: int | None, micro_batches: int, ranks: int, texts: tuple[str, ...]
) -> None:
    config = OdbConfig(token_budget=2048, depth=depth, ramp=depth > 1)
    text = announcement(config, ranks=ranks, window_bytes=None, micro_batches=micro_batches, samples=samples)
    for part in texts:
        assert part in text


@pytest.mark.parametrize(
    ("depth", "remedy"), [(64, "odb_token_budget or raise odb_depth (`odb"), (500, "odb_token_budget (`odb")]
)
def test_a_depth_that_holds_the_whole_data_set_is_not_to_be_raised(depth: int, remedy: str) -> None:
    summary: dict[str, Any] = {**SUMMARY, "padding": 0.4}
    (sentence,) = advice(summary, OdbConfig(token_budget=2048, depth=depth), None)
    assert "40% of the padded tokens were padding" in sentence
    assert f"lower {remedy}" in sentence
