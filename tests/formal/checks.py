"""The guarantees of design.md as checks of one transition, with arithmetic of their own (not `Budget`'s)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from odb_factory.core.grouping import Group
from odb_factory.core.protocol import ClosedRound, RankProtocol
from tests.core.invariants import padded_rows, work_of

if TYPE_CHECKING:
    from tests.formal.ranks import Outcome
    from tests.formal.space import Common, RankState, Space


class Violation(AssertionError):
    """A guarantee does not hold. `search` adds the trace that leads there."""

    def __init__(self, guarantee: str, message: str) -> None:
        super().__init__(f"{guarantee}: {message}")
        self.guarantee = guarantee
        self.round: Round | None = None
        """The round in which it happened, where it got as far as its end."""


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the core. In no state of a healthy world may it raise: the other ranks would wait for this one (G5)."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        raise Violation("G5", f"{call.__name__} raised {type(error).__name__}: {error}") from error


def reduced(vectors: Sequence[tuple[int, ...]], by: Callable[..., int]) -> tuple[int, ...]:
    """An element-wise reduction over ranks; G5: all bring vectors of the same length."""
    try:
        return tuple([by(column) for column in zip(*vectors, strict=True)])
    except ValueError:
        raise Violation("G5", f"ranks reduce vectors of lengths {[len(vector) for vector in vectors]}") from None


def check_plan(space: Space, begun: RankProtocol, outcome: Outcome) -> None:
    """On one rank: nothing lost or doubled (G2), every group within the budget (G6), costs true (G7)."""
    groups = [slot for slot in outcome.slots if slot is not None]
    emitted = [s.index for group in groups for s in group.samples]
    if sorted(chain(emitted, outcome.protocol._window)) != sorted(begun._window):
        slots = [[s.length for s in group.samples] for group in groups]
        kept = [s.length for s in outcome.protocol._window.values()]
        raise Violation("G2", f"samples were lost or doubled: a rank plans {slots} of these lengths and keeps {kept}")
    for group in groups:
        rows = padded_rows(group, space.config)
        if len(rows) > 1 and sum(rows) > space.config.token_budget:
            raise Violation("G6", f"a group of padded rows {rows} exceeds the budget {space.config.token_budget}")
        if group.cost != sum(rows):
            raise Violation("G7", f"a group of padded rows {rows} claims {group.cost} padded tokens")
        if group.work != work_of(rows, space.config):
            raise Violation("G7", f"a group of padded rows {rows} claims {group.work} as its work")


class Round(NamedTuple):
    """All that is known of one round of all ranks."""

    space: Space
    common: Common
    """When it began."""
    states: tuple[RankState, ...]
    """When it began, windows filled."""
    outcomes: tuple[Outcome, ...]
    held: tuple[Group | None, ...]
    """The held-back groups when it began."""
    protocols: tuple[RankProtocol, ...]
    """When it had ended."""
    closed: tuple[ClosedRound, ...]
    assigned: tuple[list[int], ...]
    """Indices handed out after it."""

    @property
    def waiting_counts(self) -> bool:
        """Whether `max_wait` is promised in this round: before the drain."""
        draining = not self.common.unassigned and not all(state.unread for state in self.states)
        return self.space.bounds_waiting and not draining

    @property
    def oldest(self) -> int:
        """The most rounds that a kept sample has waited now."""
        return max(outcome.oldest for outcome in self.outcomes)


def check_agreement(r: Round) -> None:
    """G1, G5: ranks agree on steps, totals, last flags, the end of the epoch, and whether a prefix sum follows."""
    first = r.closed[0]
    mine = [(step.totals, step.last) for step in first.steps]
    for other in r.closed[1:]:
        if len(other.steps) != len(first.steps):
            raise Violation("G1", f"steps per rank differ: {[len(c.steps) for c in r.closed]}")
        if [(step.totals, step.last) for step in other.steps] != mine:
            raise Violation("G1", "ranks learn other totals or another last step")
        if other.epoch_over != first.epoch_over:
            raise Violation("G5", f"the epoch is over on some ranks only: {[c.epoch_over for c in r.closed]}")
        if (other.ask is None) != (first.ask is None):
            raise Violation("G5", f"only some ranks take part in the prefix sum: {[c.ask for c in r.closed]}")
    if any(c.dropped != sum(state.dropped for state in r.states) for c in r.closed):
        raise Violation("G2", f"dropped samples are miscounted: {[c.dropped for c in r.closed]}")
    last = [step.last for step in first.steps]
    if last != [False] * (len(last) - 1) + [first.epoch_over] * bool(last):
        raise Violation("G1", f"last flags {last}, the epoch is {'' if first.epoch_over else 'not '}over")
    if first.epoch_over and not last and r.common.steps:
        raise Violation("G1", "the epoch ended, but none of its steps was the last one")


def check_steps(r: Round) -> None:
    """G7: the totals of each step are the sums over ranks; steps without samples only complete the last window."""
    steps = r.closed[0].steps
    for column in zip(*(c.steps for c in r.closed), strict=True):
        groups = [step.group for step in column if step.group is not None]
        true = [0, 0, 0, 0, 0]
        for group in groups:
            true[0] += len(group.samples)
            true[1] += sum(s.loss_tokens for s in group.samples)
            true[2] += sum(s.length for s in group.samples)
            true[3] += group.cost  # as `check_plan` found it
            true[4] += group.work
        t = column[0].totals
        if true != list(dataclasses.astuple(t)):
            raise Violation("G7", f"a step has samples, loss, real, padded tokens, work {true}, but is told {t}")
    empty = [not step.totals.samples for step in steps]
    over, multiple = r.closed[0].epoch_over, r.space.config.steps_multiple
    fillers = sum(empty)
    if fillers and (not over or fillers >= multiple or not all(empty[-fillers:])):
        raise Violation("G1", f"steps without samples: {empty}")
    if over and (r.common.steps + len(steps)) % multiple:
        raise Violation("G1", f"{len(steps)} steps after {r.common.steps} do not complete a multiple of {multiple}")


def check_conservation(r: Round) -> None:
    """G2: what was held back or planned is handed out or held back now; without join, it may end behind the quota."""
    cut = r.closed[0].epoch_over and not r.space.config.join
    for held, outcome, closed, after in zip(r.held, r.outcomes, r.closed, r.protocols, strict=True):
        had = [id(group) for group in (held, *outcome.slots) if group is not None]
        given = [step.group for step in closed.steps] + [group for group, _ in after._held_back]
        has = [id(group) for group in given if group is not None]
        if had != has and not (cut and had[: len(has)] == has):
            raise Violation("G2", f"of {len(had)} groups {len(has)} were handed out or held back, or in disorder")
    if r.closed[0].epoch_over and r.space.config.join:
        left = sum(len(o.kept) for o in r.outcomes) + sum(s.unread for s in r.states) + r.common.unassigned
        if left or any(p._held_back for p in r.protocols):
            raise Violation("G2", f"the epoch ended with {left} samples or indices left")


def check_quota(r: Round) -> int:
    """G3: the epoch closes with the step that reaches the quota, or when nothing is left. Returns what is owed."""
    owed = r.common.owed
    if r.space.config.join:
        return owed
    for step in r.closed[0].steps:
        if step.totals.samples and owed <= 0:
            raise Violation("G3", "a step with samples follows after the quota was reached")
        owed -= step.totals.samples
    left = sum(len(o.kept) for o in r.outcomes) + sum(s.unread for s in r.states) + r.common.unassigned
    if (owed <= 0) > r.closed[0].epoch_over:
        raise Violation("G3", "the quota was reached, but the epoch goes on")
    if r.closed[0].epoch_over and owed > 0 and left:
        raise Violation("G3", f"the epoch ended {owed} samples before the quota, with {left} left")
    return owed


def check_assignment(r: Round) -> None:
    """G2: the indices handed out are the next ones, each to one rank."""
    indices = sorted(chain.from_iterable(r.assigned))
    if indices != list(range(len(indices))):
        raise Violation("G2", f"of the indices in order, {list(map(list, r.assigned))} (by rank) were handed out")
    cursors = {getattr(p._source, "_cursor", len(indices)) for p in r.protocols}
    if cursors != {len(indices)}:
        raise Violation("G2", f"{len(indices)} indices were handed out, the cursors stand at {cursors}")


def check_progress(r: Round) -> None:
    """G4: with samples in a window one leaves at least; without any, the epoch ends or an index is handed out."""
    if any(state.window for state in r.states):
        if not any(slot is not None for outcome in r.outcomes for slot in outcome.slots):
            raise Violation("G4", "no sample left the windows")
    elif not r.closed[0].epoch_over and not any(r.assigned):
        raise Violation("G4", "all windows are empty, and no index was handed out")
    # an index counts twice until it is handed out: so no state comes twice, and every way ends
    before = 2 * r.common.unassigned + sum(state.unread + len(state.window) for state in r.states)
    left = sum(state.unread + len(outcome.kept) for state, outcome in zip(r.states, r.outcomes, strict=True))
    if not r.closed[0].epoch_over and 2 * r.common.unassigned - sum(map(len, r.assigned)) + left >= before:
        raise Violation("G4", "a round left as much to do as there was")


def check_waiting(r: Round) -> None:
    """Before the drain, no sample waits for more than `max_wait` rounds."""
    limit = r.space.config.max_wait
    if r.waiting_counts and r.oldest > limit:
        raise Violation("waiting", f"a sample was held back {r.oldest} times, max_wait is {limit}")


def check_bookkeeping(r: Round) -> None:
    """What the states of the search take for granted: it is the same on every rank, or follows from the rest."""
    same = {(p.steps, p.round_index, p.emitted, p._run_samples, p._run_tokens, len(p._held_back)) for p in r.protocols}
    if len(same) > 1:
        raise Violation("bookkeeping", f"ranks count differently: {same}")
    for p, state, assigned in zip(r.protocols, r.states, r.assigned, strict=True):
        if p._pending != state.unread + len(assigned):
            raise Violation("bookkeeping", f"{p._pending} indices pending, not {state.unread} + {len(assigned)}")


def check_round(r: Round) -> int:
    """Every guarantee; returns the samples still owed to the quota."""
    check_agreement(r)
    check_steps(r)
    check_conservation(r)
    check_assignment(r)
    check_progress(r)
    check_waiting(r)
    owed = check_quota(r)
    check_bookkeeping(r)
    return owed
