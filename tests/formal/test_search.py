"""The model check: every guarantee in every state of every family, and that it looks where it should."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from odb_factory.core.protocol import RankProtocol
from odb_factory.core.simulate import simulate
from tests.formal.report import run_all, summed
from tests.formal.search import Result, Search, canonical
from tests.formal.space import Common, RankState, Space, State, sample_of
from tests.formal.spaces import FAMILIES, TWO_KINDS, make


@pytest.mark.slow
@pytest.mark.timeout(400)  # two processes for some ten seconds, on a machine that may be busy
@pytest.mark.parametrize("name", FAMILIES)
def test_every_reachable_state_keeps_every_guarantee(
    name: str, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    family = FAMILIES[name]
    results: list[Result] = []
    for _, result in run_all(family.spaces()):
        assert isinstance(result, Result), result
        results.append(result)
    total = summed(results)
    for key in ("states", "transitions", "closed"):
        record_property(key, getattr(total, key))
    with capsys.disabled():
        print(
            f"\nmodel check, {name}: {len(results)} configurations, {total.states} states, {total.transitions} "
            f"transitions, {total.seconds:.1f} s of CPU time"
        )
    for key, least in family.floors.items():
        assert getattr(total, key) >= least, f"the search saw too little: {key} {getattr(total, key)} of {least}"


REAL = (
    make("static", {"depth": 3, "max_wait": 1}, samples=5),
    make(
        "static",
        {"depth": 4, "max_wait": 1, "alignment": "max", "ramp": True, "shuffle": True},
        samples=5,
        any_index=True,
    ),
    make("capacity", {"depth": 3, "capacity": 1, "steps_multiple": 2, "shuffle": True}, samples=4, any_index=True),
    make("quota", {"join": False, "quota": 0.5, "split": "singleton"}, samples=4, drops=True, orders=True),
    make("shared", {"depth": 3, "assignment": "shared", "max_wait": 1}, samples=10),
    make("shared", {"assignment": "shared", "steps_multiple": 2}, samples=9, drops=True, orders=True),
    make("shared", {"assignment": "shared", "join": False}, samples=9, drops=True, orders=True, kinds=TWO_KINDS),
    make("3 ranks", {"depth": 1, "assignment": "shared"}, samples=8, world_size=3, drops=True, kinds=TWO_KINDS),
)


@pytest.mark.parametrize("space", REAL, ids=str)
def test_states_of_ordinary_epochs_are_among_those_that_the_search_saw(space: Space) -> None:
    """Whatever is wrong with how states are merged or restored, or with the reading, would show here.

    These epochs run from their beginning to their end on the same objects, with the seeded generators.
    """
    space = replace(space, config=replace(space.config, shuffle=space.any_index))
    search = Search(space)
    search.run()
    seen: set[State] = set()
    for seed in range(150):
        for state in _epoch(search, seed):
            assert state in search.parents, f"seed {seed}: {state}"
            seen.add(state)
    assert len(seen) > min(60, len(search.parents) // 8)


def _epoch(search: Search, seed: int) -> list[State]:
    """The states at the beginning of the rounds of a random epoch."""
    space, rng = search.space, random.Random(seed)
    most = space.samples if space.shared else space.samples * space.world_size
    size = rng.randint(most // 2, most)
    samples = [sample_of(rng.choice(space.kinds), i) for i in range(size)]
    dropped = [i for i in range(size) if space.drops and rng.random() < 0.2]
    states: list[State] = []
    with _recorded(search, states):
        simulate(samples, replace(space.config, seed=seed), space.world_size, dropped=dropped, exact_unread=False)
    return states


@contextmanager
def _recorded(search: Search, states: list[State]) -> Iterator[None]:
    """Append a state to `states` whenever the last rank has begun a round."""
    real, ranks = RankProtocol.plan, []

    def plan(self: RankProtocol, minima: Any, *, dropped: int, unread: int) -> Any:
        ranks.append(search.model.find(_rank_state(search, self, dropped)))
        if len(ranks) == search.space.world_size:
            states.append(canonical(State(_common(search.space, self), tuple(ranks))) if None not in ranks else None)
            ranks.clear()
        return real(self, minima, dropped=dropped, unread=unread)

    with mock.patch.object(RankProtocol, "plan", plan):
        yield


def _rank_state(search: Search, of: RankProtocol, dropped: int) -> RankState:
    kinds = {kind.length: i for i, kind in enumerate(search.space.kinds)}
    group = of._held_back[0][0] if of._held_back else None
    held = tuple(kinds[s.length] for s in group.samples) if group else ()
    observed = (0, 0) if of.all_assigned else of._observed
    # of a static rank the search has no use for what is pending, but it is right all the same
    return RankState(search.model.window_of(of), of._pending - dropped, False, dropped, observed, held)


def _common(space: Space, of: RankProtocol) -> Common:
    held = of._held_back[0][1] if of._held_back else None
    multiple = space.config.steps_multiple
    return Common(
        0 if of.all_assigned else of._source._left,
        0 if space.config.join else of._quota - of.emitted + (held.samples if held else 0),
        (of.steps - 1) % multiple + 1 if of.steps else 0,
        min(of.round_index, 3) if space.config.ramp else 0,
        (0, 0) if of.all_assigned else (of._run_samples, of._run_tokens),
        dataclasses.astuple(held) if held else None,
    )
