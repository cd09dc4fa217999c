"""One rank's side of the rounds: windows, errors, the end of an epoch."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from odb_factory.config import OdbConfig
from odb_factory.core.assignment import make_index_source
from odb_factory.core.protocol import ClosedRound, ProtocolError, RankProtocol, TooManyBadSamples
from odb_factory.core.sample import SampleMeta
from odb_factory.core.simulate import reduce_elements
from odb_factory.core.stats import StepTotals
from tests.core.worlds import metas

CONFIG = OdbConfig(token_budget=100, depth=8, ramp=False)


def ranks_of(count: int, config: OdbConfig = CONFIG, epoch: int = 0) -> list[RankProtocol]:
    return [RankProtocol(config, rank=rank, epoch=epoch, world_size=count) for rank in range(count)]


def one_round(
    ranks: list[RankProtocol], windows: list[list[SampleMeta]], unread: list[int], dropped: list[int] | None = None
) -> list[ClosedRound]:
    """A round with an exchange; `windows` are added first."""
    for rank, window in zip(ranks, windows, strict=True):
        rank.add(window)
    minima = reduce_elements([r.begin_round(exhausted=not n) for r, n in zip(ranks, unread, strict=True)], min)
    drops = dropped or [0] * len(ranks)
    plans = [r.plan(minima, dropped=d, unread=n) for r, d, n in zip(ranks, drops, unread, strict=True)]
    sums = reduce_elements(plans, sum)
    return [r.close_round(sums) for r in ranks]


def test_a_window_asks_for_what_it_lacks_to_the_depth() -> None:
    (rank,) = ranks_of(1)
    assert rank.missing() == 8
    rank.add(metas(1, 2, 3))
    assert (rank.missing(), rank.window_size) == (5, 3)


def test_the_first_windows_follow_the_ramp() -> None:
    (rank,) = ranks_of(1, dataclasses.replace(CONFIG, ramp=True, depth=16))
    asked = []
    for number in range(4):
        asked.append(rank.missing())
        one_round([rank], [[SampleMeta(index=number, length=1, loss_tokens=0)]], unread=[9])
    assert asked == [2, 4, 8, 16]


def test_kept_samples_stay_in_the_window() -> None:
    ranks = ranks_of(2, dataclasses.replace(CONFIG, capacity=1))
    closed = one_round(ranks, [metas(60, 70, 80), [SampleMeta(index=9, length=5, loss_tokens=1)]], unread=[4, 0])
    assert [r.window_size for r in ranks] == [2, 0]
    assert [r.missing() for r in ranks] == [6, 8]
    assert [c.epoch_over for c in closed] == [False, False]


def test_an_observed_sample_cannot_be_observed_again_while_it_waits() -> None:
    (rank,) = ranks_of(1)
    rank.add(metas(1, 2))
    with pytest.raises(ProtocolError, match="rank 0 observed sample 1 twice"):
        rank.add([SampleMeta(index=1, length=9, loss_tokens=0)])


def test_the_steps_do_not_depend_on_the_order_in_which_samples_arrive() -> None:
    """Workers finish in any order."""
    samples = metas(*[5 + (31 * i) % 90 for i in range(16)])
    steps = []
    for seed in range(5):
        windows = [samples[:8], samples[8:]]
        for window in windows:
            random.Random(seed).shuffle(window)
        steps.append([c.steps for c in one_round(ranks_of(2), windows, unread=[5, 5])])
    assert all(other == steps[0] for other in steps)


def test_ranks_draw_their_held_back_groups_independently() -> None:
    """The same window on every rank: with one draw for all, the same lengths would always wait together."""
    config = dataclasses.replace(CONFIG, capacity=3)
    windows = [[SampleMeta(index=i, length=60 + i, loss_tokens=0) for i in range(8)] for _ in range(6)]
    closed = one_round(ranks_of(6, config), windows, unread=[1] * 6)
    drawn = {frozenset(s.index for step in c.steps if step.group for s in step.group.samples) for c in closed}
    assert len(drawn) > 1


@pytest.mark.parametrize(("split", "sizes"), [("balanced", [3, 3]), ("singleton", [1, 5])])
def test_a_rank_with_too_few_groups_splits_as_configured(split: str, sizes: list[int]) -> None:
    config = dataclasses.replace(CONFIG, alignment="max", split=split)
    few = [SampleMeta(index=i, length=5, loss_tokens=0) for i in range(6)]
    many = [SampleMeta(index=i, length=60, loss_tokens=0) for i in range(10, 12)]
    closed = one_round(ranks_of(2, config), [few, many], unread=[1, 1])
    assert sorted(len(step.group.samples) for step in closed[0].steps if step.group) == sizes


def test_each_epoch_and_seed_has_its_own_draw_and_order_of_steps() -> None:
    """Over the same window: which groups leave when three may, and in which order they go when all may."""
    window = [SampleMeta(index=i, length=60 + i, loss_tokens=0) for i in range(8)]
    for capacity, keep_order in ((3, False), (None, True)):
        for changed in ("epoch", "seed"):
            seen = set()
            for value in range(6):
                config = dataclasses.replace(CONFIG, capacity=capacity, seed=value if changed == "seed" else 0)
                ranks = ranks_of(1, config, epoch=value if changed == "epoch" else 0)
                (closed,) = one_round(ranks, [window], unread=[1])
                indices = [s.index for step in closed.steps if step.group for s in step.group.samples]
                seen.add(tuple(indices if keep_order else sorted(indices)))
            assert len(seen) > 3, (capacity, changed)


def test_dropped_samples_are_summed_over_ranks_and_told_to_all() -> None:
    closed = one_round(ranks_of(3), [metas(5), [], []], unread=[1, 0, 0], dropped=[2, 0, 3])
    assert [c.dropped for c in closed] == [5, 5, 5]


def test_join_mode_ends_when_no_rank_has_anything_left() -> None:
    ranks = ranks_of(2)
    other = SampleMeta(index=5, length=9, loss_tokens=1)
    first = one_round(ranks, [metas(5), []], unread=[0, 1])
    assert [[step.last for step in c.steps] for c in first] == [[False], [False]]
    assert not any(c.epoch_over for c in first)
    second = one_round(ranks, [[], [other]], unread=[0, 0])
    assert all(c.epoch_over for c in second)
    assert [[step.last for step in c.steps] for c in second] == [[True], [True]]


def test_nonjoin_mode_ends_with_the_step_that_reaches_the_quota() -> None:
    config = dataclasses.replace(CONFIG, join=False, quota=0.5, steps_multiple=3)
    ranks = [RankProtocol(config, rank=rank, epoch=0, world_size=2, dataset_size=8) for rank in range(2)]
    windows = [[SampleMeta(index=4 * rank + i, length=60 + i, loss_tokens=0) for i in range(4)] for rank in range(2)]
    closed = one_round(ranks, windows, unread=[1, 1])
    assert all(c.epoch_over for c in closed)
    for c in closed:
        assert [step.totals.samples for step in c.steps] == [2, 2, 0], "two of four steps, and a filler"
        assert [step.last for step in c.steps] == [False, False, True]


def test_the_quota_is_not_one_more_for_a_rounding_error() -> None:
    config = dataclasses.replace(CONFIG, depth=100, join=False, quota=0.07, max_samples=1)
    rank = RankProtocol(config, rank=0, epoch=0, world_size=2, dataset_size=100)
    (closed,) = one_round([rank], [metas(*[60] * 20)], unread=[1])
    assert len(closed.steps) == 7, "0.07 * 100 is 7.000000000000001 in floating point"


def test_what_was_emitted_before_a_resumption_counts_for_the_quota() -> None:
    config = dataclasses.replace(CONFIG, join=False, quota=0.5)
    rank = RankProtocol(config, rank=0, epoch=0, world_size=2, dataset_size=20, emitted=9)
    (closed,) = one_round([rank], [metas(60, 61, 62)], unread=[1])
    assert closed.epoch_over
    assert [step.totals.samples for step in closed.steps] == [1]


def shared_pair(order: list[int], **values: Any) -> list[RankProtocol]:
    config = dataclasses.replace(CONFIG, **{"depth": 1, "assignment": "shared", **values})
    return [
        RankProtocol(config, rank=rank, epoch=0, world_size=2, source=make_index_source("shared", order, rank, 2, 2))
        for rank in range(2)
    ]


def test_a_step_waits_where_all_that_is_left_to_read_may_be_dropped() -> None:
    """Whether it is the last one is known after the next round, in which there is nothing to align."""
    ranks = shared_pair(list(range(5)))
    assert [rank.start() for rank in ranks] == [[0, 2], [1, 3]]
    first = one_round(ranks, [metas(5), metas(7)], unread=[0, 0], dropped=[1, 1])  # 2 and 3 were dropped
    assert [(c.steps, c.epoch_over) for c in first] == [((), False)] * 2
    asks = [c.ask for c in first]
    assert asks == [1, 1], "an equal share, and one sample is left"
    assert ranks[0].assign(1, 0, 2) + ranks[1].assign(1, 1, 2) == [4]
    assert all(rank.all_assigned for rank in ranks)
    second = one_round(ranks, [[], []], unread=[0, 0], dropped=[0, 1])
    assert [[step.last for step in c.steps] for c in second] == [[True], [True]]
    assert [c.epoch_over for c in second] == [True, True]
    assert second[0].steps[0].totals.samples == 2


def test_samples_that_were_announced_but_do_not_come_are_an_error_on_all_ranks() -> None:
    ranks = ranks_of(2)
    for rank in ranks:
        minima = reduce_elements([r.begin_round(exhausted=False) for r in ranks], min)
        plan = rank.plan(minima, dropped=0, unread=1)
        with pytest.raises(ProtocolError, match="no step though samples were announced"):
            rank.close_round(plan)


def test_too_many_bad_samples_are_an_error_on_all_ranks_in_the_same_round() -> None:
    ranks = ranks_of(2, dataclasses.replace(CONFIG, max_bad_samples=3))
    for rank in ranks:
        rank.bad = 2  # of a run that is resumed
        rank.add([SampleMeta(index=rank.rank, length=5, loss_tokens=1)])
    minima = reduce_elements([r.begin_round(exhausted=False) for r in ranks], min)
    plans = [r.plan(minima, dropped=1, unread=1, bad=1) for r in ranks]
    for rank in ranks:
        with pytest.raises(TooManyBadSamples, match=r"4 samples of epoch 0 were skipped as bad, more than .* 3 allows"):
            rank.close_round(reduce_elements(plans, sum))


def test_an_epoch_without_samples_ends_without_steps() -> None:
    closed = one_round(ranks_of(2), [[], []], unread=[0, 0], dropped=[3, 2])
    assert [(c.steps, c.epoch_over, c.dropped) for c in closed] == [((), True, 5)] * 2


@pytest.mark.parametrize(("multiple", "steps"), [(1, 2), (2, 2), (3, 3), (4, 4), (8, 8)])
def test_fillers_complete_the_last_accumulation_window_and_the_very_last_step_is_last(
    multiple: int, steps: int
) -> None:
    ranks = ranks_of(2, dataclasses.replace(CONFIG, steps_multiple=multiple))
    first = one_round(ranks, [metas(60, 70), [SampleMeta(index=9, length=5, loss_tokens=1)]], unread=[0, 1])
    second = one_round(ranks, [[], [SampleMeta(index=10, length=5, loss_tokens=1)]], unread=[0, 0])
    done = [(*a.steps, *b.steps) for a, b in zip(first, second, strict=True)]
    real = len(first[0].steps) + len(second[0].steps)
    assert [len(d) for d in done] == [-(-real // multiple) * multiple] * 2 == [steps] * 2
    for rank_steps in done:
        assert [step.last for step in rank_steps] == [False] * (steps - 1) + [True]
        assert all(step.group is None and step.totals.samples == 0 for step in rank_steps[real:])


def test_the_failure_of_a_rank_reaches_the_others_by_its_number() -> None:
    ranks = ranks_of(3)
    for rank in ranks:
        rank.add([SampleMeta(index=rank.rank, length=5, loss_tokens=1)])
    minima = reduce_elements([r.begin_round(exhausted=False, failed=r.rank == 2) for r in ranks], min)
    for rank in ranks[:2]:
        with pytest.raises(ProtocolError, match="rank 2 failed"):
            rank.plan(minima, dropped=0, unread=0)


def test_of_several_failed_ranks_each_healthy_one_learns_the_first() -> None:
    ranks = ranks_of(3)
    minima = reduce_elements([r.begin_round(exhausted=True, failed=r.rank > 0) for r in ranks], min)
    with pytest.raises(ProtocolError, match="rank 1 failed"):
        ranks[0].plan(minima, dropped=0, unread=0)


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("configuration", {"config": dataclasses.replace(CONFIG, token_budget=99)}),
        ("size of the dataset", {"dataset_size": 11}),
        ("resumed state", {"state_check": 5}),
        ("epoch", {"epoch": 1}),
    ],
)
@pytest.mark.parametrize("other", [0, 1])
def test_every_rank_refuses_to_go_on_with_another_configuration_data_set_or_epoch(
    what: str, changed: dict[str, Any], other: int
) -> None:
    same: dict[str, Any] = {"config": CONFIG, "epoch": 0, "dataset_size": 10}
    ranks = [RankProtocol(rank=rank, world_size=2, **same | (changed if rank == other else {})) for rank in range(2)]
    minima = reduce_elements([r.begin_round(exhausted=True) for r in ranks], min)
    for rank in ranks:
        with pytest.raises(ProtocolError, match=f"differ in their {what} "):
            rank.plan(minima, dropped=0, unread=0)


def test_every_rank_refuses_to_go_on_in_another_round() -> None:
    ahead, behind = ranks_of(2)
    one_round([ahead], [metas(5)], unread=[3])
    minima = reduce_elements([r.begin_round(exhausted=False) for r in (ahead, behind)], min)
    for rank in (ahead, behind):
        with pytest.raises(ProtocolError, match=r"differ in their round \(0 and 1\)"):
            rank.plan(minima, dropped=0, unread=0)


def test_the_traffic_of_a_round_grows_with_its_steps_and_not_with_the_world() -> None:
    first_widths, second_widths = set(), {}
    for world_size in (2, 16):
        for steps in (1, 4):
            ranks = ranks_of(world_size)
            for rank in ranks:
                rank.add([SampleMeta(index=i, length=60, loss_tokens=1) for i in range(steps)])
            first = [r.begin_round(exhausted=False) for r in ranks]
            minima = reduce_elements(first, min)
            first_widths |= {len(vector) for vector in first}
            (second_widths[world_size, steps],) = {len(r.plan(minima, dropped=0, unread=1)) for r in ranks}
    assert len(first_widths) == 1
    assert second_widths == {
        (w, steps): StepTotals.WIDTH * steps + RankProtocol.TAIL for w in (2, 16) for steps in (1, 4)
    }
