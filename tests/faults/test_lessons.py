"""What the existing package for online dynamic batching does wrong, one test each, so that we do not.

What an equal test holds already is not repeated:
(a) uneven shards stop ranks at different steps, or lose samples:
    tests/runtime/test_world.py::test_ranks_with_very_uneven_work_stay_aligned,
    tests/runtime/test_world.py::test_a_rank_without_any_sample_runs_fillers
(g) an exception in the collate function shows only "exited unexpectedly":
    tests/runtime/test_faults.py::test_an_exception_in_the_collate_function_is_shown_with_samples_cause_and_traceback
(j) errors for unsupported use come at the first iteration instead of the construction, the part that is done there:
    tests/runtime/test_loader.py::test_a_data_set_that_is_not_map_style_is_refused, ::test_an_empty_data_set_is_refused,
    ::test_a_bad_number_of_workers_is_refused, ::test_several_ranks_without_a_way_to_meet_are_refused,
    tests/runtime/test_exchange.py::test_several_announced_ranks_without_a_process_group_are_an_error,
    tests/core/test_config.py::test_an_unknown_key_is_refused_by_its_name_with_the_known_ones
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.runtime.rendezvous import serve_store
from tests.dist import alive, children, descendants, run_ranks
from tests.runtime.helpers import Epoch, Lengths, PadCollate, check_world, heavy_tail, open_files, run_epoch, wait_until

distributed = pytest.mark.distributed


def config(**values: Any) -> OdbConfig:
    return OdbConfig(**{"token_budget": 160, "depth": 16, "timeout": 40.0, **values})


def held() -> tuple[int, int, int]:
    """(processes, threads, descriptors) of this process."""
    gc.collect()
    return len(descendants()), threading.active_count(), open_files()


# --- (b) an empty first sample shifts every later step by one


def _with_empty_samples(rank: int, world: int, lengths: list[int]) -> list[Epoch]:
    data = Lengths(lengths)
    with OdbDataLoader(data, PadCollate(), config(shuffle=False, on_bad_sample="skip")) as loader:
        return [run_epoch(loader, data) for _ in range(2)]


@distributed
@pytest.mark.parametrize("empty", [{0}, {1}, {0, 1}], ids=["of rank 0", "of rank 1", "of both"])
def test_an_empty_first_sample_is_left_out_and_shifts_nothing(empty: set[int]) -> None:
    lengths = [0 if i in empty else n for i, n in enumerate(heavy_tail(60, 3))]
    for ranks in zip(*run_ranks(2, _with_empty_samples, lengths), strict=True):
        check_world(ranks, Lengths(lengths))  # each batch was compared with its StepInfo by run_epoch
        assert {d.index for rank in ranks for d in rank.dropped} == empty
        assert {d.reason for rank in ranks for d in rank.dropped} == {"empty"}


# --- (c) under spawn or forkserver the ranks silently run unsynchronised


def _spawned(rank: int, world: int, data: Lengths) -> Epoch:
    with OdbDataLoader(data, PadCollate(), config(start_method="spawn")) as loader:
        return run_epoch(loader, data)


@distributed
@pytest.mark.slow
def test_spawned_collate_processes_are_synchronised() -> None:
    data = Lengths(heavy_tail(70, 2))
    ranks = run_ranks(2, _spawned, data, deadline=90.0)
    check_world(ranks, data)
    for rank in ranks:
        assert rank.end.exchanges == 2 * rank.end.rounds > 0
        assert rank.end.exchange_bytes > 0


def test_forkserver_is_refused_rather_than_run_unsynchronised() -> None:
    with pytest.raises(ValueError, match=r"^start_method must be one of fork, spawn, got 'forkserver'\.$"):
        config(start_method="forkserver")


# --- (d) one loader used for many epochs by a consumer that does no work leaks workers, and then fails


def _many_epochs(rank: int, world: int, size: int) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
    data = Lengths(heavy_tail(size))
    indices, seen = [], []
    with OdbDataLoader(data, PadCollate(), config(), num_workers=2) as loader:
        for number in range(40):
            indices.append([i for _, info in loader for i in info.indices])
            if number % 6 == 3:
                seen.append(held())
    return indices, seen


@distributed
def test_forty_epochs_of_one_loader_need_no_more_than_the_first() -> None:
    results = run_ranks(2, _many_epochs, 40, deadline=80.0)
    for epoch in zip(*(indices for indices, _ in results), strict=True):
        assert sorted(i for indices in epoch for i in indices) == list(range(40))
    for _, seen in results:
        assert {processes for processes, _, _ in seen} == {3}, "a collate process and two workers"
        for one in zip(*seen, strict=True):
            assert max(one) == one[0], f"(processes, threads, descriptors) grow: {seen}"


# --- (e) an early break leaks processes, and fails after a few


def _many_breaks(rank: int, world: int, data: Lengths) -> tuple[list[tuple[int, int, int]], Epoch]:
    seen = []
    with OdbDataLoader(data, PadCollate(), config(), num_workers=1) as loader:
        for _ in range(10):
            for _, info in loader:
                if info.step == 2:
                    break
            seen.append(held())
        return seen, run_epoch(loader, data)


@distributed
def test_ten_early_breaks_in_a_row_leave_nothing_and_the_next_epoch_is_whole() -> None:
    data = Lengths(heavy_tail(100))
    results = run_ranks(2, _many_breaks, data, deadline=80.0)
    check_world([epoch for _, epoch in results], data)
    for seen, _ in results:
        assert {processes for processes, _, _ in seen} == {0}
        assert max(seen[1:]) <= seen[0], seen


# --- (f) a new loader for each epoch collides with the group of the one before


def _new_loaders(rank: int, world: int, data: Lengths, how: str) -> tuple[list[Epoch], tuple[int, ...], list[int]]:
    epochs, kept = [], []
    serve_store(5.0)  # the first store of a process opens a pipe that stays for its life
    before = held()
    for number in range(6):
        loader = OdbDataLoader(data, PadCollate(), config(), num_workers=1)
        loader.set_epoch(number)
        epochs.append(run_epoch(loader, data))
        if how == "closed":
            loader.close()
        if how == "kept":
            kept.append(loader)
    most = len(descendants())
    kept.clear()
    del loader
    wait_until(lambda: held() <= before)
    return epochs, held(), [*before, most]


@distributed
@pytest.mark.parametrize(("how", "most"), [("closed", 0), ("collected", 2), ("kept", 12)])
def test_six_new_loaders_in_a_row_do_not_collide(how: str, most: int) -> None:
    data = Lengths(heavy_tail(50))
    results = run_ranks(2, _new_loaders, data, how, deadline=80.0)
    for ranks in zip(*(epochs for epochs, _, _ in results), strict=True):
        check_world(ranks, data)
        assert all(rank.end.exchanges == 2 * rank.end.rounds > 0 for rank in ranks)
    for _, after, (*before, processes) in results:
        assert processes == most, "a collate process and a worker for each loader that lives"
        assert after <= tuple(before)


# --- (h) after SIGKILL of a rank its collate process lives on for minutes, and the survivor hangs in a collective


def _killed_in_step(rank: int, world: int, victim: int) -> tuple[str, float, float] | None:
    """(class of the error, seconds to it, seconds to the end of the dead rank's processes) on a survivor."""
    data = Lengths([10] * 3000, sleep=0.002)
    with OdbDataLoader(data, PadCollate(), config(), num_workers=1) as loader:
        steps = iter(loader)
        next(steps)
        families: list[Any] = [None] * world
        dist.all_gather_object(families, [os.getpid(), *descendants()])
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        assert wait_until(lambda: not alive(families[victim][0]))
        begun = time.monotonic()
        try:
            for _ in steps:
                dist.all_reduce(torch.ones(1))  # as a training step does
        except RuntimeError as error:  # of the loader, or of the trainers' own group, whichever is first
            seconds = time.monotonic() - begun
            assert len(families[victim]) == 3, "a trainer, a collate process and a worker"
            wait_until(lambda: not any(map(alive, families[victim])), 20.0)
            return type(error).__name__, seconds, time.monotonic() - begun
    return None


@distributed
@pytest.mark.parametrize("victim", [0, 1])
def test_the_processes_of_a_killed_rank_go_with_it_and_the_survivors_end_soon(victim: int) -> None:
    results = run_ranks(3, _killed_in_step, victim, may_die=[victim])
    for rank, result in enumerate(results):
        if rank != victim:
            assert result is not None
            _, seconds, gone = result
            assert seconds < 15
            assert gone < 15


# --- (i) num_workers=0 silently becomes 4


@pytest.mark.parametrize("options", [{"num_workers": 0}, {}], ids=["zero", "default"])
def test_without_workers_there_is_no_worker_process(options: dict[str, int]) -> None:
    data = Lengths(heavy_tail(60))
    with OdbDataLoader(data, PadCollate(), config(), **options) as loader:
        for _ in loader:
            assert loader._session is not None
            assert loader._session.process.is_alive()
            assert children(loader._session.process.pid) == []


# --- (j) errors for unsupported use come at the first iteration


class Stream(IterableDataset):  # type: ignore[type-arg]
    """An iterable data set: torch gives it a `__getitem__` that only raises."""

    def __iter__(self) -> Any:
        return iter([{"input_ids": [1, 2, 3]}] * 4)


class SizedStream(Stream):
    """One that knows its length."""

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: OdbDataLoader(Stream(), PadCollate(), config()),
        lambda: OdbDataLoader(SizedStream(), PadCollate(), config()),
        lambda: OdbDataLoader(Lengths([3]), None, config()),  # type: ignore[arg-type]
        lambda: OdbDataLoader(Lengths([3]), PadCollate(), config(), num_workers=1, prefetch_factor=0),
        lambda: OdbDataLoader(Lengths([3]), PadCollate(), config(), observe=None),  # type: ignore[arg-type]
        lambda: OdbDataLoader(Lengths([3]), PadCollate(), config(), batch_size=4),  # type: ignore[call-arg]
        lambda: config(bucket_size=4),
    ],
    ids=["stream", "stream with length", "no collate function", "no prefetch", "no observe", "option", "setting"],
)
def test_unsupported_use_is_refused_where_the_loader_is_made(make: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        make()
