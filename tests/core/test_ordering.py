"""The order of the steps of a round."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from odb_factory.core.budget import Budget
from odb_factory.core.grouping import Group, make_group
from odb_factory.core.ordering import order_slots
from tests.core.worlds import meta


def slots(costs: list[int], start: int = 0) -> list[Group | None]:
    """Groups of one sample with these costs."""
    return [make_group([meta(start + i, cost)], Budget(tokens=10**6), True) for i, cost in enumerate(costs)]


def cost_ranks(ordered: list[Group | None]) -> list[int]:
    """The rank by cost (0: costliest) of each step; costs must differ."""
    costs = [slot.cost for slot in ordered if slot]
    return [sorted(costs, reverse=True).index(cost) for cost in costs]


@given(st.integers(1, 20), st.integers(2, 16), st.integers(0, 10**6))
def test_step_k_holds_the_group_of_the_same_cost_rank_on_every_rank(steps: int, world_size: int, seed: int) -> None:
    rng = random.Random(seed)
    ranks = [slots(rng.sample(range(1, 10_000), steps), start=1000 * r) for r in range(world_size)]
    ordered = [order_slots(rank, seed=seed, epoch=1, round_index=2) for rank in ranks]
    assert len({tuple(cost_ranks(rank)) for rank in ordered}) == 1
    for before, after in zip(ranks, ordered, strict=True):
        assert Counter(map(id, before)) == Counter(map(id, after))


def test_without_attention_padded_tokens_pair_the_steps() -> None:
    """The wide group holds fewer real tokens than the narrow one."""
    budget = Budget(tokens=1000)
    wide = make_group([meta(0, 100), *(meta(i, 1) for i in range(1, 5))], budget, True)
    narrow = make_group([meta(i, 60) for i in range(5, 10)], budget, True)
    assert (wide.cost, wide.tokens) == (500, 104)
    assert (narrow.cost, narrow.tokens) == (300, 300)
    reference = order_slots(slots([500, 300]), seed=0, epoch=0, round_index=0)
    assert order_slots([narrow, wide], seed=0, epoch=0, round_index=0) == [
        wide if slot and slot.cost == 500 else narrow for slot in reference
    ]


def test_with_attention_long_rows_meet_though_their_padded_tokens_are_fewer() -> None:
    budget = Budget(tokens=1000, attention_length=100)
    short = make_group([meta(i, 50) for i in range(10)], budget, True)
    long = make_group([meta(20, 400)], budget, True)
    assert (short.cost, short.work) == (500, 750)
    assert (long.cost, long.work) == (400, 2000)
    reference = order_slots(slots([500, 400]), seed=0, epoch=0, round_index=0)
    assert order_slots([short, long], seed=0, epoch=0, round_index=0) == [
        long if slot and slot.cost == 500 else short for slot in reference
    ]


def test_the_order_does_not_depend_on_the_order_of_the_slots() -> None:
    given_slots = slots([5, 5, 5, 9, 1])
    other = given_slots[::-1]
    assert order_slots(given_slots, seed=0, epoch=0, round_index=0) == order_slots(
        other, seed=0, epoch=0, round_index=0
    )


def test_seed_epoch_and_round_each_give_another_permutation() -> None:
    scopes = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    orders = {
        tuple(cost_ranks(order_slots(slots(list(range(1, 21))), seed=a, epoch=b, round_index=c))) for a, b, c in scopes
    }
    assert len(orders) == 4


def test_the_permutation_undoes_the_order_by_cost() -> None:
    """Over rounds the costliest group stands at every step about equally often."""
    places = Counter(
        cost_ranks(order_slots(slots([10, 20, 30, 40]), seed=0, epoch=0, round_index=r)).index(0) for r in range(400)
    )
    assert set(places) == {0, 1, 2, 3}
    assert all(70 < count < 130 for count in places.values()), places


def test_idle_slots_stay_idle() -> None:
    assert order_slots([None] * 3, seed=0, epoch=0, round_index=0) == [None] * 3


def test_idle_slots_meet_the_cheapest_groups() -> None:
    full = order_slots(slots([10, 20, 30]), seed=3, epoch=0, round_index=0)
    partly = order_slots([None, *slots([20, 30])], seed=3, epoch=0, round_index=0)
    assert [slot.cost for slot in full if slot][partly.index(None)] == 10
