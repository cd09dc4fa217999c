"""Several real ranks with different data: same steps everywhere, every index once, exact totals."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.core.assignment import epoch_order
from odb_factory.core.protocol import RankProtocol
from odb_factory.core.stats import StepTotals
from odb_factory.runtime import collate_process, exchange, session
from odb_factory.runtime.errors import CollateError, ExchangeError, OdbError, SampleError
from odb_factory.runtime.rendezvous import Rendezvous, serve_store
from tests.dist import descendants, run_ranks
from tests.runtime.helpers import (
    Epoch,
    Lengths,
    PadCollate,
    check_world,
    heavy_tail,
    run_epoch,
    uneven,
)

pytestmark = pytest.mark.distributed

BASE = OdbConfig(token_budget=160, depth=16, timeout=40.0, max_wait=3)


def with_values(**values: Any) -> OdbConfig:
    return dataclasses.replace(BASE, **values)


def _epochs(rank: int, world: int, runs: list[tuple[Lengths, OdbConfig]], workers: int) -> list[list[Epoch]]:
    """Two epochs of each run, one loader after the other in the same processes."""
    results = []
    for data, config in runs:
        with OdbDataLoader(data, PadCollate(), config, num_workers=workers) as loader:
            assert (loader.rank, loader.world_size) == (rank, world)
            results.append([run_epoch(loader, data) for _ in range(2)])
    return results


def check_runs(world: int, runs: list[tuple[Lengths, OdbConfig]], workers: int = 0) -> list[list[list[Epoch]]]:
    """Run and check; returns [run][epoch][rank]."""
    results = run_ranks(world, _epochs, runs, workers)
    checked = []
    for number, (data, config) in enumerate(runs):
        epochs = list(zip(*(rank[number] for rank in results), strict=True))
        for index, ranks in enumerate(epochs):
            check_world(ranks, data)
            check_exchanges(ranks, index, config)
            assert len(ranks[0].infos) % config.steps_multiple == 0
        checked.append([list(ranks) for ranks in epochs])
    return checked


def check_exchanges(ranks: Any, epoch: int, config: OdbConfig) -> None:
    """Two reductions a round, on every rank, of a size that depends on the number of steps only.

    With shared assignment a prefix sum may follow, of 5 numbers at most.
    """
    first_vector = len(RankProtocol(BASE, rank=0, epoch=0, world_size=2).begin_round(exhausted=True))
    for one in ranks:
        assert one.end.epoch == epoch
        assert one.end.left == 0
        assert one.end.exchanges == 2 * one.end.rounds > 0
        aligned = sum(1 for info in one.infos if info.global_samples)
        sent = 8 * ((first_vector + RankProtocol.TAIL) * one.end.rounds + StepTotals.WIDTH * aligned)
        more = 8 * 5 * one.end.rounds if config.assignment == "shared" else 0
        assert sent <= one.end.exchange_bytes <= sent + more


RULES = [
    {"alignment": alignment, "split": split, "assignment": assignment}
    for alignment, assignment in (("carry", "shared"), ("carry", "static"), ("max", "shared"))
    for split in ("balanced", "singleton")
]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_different_data_stay_aligned(world: int) -> None:
    runs = [
        (Lengths(heavy_tail(90, seed)), with_values(seed=seed, **rule))
        for number, rule in enumerate(RULES)
        for seed in (number, number + 1)
    ]
    check_runs(world, runs)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_very_uneven_work_stay_aligned(world: int) -> None:
    static = [rule for rule in RULES if rule["assignment"] == "static"]
    runs = [(Lengths(uneven(61, world)), with_values(shuffle=False, **rule)) for rule in static]
    for ranks in (epoch for run in check_runs(world, runs) for epoch in run):
        steps = zip(*(rank.infos for rank in ranks), strict=True)
        assert any(len({info.tokens for info in infos}) == world for infos in steps), "the ranks do differ"
        work = [sum(info.tokens for info in rank.infos) for rank in ranks]
        assert max(work) > 2 * min(work)


@pytest.mark.parametrize("world", [2, 4])
def test_with_the_shared_cursor_very_uneven_samples_become_even_work(world: int) -> None:
    config = with_values(shuffle=False, depth=8)
    [[ranks, _]] = check_runs(world, [(Lengths(uneven(240, world)), config)])
    work = [sum(info.tokens for info in rank.infos) for rank in ranks]
    assert max(work) < 1.3 * min(work)


def test_ranks_with_workers_stay_aligned() -> None:
    check_runs(2, [(Lengths(heavy_tail(80, 5), sleep=0.003), with_values(seed=3))], workers=2)


def test_traffic_depends_on_steps_not_on_the_number_of_ranks() -> None:
    """Every rank of a world of 2 and of 4 gets the same lengths, so it makes the same steps."""
    sent = []
    for world in (2, 4):
        lengths = [length for length in heavy_tail(40, 7) for _ in range(world)]
        [[first, _]] = check_runs(
            world, [(Lengths(lengths), with_values(shuffle=False, alignment="max", assignment="static"))]
        )
        assert first[0].end is not None
        sent.append((len(first[0].infos), first[0].end.exchanges, first[0].end.exchange_bytes))
    assert sent[0] == sent[1]


def test_odd_sizes_and_narrow_settings_stay_aligned() -> None:
    runs = [
        (Lengths(heavy_tail(7, 1)), with_values(depth=1)),
        (Lengths(heavy_tail(50, 2)), with_values(depth=2, capacity=1, ramp=False)),
        (Lengths(heavy_tail(31, 3)), with_values(depth=1000, max_samples=2, queue_steps=1)),
        (Lengths(heavy_tail(30, 4)), with_values(steps_multiple=5)),
        (Lengths(heavy_tail(40, 5), drop={3, 11, 38, 39}), with_values(shuffle=False)),
        (Lengths(heavy_tail(40, 5), drop=range(1, 40, 3)), with_values(shuffle=False, assignment="static")),
        # the line before: all that rank 1 has
        (Lengths([20, 500, 30, 300, 40, 10, 10]), with_values(overlong="drop")),
    ]
    checked = check_runs(3, runs)
    assert all(info.idle for info in checked[5][0][1].infos)
    assert [rank.global_dropped for rank in checked[6][1]] == [2, 2, 2]


def test_a_rank_without_any_sample_runs_fillers() -> None:
    data = Lengths([12, 30])
    [[first, second]] = check_runs(4, [(data, with_values(shuffle=False))])
    for epoch in (first, second):
        assert [rank.indices for rank in epoch] == [[0], [1], [], []]
        assert [[info.idle for info in rank.infos] for rank in epoch] == [[False], [False], [True], [True]]


def test_idle_slots_can_be_handed_to_the_caller() -> None:
    [[first, _]] = check_runs(3, [(Lengths([12, 30]), with_values(shuffle=False, idle="skip", steps_multiple=3))])
    assert [[info.idle for info in rank.infos] for rank in first] == [[False, True, True]] * 2 + [[True] * 3]


def _not_joined(rank: int, world: int, data: Lengths, config: OdbConfig) -> list[Epoch]:
    with OdbDataLoader(data, PadCollate(), config) as loader:
        return [run_epoch(loader, data) for _ in range(3)]


@pytest.mark.parametrize("assignment", ["static", "shared"])
@pytest.mark.parametrize("alignment", ["carry", "max"])
def test_without_join_the_epoch_closes_at_the_quota_and_what_is_left_is_counted(
    alignment: str, assignment: str
) -> None:
    data = Lengths(heavy_tail(121, 8), drop={4, 50})
    config = with_values(join=False, alignment=alignment, depth=8, assignment=assignment, quota=0.8)
    results = run_ranks(2, _not_joined, data, config)
    for ranks in zip(*results, strict=True):
        emitted = [i for rank in ranks for i in rank.indices]
        dropped = [d.index for rank in ranks for d in rank.dropped]
        assert len(set(emitted)) == len(emitted)
        last = ranks[0].infos[-1].global_samples
        assert 97 <= len(emitted) < 97 + last, "0.8 of 121, within one step"
        for rank in ranks:
            assert rank.end is not None
            assert rank.end.left == 121 - len(emitted) - len(dropped)
        steps = [[(i.step, i.last, i.global_samples) for i in rank.infos] for rank in ranks]
        assert steps[0] == steps[1]


class _Fat(PadCollate):
    """Batches that do not fit into a socket's buffer."""

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {**super().__call__(samples), "pixel_values": torch.zeros(500_000)}


def _pause(rank: int, world: int, data: Lengths) -> Epoch:
    config = with_values(timeout=3.0, queue_steps=1, ramp=False, shuffle=False)
    epoch = Epoch()
    with OdbDataLoader(data, _Fat() if rank else PadCollate(), config) as loader:
        for _, info in loader:
            epoch.infos.append(info)
            if info.step == 1:
                time.sleep(5.0)
    epoch.end = loader.epoch_ends[-1]
    return epoch


def test_trainers_may_pause_for_longer_than_the_timeout() -> None:
    """As for an evaluation. One rank has sent all its steps and waits in an exchange, but nobody needs its data yet."""
    data = Lengths([20] * 128)
    check_world(run_ranks(2, _pause, data), data)


# --- nothing to train on


def _nothing_is_valid(rank: int, world: int, size: int) -> tuple[str, str]:
    with OdbDataLoader(Lengths([10] * size, drop=range(size)), PadCollate(), BASE) as loader:
        try:
            run_epoch(loader, Lengths([10]))
        except OdbError as error:
            assert descendants() == [], "closed"
            return type(error).__name__, str(error)
    return "", "nothing was raised"


@pytest.mark.parametrize(("world", "other"), [(2, "rank 0"), (3, "another rank")])
def test_every_rank_says_that_all_was_dropped_also_one_that_dropped_nothing(world: int, other: str) -> None:
    (name, text), *others = run_ranks(world, _nothing_is_valid, 1)
    assert name == SampleError.__name__, text
    assert text.startswith("rank 0: the only sample of this epoch was dropped")
    assert "(the first on this rank: sample 0 (broken): sample number 0)" in text
    for rank, (name, text) in enumerate(others, 1):
        assert name == SampleError.__name__, text
        assert text.startswith(f"rank {rank}: the only sample of this epoch was dropped")
        assert f"(none of them on this rank, so see the error of {other})" in text


def test_ranks_that_share_what_was_dropped_each_name_theirs() -> None:
    for rank, (name, text) in enumerate(run_ranks(2, _nothing_is_valid, 40)):
        assert name == SampleError.__name__, text
        assert text.startswith(f"rank {rank}: all 40 samples of this epoch were dropped")
        assert "(the first on this rank: sample " in text


# --- leaving early


def _leave_early(rank: int, world: int, data: Lengths) -> tuple[int, Epoch, Epoch]:
    with OdbDataLoader(data, PadCollate(), BASE, num_workers=1) as loader:
        first = run_epoch(loader, data)
        for _, info in loader:
            if info.step == 4:
                break
        left = len(descendants())
        return left, first, run_epoch(loader, data)


def test_all_ranks_may_leave_early_and_go_on_with_the_next_epoch() -> None:
    data = Lengths(heavy_tail(120, 4))
    results = run_ranks(2, _leave_early, data)
    assert [left for left, _, _ in results] == [0, 0], "collate process and workers are gone after the break"
    for number in (1, 2):
        check_world([result[number] for result in results], data)
    assert {result[2].infos[0].epoch for result in results} == {2}


def _stop_at_last(rank: int, world: int, data: Lengths) -> list[list[int]]:
    epochs: list[list[int]] = []
    with OdbDataLoader(data, PadCollate(), BASE) as loader:
        for number in range(3):
            loader.set_epoch(number)
            steps = iter(loader)
            epochs.append([])
            while True:
                _, info = next(steps)
                epochs[-1] += info.indices
                if info.last:
                    break
    return epochs


def test_all_ranks_may_stop_at_the_last_step_without_asking_for_more() -> None:
    results = run_ranks(2, _stop_at_last, Lengths(heavy_tail(80, 4)))
    for epoch in zip(*results, strict=True):
        assert sorted(i for indices in epoch for i in indices) == list(range(80))


def _given_place(rank: int, world: int, port: int, data: Lengths) -> tuple[Epoch, str]:
    place = Rendezvous(host="127.0.0.1", port=port, rank=rank, world_size=world)
    with OdbDataLoader(data, PadCollate(), BASE, rendezvous=place) as loader:
        epoch = run_epoch(loader, data)
        assert epoch.end is not None
        assert epoch.end.exchanges > 0
        next(iter(loader))  # and leave
        start = time.monotonic()
        with pytest.raises(ExchangeError) as caught:
            next(iter(loader))
        assert time.monotonic() - start < 10
        return epoch, str(caught.value)


def test_a_rendezvous_of_ones_own_serves_once_without_a_process_group() -> None:
    store = serve_store(40.0)
    data = Lengths(heavy_tail(50, 4))
    results = run_ranks(2, _given_place, store.port, data, init_group=False)
    check_world([epoch for epoch, _ in results], data)
    for _, text in results:
        assert "rendezvous" in text
        assert "once" in text


# --- a collate process that was forked at a bad moment


def _hang_at_start(rank: int, world: int, data: Lengths, hanging: int, bad_starts: int) -> tuple[int, Any]:
    """On one rank the first forks hang, as those do that inherited a lock; returns the number of forks."""
    starts = multiprocessing.get_context("fork").Value("l", 0)

    def try_gloo() -> object:
        starts.value += 1
        if rank == hanging and starts.value <= bad_starts:
            time.sleep(600)
        return exchange.try_gloo()

    collate_process.try_gloo = try_gloo  # type: ignore[attr-defined]
    session.UP_SECONDS = (4.0, 20.0) if bad_starts == 1 else (1.0, 1.5, 2.0)
    with OdbDataLoader(data, PadCollate(), BASE, rank=rank, world_size=world) as loader:
        try:
            result: Any = run_epoch(loader, data)
        except CollateError as error:
            result = str(error)
    assert descendants() == []
    return starts.value, result


def test_a_collate_process_that_does_not_come_up_is_forked_again() -> None:
    data = Lengths(heavy_tail(40, 6))
    results = run_ranks(2, _hang_at_start, data, 1, 1)
    assert [starts for starts, _ in results] == [1, 2]
    check_world([epoch for _, epoch in results], data)


def _hang_for_good(rank: int, world: int) -> tuple[int, Any]:
    return _hang_at_start(0, 2, Lengths([10]), 0, 99)


def test_a_collate_process_that_never_comes_up_is_an_error_that_knows_a_way_out() -> None:
    [(starts, text)] = run_ranks(1, _hang_for_good)
    assert starts == 3
    assert "rank 0: 3 collate processes in a row were forked and did not come up within 1, 1.5, 2 s" in text
    assert "start_method" in text


# --- one rank goes wrong


def _fails(rank: int, world: int, kind: str) -> tuple[str, str, float]:
    """(class, text, seconds) of what this rank's loader raised."""
    # the collate process must not have sent all steps before a rank is killed
    data = Lengths([10] * 3000, sleep=0.004) if "kill" in kind else Lengths([10] * 200)
    config = dataclasses.replace(BASE, assignment="static")
    collate = PadCollate()
    if rank == 1:
        if kind == "configuration":
            config = dataclasses.replace(config, depth=17)
        if kind == "size of the dataset":
            data = Lengths([10] * 201)
        if kind == "sample":
            data = Lengths([10] * 200, fail=range(100, 200))
        if kind == "collate":
            own = epoch_order(200, seed=BASE.seed, epoch=0, shuffle=True)[rank::world]
            collate = PadCollate(fail_on=own[60])
    with OdbDataLoader(data, collate, config) as loader:
        if kind == "epoch" and rank == 1:
            loader.set_epoch(3)
        start = time.monotonic()
        try:
            for _, info in loader:
                if kind == "kill" and rank == 1 and info.step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind == "kill collate process" and rank == 1 and info.step == 3:
                    assert loader._session is not None
                    os.kill(loader._session.process.pid or 0, signal.SIGKILL)
        except OdbError as error:
            return type(error).__name__, str(error), time.monotonic() - start
    return "", "nothing was raised", 0.0


@pytest.mark.parametrize("kind", ["configuration", "size of the dataset", "epoch"])
def test_ranks_that_were_started_differently_all_get_a_clear_error_at_once(kind: str) -> None:
    for rank, (name, text, seconds) in enumerate(run_ranks(3, _fails, kind)):
        assert name == "ExchangeError", text
        assert text.startswith(f"rank {rank}: the ranks differ in their {kind}")
        assert "same recipe" in text
        assert seconds < 20


@pytest.mark.parametrize("world", [2, 4])
def test_a_sample_that_fails_on_one_rank_is_told_to_all(world: int) -> None:
    results = run_ranks(world, _fails, "sample")
    for rank, (name, text, seconds) in enumerate(results):
        assert seconds < 15
        if rank == 1:
            assert name == SampleError.__name__
            assert "could not be read: KeyError: 'no key in sample" in text
        else:
            assert name == ExchangeError.__name__, text
            assert f"rank {rank}: rank 1 failed while it prepared data" in text


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("collate", "ZeroDivisionError: collate went wrong"), ("kill collate process", "killed by SIGKILL")],
)
def test_a_collate_process_that_fails_or_is_killed_on_one_rank_ends_the_others_soon(kind: str, cause: str) -> None:
    results = run_ranks(3, _fails, kind)
    assert results[1][0] == CollateError.__name__
    assert cause in results[1][1]
    for rank in (0, 2):
        name, text, seconds = results[rank]
        assert name == ExchangeError.__name__, text
        assert text.startswith(f"rank {rank} of 3 lost the others in the"), "and it does not name itself twice"
        assert seconds < 15


@pytest.mark.parametrize("world", [2, 4])
def test_a_killed_rank_ends_the_others_soon(world: int) -> None:
    results = run_ranks(world, _fails, "kill", may_die=[1])
    assert results[1] is None
    for rank in set(range(world)) - {1}:
        name, text, seconds = results[rank]
        assert name == ExchangeError.__name__, text
        assert f"rank {rank} of {world} lost the others in the" in text
        assert "of epoch 0" in text
        assert seconds < 15


def _one_stalls(rank: int, world: int) -> tuple[str, str, float]:
    class Stalls(Lengths):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if rank == 1 and index > 30:
                time.sleep(600)
            return super().__getitem__(index)

    config = dataclasses.replace(BASE, timeout=3.0, shuffle=False)
    start = time.monotonic()
    with OdbDataLoader(Stalls([10] * 200), PadCollate(), config) as loader:
        try:
            for _ in loader:
                pass
        except OdbError as error:
            dist.barrier()
            return type(error).__name__, str(error), time.monotonic() - start
    raise AssertionError("nothing was raised")


def test_a_rank_that_stalls_is_an_error_on_all_after_the_timeout() -> None:
    (name, text, seconds), (other_name, other_text, other_seconds) = run_ranks(2, _one_stalls)
    assert name == ExchangeError.__name__
    assert "rank 0 waited for more than 3 s (odb_timeout) for rank 1 in the exchange" in text or "lost" in text
    assert other_name == CollateError.__name__
    assert "it was last at: reading samples for round" in other_text
    assert max(seconds, other_seconds) < 20
