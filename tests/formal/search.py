"""The search: every reachable state of a `Space`, breadth first, each expanded once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations, product
from math import ceil

from odb_factory.core import assignment
from odb_factory.core.protocol import RankProtocol
from odb_factory.core.stats import StepTotals
from tests.formal.checks import Round, Violation, attempt, check_round, reduced
from tests.formal.ranks import Order, Outcome, RankModel, scripted_generators
from tests.formal.space import Common, RankState, Space, State
from tests.formal.trace import explain


@dataclass(slots=True)
class Result:
    """What a search has seen."""

    states: int = 0
    """Distinct states of the whole world at the beginning of a round; each was expanded."""
    transitions: int = 0
    """Rounds run by the protocol, one for each way that the draws (and orders of steps) may turn out in a state."""
    closed: int = 0
    """How many of these ended the epoch."""
    assigned_without_samples: int = 0
    """Rounds with every window empty that went on."""
    held_back: int = 0
    """Rounds that held a step back."""
    waited_longest: int = 0
    """Rounds before the drain after which some sample had waited for `max_wait` rounds, where that is the bound."""
    seconds: float = 0.0
    """CPU time."""


class Search:
    """One search of `space`. `run` visits everything, or raises the `Violation` that it meets first."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.model = RankModel(space)
        self.result = Result()
        self.parents: dict[State, State | None] = {}
        """Of each state seen, the one whose round led there first; None: the epoch begins with it."""
        self._left: set[State] = set()
        self._kinds = {(kind.length, kind.media): i for i, kind in enumerate(space.kinds)}

    def run(self) -> Result:
        begin = time.process_time()
        with scripted_generators():
            level = [s for start in self.starts() for s in self._enter(start, None)]
            while level:
                found: list[State] = []
                for at in level:
                    try:
                        for after, _ in self.rounds(at):
                            found += self._enter(after, at) if after is not None else ()
                    except Violation as violation:
                        violation.add_note(explain(self, at, violation))
                        raise
                level = found
        self.result.states = len(self.parents)
        self.result.seconds = time.process_time() - begin
        return self.result

    def _enter(self, state: State, parent: State | None) -> list[State]:
        """The new states in which the next round may begin after `state`."""
        state = canonical(state)
        if state in self._left:
            return []
        self._left.add(state)
        filled = dict.fromkeys(map(canonical, self.filled(state)))
        if not filled:
            raise Violation("bookkeeping", "the search has no way on from here")
        new = [s for s in filled if s not in self.parents]
        self.parents.update(dict.fromkeys(new, parent))
        return new

    def starts(self) -> Iterator[State]:
        """Every beginning of an epoch, small ones first: windows are empty, nothing is read."""
        space = self.space
        counts: list[tuple[int, ...]]
        if space.shared:
            counts = [(size,) for size in range(space.samples + 1)]
        else:
            every = product(range(space.samples + 1), repeat=space.world_size)
            counts = sorted((c for c in every if list(c) == sorted(c)), key=sum)  # ranks are alike
        for count in counts:
            size = sum(count)
            # a resumed run has emitted some before; with join that changes nothing
            for emitted in range(1 if space.config.join else size + 1):
                owed = 0 if space.config.join else ceil(Fraction(str(space.config.quota)) * (size + emitted)) - emitted
                if owed > 0 or not size or space.config.join:
                    yield self._start(count, emitted, owed)

    def _start(self, count: tuple[int, ...], emitted: int, owed: int) -> State:
        space, size = self.space, sum(count)
        unassigned, ranks = 0, []
        for rank in range(space.world_size):
            source: assignment.IndexSource
            if space.shared:
                first = space.config.window_target(0) + 1
                source = assignment.SharedIndexSource(range(size), rank, space.world_size, first)
                unassigned = size - source._cursor
            else:
                source = assignment.StaticIndexSource(range(count[rank]), 0, 1)
            new = RankProtocol(
                space.config,
                rank=rank,
                epoch=0,
                world_size=None,
                dataset_size=size + emitted,
                source=source,
                emitted=emitted,
            )
            if not space.config.join and new._quota - new.emitted != owed:
                raise Violation("G3", f"the quota is {new._quota} of {size + emitted} samples, not {owed + emitted}")
            ranks.append(self.model.number(RankState((), len(new.start()))))
        if unassigned + sum(self.model.states[number].unread for number in ranks) != size:
            raise Violation("G2", f"{size} samples, but other numbers of indices are handed out at the start")
        return State(Common(unassigned, owed), tuple(ranks))

    def filled(self, state: State) -> Iterator[State]:
        """Every way in which the ranks may fill their windows for the next round."""
        fills = [self.model.fills(rank, number, state.common) for rank, number in enumerate(state.ranks)]
        for ranks in product(*fills):
            yield State(state.common, ranks)

    def rounds(self, state: State) -> Iterator[tuple[State | None, Round]]:
        """Run the round that begins in `state`, in every way; None: the epoch is over."""
        common, model = state.common, self.model
        begun = [model.begin(rank, number, common) for rank, number in enumerate(state.ranks)]
        minima = reduced([vector for _, vector in begun], min)
        usual = [model.plans(rank, number, common, minima, None) for rank, number in enumerate(state.ranks)]
        orders: list[Order] = [None]
        if self.space.orders:
            orders = [*permutations(range(len(usual[0][0].slots)))]
        for order in orders:
            options = usual
            if order is not None:
                options = [model.plans(rank, number, common, minima, order) for rank, number in enumerate(state.ranks)]
            for outcomes in product(*options):
                self.result.transitions += 1
                yield self.close(state, outcomes)

    def close(self, state: State, outcomes: tuple[Outcome, ...]) -> tuple[State | None, Round]:
        """The second reduction and what follows it."""
        common, states = state.common, tuple([self.model.states[number] for number in state.ranks])
        sums = reduced([outcome.vector for outcome in outcomes], sum)
        protocols = tuple(
            [
                self.model.in_common(outcome.protocol, rank, states[rank], common)
                for rank, outcome in enumerate(outcomes)
            ]
        )
        held = tuple([p._held_back[0][0] if p._held_back else None for p in protocols])
        closed = tuple([attempt(p.close_round, sums) for p in protocols])
        asks = [c.ask for c in closed if c.ask is not None]
        assigned: tuple[list[int], ...] = ([],) * len(closed)
        if len(asks) == len(closed):
            before, total = assignment.exclusive_sums(asks), sum(asks)
            parts = zip(protocols, asks, before, strict=True)
            assigned = tuple([attempt(p.assign, ask, offset, total) for p, ask, offset in parts])
        done = Round(self.space, common, states, outcomes, held, protocols, closed, assigned)
        try:
            owed = check_round(done)
        except Violation as violation:
            violation.round = done
            raise
        return self._after(done, owed), done

    def _after(self, done: Round, owed: int) -> State | None:
        first, config = done.protocols[0], self.space.config
        if done.closed[0].epoch_over:
            self.result.closed += 1
            return None
        self.result.assigned_without_samples += not any(state.window for state in done.states)
        self.result.held_back += bool(first._held_back)
        self.result.waited_longest += done.waiting_counts and done.oldest == config.max_wait
        unassigned = done.common.unassigned - sum(map(len, done.assigned))
        totals: StepTotals | None = first._held_back[0][1] if first._held_back else None
        common = Common(
            unassigned,
            owed,
            (first.steps - 1) % config.steps_multiple + 1 if first.steps else 0,
            min(first.round_index, 3) if config.ramp else 0,
            (first._run_samples, first._run_tokens) if unassigned else (0, 0),
            None if totals is None else dataclasses.astuple(totals),
        )
        ranks = []
        for p, state, outcome, new in zip(done.protocols, done.states, done.outcomes, done.assigned, strict=True):
            group = p._held_back[0][0] if p._held_back else None
            back = tuple([self._kinds[s.length, s.has_media] for s in group.samples]) if group else ()
            ahead = state.unread > 0
            observed = p._observed if unassigned else (0, 0)
            rank = RankState(outcome.kept, state.unread + len(new), ahead, 0, observed, back)
            ranks.append(self.model.number(rank))
        return State(common, tuple(ranks))


def canonical(state: State) -> State:
    """One of the states that differ in the numbers of the ranks only.

    Once every index is assigned nothing tells ranks apart; before that, the prefix sum does.
    """
    return state if state.common.unassigned else State(state.common, tuple(sorted(state.ranks)))
