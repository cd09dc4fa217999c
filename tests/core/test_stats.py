"""Figures about steps."""

from __future__ import annotations

import pytest

from odb_factory.core.budget import Budget
from odb_factory.core.grouping import make_group
from odb_factory.core.stats import StepTotals, ideal_time_share, padding_share, totals_of
from tests.core.worlds import meta


def test_a_ranks_share_of_the_totals_is_in_the_order_of_the_totals() -> None:
    budget = Budget(tokens=100, pad_to_multiple_of=8, attention_length=64)
    group = make_group([meta(0, 10, loss=3), meta(1, 6, loss=4)], budget, True)
    assert StepTotals(*totals_of(group)) == StepTotals(samples=2, loss_tokens=7, tokens=16, padded_tokens=32, work=40)


def test_an_idle_slot_adds_nothing_to_any_total() -> None:
    assert totals_of(None) == (0,) * StepTotals.WIDTH


def test_the_padding_share_is_what_is_not_real() -> None:
    assert padding_share(75, 100) == 0.25
    assert padding_share(100, 100) == 0.0
    assert padding_share(0, 0) == 0.0


@pytest.mark.parametrize(
    ("costs", "share"),
    [
        pytest.param([[4.0, 4.0], [1.0, 1.0]], 1.0, id="equal work in each step"),
        pytest.param([[4.0, 2.0], [0.0, 2.0]], 8 / 12, id="each step waits for its slowest rank"),
        pytest.param([[4.0, 0.0]], 0.5, id="one of two ranks idle"),
        pytest.param([[3.0], [1.0]], 1.0, id="one rank"),
        pytest.param([], 1.0, id="no steps"),
        pytest.param([[0.0, 0.0]], 1.0, id="fillers only"),
    ],
)
def test_the_share_of_ideal_time_compares_the_work_with_the_slowest_rank(
    costs: list[list[float]], share: float
) -> None:
    assert ideal_time_share(costs) == pytest.approx(share)
