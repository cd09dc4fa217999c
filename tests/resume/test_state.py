"""`OdbDataLoader.state_dict` and `load_state_dict`, without a Trainer."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest

from odb_factory import OdbConfig, OdbDataLoader
from odb_factory.runtime.errors import SampleError
from odb_factory.runtime.state import StateError
from tests.dist import run_ranks
from tests.runtime.helpers import Counted, Lengths, PadCollate, collect, heavy_tail

BASE = OdbConfig(token_budget=160, depth=16, timeout=40.0)
SIZE = 90
DROP = (5, 44)


def data_set(**options: Any) -> Lengths:
    return Lengths(heavy_tail(SIZE, 3), drop=DROP, **options)


def loader_of(data: Any = None, **values: Any) -> OdbDataLoader:
    return OdbDataLoader(data or data_set(), PadCollate(), dataclasses.replace(BASE, **values))


def run_until(loader: OdbDataLoader, epoch: int, step: int) -> tuple[list[int], dict[str, Any]]:
    """Iterate to `step` of `epoch`; returns what was emitted of that epoch, and the state after that step."""
    for _ in range(epoch):
        collect(loader)
    emitted: list[int] = []
    for _, info in loader:
        emitted += info.indices
        if info.step == step:
            return emitted, loader.state_dict()
    raise AssertionError("the epoch is shorter")


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("step", [0, 3, 7])
def test_the_rest_of_the_epoch_comes_exactly_once_and_nothing_else_is_read(epoch: int, step: int) -> None:
    with loader_of() as loader:
        emitted, state = run_until(loader, epoch, step)
    state = json.loads(json.dumps(state))
    data = Counted(heavy_tail(SIZE, 3), drop=DROP)
    with loader_of(data, depth=7, token_budget=100) as other:
        other.load_state_dict(state)
        infos = collect(other)
        assert {info.epoch for info in infos} == {epoch}
        assert [info.step for info in infos] == list(range(step + 1, step + 1 + len(infos))), "steps are counted on"
        rest = [i for info in infos for i in info.indices]
        assert sorted(emitted + rest) == sorted(set(range(SIZE)) - set(DROP))
        assert data.reads.value <= SIZE - len(emitted)
        assert [i for info in collect(other) for i in info.indices], "the next epoch is whole again"
        assert data.reads.value <= 2 * SIZE - len(emitted)


def test_a_state_between_epochs_is_the_beginning_of_the_next() -> None:
    with loader_of() as loader:
        fresh = loader.state_dict()
        collect(loader)
        after = loader.state_dict()
    assert (fresh["epoch"], after["epoch"]) == (0, 1)
    assert fresh["done"] == after["done"]
    with loader_of() as other:
        other.load_state_dict(after)
        infos = collect(other)
    assert {info.epoch for info in infos} == {1}
    assert sum(info.samples for info in infos) == SIZE - len(DROP)


def test_a_state_taken_twice_or_after_a_resumption_adds_up() -> None:
    with loader_of() as loader:
        first, state = run_until(loader, 0, 2)
    with loader_of() as second:
        second.load_state_dict(state)
        assert second.state_dict() == state, "nothing was trained since"
        steps = iter(second)
        more: list[int] = []
        for _ in range(2):
            more += next(steps)[1].indices
        both = second.state_dict()
        steps.close()  # type: ignore[attr-defined]
        assert second.state_dict() == both, "leaving early does not change what was trained"
    with loader_of() as third:
        third.load_state_dict(both)
        rest = [i for info in collect(third) for i in info.indices]
    assert sorted(first + more + rest) == sorted(set(range(SIZE)) - set(DROP))


def test_bad_samples_are_counted_on() -> None:
    config: dict[str, Any] = {"on_bad_sample": "skip", "shuffle": False, "ramp": False, "depth": 8}
    broken = Lengths([20] * 60, fail={1, 2, 50, 51})
    with loader_of(broken, **config) as loader:
        _, state = run_until(loader, 0, 2)
    assert state["bad"] == 2
    with loader_of(broken, max_bad_samples=3, **config) as other:
        other.load_state_dict(state)
        with pytest.raises(SampleError, match=r"4 samples of epoch 0 were skipped as bad, more than .* 3 allows"):
            collect(other)


class Printed(Lengths):
    """A data set that knows what it is."""

    name = "apples"

    def fingerprint(self) -> str:
        return self.name


@pytest.mark.parametrize(
    ("data", "values", "text"),
    [
        (Lengths([9] * (SIZE + 1)), {}, r"another number of samples \(90, here 91\)"),
        (None, {"seed": 5}, r"another seed \(0, here 5\), so it does not say which samples are done; set the seed"),
        (None, {"shuffle": False}, r"another order \(shuffled or not\) \(True, here False\)"),
    ],
)
def test_a_state_of_another_run_is_refused_with_the_reason(data: Any, values: dict[str, Any], text: str) -> None:
    with loader_of() as loader:
        _, state = run_until(loader, 0, 1)
    with loader_of(data, **values) as other, pytest.raises(StateError, match=text):
        other.load_state_dict(state)


def test_a_state_of_another_data_set_of_the_same_size_is_refused() -> None:
    data = Printed([9] * 30)
    with loader_of(data) as loader:
        _, state = run_until(loader, 0, 0)
        loader.load_state_dict(state)
    data.name = "pears"
    with loader_of(data) as other, pytest.raises(StateError, match=r"another dataset \('apples', here 'pears'\)"):
        other.load_state_dict(state)


@pytest.mark.parametrize("change", [{"version": 99}, {"done": "AAAA"}, {"done": None}, None])
def test_what_is_no_state_is_refused(change: dict[str, Any] | None) -> None:
    with loader_of() as loader:
        state = {**loader.state_dict(), **(change or {})}
        if change is None:
            del state["emitted"]
        with pytest.raises(StateError, match=r"no state of an OdbDataLoader of this version|is damaged"):
            loader.load_state_dict(state)


def test_another_epoch_than_that_of_the_state_is_refused() -> None:
    with loader_of() as loader:
        _, state = run_until(loader, 1, 1)
    with loader_of() as other:
        other.load_state_dict(state)
        other.set_epoch(4)
        with pytest.raises(StateError, match="the state that was loaded is of epoch 1, but set_epoch asked for 4"):
            collect(other)


def test_a_start_that_fails_does_not_lose_the_state_that_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with loader_of() as loader:
        emitted, state = run_until(loader, 0, 2)
        loader.load_state_dict(state)
        with monkeypatch.context() as patch:
            patch.setattr(loader, "_start", lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                collect(loader)
        rest = [i for info in collect(loader) for i in info.indices]
    assert sorted(emitted + rest) == sorted(set(range(SIZE)) - set(DROP))


def test_a_loader_that_is_being_iterated_does_not_load() -> None:
    with loader_of() as loader:
        state = loader.state_dict()
        steps = iter(loader)
        next(steps)
        with pytest.raises(RuntimeError, match="being iterated"):
            loader.load_state_dict(state)


# --- several ranks


def test_an_epoch_of_which_only_dropped_samples_are_left_ends_quietly() -> None:
    with loader_of(Lengths([10] * 20), token_budget=40, depth=4, shuffle=False) as loader:
        emitted, state = run_until(loader, 0, 1)
    left = set(range(20)) - set(emitted)
    assert left
    with loader_of(Lengths([10] * 20, drop=left), token_budget=40, depth=4, shuffle=False) as loader:
        loader.load_state_dict(state)
        assert collect(loader) == []
        assert loader.epoch_ends[0].global_dropped == len(left)
        assert loader.state_dict()["epoch"] == 1


def test_an_epoch_of_which_nothing_was_done_and_nothing_is_valid_is_an_error_when_resumed_too() -> None:
    with loader_of(Lengths([10] * 20)) as loader:
        for _, info in loader:
            if info.last:
                state = loader.state_dict()
    with loader_of(Lengths([10] * 20, drop=range(20))) as loader:
        loader.load_state_dict(state)
        with pytest.raises(SampleError, match="all 20 samples of this epoch were dropped"):
            collect(loader)


def _some_steps(rank: int, world: int, state: Any, steps: int) -> tuple[list[int], Any]:
    with loader_of() as loader:
        if state is not None:
            loader.load_state_dict(state)
        emitted: list[int] = []
        for _, info in loader:
            emitted += info.indices
            if info.step + 1 == steps or info.last:
                return emitted, loader.state_dict()
    raise AssertionError("no step")


@pytest.mark.distributed
def test_ranks_of_any_number_go_on_where_others_stopped() -> None:
    """4 ranks, then 1, then 3: every rank has the whole state, and the last ones end the epoch."""
    state, emitted = None, []
    for world, steps in ((4, 2), (1, 4), (3, 10**6)):
        results = run_ranks(world, _some_steps, state, steps)
        emitted += [i for indices, _ in results for i in indices]
        states = [json.dumps(state) for _, state in results]
        assert len(set(states)) == 1
        state = json.loads(states[0])
    assert Counter(emitted) == Counter(set(range(SIZE)) - set(DROP))
    assert state is not None
    assert state["epoch"] == 1


def _other_states(rank: int, world: int) -> str:
    with loader_of() as loader:
        _, state = run_until(loader, 0, 1)
    with loader_of() as other:
        if rank == 0:
            other.load_state_dict(state)
        try:
            collect(other)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.distributed
def test_ranks_that_load_different_states_are_told() -> None:
    for text in run_ranks(2, _other_states):
        assert "ExchangeError: rank" in text
        assert "differ in their resumed state" in text


def _without_a_group(rank: int, world: int) -> str:
    loader = OdbDataLoader(data_set(), PadCollate(), BASE, rank=0, world_size=1)
    loader.world_size = 2  # as with a rendezvous of one's own
    try:
        loader.state_dict()
    except StateError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_several_ranks_without_a_process_group_cannot_gather() -> None:
    assert "init_process_group" in run_ranks(1, _without_a_group, init_group=False)[0]
