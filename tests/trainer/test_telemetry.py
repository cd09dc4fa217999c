"""Figures of a run over ranks, and what is kept to draw it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odb_factory.runtime.messages import StepInfo
from odb_factory.trainer.ledger import Ledger
from odb_factory.trainer.picture import RunPicture, draw, table_of
from odb_factory.trainer.series import BIN_EDGES, Lengths, Series
from odb_factory.trainer.telemetry import Meter, figures_of


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def info(
    number: int, round_: int, *, padded: int, total: tuple[int, int, int], work: int, all_work: int, window: int = 0
) -> StepInfo:
    """A step of one rank: its padded tokens (0: IDLE), and (samples, tokens, padded tokens) of all ranks; work."""
    samples, tokens, padded_tokens = total
    return StepInfo(
        epoch=0,
        step=number,
        round=round_,
        idle=padded == 0,
        last=False,
        indices=(),
        lengths=(),
        loss_tokens=0,
        tokens=0,
        padded_tokens=padded,
        work=work,
        global_samples=samples,
        global_loss_tokens=0,
        global_tokens=tokens,
        global_padded_tokens=padded_tokens,
        global_work=all_work,
        global_dropped=0,
        window_samples=window,
        window_bytes=100 * window,
        align_seconds=0.002 * window,
    )


TOTALS = [(6, 90, 100), (4, 50, 60), (1, 10, 10)]
WORK = [150, 75, 15]
RANKS = [
    [
        info(k, r, padded=p, total=t, work=w, all_work=a, window=8 - 4 * r)
        for k, r, p, t, w, a in zip(range(3), [0, 0, 1], [60, 30, 10], TOTALS, [70, 40, 15], WORK, strict=True)
    ],
    [
        info(k, r, padded=p, total=t, work=w, all_work=a, window=4 - 4 * r)
        for k, r, p, t, w, a in zip(range(3), [0, 0, 1], [40, 30, 0], TOTALS, [80, 35, 0], WORK, strict=True)
    ],
]


def alone(sums: np.ndarray, work: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The reduction of a run on one rank."""
    return sums, work


class Timed:
    """A ledger and its meter, driven as a trainer does."""

    def __init__(self, world_size: int, reduce: Any) -> None:
        self.clock = Clock()
        self.ledger = Ledger(dataset_size=100, epochs=1, first_guess=1, world_size=world_size)
        self.meter = Meter(self.ledger, reduce, self.clock)

    def update(self, steps: list[StepInfo], *, wait: float, work: float) -> None:
        self.meter.begin_update()
        with self.meter.waiting():
            self.clock.now += wait
        self.clock.now += work
        self.ledger.add(steps)
        self.meter.end_update(steps)


@pytest.fixture
def world() -> list[Timed]:
    """Two ranks whose reductions see each other's quantities."""
    ranks: list[Timed] = []

    def make(own: int) -> Any:
        def reduce(sums: np.ndarray, work: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            other_sums, other_work = ranks[1 - own].meter.own()
            return sums + other_sums, np.maximum(work, other_work)

        return reduce

    for rank, (steps, wait) in enumerate(zip(RANKS, (1.0, 3.0), strict=True)):
        timed = Timed(2, make(rank))
        for part in (steps[:2], steps[2:]):
            timed.update(part, wait=wait, work=4.0)
            with timed.meter.paused():
                timed.clock.now += 1000  # an evaluation
        ranks.append(timed)
    return ranks


def test_figures_are_those_of_all_ranks(world: list[Timed]) -> None:
    meter = world[0].meter
    state = meter.state()
    figures = meter.figures()
    seconds = (2 * 5.0 + 2 * 7.0) / 2  # mean over ranks of both updates, without the evaluations
    assert figures == pytest.approx(
        {
            "samples_per_second": 11 / seconds,
            "tokens_per_second": 150 / seconds,
            "padded_tokens_per_second": 170 / seconds,
            "padding": 1 - 150 / 170,
            "samples_per_step": 11 / 3,
            "data_wait": 8 / 24,
            "filler_share": 1 / 6,
            "imbalance": 1 - 240 / (2 * (80 + 40 + 15)),
            "samples_per_update": 11 / 2,
            "window_samples": (8 + 8 + 4 + 4 + 4 + 0) / 6,
            "window_bytes": 100 * (8 + 8 + 4 + 4 + 4 + 0) / 6,
            "align_ms": 2 * (8 + 8 + 4 + 4 + 4 + 0) / 6,
        },
        rel=1e-5,
    )
    assert meter.figures_of_run() == pytest.approx(figures)
    assert state == pytest.approx(meter.run), "what a checkpoint saves includes what was not logged yet"


def test_a_log_starts_anew_and_the_run_adds_up() -> None:
    timed = Timed(1, alone)
    logged = []
    for steps in RANKS[0][:2], RANKS[0][2:]:
        timed.update(steps, wait=0.0, work=2.0)
        logged.append(timed.meter.figures())
    assert [f["samples_per_step"] for f in logged] == [5, 1]
    assert [f["samples_per_second"] for f in logged] == [10 / 2, 1 / 2]
    assert timed.meter.figures_of_run()["samples_per_second"] == pytest.approx(11 / 4)
    later = Meter(timed.ledger, alone)
    later.restore(json.loads(json.dumps(timed.meter.state())))
    assert later.figures_of_run() == timed.meter.figures_of_run()


def test_rates_of_a_run_whose_beginning_was_not_timed_are_those_of_its_end() -> None:
    """States of old versions say nothing of time."""
    timed = Timed(1, alone)
    timed.update(RANKS[0][:2], wait=0.0, work=2.0)
    timed.meter.restore(None)
    timed.update(RANKS[0][2:], wait=0.0, work=2.0)
    timed.meter.figures()
    assert timed.meter.figures_of_run()["samples_per_second"] == pytest.approx(1 / 2)


def test_nothing_trained_gives_zeros() -> None:
    assert set(Timed(1, alone).meter.figures().values()) == {0.0}


def test_a_long_series_stays_small_and_loses_nothing() -> None:
    series = Series(most=16)
    for number in range(1000):
        series.add(1, number)
    rows = series.rows()
    assert 16 <= len(rows) <= 32
    assert rows[:, 0].sum() == 1000
    assert rows[:, 1].sum() == sum(range(1000))
    assert set(rows[:-1, 0]) == {32.0}, "all but the last one stand for equally many steps"


def test_lengths_fall_into_their_bins() -> None:
    lengths = Lengths()
    lengths.add((1, 64, 64, 65, 1 << 25))
    lengths.add(())
    assert lengths.counts.sum() == 5
    place = int(np.flatnonzero(BIN_EDGES == 64)[0])
    assert lengths.counts[place] == 3
    assert lengths.counts[0] == 1
    assert lengths.counts[-1] == 1, "longer than the last edge: counted in the last bin"


@pytest.mark.parametrize("rows", [1, 2, 500])
def test_the_picture_is_drawn_of_any_run(tmp_path: Path, rows: int) -> None:
    import matplotlib.image

    lengths, series = Lengths(), Series()
    for number in range(rows):
        lengths.add([number % 700 + 1] * 3)
        series.add(1, number % 50, number, 2 * number, 0.0 if rows == 1 else 1.0, 0.0)
    picture = RunPicture(
        title="a run",
        lengths=lengths.counts,
        steps=series.rows(),
        before=0,
        token_budget=1024,
        world_size=2,
        table=[("samples", "3")],
    )
    draw(tmp_path / "odb_report.png", picture)
    image = matplotlib.image.imread(tmp_path / "odb_report.png")
    assert image.shape[0] > 600
    assert image.shape[1] > 1000
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 20
    assert [p.name for p in tmp_path.iterdir()] == ["odb_report.png"]


def test_the_table_says_what_was_left_out() -> None:
    numbers: dict[str, Any] = dict.fromkeys(figures_of({}), 0.5)
    summary = {
        **numbers,
        "samples": 9,
        "unique": 8,
        "dropped": {"a": 2, "b": 1},
        "bad": 1,
        "steps": 3,
        "fillers": 1,
        "updates": 2,
    }
    rows = dict(table_of({**summary, "left": 4}))
    assert rows["left out (odb_quota)"] == "4"
    assert rows["samples dropped (bad ones)"] == "3 (1)"
    assert "left out (odb_quota)" not in dict(table_of({**summary, "left": 0}))
