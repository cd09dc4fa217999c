"""Which full groups a rank emits: those that cost what the others' cost."""

from __future__ import annotations

import random
from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_factory.config import OdbConfig
from odb_factory.core.alignment import plan_round
from odb_factory.core.budget import Budget
from odb_factory.core.choice import choose, closest
from odb_factory.core.grouping import Group, make_group
from odb_factory.core.protocol import RankProtocol
from odb_factory.core.sample import SampleMeta
from odb_factory.core.simulate import simulate
from tests.core.worlds import meta

BUDGET = Budget(tokens=1000)


def of_cost(*costs: int, first: int = 0) -> list[Group]:
    """Full groups of one sample each."""
    return [make_group([meta(first + i, cost)], BUDGET, True) for i, cost in enumerate(costs)]


def costs_of(groups: list[Group]) -> list[int]:
    return sorted(g.cost for g in groups)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_closest_is_the_best_of_all_selections(costs: list[int], aims: list[int]) -> None:
    costs, aims = sorted(costs, reverse=True), sorted(aims, reverse=True)[: len(costs)]
    found = closest(costs, aims)
    assert found == sorted(set(found))
    best = min(
        sum((costs[i] - aim) ** 2 for i, aim in zip(places, aims, strict=True))
        for places in combinations(range(len(costs)), len(aims))
    )
    assert sum((costs[i] - aim) ** 2 for i, aim in zip(found, aims, strict=True)) == best


def test_what_a_rank_has_too_many_of_is_held_back() -> None:
    usual = [900, 500, 500, 500]
    assert costs_of(choose(of_cost(900, 900, 900, 500, 500, 500), [], usual, 4)) == [500, 500, 500, 900]
    assert costs_of(choose(of_cost(900, 500, 500, 500, 500, 500), [], usual, 4)) == [500, 500, 500, 900]


def test_what_is_emitted_in_any_case_counts() -> None:
    overdue = of_cost(900, first=50)
    assert costs_of(choose(of_cost(900, 500, 500, 500), overdue, [900, 500, 500, 500], 3)) == [500, 500, 500]


def test_the_aim_follows_the_data() -> None:
    """Whatever was usual: of what a rank has nothing else but, it emits."""
    assert costs_of(choose(of_cost(100, 100, 100), [], [900, 900], 2)) == [100, 100]
    # a quarter of its own distribution: where most are dear by now, not only the cheap ones leave
    assert 900 in costs_of(choose(of_cost(*[900] * 12, *[500] * 4), [], [500] * 8, 8))


@pytest.mark.parametrize("usual", [(), (90, 50, 10)])
def test_overdue_groups_and_full_ones_go_first_whatever_is_usual(usual: tuple[int, ...]) -> None:
    groups = [*of_cost(10, 20, 30, 40, 50), make_group([meta(9, 50)], BUDGET, False)]
    for steps in range(1, 6):
        plan = plan_round(
            groups, {9: 3, 2: 4}, steps, BUDGET, split="balanced", max_wait=3, rng=random.Random(0), usual=usual
        )
        emitted = [s.index for slot in plan.slots if slot for s in slot.samples]
        assert len(emitted) == steps
        assert emitted[:2] == [2, 9][:steps]
        assert sorted([*emitted, *(s.index for s in plan.kept)]) == [0, 1, 2, 3, 4, 9]


def test_attention_counts_among_what_is_usual() -> None:
    """Of 400 padded tokens each: 8 rows of 50, and one row of 400."""
    budget = Budget(tokens=400, attention_length=400)
    short = [make_group([meta(10 * i + k, 50) for k in range(8)], budget, True) for i in range(3)]
    long = [make_group([meta(100 + i, 400)], budget, True) for i in range(3)]
    assert choose([*short, *long], [], [450, 450, 450, 800], 4).count(long[0]) == 1
    emitted = choose([*short, *long], [], [800, 800, 800, 450], 4)
    assert sorted(group.work for group in emitted) == [450, 800, 800, 800]
    assert sorted(group.work for group in choose(short + long, long[:1], [450, 450, 450, 450], 3)) == [450, 450, 450]


def test_ranks_learn_what_is_usual_from_the_totals() -> None:
    config = OdbConfig(token_budget=8, depth=4, ramp=False, attention_length=4)
    ranks = [RankProtocol(config, rank=r, epoch=0, world_size=2) for r in range(2)]
    for r, rank in enumerate(ranks):
        rank.add([SampleMeta(index=4 * r + i, length=length, loss_tokens=1) for i, length in enumerate((8, 8, 6, 5))])
    minima = [min(column) for column in zip(*(rank.begin_round(exhausted=False) for rank in ranks), strict=True)]
    sums = [sum(column) for column in zip(*(r.plan(minima, dropped=0, unread=1) for r in ranks), strict=True)]
    for rank in ranks:
        rank.close_round(sums)
        assert rank._usual == (24, 24, 15, 11)


def _imbalance(monkeypatch: pytest.MonkeyPatch, chosen: bool) -> float:
    """Padded tokens of the slowest rank over the mean, less 1; with the choice by work, or with draws instead."""
    if not chosen:
        monkeypatch.setattr("odb_factory.core.alignment.choose", lambda groups, taken, usual, count: groups[:count])
    paid, least = 0.0, 0.0
    for seed in range(4):
        rng = random.Random(seed)
        lengths = [min(2000, max(8, int(rng.lognormvariate(5.8, 1.0)))) for _ in range(6000)]
        samples = [SampleMeta(index=i, length=n, loss_tokens=1) for i, n in enumerate(lengths)]
        steps = zip(
            *simulate(samples, OdbConfig(token_budget=3000, depth=128, seed=seed), 4).steps,
            strict=True,
        )
        costs = [[step.group.cost if step.group else 0 for step in ranks] for ranks in steps]
        paid += sum(map(max, costs))
        least += sum(map(sum, costs)) / 4
    assert 0 < paid < inf
    return paid / least - 1


def test_choosing_evens_the_ranks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = _imbalance(monkeypatch, True)
    assert chosen < 0.9 * _imbalance(monkeypatch, False)


def _time_beyond_ideal(attention_length: int | None) -> float:
    """Time of the slowest rank over the mean, less 1, where rows of 4000 tokens spend half of it on attention."""
    paid = least = 0.0
    for seed in range(2):
        rng = random.Random(seed)
        lengths = [min(2000, max(8, int(rng.lognormvariate(5.8, 1.0)))) for _ in range(6000)]
        samples = [SampleMeta(index=i, length=n, loss_tokens=1) for i, n in enumerate(lengths)]
        config = OdbConfig(token_budget=3000, depth=128, seed=seed, attention_length=attention_length)
        for ranks in zip(*simulate(samples, config, 4).steps, strict=True):
            groups = [step.group for step in ranks]
            times = [g.cost * (1 + g.cost / len(g.samples) / 4000) if g else 0.0 for g in groups]
            paid += max(times)
            least += sum(times) / 4
    return paid / least - 1


def test_counting_attention_evens_out_ranks_that_pay_for_it() -> None:
    assert _time_beyond_ideal(4000) < 0.6 * _time_beyond_ideal(None)
