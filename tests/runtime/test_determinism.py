"""Same seed, data, world size and config: the same steps, whatever the timing and the number of workers."""

from __future__ import annotations

import time
from typing import Any

import pytest

from odb_factory import OdbConfig, OdbDataLoader, StepInfo
from tests.dist import run_ranks
from tests.runtime.helpers import Lengths, PadCollate, collect, heavy_tail

LENGTHS = heavy_tail(120, seed=9)
DROP = {5, 60, 61, 119}


def _steps(
    seed: int = 1, *, workers: int = 0, sleep: float = 0.0, collate_sleep: float = 0.0, consumer_sleep: float = 0.0
) -> list[list[StepInfo]]:
    """Two epochs of this rank."""
    data = Lengths(LENGTHS, drop=DROP, sleep=sleep)
    config = OdbConfig(token_budget=160, depth=16, seed=seed, timeout=40.0, max_wait=2)
    epochs: list[list[StepInfo]] = []
    with OdbDataLoader(data, PadCollate(sleep=collate_sleep), config, num_workers=workers) as loader:
        for _ in range(2):
            epochs.append([])
            for _, info in loader:
                time.sleep(consumer_sleep)
                epochs[-1].append(info)
    return epochs


SLOW: list[dict[str, Any]] = [
    {"workers": 2},
    {"workers": 3, "sleep": 0.01},
    {"workers": 1, "collate_sleep": 0.005},
    {"sleep": 0.004},
    {"consumer_sleep": 0.01},
]


def test_the_same_seed_gives_the_same_steps_and_another_seed_others() -> None:
    first = _steps()
    assert _steps() == first
    other = _steps(seed=2)
    assert [i.indices for i in other[0]] != [i.indices for i in first[0]]
    assert [i.indices for i in first[0]] != [i.indices for i in first[1]]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("how", SLOW, ids=str)
def test_timing_and_workers_make_no_difference(how: dict[str, Any]) -> None:
    assert _steps(**how) == _steps()


def test_workers_see_the_same_random_numbers_in_every_run() -> None:
    class Noisy(Lengths):
        def __getitem__(self, index: int) -> dict[str, Any]:
            import random

            import torch

            sample = super().__getitem__(index)
            sample["input_ids"] = sample["input_ids"] * 0 + int(torch.randint(10**9, (1,)))
            sample["labels"] = sample["labels"] * 0 + random.randrange(10**9)
            return sample

    def draw(seed: int) -> list[list[int]]:
        config = OdbConfig(token_budget=160, depth=16, seed=seed)
        with OdbDataLoader(Noisy(LENGTHS), PadCollate(), config, num_workers=2) as loader:
            return [[*b["input_ids"][:, 0].tolist(), *b["labels"][:, 0].tolist()] for b, _ in loader]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def _rank_steps(rank: int, world: int, variants: list[list[dict[str, Any]]]) -> list[list[list[StepInfo]]]:
    """One result for each variant, which has a set of options for each rank."""
    return [_steps(**options[rank]) for options in variants]


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_several_ranks_repeat_their_steps_whatever_the_timing_of_each(world: int) -> None:
    variants: list[list[dict[str, Any]]] = [
        [{}] * world,
        [{}] * world,
        [{"sleep": 0.01 * rank} for rank in range(world)],
        [{"workers": rank % 2, "collate_sleep": 0.004 * (world - rank)} for rank in range(world)],
    ]
    results = run_ranks(world, _rank_steps, variants)
    for first, *others in results:
        assert all(other == first for other in others)
    assert results[0][0] != results[1][0]


def test_an_epoch_does_not_depend_on_those_before_it() -> None:
    data = Lengths(LENGTHS)
    config = OdbConfig(token_budget=160, depth=16, seed=4)
    with OdbDataLoader(data, PadCollate(), config) as loader:
        _, _, third = collect(loader), collect(loader), collect(loader)
    with OdbDataLoader(data, PadCollate(), config) as loader:
        next(iter(loader))
        loader.set_epoch(2)
        assert collect(loader) == third
