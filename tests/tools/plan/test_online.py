"""The prediction of ODB: the epoch that is made of a sample, updates, and epochs too long to be simulated."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from odb_factory.config import OdbConfig
from odb_factory.core.sample import Dropped, SampleMeta
from odb_factory.core.simulate import simulate
from odb_factory.tools.plan import online
from odb_factory.tools.plan.observed import EpochSamples, Observed, describe_lengths, histogram, make_epoch
from odb_factory.tools.plan.online import count_updates, predict_online


def lognormal(size: int, seed: int = 0, nbytes: int = 100) -> list[SampleMeta]:
    rng = random.Random(seed)
    lengths = [min(400, max(4, int(rng.lognormvariate(4, 0.8)))) for _ in range(size)]
    return [SampleMeta(index=i, length=n, loss_tokens=1, nbytes=nbytes) for i, n in enumerate(lengths)]


def observed(metas: Sequence[SampleMeta], size: int, dropped: Sequence[int] = ()) -> Observed:
    return Observed(size, tuple(metas), tuple(Dropped(index, "bad", bad=True) for index in dropped))


class TestMakeEpoch:
    def test_all_rows_are_the_data_set_itself(self) -> None:
        metas = [m for m in lognormal(20) if m.index not in (3, 7)]
        epoch = make_epoch(observed(metas, 20, (3, 7)), 20, seed=1)
        assert epoch.exact
        assert epoch.dropped == {3, 7}
        assert epoch.usable == metas

    def test_each_row_of_a_sample_comes_as_often_as_any_other(self) -> None:
        metas = [SampleMeta(index=10 * i, length=i + 1, loss_tokens=1) for i in range(9)]
        epoch = make_epoch(observed(metas, 1000, (95,)), 34, seed=1)
        assert not epoch.exact
        assert [s.index for s in epoch.samples] == list(range(34))
        counts = Counter(s.length for s in epoch.usable)
        counts["dropped"] = len(epoch.dropped)
        assert set(counts.values()) == {3, 4}
        assert sum(counts.values()) == 34

    def test_the_draw_depends_on_the_seed(self) -> None:
        made = [make_epoch(observed(lognormal(10), 100), 35, seed=seed) for seed in (1, 1, 2)]
        assert made[0] == made[1] != made[2]


CONFIG = OdbConfig(token_budget=800, depth=32, pad_to_multiple_of=8, seed=5, attention_length=500)


def test_an_epoch_is_the_core_s_own() -> None:
    samples = lognormal(300)
    prediction = predict_online(lambda n: EpochSamples(tuple(samples), frozenset(), True), 300, CONFIG, 4)
    epoch = simulate(samples, CONFIG, 4)
    groups = [step.group for rank in epoch.steps for step in rank if step.group]
    assert prediction.exact
    assert prediction.steps == len(epoch.steps[0])
    assert prediction.samples == 300
    assert prediction.padded_tokens == sum(group.cost for group in groups)
    assert prediction.tokens == sum(s.length for s in samples)
    assert 0 < prediction.padding < 0.5
    assert 0.5 < prediction.ideal_share < 1
    steps = zip(*[[step.group for step in rank] for rank in epoch.steps], strict=True)
    assert prediction.slowest_work == sum(max(group.work if group else 0 for group in step) for step in steps)
    assert prediction.useful_work == sum(s.length for s in samples) + sum(s.length**2 for s in samples) // 500


def test_overlong_samples_are_dropped_where_the_recipe_says_so() -> None:
    lengths = [900, 10, 20, 30, 900, 40]
    samples = tuple(SampleMeta(index=i, length=n, loss_tokens=1) for i, n in enumerate(lengths))
    made = EpochSamples(samples, frozenset({1}), True)
    for overlong, count in (("keep", 5), ("drop", 3)):
        config = OdbConfig(token_budget=800, depth=32, overlong=overlong)
        assert predict_online(lambda n: made, 6, config, 1).samples == count


@pytest.mark.parametrize("window_bytes", [800, 2000])
def test_a_window_short_of_bytes_pads_more(window_bytes: int) -> None:
    made = EpochSamples(tuple(lognormal(300)), frozenset(), True)
    free, bound = (
        predict_online(lambda n: made, 300, OdbConfig(token_budget=800, depth=64, window_bytes=limit), 2)
        for limit in (None, window_bytes)
    )
    assert free.short_windows == 0 < bound.short_windows
    assert free.samples == bound.samples == 300
    assert free.padding < bound.padding


class TestCountUpdates:
    def test_of_steps(self) -> None:
        assert count_updates([1, 1, 1, 1, 1, 1], 3, None) == 2

    def test_of_samples_with_the_rest_at_the_end(self) -> None:
        assert count_updates([4, 4, 9, 1, 1], 1, 8) == 3
        assert count_updates([4, 4, 8], 1, 8) == 2


def test_a_long_epoch_is_drawn_out_to_what_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    source = observed(lognormal(500), 20_000)

    def make(count: int) -> EpochSamples:
        return make_epoch(source, count, seed=1)

    whole = predict_online(make, 20_000, CONFIG, 2)
    monkeypatch.setattr(online, "MOST_SIMULATED", 10_000)
    drawn = predict_online(make, 20_000, CONFIG, 2)
    assert not drawn.exact
    assert drawn.samples == 20_000
    for name in ("steps", "updates", "padded_tokens", "slowest_work", "tokens"):
        assert getattr(drawn, name) == pytest.approx(getattr(whole, name), rel=0.01), name


class TestLengths:
    def test_figures_by_hand(self) -> None:
        metas = [
            SampleMeta(index=i, length=n, loss_tokens=n // 2, has_media=i == 0)
            for i, n in enumerate((2, 10, 10, 18, 20, 24))
        ]
        figures = describe_lengths(metas, cutoff=20, overlong=[False] * 5 + [True])
        assert figures.mean == 14
        assert figures.cv == pytest.approx((((12**2 + 2 * 4**2 + 4**2 + 6**2 + 10**2) / 6) ** 0.5) / 14)
        assert (figures.least, figures.median, figures.most) == (2, 14, 24)
        assert figures.short == pytest.approx(1 / 6)
        assert figures.truncated == pytest.approx(2 / 6)
        assert figures.above_cutoff == figures.above_budget == figures.with_media == pytest.approx(1 / 6)
        assert figures.loss_share == 0.5
        assert figures.loss_share_sd == 0

    def test_quantiles_lie_between_neighbours(self) -> None:
        for lengths, median, p90 in (([20, 1, 11], 11, 18.2), ([7], 7, 7)):
            metas = [SampleMeta(index=i, length=n, loss_tokens=0) for i, n in enumerate(lengths)]
            figures = describe_lengths(metas, cutoff=20, overlong=[False] * len(metas))
            assert (figures.median, figures.p90) == (median, pytest.approx(p90))

    @pytest.mark.parametrize("lengths", [[5], [1, 2, 3], [0, 99, 100], list(range(1, 1000))])
    def test_a_histogram_counts_each_once(self, lengths: list[int]) -> None:
        edges, counts = histogram(lengths, 10)
        assert len(edges) == len(counts) + 1 <= 11
        assert counts == [sum(low <= n < high for n in lengths) for low, high in itertools.pairwise(edges)]
        assert sum(counts) == len(lengths)
