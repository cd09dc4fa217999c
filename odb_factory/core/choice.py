"""Which of its full groups a rank emits under `carry`, where it has more of them than the round has steps.

A step lasts as long as its slowest rank, so groups of like work should meet, and `ordering` pairs them so. That works
as far as all ranks emit the like; but a window of random samples has a long group more here and one less there. A
rank therefore chooses those of its groups that come closest to what all ranks emitted in the round before, and holds
back what it has too many of until it has too few. The work of the round before is known to every rank from
the totals of its steps: it is theirs over the number of ranks.

A quarter of its own distribution is mixed into what it aims at. So the aim follows the data, whatever was emitted
first, and no kind of group is held back for good: on average each leaves as often as it comes (long samples do not sink
to the end of the epoch), and `max_wait` bounds how long a single one may wait. Only full groups are chosen from, and
overdue ones go first, so this is one of the draws that the guarantees allow for.
"""

from __future__ import annotations

from collections.abc import Sequence

from odb_factory.core.grouping import Group

RESERVE = 8
"""A round leaves one in so many of the fewest full groups, so that the rank with the fewest has a choice as well."""

OWN = 4
"""One part in so many of the aim is the rank's own distribution of work."""


def choose(groups: Sequence[Group], taken: Sequence[Group], usual: Sequence[int], count: int) -> list[Group]:
    """`count` of `groups`, whose work together with that of `taken` is closest to the usual.

    Args:
        groups: full ones, more than `count`.
        taken: those that are emitted in any case.
        usual: the work of a rank's groups in the round before, from much to little; at least one.
    """
    ranked = sorted(groups, key=lambda g: (-g.work, g.samples[0].index))
    own = sorted((g.work for g in [*groups, *taken]), reverse=True)
    slots = len(taken) + count
    aims = [
        ((OWN - 1) * often + mine) // OWN
        for often, mine in zip(_spread(usual, slots), _spread(own, slots), strict=True)
    ]
    for group in taken:
        aims.remove(min(aims, key=lambda aim: abs(aim - group.work)))
    return [ranked[i] for i in closest([g.work for g in ranked], aims)]


def _spread(work: Sequence[int], slots: int) -> list[int]:
    """The distribution of `work`, sorted, as `slots` values."""
    return [work[(2 * slot + 1) * len(work) // (2 * slots)] for slot in range(slots)]


def closest(work: Sequence[int], aims: Sequence[int]) -> list[int]:
    """Positions in `work`, ascending, one for each aim: the least sum of squared differences.

    Both are sorted from much to little, so they are matched in order, and what is left to decide is which to leave
    out: after aim i, j of them. O(aims x left out).
    """
    spare = len(work) - len(aims)
    sums = [0] * (spare + 1)
    """[j]: least sum for the aims so far with at most j left out."""
    left_out: list[list[int]] = []
    for i, aim in enumerate(aims):
        best, at = -1, 0
        row = []
        for j in range(spare + 1):
            total = sums[j] + (work[i + j] - aim) ** 2
            if best < 0 or total < best:
                best, at = total, j
            sums[j] = best
            row.append(at)
        left_out.append(row)
    result = []
    j = spare
    for i in range(len(aims) - 1, -1, -1):
        j = left_out[i][j]
        result.append(i + j)
    return result[::-1]
