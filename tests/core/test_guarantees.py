"""G1, G2, G4, G6, G7 and the bound on waiting, in random worlds of up to 128 simulated ranks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb_factory.config import OdbConfig
from odb_factory.core.simulate import Epoch, RankRound, simulate
from odb_factory.core.stats import StepTotals
from tests.core.invariants import (
    World,
    check_each_once,
    check_join,
    check_nonjoin,
    check_paired,
    check_rounds,
    check_same_steps,
    check_totals,
    check_wait,
    check_within_bounds,
    emitted,
)
from tests.core.worlds import large_worlds, meta, metas, small_worlds

SMALL = settings(max_examples=300)
LARGE = settings(max_examples=40)


@SMALL
@given(small_worlds(join=True))
def test_join_mode_keeps_every_guarantee_in_small_worlds(world: World) -> None:
    check_join(world, world.run())


@LARGE
@given(large_worlds(join=True))
def test_join_mode_keeps_every_guarantee_in_large_worlds(world: World) -> None:
    check_join(world, world.run())


@SMALL
@given(small_worlds(join=False))
def test_nonjoin_mode_closes_together_without_repeats_in_small_worlds(world: World) -> None:
    check_nonjoin(world, world.run())


@LARGE
@given(large_worlds(join=False))
def test_nonjoin_mode_closes_together_without_repeats_in_large_worlds(world: World) -> None:
    check_nonjoin(world, world.run())


@settings(max_examples=50)
@given(
    st.integers(2, 5),
    st.integers(3, 12),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 10**6),
    st.sampled_from(["static", "shared"]),
)
def test_no_sample_waits_beyond_the_bound_in_long_epochs_of_uneven_ranks(
    world_size: int, depth: int, max_wait: int, ramp: bool, seed: int, assignment: str
) -> None:
    """Each rank has lengths of its own scale, so some have far more full groups than may leave."""
    rng = random.Random(seed)
    scales = [rng.choice([5, 30, 90]) for _ in range(world_size)]
    samples = [meta(i, rng.randint(1, scales[i % world_size])) for i in range(world_size * 100)]
    config = OdbConfig(
        token_budget=100, depth=depth, max_wait=max_wait, ramp=ramp, shuffle=False, seed=seed, assignment=assignment
    )
    check_join(World(config, tuple(samples), world_size), simulate(samples, config, world_size))


@settings(max_examples=100)
@given(small_worlds(join=True), st.booleans())
def test_a_rank_need_only_know_whether_samples_are_unread(world: World, join: bool) -> None:
    world = dataclasses.replace(world, config=dataclasses.replace(world.config, join=join))
    assert world.run(exact_unread=False).steps == world.run().steps


@pytest.mark.parametrize("alignment", ["carry", "max"])
@pytest.mark.parametrize("split", ["balanced", "singleton"])
@pytest.mark.parametrize("world_size", [1, 3, 128])
def test_fewer_samples_than_ranks_still_reach_every_rank_as_idle_slots(
    alignment: str, split: str, world_size: int
) -> None:
    config = OdbConfig(token_budget=100, depth=16, alignment=alignment, split=split)
    for size in (0, 1, 2):
        epoch = simulate(metas(*range(10, 10 + size)), config, world_size)
        check_join(World(config, tuple(metas(*range(10, 10 + size))), world_size), epoch)
        idle_ranks = sum(all(step.group is None for step in rank) for rank in epoch.steps)
        assert idle_ranks == max(0, world_size - size)


def test_nonjoin_mode_with_fewer_samples_than_ranks_emits_up_to_the_quota() -> None:
    epoch = simulate(metas(10, 20), OdbConfig(token_budget=100, join=False, quota=0.5), 3)
    assert [len(rank) for rank in epoch.steps] == [1, 1, 1]
    assert len(emitted(epoch)) == 2, "both are in the step that reaches the quota"


@pytest.mark.parametrize("assignment", ["static", "shared"])
def test_nonjoin_mode_leaves_the_tail_where_join_mode_has_idle_slots(assignment: str) -> None:
    """Rank 0 has the long samples and needs more steps than rank 1."""
    samples = metas(*[100 if i % 2 == 0 else 10 for i in range(40)])
    config = OdbConfig(token_budget=100, depth=8, capacity=2, shuffle=False, ramp=False, assignment=assignment)
    joined = simulate(samples, config, 2)
    closed = simulate(samples, dataclasses.replace(config, join=False, quota=0.6), 2)
    fillers = [sum(step.group is None for rank in epoch.steps for step in rank) for epoch in (joined, closed)]
    assert fillers[0] > fillers[1] == 0
    assert 24 <= len(emitted(closed)) < 40


@SMALL
@given(small_worlds(join=True), st.integers(0, 30), st.integers(1, 4))
def test_a_resumed_epoch_emits_the_rest_exactly_once(world: World, count: int, world_size: int) -> None:
    """What was emitted in some steps by one world is left out by another world."""
    first = world.run()
    steps = zip(*first.steps, strict=True)
    before = [s.index for column in list(steps)[:count] for step in column if step.group for s in step.group.samples]
    rest = simulate(world.samples, world.config, world_size, dropped=world.dropped, done=before)
    check_same_steps(rest)
    check_each_once(rest, set(world.valid) - set(before))


def test_carry_emits_only_full_groups_before_the_drain_unless_a_sample_is_overdue() -> None:
    samples = metas(*[1 + (37 * i) % 97 for i in range(600)])
    config = OdbConfig(token_budget=256, depth=32, max_wait=1000, ramp=False)
    epoch = simulate(samples, config, 4)
    before = [
        done for column in zip(*epoch.rounds, strict=True) for done in column if not any(d.exhausted for d in column)
    ]
    assert len(before) > 15
    for done in before:
        for step in done.steps:
            assert step.group is not None
            longest = max(s.length for s in step.group.samples)
            assert longest * (len(step.group.samples) + 1) > 256


def test_overdue_samples_go_out_although_full_groups_alone_would_starve_them() -> None:
    """Rank 0's windows hold one full group and a rest; rank 1 has far more full groups than may leave."""
    samples = metas(*[x for _ in range(120) for x in (10, 90)])
    slow = OdbConfig(token_budget=100, depth=12, max_wait=1000, ramp=False, shuffle=False)
    with pytest.raises(AssertionError, match=r"wait"):
        check_wait(simulate(samples, slow, 2), dataclasses.replace(slow, max_wait=3))
    soon = dataclasses.replace(slow, max_wait=3)
    check_wait(simulate(samples, soon, 2), soon)


@pytest.mark.parametrize("alignment", ["carry", "max"])
def test_without_the_exchange_uneven_shards_break_the_same_number_of_steps(alignment: str) -> None:
    """The negative control: what the two reductions are for."""
    samples = metas(*[90 if i % 2 == 0 else 10 for i in range(60)])
    config = OdbConfig(token_budget=100, depth=8, alignment=alignment, shuffle=False, assignment="static")
    check_same_steps(simulate(samples, config, 2))
    with pytest.raises(AssertionError, match="steps per rank differ"):
        check_same_steps(simulate(samples, config, 2, exchange=False))


def test_without_the_exchange_even_shards_still_break_the_totals() -> None:
    samples = metas(*[50] * 40)
    config = OdbConfig(token_budget=100, depth=8, shuffle=False)
    check_totals(simulate(samples, config, 2), config, samples)
    alone = simulate(samples, config, 2, exchange=False)
    assert len(alone.steps[0]) == len(alone.steps[1])
    with pytest.raises(AssertionError):
        check_totals(alone, config, samples)


def change_round(epoch: Epoch, rank: int, number: int, change: Callable[[RankRound], RankRound]) -> Epoch:
    """`epoch` with one round of one rank changed."""
    rounds = [list(done) for done in epoch.rounds]
    rounds[rank][number] = change(rounds[rank][number])
    return Epoch(tuple(map(tuple, rounds)))


class TestTheChecksThemselves:
    """Each check fails where its guarantee was broken by hand in a sound epoch."""

    config = OdbConfig(token_budget=100, depth=8)
    samples = tuple(metas(*range(10, 50)))

    @pytest.fixture
    def epoch(self) -> Epoch:
        epoch = simulate(self.samples, self.config, 2)
        check_join(World(self.config, self.samples, 2), epoch)
        return epoch

    def test_a_missing_step_is_noticed(self, epoch: Epoch) -> None:
        short = change_round(epoch, 1, 0, lambda done: dataclasses.replace(done, steps=done.steps[1:]))
        with pytest.raises(AssertionError, match="steps per rank differ"):
            check_same_steps(short)

    def test_a_second_last_step_is_noticed(self, epoch: Epoch) -> None:
        def mark(done: RankRound) -> RankRound:
            first = dataclasses.replace(done.steps[0], last=True)
            return dataclasses.replace(done, steps=(first, *done.steps[1:]))

        with pytest.raises(AssertionError, match="last flags"):
            check_same_steps(change_round(change_round(epoch, 0, 0, mark), 1, 0, mark))

    def test_a_lost_and_a_repeated_sample_are_noticed(self, epoch: Epoch) -> None:
        valid = [s.index for s in self.samples]
        check_each_once(epoch, valid)
        for wrong in (valid[1:], [*valid, 0], [*valid, 40]):
            with pytest.raises(AssertionError):
                check_each_once(epoch, wrong)

    def test_a_round_without_samples_and_too_many_rounds_are_noticed(self, epoch: Epoch) -> None:
        idle = change_round(epoch, 0, 2, lambda done: dataclasses.replace(done, window=999, observed=()))
        with pytest.raises(AssertionError, match="took nothing"):
            check_rounds(idle, emitted(epoch))
        with pytest.raises(AssertionError, match="rounds for 1 samples"):
            check_rounds(epoch, [0])

    def test_a_group_above_a_bound_is_noticed(self, epoch: Epoch) -> None:
        bounds: list[dict[str, Any]] = [{"token_budget": 60}, {"max_samples": 1}]
        wider: list[dict[str, Any]] = [{"dummy_tokens": 80}, {"pad_to_multiple_of": 64}]
        for bound in bounds + wider:
            with pytest.raises(AssertionError):
                check_within_bounds(epoch, dataclasses.replace(self.config, **bound))

    def test_steps_that_are_not_paired_by_work_are_noticed(self) -> None:
        samples = [meta(i, 60 + i) for i in range(16)]
        epoch = simulate(samples, dataclasses.replace(self.config, ramp=False), 2)
        check_paired(epoch)
        swapped = change_round(epoch, 0, 0, lambda done: dataclasses.replace(done, steps=done.steps[::-1]))
        with pytest.raises(AssertionError, match="not paired"):
            check_paired(swapped)

    def test_wrong_totals_are_noticed(self, epoch: Epoch) -> None:
        for name in ("samples", "loss_tokens", "tokens", "padded_tokens", "work"):

            def add_one(done: RankRound, name: str = name) -> RankRound:
                step = done.steps[0]
                totals = dataclasses.replace(step.totals, **{name: getattr(step.totals, name) + 1})
                assert isinstance(totals, StepTotals)
                return dataclasses.replace(done, steps=(dataclasses.replace(step, totals=totals), *done.steps[1:]))

            with pytest.raises(AssertionError):
                check_totals(change_round(epoch, 0, 0, add_one), self.config, self.samples)

    def test_a_group_with_patches_above_the_bound_is_noticed(self) -> None:
        samples = [meta(i, 10, 5) for i in range(4)]
        epoch = simulate(samples, self.config, 1)
        with pytest.raises(AssertionError, match="patches"):
            check_within_bounds(epoch, dataclasses.replace(self.config, max_patches=9))
