"""One rank of a search: real `RankProtocol` objects out of states, and all that may happen to them before a sum.

What a rank does up to the second reduction depends on its own state and on the minima only, so it is computed once and
kept. A transition starts from a `RankProtocol` with the state written into it, not from the path that led there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, permutations, product
from typing import Any, NamedTuple
from unittest import mock

from odb_factory.core import ordering, protocol
from odb_factory.core.assignment import IndexSource, SharedIndexSource, StaticIndexSource
from odb_factory.core.grouping import Group
from odb_factory.core.protocol import RankProtocol
from odb_factory.core.stats import StepTotals
from tests.formal.checks import Violation, attempt, check_plan
from tests.formal.space import Common, RankState, Space, held_group, sample_of

Order = tuple[int, ...] | None


class Scripted:
    """Stands for the seeded generators: shuffles as the search says."""

    draw: Order = None
    steps: Order = None

    def __init__(self, order: Order) -> None:
        self._order = order

    def shuffle(self, items: list[Any]) -> None:
        if self._order is not None:
            items[:] = [items[i] for i in self._order]

    @classmethod
    def make(cls, _seed: int, *scope: int | str) -> Scripted:
        return cls(cls.draw if scope[0] == "draw" else cls.steps)


@contextlib.contextmanager
def scripted_generators() -> Iterator[None]:
    """Replace the generators that the core draws from."""
    with (
        mock.patch.object(protocol, "generator", Scripted.make),
        mock.patch.object(ordering, "generator", Scripted.make),
    ):
        yield


class Outcome(NamedTuple):
    """What a rank decided in `plan`."""

    protocol: RankProtocol
    vector: tuple[int, ...]
    slots: tuple[Group | None, ...]
    kept: tuple[tuple[int, int], ...]
    """Its window afterwards."""
    oldest: int
    """Most rounds that a kept sample has waited now."""


class RankModel:
    """The ranks of one search, with all that was computed for them so far."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.states: list[RankState] = []
        self._numbers: dict[RankState, int] = {}
        # Without a world size, groups to be held back are drawn, here in every way; what `core.choice` makes is one.
        self._templates = [
            RankProtocol(space.config, rank=r, epoch=0, world_size=None) for r in range(space.world_size)
        ]
        self._fills: dict[Any, tuple[int, ...]] = {}
        self._begins: dict[Any, tuple[RankProtocol, tuple[int, ...]]] = {}
        self._plans: dict[Any, tuple[Outcome, ...]] = {}

    def find(self, state: RankState) -> int | None:
        """The number of `state`, if it has one."""
        return self._numbers.get(state)

    def number(self, state: RankState) -> int:
        """A number for `state`, the same each time."""
        number = self._numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
        return number

    def build(self, rank: int, state: RankState, common: Common) -> RankProtocol:
        """The `RankProtocol` of `rank` that is in this state."""
        space = self.space
        samples = [sample_of(space.kinds[kind], 10 * i + 9) for i, (kind, _) in enumerate(state.window)]
        new = copy_of(self._templates[rank])
        new.round_index = common.round
        new._source = self._source(rank, common.unassigned)
        new._pending = state.unread + state.dropped
        new._observed = state.observed
        new._window = {s.index: s for s in samples}
        new._waited = {s.index: age for s, (_, age) in zip(samples, state.window, strict=True) if age}
        return new

    def _source(self, rank: int, unassigned: int) -> IndexSource:
        if self.space.shared:
            return SharedIndexSource(range(unassigned), rank, self.space.world_size, first=0)
        return StaticIndexSource((), rank, self.space.world_size)

    def in_common(self, before: RankProtocol, rank: int, state: RankState, common: Common) -> RankProtocol:
        """A copy of `before`, which `plan` left, with what all ranks have in common written into it."""
        new = copy_of(before)
        new.steps = common.steps
        new.round_index = common.round
        new._run_samples, new._run_tokens = common.run
        new._source = self._source(rank, common.unassigned)
        held = common.held
        new._held_back = [] if held is None else [(held_group(self.space, state.held), StepTotals(*held))]
        # only the difference of the two matters; what is held back was counted when it was planned
        new.emitted, new._quota = 0, common.owed - (held[0] if held else 0)
        return new

    def fills(self, rank: int, number: int, common: Common) -> tuple[int, ...]:
        """Every state of this rank after its window was filled for the next round."""
        key = (rank, number, common.round, not common.unassigned)
        found = self._fills.get(key)
        if found is None:
            state = self.states[number]
            found = self._fills[key] = tuple({self.number(s): None for s in self._fill(rank, state, common)})
        return found

    def _fill(self, rank: int, state: RankState, common: Common) -> Iterator[RankState]:
        missing = self.build(rank, state, common).missing()
        for taken, dropped in self._readings(missing, state):
            for kinds in combinations_with_replacement(range(len(self.space.kinds)), taken):
                for indices in self._indices(state, kinds):
                    new = self.build(rank, state, common)
                    new.add([sample_of(self.space.kinds[k], i) for k, i in zip(kinds, indices, strict=True)])
                    window = self.window_of(new)
                    unread = state.unread - taken - dropped
                    if new._pending != unread + dropped:
                        raise Violation("bookkeeping", f"{new._pending} indices pending, not {unread + dropped}")
                    observed = new._observed if common.unassigned else (0, 0)
                    yield RankState(window, unread, False, dropped, observed, state.held)

    def _readings(self, missing: int, state: RankState) -> Iterator[tuple[int, int]]:
        """(taken, dropped) of every reading: dropped are those before the last one taken, and up to the next valid."""
        for taken in range(min(missing, state.unread) + 1):
            for dropped in range(state.unread - taken + 1 if self.space.drops else 1):
                rest = state.unread - taken - dropped
                if state.ahead and not taken and (dropped or not rest):
                    continue  # the next one is known to be valid
                short = rest > 0 and taken < missing
                if not short or (self.space.short_reads and (taken or state.window)):
                    yield taken, dropped

    def _indices(self, state: RankState, kinds: tuple[int, ...]) -> Iterator[list[int]]:
        """Indices for new samples: behind those in the window, or at every place among those of their kind."""
        if not self.space.any_index:
            yield [500 + i for i in range(len(kinds))]
            return
        places = [[10 * i for i, (k, _) in enumerate(state.window) if k == kind] + [500] for kind in kinds]
        for chosen in product(*places):
            placed = list(zip(kinds, chosen, strict=True))
            if placed == sorted(placed):  # samples of one kind are all alike
                yield [place + i for i, place in enumerate(chosen)]

    def window_of(self, of: RankProtocol) -> tuple[tuple[int, int], ...]:
        """Its window in canonical form. Of ages from `max_wait` on, only the order matters."""
        limit = self.space.config.max_wait
        ages = {s.index: of._waited.get(s.index, 0) for s in of._window.values()}
        late = sorted({age for age in ages.values() if age >= limit})
        rank_of = {age: limit + i for i, age in enumerate(late)}
        numbers = {kind: i for i, kind in enumerate(self.space.kinds)}
        window = [
            (numbers[s.length, s.has_media], s.index, rank_of.get(ages[s.index], ages[s.index]))
            for s in of._window.values()
        ]
        return tuple((kind, age) for kind, _, age in sorted(window))

    def begin(self, rank: int, number: int, common: Common) -> tuple[RankProtocol, tuple[int, ...]]:
        """The protocol after `begin_round`, and its vector."""
        key = (rank, number, common.round, not common.unassigned)
        found = self._begins.get(key)
        if found is None:
            state = self.states[number]
            new = self.build(rank, state, common)
            found = self._begins[key] = (new, attempt(new.begin_round, exhausted=not state.unread))
        return found

    def plans(
        self, rank: int, number: int, common: Common, minima: tuple[int, ...], order: Order
    ) -> tuple[Outcome, ...]:
        """What the rank may decide: one outcome for each draw of held-back groups, where they differ."""
        key = (rank, number, common.round, not common.unassigned, minima, order)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = tuple(self._plan(rank, number, common, minima, order))
        return found

    def _plan(self, rank: int, number: int, common: Common, minima: tuple[int, ...], order: Order) -> Iterator[Outcome]:
        begun, _ = self.begin(rank, number, common)
        state = self.states[number]
        seen = set()
        draws: Sequence[Order] = [*permutations(range(len(begun._groups)))] or [None]
        for draw in draws:
            Scripted.draw, Scripted.steps = draw, order
            new = copy_of(begun)
            vector = attempt(new.plan, minima, dropped=state.dropped, unread=min(1, state.unread))
            outcome = Outcome(new, vector, tuple(new._slots), self.window_of(new), max(new._waited.values(), default=0))
            check_plan(self.space, begun, outcome)
            what = (outcome.kept, tuple(_kinds(slot) for slot in outcome.slots))
            if what not in seen:
                seen.add(what)
                yield outcome
            if len(begun._groups) <= len(outcome.slots):
                return  # nothing to draw


def _kinds(group: Group | None) -> tuple[tuple[int, bool], ...]:
    return tuple((s.length, s.has_media) for s in group.samples) if group else ()


def copy_of(before: RankProtocol) -> RankProtocol:
    """A copy that a call of the next method of the round cannot change the original through."""
    new: RankProtocol = object.__new__(RankProtocol)
    new.__dict__.update(before.__dict__)
    return new
