"""Alignment of the number of groups over ranks: the solution of the Distributed Group Alignment Problem (DGAP).

Per round every rank contributes one `RankReport`. One element-wise *minimum* over ranks (`encode`) gives every rank the
same `GlobalView`, and from it alone each computes the same number of steps `T` (`target`). A rank then makes exactly
`T` slots of its own window (`plan_round`): too many groups overflow back into the window, too few are split, and a rank
whose window is empty has `T` IDLE slots.

Why it ends (G4). Count every index twice until it is handed out, then once until its sample is emitted or dropped. Each
round that does not end the epoch makes this smaller:
- Some window holds a sample. Then `target` is at least 1 and at most the smallest window that is not empty, so a rank
  with samples and too few groups has enough samples for `split_to`, which never makes an empty group: `plan_round`
  fills each of its `T` slots. Samples leave a window only by being emitted, so at least one of them is.
- All windows are empty: `T` is 0. As a reader gives at least one sample where it has any, nothing is left to read
  either. Where all indices are assigned (`static`: always), `close_round` ends the epoch. Else (`shared`: all that was
  read was dropped) every window lacks samples and `RankProtocol._want` says so; `SharedIndexSource.ask` gives at least
  1 to any rank that wants one, so `assign` hands out at least one index. If nobody wanted any, or samples were
  announced that do not come, `close_round` raises, on every rank in the same round.

Without join it may end earlier: `close_round` counts the emitted samples in the summed totals (`_cut_at_quota`), cuts
behind the step that reaches the quota and ends the epoch with it (G3). Below the quota all is as with join.

The last step. While nothing is left in windows or readers, but indices are not assigned, these may all be dropped. So
`close_round` then holds one step back, until another step follows or the epoch ends and it is the last one. It is never
lost (G2): each round begins with it, and at most one waits.

Why nobody waits for ever (G5). The length of the second vector follows from `T`. The end of the epoch, the held-back
step, and whether a prefix sum follows depend on sums, and on a cursor that moves by sums. All of these are the same on
every rank. A rank that fails says so in the first vector (`begin_round`), and the others raise.

More of it: `grouping` (splits, the budget, G6), `protocol` (the order of the calls, totals, G7), `assignment` (each
index to one rank), `runtime.rounds` and `runtime.window` (they make the calls). `tests/formal` checks it on this very
code, in every state of small worlds.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from odb_factory.core.budget import Budget
from odb_factory.core.choice import RESERVE, choose
from odb_factory.core.grouping import Group, split_to
from odb_factory.core.sample import SampleMeta

NONE = 2**62
"""Stands for "no such rank" in a minimum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank tells the others about its window, at the start of a round."""

    capacity: int
    """`C`: groups that it can emit in this round, at least 1."""
    samples: int
    """`S`: samples in its window."""
    groups: int
    """`G`: groups that they make."""
    full: int
    """`F`: how many of these are full."""
    overdue: int
    """How many groups hold a sample that was held back for `max_wait` rounds."""
    exhausted: bool
    """No sample will come after those in the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalView:
    """What all ranks know together. "Active" ranks are those with a sample in their window."""

    min_capacity: int
    """Over active ranks."""
    min_samples: int
    """Over active ranks; 0 if there is none."""
    max_groups: int
    min_full: int
    """Over active ranks."""
    max_overdue: int
    draining: bool
    """Some rank is exhausted."""

    @property
    def empty(self) -> bool:
        """No rank has a sample left."""
        return self.min_samples == 0


def make_report(
    groups: Sequence[Group], waited: Mapping[int, int], *, capacity: int, max_wait: int, exhausted: bool
) -> RankReport:
    """The report of a rank with these groups; `waited[index]` is the number of rounds a sample was held back."""
    return RankReport(
        capacity=capacity,
        samples=sum(len(g.samples) for g in groups),
        groups=len(groups),
        full=sum(g.full for g in groups),
        overdue=sum(_age(g, waited) >= max_wait for g in groups),
        exhausted=exhausted,
    )


def encode(report: RankReport) -> tuple[int, ...]:
    """Integers (6,) whose element-wise minimum over ranks `decode` understands."""
    active = report.samples > 0
    return (
        report.capacity if active else NONE,
        report.samples if active else NONE,
        -report.groups,
        report.full if active else NONE,
        -report.overdue,
        -int(report.exhausted),
    )


def decode(minima: Sequence[int]) -> GlobalView:
    """The global view out of the element-wise minimum of all ranks' `encode`."""
    capacity, samples, neg_groups, full, neg_overdue, neg_exhausted = minima
    return GlobalView(
        min_capacity=capacity if capacity != NONE else 0,
        min_samples=samples if samples != NONE else 0,
        max_groups=-neg_groups,
        min_full=full if full != NONE else 0,
        max_overdue=-neg_overdue,
        draining=neg_exhausted < 0,
    )


RAMP_SHARE = 3
"""A round of the ramp emits one in so many full groups."""


def target(view: GlobalView, rule: str, *, ramping: bool = False) -> int:
    """`T`, the number of steps of this round: the same on every rank; 0 only when no rank has a sample.

    `max` (the paper's rule): `max(1, min(max G, min+ C, min+ S))`. `carry`: before the drain the smallest number of
    full groups, so that every rank emits only full groups, less an eighth, so that each may choose among its own
    (`choice`), but enough steps for every overdue group; in the drain as `max`.

    Args:
        ramping: the window is one of the small first ones, which make bad groups. `carry` then emits a third only: the
            trainer has something to do while the next, larger window is read, and most samples wait for that one.
    """
    if view.empty:
        return 0
    bound = min(view.min_capacity, view.min_samples)
    if rule == "max" or view.draining:
        wanted = view.max_groups
    elif ramping:
        wanted = max(-(-view.min_full // RAMP_SHARE), view.max_overdue)
    else:
        wanted = max(view.min_full - view.min_full // RESERVE, view.max_overdue)
    return max(1, min(wanted, bound))


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a rank emits in a round."""

    slots: tuple[Group | None, ...]
    """(T,) groups in no particular order; all None where the window is empty."""
    kept: tuple[SampleMeta, ...]
    """Overflow: the samples that return to the window."""


def plan_round(
    groups: Sequence[Group],
    waited: Mapping[int, int],
    steps: int,
    budget: Budget,
    *,
    split: str,
    max_wait: int,
    rng: random.Random,
    usual: Sequence[int] = (),
) -> RoundPlan:
    """Exactly `steps` slots out of this rank's groups.

    Too many groups: overdue ones go first, oldest first; then full ones, then the others, drawn at random. A choice by
    length would let the long samples, or the short ones, sink to the end of the epoch.

    Args:
        usual: the work of a rank's groups in the round before, from much to little. Where it is given, full
            groups are not drawn but chosen by it (`choice.choose`).
    """
    if not groups:
        return RoundPlan((None,) * steps, ())
    if len(groups) <= steps:
        return RoundPlan(tuple(split_to(groups, steps, budget, split)), ())
    drawn = list(groups)
    rng.shuffle(drawn)
    drawn.sort(key=lambda g: (-age if (age := _age(g, waited)) >= max_wait else 0, not g.full))
    if usual:
        drawn = _chosen_first(drawn, waited, steps, max_wait, usual)
    kept = tuple(s for g in drawn[steps:] for s in g.samples)
    return RoundPlan(tuple(drawn[:steps]), kept)


def _chosen_first(
    drawn: list[Group], waited: Mapping[int, int], steps: int, max_wait: int, usual: Sequence[int]
) -> list[Group]:
    """`drawn`, but of its full groups that are not overdue, those to be emitted are chosen by work."""
    overdue = [g for g in drawn if _age(g, waited) >= max_wait]
    free = [g for g in drawn[len(overdue) :] if g.full]
    count = steps - len(overdue)
    if not 0 < count < len(free):
        return drawn
    chosen = choose(free, overdue, usual, count)
    emitted = {id(g) for g in [*overdue, *chosen]}
    return [*overdue, *chosen, *(g for g in drawn if id(g) not in emitted)]


def _age(group: Group, waited: Mapping[int, int]) -> int:
    return max(waited.get(s.index, 0) for s in group.samples)
