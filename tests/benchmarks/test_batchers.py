"""Every way of batching emits what it should, within its budget; ours is what the core's simulation says."""

from __future__ import annotations

import collections
import dataclasses

import pytest

from benchmarks.batchers import METHODS, Settings, bmt, gmt, odb, packing, public, public_is_installed, standard
from benchmarks.batchers.online import PAPER, odb_config, run_online
from benchmarks.epochs import Epoch, ideal_share
from benchmarks.errors import BenchmarkError
from benchmarks.lengths import draw
from odb_factory.core.sample import SampleMeta
from odb_factory.core.simulate import simulate
from odb_factory.core.stats import ideal_time_share

LENGTHS = draw("sharegpt4o", 1203, seed=5)
SETTINGS = Settings(world=4, budget=9000, depth=64, batch_size=2, cutoff=8192, seed=1)
NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(not public_is_installed(), reason="the package is not installed"))
    if name == "public"
    else name
    for name in METHODS
]


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_is_emitted(name: str) -> None:
    epoch = METHODS[name](LENGTHS, SETTINGS)
    assert set(epoch.emitted) == set(range(len(LENGTHS)))
    assert {len(step) for step in epoch.steps} == {SETTINGS.world}
    repeated = sum(epoch.emitted.values()) - len(LENGTHS)
    if name in ("gmt", "bmt", "paper", "odb"):
        assert repeated == 0
    elif name == "public":
        assert repeated == 1, "1203 samples on 4 ranks"
    else:
        most = max(len(micro.samples) for step in epoch.steps for micro in step)
        assert 0 <= repeated < most * SETTINGS.world, "the first ones once more, to complete the last step"


@pytest.mark.parametrize("name", NAMES)
def test_budgets_are_kept_and_costs_are_true(name: str) -> None:
    epoch = METHODS[name](LENGTHS, SETTINGS)
    for micro in (micro for step in epoch.steps for micro in step if micro.samples):
        widest = -(-max(LENGTHS[i] for i in micro.samples) // 8) * 8
        if name == "packing":
            assert micro.padded_tokens % SETTINGS.cutoff == 0
            assert sum(min(LENGTHS[i], SETTINGS.cutoff - 1) for i in micro.samples) <= micro.padded_tokens
            continue
        assert micro.padded_tokens == widest * len(micro.samples)
        assert micro.squares == widest**2 * len(micro.samples)
        if name in ("standard", "sorted"):
            assert len(micro.samples) == SETTINGS.batch_size
        elif len(micro.samples) > 1:
            # the public package does not count the rounding up to a multiple of 8
            slack = 7 * len(micro.samples) if name == "public" else 0
            assert micro.padded_tokens <= SETTINGS.budget + slack


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_alone_draws(name: str) -> None:
    again = METHODS[name](list(LENGTHS), SETTINGS)
    assert METHODS[name](LENGTHS, SETTINGS) == again
    assert METHODS[name](LENGTHS, dataclasses.replace(SETTINGS, seed=2)).steps != again.steps


def test_ours_is_what_the_core_says() -> None:
    config = odb_config(64, 9000, 1, 8)
    samples = [SampleMeta(index=i, length=n, loss_tokens=1) for i, n in enumerate(LENGTHS)]
    steps = list(zip(*simulate(samples, config, 4).steps, strict=True))
    epoch = odb(LENGTHS, world=4, depth=64, budget=9000, seed=1)
    assert len(epoch.steps) == len(steps)
    for mine, theirs in zip(epoch.steps, steps, strict=True):
        for micro, step in zip(mine, theirs, strict=True):
            assert micro.samples == (tuple(s.index for s in step.group.samples) if step.group else ())
    totals = [ranks[0].totals for ranks in steps]
    paid = sum(micro.padded_tokens for step in epoch.steps for micro in step if micro.samples)
    assert paid == sum(t.padded_tokens for t in totals)
    costs = [[step.group.cost if step.group else 0 for step in ranks] for ranks in steps]
    assert ideal_share(epoch) == pytest.approx(ideal_time_share(costs) * sum(LENGTHS) / paid)


def test_deferral_is_counted_in_rounds() -> None:
    free = run_online(LENGTHS, odb_config(64, 9000, 1, 8), 4)
    assert 0 < max(free.deferrals) <= free.config.max_wait
    tight = run_online(LENGTHS, odb_config(64, 9000, 1, 8, max_wait=1), 4)
    assert max(tight.deferrals) < max(free.deferrals)
    # groups that are left over when every rank emits as many as the one with the most: none
    assert max(run_online(LENGTHS, odb_config(64, 9000, 1, 8, **PAPER), 4).deferrals) == 0


def test_the_paper_pairs_by_length() -> None:
    """The longest samples of all ranks meet in one step of the first round."""
    config = odb_config(64, 9000, 1, 8, **PAPER)
    by_length = run_online(LENGTHS[:256], config, 4, by_length=True).epoch
    longest = [[max(LENGTHS[i] for i in micro.samples) for micro in step] for step in by_length.steps]
    for rank in range(4):
        assert sorted(longest, key=lambda step: step[rank]) == sorted(longest, key=lambda step: step[0])
    by_cost = run_online(LENGTHS[:256], config, 4).epoch
    assert by_cost.emitted == by_length.emitted
    assert ideal_share(by_cost) > ideal_share(by_length)


def test_gmt_sorts_globally_and_bmt_inside_buckets() -> None:
    def spread(epoch: Epoch) -> int:
        batches = [[LENGTHS[i] for i in micro.samples] for step in epoch.steps for micro in step if micro.samples]
        return sum(max(batch) - min(batch) for batch in batches)

    whole = gmt(LENGTHS, world=4, budget=9000)
    parts = bmt(LENGTHS, world=4, budget=9000, bucket_size=64)
    assert spread(whole) < spread(parts)
    assert bmt(LENGTHS, world=4, budget=9000, bucket_size=len(LENGTHS)).padded_tokens == whole.padded_tokens
    assert whole.fillers == -sum(1 for step in whole.steps for micro in step if micro.samples) % 4


def test_packing_counts_attention_as_it_runs() -> None:
    free = packing([100, 50, 40], world=1, cutoff=128, rows_per_batch=1)
    rows = packing([100, 50, 40], world=1, cutoff=128, rows_per_batch=1, padding_free=False)
    assert collections.Counter(m.squares for (m,) in free.steps) == {100**2: 1, 50**2 + 40**2: 1}
    assert [m.squares for (m,) in rows.steps] == [128**2, 128**2]
    with pytest.raises(BenchmarkError, match="cutoff 64"):
        packing([100], world=1, cutoff=64, rows_per_batch=1)


def test_standard_repeats_to_complete_the_last_step() -> None:
    epoch = standard([8] * 10, world=2, batch_size=3)
    assert sorted(epoch.emitted.values(), reverse=True) == [2, 2, *[1] * 8]


@pytest.mark.skipif(not public_is_installed(), reason="online-dynamic-batching is not installed")
def test_a_failing_rank_of_the_public_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not waited for; and what was replaced for the run is put back."""
    from odb import grouping

    real, steps = grouping.dist, grouping.get_input_length

    def broken(sample: dict) -> int:
        if steps(sample) == 13:
            raise RuntimeError("thirteen")
        return steps(sample)

    monkeypatch.setattr(grouping, "get_input_length", broken)
    with pytest.raises(BenchmarkError, match=r"rank \d of the public package failed.*thirteen"):
        public([8, 8, 8, 13], world=4, depth=2, budget=64, seed=3)
    assert grouping.dist is real
