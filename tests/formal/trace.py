"""A counter-example as text: the way to a violated guarantee, round by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from odb_factory.core import protocol
from odb_factory.core.alignment import NONE
from odb_factory.core.grouping import Group
from odb_factory.core.stats import StepTotals
from tests.formal.checks import Round, Violation
from tests.formal.space import Space, State

if TYPE_CHECKING:
    from tests.formal.search import Search


def explain(search: Search, at: State, violation: Violation) -> str:
    """The shortest way to `at`, and the round from there that violates a guarantee."""
    path: list[State] = []
    state: State | None = at
    while state is not None:
        path.append(state)
        state = search.parents[state]
    path.reverse()
    start, before, names = _find_start(search, path[0])
    lines = [
        "COUNTER-EXAMPLE",
        f"{search.space}",
        "m: with media; *: full; of samples that waited longer than max_wait only the order is shown",
        _describe_start(search, start),
    ]
    for number, state in enumerate(path):
        lines += [f"round {number}", *_filled(search, before, state, names)]
        if state is at:
            break
        before, done, after_names = _step(search, state, path[number + 1], names)
        lines += _ended(search.space, done, names)
        names = after_names
    if violation.round is not None:
        lines += _ended(search.space, violation.round, names)
    lines.append(f"VIOLATED {violation}")
    return "\n".join(lines)


def _find_start(search: Search, first: State) -> tuple[State, State, list[int]]:
    """The beginning of the epoch, the same with ranks in the order of `first`, and which rank stands where."""
    for start in search.starts():
        found = _arrange(search, start, first)
        if found is not None:
            return start, State(start.common, tuple(start.ranks[i] for i in found)), found
    raise AssertionError("no beginning leads to this state")


def _arrange(search: Search, before: State, after: State) -> list[int] | None:
    """The ranks of `before` in the order of `after`, if filling its windows leads there."""
    if before.common != after.common:
        return None
    fills = [search.model.fills(rank, number, before.common) for rank, number in enumerate(before.ranks)]
    for ranks in product(*fills):
        order = list(range(len(ranks)))
        if not before.common.unassigned:
            order.sort(key=ranks.__getitem__)
        if tuple(ranks[i] for i in order) == after.ranks:
            return order
    return None


def _step(search: Search, state: State, after: State, names: list[int]) -> tuple[State, Round, list[int]]:
    """The round that leads from `state` to `after`."""
    for between, done in search.rounds(state):
        order = _arrange(search, between, after) if between is not None else None
        if between is not None and order is not None:
            return State(between.common, tuple(between.ranks[i] for i in order)), done, [names[i] for i in order]
    raise AssertionError("no round leads to this state")


def _describe_start(search: Search, start: State) -> str:
    ranks = [search.model.states[number].unread for number in start.ranks]
    quota = "" if search.space.config.join else f", {start.common.owed} samples to the quota"
    return f"the epoch begins: indices by rank {ranks}, {start.common.unassigned} not assigned yet{quota}"


def _filled(search: Search, before: State, state: State, names: Sequence[int]) -> Iterator[str]:
    """What each rank read, and what it reports."""
    space, model = search.space, search.model
    vectors = []
    for position, number in sorted(enumerate(state.ranks), key=lambda p: names[p[0]]):
        was, now = model.states[before.ranks[position]], model.states[number]
        read = Counter(kind for kind, _ in now.window) - Counter(kind for kind, _ in was.window)
        text = " ".join(str(space.kinds[kind]) for kind in sorted(read.elements())) or "nothing"
        yield (
            f"  rank {names[position]} reads {text}, drops {now.dropped}, {now.unread} unread; "
            f"window {_window(space, now.window)}"
        )
        begun, vector = model.begin(position, number, state.common)
        vectors.append(vector)
        yield f"    groups {' '.join(_group(g) + '*' * g.full for g in begun._groups) or '-'}"
        yield f"    reports {_report(vector)}"
    minima = [min(column) for column in zip(*vectors, strict=True)]
    steps = protocol.target(protocol.decode(minima[:6]), space.config.alignment)
    yield f"  minima: {_report(minima)}; T = {steps}"


def _report(vector: Sequence[int]) -> str:
    capacity, samples, groups, full, overdue, exhausted = vector[:6]
    shown = ["-" if value == NONE else value for value in (capacity, samples, full)]
    return (
        f"C {shown[0]}, S {shown[1]}, G {-groups}, F {shown[2]}, overdue {-overdue}, "
        f"{'exhausted' if exhausted else 'not exhausted'}"
    )


def _ended(space: Space, done: Round, names: Sequence[int]) -> Iterator[str]:
    """What each rank emits and keeps, and what the round came to."""
    for position in sorted(range(len(names)), key=names.__getitem__):
        outcome, closed = done.outcomes[position], done.closed[position]
        assigned = f"; asks for {closed.ask}, gets indices {done.assigned[position]}" if closed.ask is not None else ""
        yield (
            f"  rank {names[position]} plans {_groups(outcome.slots)}; keeps {_window(space, outcome.kept)}; hands out "
            f"{_groups([step.group for step in closed.steps])}{assigned}"
        )
        back = [_group(group) for group, _ in done.protocols[position]._held_back]
        if back:
            yield f"    holds back the step {back[0]}"
    first = done.closed[0]
    yield (
        f"  {len(first.steps)} steps, totals {[_totals(step.totals) for step in first.steps]}, "
        f"last {[int(step.last) for step in first.steps]}, epoch {'over' if first.epoch_over else 'goes on'}"
    )


def _totals(totals: StepTotals) -> str:
    return (
        f"{totals.samples} samples, {totals.loss_tokens}/{totals.tokens}/{totals.padded_tokens}/{totals.work} "
        "loss/real/padded/work"
    )


def _groups(groups: Sequence[Group | None]) -> str:
    return " ".join(map(_group, groups)) or "nothing"


def _group(group: Group | None) -> str:
    if group is None:
        return "IDLE"
    return "[" + " ".join(f"{s.length}{'m' * s.has_media}" for s in group.samples) + "]"


def _window(space: Space, window: Sequence[tuple[int, int]]) -> str:
    shown = (f"{space.kinds[kind]}" + (f"(waited {age})" if age else "") for kind, age in window)
    return "[" + " ".join(shown) + "]"
