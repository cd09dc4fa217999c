"""Figures about steps: totals over ranks, padding, share of ideal time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from odb_factory.core.grouping import Group


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over all ranks of one step (G7: exact)."""

    samples: int
    loss_tokens: int
    tokens: int
    """Real tokens."""
    padded_tokens: int
    work: int
    """`padded_work` (tokens)."""

    WIDTH: ClassVar[int] = 5


NO_TOTALS = StepTotals(0, 0, 0, 0, 0)
"""Of a step in which no rank has a group."""


def totals_of(group: Group | None) -> tuple[int, int, int, int, int]:
    """This rank's share of a step's totals, in the order of `StepTotals`; zeros for an IDLE slot."""
    if group is None:
        return (0, 0, 0, 0, 0)
    return (len(group.samples), group.loss_tokens, group.tokens, group.cost, group.work)


def padding_share(tokens: int, padded_tokens: int) -> float:
    """Share of the padded tokens that is padding, 0 where there is none."""
    return 1.0 - tokens / padded_tokens if padded_tokens else 0.0


def ideal_time_share(costs: Sequence[Sequence[float]]) -> float:
    """Share of ideal time: sum of work / (W x sum over steps of the slowest rank's work).

    Args:
        costs: (steps, W) work of each rank in each step, 0 for an IDLE slot.
    """
    slowest = sum(max(step) for step in costs)
    if not slowest:
        return 1.0
    return sum(sum(step) for step in costs) / (len(costs[0]) * slowest)
