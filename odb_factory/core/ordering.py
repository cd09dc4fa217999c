"""Order of the steps of a round: like work meets, and the order is random but the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from odb_factory.core.grouping import Group
from odb_factory.core.seeding import generator


def order_slots(slots: Sequence[Group | None], *, seed: int, epoch: int, round_index: int) -> list[Group | None]:
    """Pair by work: sort this rank's slots by it, then apply one permutation that all ranks share.

    Step k then holds each rank's group of the same place in that order, so that nobody waits long for the slowest; the
    permutation, drawn from what all ranks know, undoes the order by length that sorting brought in.
    """
    ranked = sorted(slots, key=lambda g: (0, 0, 0) if g is None else (1, g.work, g.samples[0].index), reverse=True)
    order = list(range(len(ranked)))
    generator(seed, "steps", epoch, round_index).shuffle(order)
    return [ranked[i] for i in order]
