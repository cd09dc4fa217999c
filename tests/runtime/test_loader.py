"""The loader of one rank: what it yields."""

from __future__ import annotations

import gc
import itertools
import re
from typing import Any

import pytest
import torch

from odb_factory import OdbConfig, OdbDataLoader, SampleMeta
from odb_factory.core.sample import Dropped
from odb_factory.runtime.errors import SampleError
from tests.dist import descendants
from tests.runtime.helpers import (
    Epoch,
    Lengths,
    PadCollate,
    check_world,
    collect,
    heavy_tail,
    run_epoch,
    wait_until,
)

COLLATE = PadCollate()


def config(**values: Any) -> OdbConfig:
    return OdbConfig(**{"token_budget": 200, "depth": 32, "timeout": 30.0, **values})


def loader_of(data: Any, cfg: OdbConfig | None = None, **options: Any) -> OdbDataLoader:
    return OdbDataLoader(data, options.pop("collate", COLLATE), cfg or config(), **options)


# --- whole epochs


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_every_index_once_in_each_of_two_epochs(start_method: str, workers: int) -> None:
    data = Lengths(heavy_tail(150))
    with loader_of(data, config(start_method=start_method), num_workers=workers) as loader:
        first, second = run_epoch(loader, data), run_epoch(loader, data)
    for number, epoch in enumerate((first, second)):
        check_world([epoch], data)
        assert epoch.end is not None
        assert (epoch.end.epoch, epoch.end.left, epoch.end.exchanges) == (number, 0, 0)
        assert {info.epoch for info in epoch.infos} == {number}
        assert any(info.samples > 1 for info in epoch.infos), "samples are batched"
        assert not any(info.idle for info in epoch.infos), "a rank alone is never idle"
    assert first.indices != second.indices


@pytest.mark.parametrize("alignment", ["carry", "max"])
@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1},
        {"depth": 2, "ramp": False},
        {"depth": 1000, "ramp": False},
        {"capacity": 1},
        {"max_samples": 3},
        {"pad_to_multiple_of": 16},
        {"shuffle": False},
        {"queue_steps": 1, "steps_multiple": 4},
    ],
    ids=str,
)
def test_every_index_once_whatever_the_options(alignment: str, options: dict[str, Any]) -> None:
    data = Lengths(heavy_tail(60, seed=3))
    cfg = config(alignment=alignment, **options)
    with loader_of(data, cfg, collate=PadCollate(multiple=cfg.pad_to_multiple_of)) as loader:
        epoch = run_epoch(loader, data)
    check_world([epoch], data)
    assert len(epoch.infos) % cfg.steps_multiple == 0
    assert max(info.samples for info in epoch.infos) <= (cfg.max_samples or len(data))
    assert epoch.end is not None
    assert epoch.end.rounds == epoch.infos[-1].round + 1
    for _, steps in itertools.groupby(epoch.infos, key=lambda info: info.round):
        assert sum(1 for info in steps if not info.idle) <= cfg.groups_per_round


def test_the_order_is_that_of_the_data_set_without_shuffling() -> None:
    data = Lengths([10] * 30)
    with loader_of(data, config(shuffle=False, token_budget=10, depth=1)) as loader:
        assert run_epoch(loader, data).indices == list(range(30))


def test_epochs_can_be_chosen_and_have_their_own_order() -> None:
    data = Lengths(heavy_tail(50))
    with loader_of(data) as loader:
        orders = [run_epoch(loader, data).indices for _ in range(2)]
        loader.set_epoch(1)
        again = run_epoch(loader, data)
        following = run_epoch(loader, data)
    assert orders[0] != orders[1] == again.indices
    assert again.infos[0].epoch == 1
    assert following.infos[0].epoch == 2


def test_the_epoch_chosen_while_the_last_one_is_open_is_the_next_one() -> None:
    data = Lengths(heavy_tail(40))
    with loader_of(data) as loader:
        steps = iter(loader)
        next(steps)
        loader.set_epoch(7)
        rest = [info for _, info in steps]
        assert {info.epoch for info in rest} == {0}
        assert run_epoch(loader, data).infos[0].epoch == 7


def test_one_sample_is_one_step() -> None:
    data = Lengths([5])
    with loader_of(data, config(steps_multiple=3)) as loader:
        epoch = run_epoch(loader, data)
    assert [info.idle for info in epoch.infos] == [False, True, True]
    check_world([epoch], data)


def test_samples_of_a_kind_of_their_own_need_only_an_observe_function() -> None:
    words = ["a", "bb", "ccc"] * 10

    def observe(index: int, sample: str) -> SampleMeta:
        return SampleMeta(index=index, length=len(sample), loss_tokens=len(sample) - 1)

    with OdbDataLoader(words, "|".join, config(token_budget=6), observe=observe) as loader:
        batches = [batch for batch, _ in loader]
    assert sorted("|".join(batches).split("|")) == sorted(words)
    assert all(max(map(len, b.split("|"))) * len(b.split("|")) <= 6 for b in batches)
    assert "ccc|ccc" in batches


# --- samples that a policy takes out


@pytest.mark.parametrize("workers", [0, 2])
def test_dropped_samples_are_counted_and_named(workers: int) -> None:
    drop = {0, 7, 8, 9, 30, 59}
    data = Lengths(heavy_tail(60), drop=drop)
    with loader_of(data, num_workers=workers) as loader:
        epochs = [run_epoch(loader, data) for _ in range(2)]
    for epoch in epochs:
        check_world([epoch], data)
        assert {d.index for d in epoch.dropped} == drop
        assert Dropped(30, "broken", "sample number 30") in epoch.dropped
        assert set(epoch.indices) == set(range(60)) - drop


def test_drops_at_the_very_end_are_not_lost() -> None:
    data = Lengths([10] * 20, drop=range(15, 20))
    with loader_of(data, config(shuffle=False, depth=4, ramp=False)) as loader:
        epoch = run_epoch(loader, data)
    check_world([epoch], data)
    assert [d.index for d in epoch.dropped] == list(range(15, 20))
    assert epoch.infos[-1].last, "and no step comes after the last sample"


@pytest.mark.parametrize(
    ("data", "options", "reason"),
    [
        (Lengths([10] * 9, drop=range(9)), {}, r"sample 0 \(broken\): sample number 0"),
        (Lengths([10] * 9, fail=range(9)), {"on_bad_sample": "skip"}, r"sample 0 \(\w+\): KeyError: 'no key"),
        (Lengths([500] * 9), {"overlong": "drop"}, r"sample 0 \(overlong\): 500 tokens, budget 200"),
    ],
    ids=["dropped", "bad", "overlong"],
)
def test_an_epoch_in_which_all_is_dropped_is_an_error(data: Lengths, options: dict[str, Any], reason: str) -> None:
    with loader_of(data, config(steps_multiple=2, depth=3, shuffle=False, **options)) as loader:
        for number in range(2):  # the next epoch starts anew
            with pytest.raises(SampleError) as caught:
                collect(loader)
            text = str(caught.value)
            assert text.startswith(
                "rank 0: all 9 samples of this epoch were dropped, so there is nothing to train on; "
            )
            assert re.search(rf"fix the data.*odb_token_budget.*the first ones: {reason}.*; sample 1.*; sample 2", text)
            assert "sample 3" not in text
            assert descendants_of_loader() == [], "closed"
            assert sorted(d.index for d in loader.epoch_ends[number].dropped) == list(range(9)), "all can be looked up"


def test_a_data_set_of_one_sample_that_is_dropped_is_an_error_in_the_singular() -> None:
    with (
        loader_of(Lengths([10], drop={0})) as loader,
        pytest.raises(SampleError, match="the only sample of this epoch was dropped"),
    ):
        collect(loader)


OVERLONG = [20, 500, 30, 300, 40]


def test_an_overlong_sample_is_kept_as_a_group_of_one() -> None:
    data = Lengths(OVERLONG)
    with loader_of(data, config(overlong="keep")) as loader:
        epoch = run_epoch(loader, data)
    check_world([epoch], data)
    assert sorted(info.indices for info in epoch.infos if info.padded_tokens > 200) == [(1,), (3,)]


def test_an_overlong_sample_is_dropped_and_named() -> None:
    data = Lengths(OVERLONG)
    with loader_of(data, config(overlong="drop")) as loader:
        epoch = run_epoch(loader, data)
    check_world([epoch], data)
    assert sorted(epoch.dropped, key=lambda d: d.index) == [
        Dropped(1, "overlong", "500 tokens, budget 200"),
        Dropped(3, "overlong", "300 tokens, budget 200"),
    ]


def test_an_overlong_sample_is_an_error_that_names_it() -> None:
    with (
        loader_of(Lengths(OVERLONG), config(overlong="error", shuffle=False)) as loader,
        pytest.raises(SampleError, match=r"rank 0: sample 1 is longer.*500 tokens, budget 200.*overlong"),
    ):
        collect(loader)


# --- IDLE slots


@pytest.mark.parametrize("idle", ["filler", "skip"])
def test_fillers_complete_the_last_accumulation_window(idle: str) -> None:
    data = Lengths([90, 150, 20, 70, 33])
    with loader_of(data, config(token_budget=150, steps_multiple=8, idle=idle)) as loader:
        epoch = run_epoch(loader, data)  # check_batch looks at the fillers, or that there is no batch
    check_world([epoch], data)
    assert len(epoch.infos) == 8
    assert epoch.infos[-1].idle
    assert epoch.infos[-1].global_samples == 0


def test_a_filler_repeats_the_shortest_sample_with_media() -> None:
    class Mixed(Lengths):
        def __getitem__(self, index: int) -> dict[str, Any]:
            grid = {"image_grid_thw": torch.tensor([[1, 2, 2]])} if index in (1, 2) else {}
            return {**super().__getitem__(index), **grid}

    data = Mixed([5, 60, 40, 50])
    with loader_of(data, config(token_budget=60, steps_multiple=16)) as loader:
        fillers = {int(batch["input_ids"][0, 0]) for batch, info in loader if info.idle}
    assert fillers == {2}


# --- leaving early, and again


def test_an_early_break_ends_the_collate_process_and_the_loader_can_be_used_again() -> None:
    data = Lengths(heavy_tail(200))
    with loader_of(data, num_workers=2) as loader:
        for _, info in loader:
            if info.step == 3:
                break
        assert wait_until(lambda: not descendants_of_loader()), "collate process and workers are gone"
        assert loader.epoch_ends == [], "that epoch did not end"
        epoch = run_epoch(loader, data)
        check_world([epoch], data)
        assert epoch.infos[0].epoch == 1
        assert len(descendants_of_loader()) == 3
    assert wait_until(lambda: not descendants_of_loader())


def descendants_of_loader() -> list[int]:
    from tests.dist import describe

    return [p for p in descendants() if not any(s in describe(p) for s in ("forkserver", "resource_tracker"))]


def test_stopping_right_after_the_last_step_is_the_end_of_the_epoch() -> None:
    data = Lengths(heavy_tail(80))
    with loader_of(data) as loader:
        session = None
        for number in range(3):
            for _, info in loader:
                if info.last:
                    break
            assert [end.epoch for end in loader.epoch_ends] == list(range(number + 1))
            assert loader._session is not None, "nothing to start anew"
            assert session in (None, loader._session)
            session = loader._session


def test_an_iterator_that_stopped_at_the_last_step_and_still_lives_is_no_obstacle() -> None:
    """As in transformers' Trainer: the old iterator lives until the name is bound to the new one."""
    data = Lengths(heavy_tail(80))
    with loader_of(data) as loader:
        for number in range(3):
            loader.set_epoch(number)
            steps = iter(loader)
            epoch = Epoch()
            while not epoch.infos or not epoch.infos[-1].last:
                epoch.infos.append(next(steps)[1])
            assert {info.epoch for info in epoch.infos} == {number}
            assert sorted(epoch.indices) == list(range(80))


def test_a_second_iterator_over_an_open_epoch_is_refused() -> None:
    data = Lengths(heavy_tail(80))
    with loader_of(data) as loader:
        first, second = iter(loader), iter(loader)
        next(first)
        with pytest.raises(RuntimeError, match="being iterated already"):
            next(iter(loader))
        with pytest.raises(RuntimeError, match="being iterated already"):
            next(second)
        assert sum(1 for _ in first) > 0, "and does not disturb the first"
        assert sorted(i for info in collect(loader) for i in info.indices) == list(range(80))


def test_close_may_be_called_at_any_time() -> None:
    data = Lengths(heavy_tail(80))
    loader = loader_of(data)
    loader.close()
    check_world([run_epoch(loader, data)], data)
    loader.close()
    loader.close()
    check_world([run_epoch(loader, data)], data)
    loader.close()


def test_a_loader_that_is_forgotten_takes_its_process_along() -> None:
    data = Lengths(heavy_tail(40))
    loader = loader_of(data, num_workers=1)
    collect(loader)
    assert descendants_of_loader()
    del loader
    gc.collect()
    assert wait_until(lambda: not descendants_of_loader())


def test_two_loaders_do_not_disturb_each_other() -> None:
    one, two = Lengths(heavy_tail(90, seed=1)), Lengths(heavy_tail(120, seed=2))
    with loader_of(one, num_workers=1) as a, loader_of(two, config(seed=5, depth=8)) as b:
        for _ in range(2):
            epochs = Epoch(), Epoch()
            for pair in itertools.zip_longest(a, b):
                for item, epoch in zip(pair, epochs, strict=True):
                    if item is not None:
                        epoch.infos.append(item[1])
            assert sorted(epochs[0].indices) == list(range(90))
            assert sorted(epochs[1].indices) == list(range(120))
        a.close()
        check_world([run_epoch(b, two)], two)


# --- unusable arguments


def test_a_data_set_that_is_not_map_style_is_refused() -> None:
    with pytest.raises(TypeError, match=r"map-style dataset .* got generator"):
        loader_of(x for x in range(3))


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        loader_of(Lengths([]))


@pytest.mark.parametrize("workers", [-1, 1.5, True, None, "2"])
def test_a_bad_number_of_workers_is_refused(workers: Any) -> None:
    with pytest.raises(ValueError, match="num_workers must be an integer of at least 0"):
        loader_of(Lengths([1]), num_workers=workers)


def test_several_ranks_without_a_way_to_meet_are_refused() -> None:
    with pytest.raises(RuntimeError, match="2 ranks need a way to meet"):
        loader_of(Lengths([1]), rank=0, world_size=2)


def test_a_data_set_that_cannot_be_pickled_is_refused_by_spawn_at_once() -> None:
    loader = loader_of([{"input_ids": [1]}], config(start_method="spawn"), observe=lambda index, sample: sample)
    with pytest.raises(Exception, match="pickle"):
        collect(loader)
