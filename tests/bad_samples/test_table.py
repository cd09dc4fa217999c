"""The bad-input table: every kind of bad sample, under both policies, on one rank and on two."""

from __future__ import annotations

import pytest

from tests.bad_samples.judge import (
    judge_bound,
    judge_epoch,
    judge_machine,
    judge_raise,
    judge_skip,
    judge_starved,
)
from tests.bad_samples.kinds import kind_names
from tests.bad_samples.run import RANKS, worlds
from tests.bad_samples.worlds import LATE_BAD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(200),
    pytest.mark.parametrize("ranks", RANKS),
]


@pytest.mark.parametrize("name", kind_names())
def test_raise_stops_every_rank_and_names_the_sample(name: str, ranks: int) -> None:
    judge_raise(name, worlds(ranks))


@pytest.mark.parametrize("name", kind_names())
def test_skip_counts_and_names_the_sample(name: str, ranks: int) -> None:
    judge_skip(name, worlds(ranks))


@pytest.mark.parametrize("template", ["vl", "plain"])
def test_skip_emits_each_good_sample_once_in_step(template: str, ranks: int) -> None:
    judge_epoch(template, worlds(ranks))


def test_a_rank_with_nothing_but_bad_samples_stays_in_step(ranks: int) -> None:
    judge_starved(worlds(ranks))


@pytest.mark.parametrize("bound", [2, len(LATE_BAD), None])
def test_too_many_bad_samples_stop_every_rank_in_the_same_round(bound: int | None, ranks: int) -> None:
    judge_bound(bound, worlds(ranks))


@pytest.mark.parametrize("error", ["EMFILE, image", "EMFILE, video", "ENOSPC", "MemoryError"])
def test_an_error_of_the_machine_is_never_skipped(error: str, ranks: int) -> None:
    judge_machine(error, worlds(ranks))
