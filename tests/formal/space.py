"""What one search covers: a configuration of the protocol and bounds on the world, and the states of its epochs.

States hold no sample identities. A sample is a pair (kind, rounds waited); the order of a window's pairs is the order
of the samples' indices within a kind, the only thing about an index that the core looks at.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from odb_factory.config import OdbConfig
from odb_factory.core.grouping import Group, make_group
from odb_factory.core.protocol import make_budget
from odb_factory.core.sample import SampleMeta

HELD = 1000
"""First index of the samples in a step that is held back; those in a window are below."""


class Kind(NamedTuple):
    """A class of samples that the core treats alike."""

    length: int
    media: bool = False

    def __str__(self) -> str:
        return f"{self.length}m" if self.media else str(self.length)


class RankState(NamedTuple):
    """One rank between two rounds, or (`dropped` set, `ahead` not) after its window was filled."""

    window: tuple[tuple[int, int], ...]
    """(number of its kind, rounds waited) of each sample."""
    unread: int
    """Indices of this rank that were neither taken nor dropped yet."""
    ahead: bool = False
    """The reader knows already that the next of them is a valid sample."""
    dropped: int = 0
    """Samples dropped while the window was filled."""
    observed: tuple[int, int] = (0, 0)
    """Samples and tokens that entered the window so far; (0, 0) once they no longer matter."""
    held: tuple[int, ...] = ()
    """Kinds in this rank's part of the held-back step; empty: IDLE, or no step is held back."""


class Common(NamedTuple):
    """What is the same on every rank."""

    unassigned: int = 0
    """Indices behind the shared cursor."""
    owed: int = 0
    """Non-join: samples to hand out before the quota is reached. Join: 0."""
    steps: int = 0
    """Steps handed out so far: 0, or 1..`steps_multiple` in its place, which is all that matters."""
    round: int = 0
    """Rounds closed so far, as far as the ramp looks at them."""
    run: tuple[int, int] = (0, 0)
    """Samples and tokens emitted so far; (0, 0) once they no longer matter."""
    held: tuple[int, ...] | None = None
    """Totals of the held-back step."""


class State(NamedTuple):
    """The whole world. `ranks` are numbers that `RankModel` gave to the rank states."""

    common: Common
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Space:
    """One search.

    Args:
        samples: most samples; of each rank where the assignment is static (every combination of 0 to that many), else
            of the whole data set.
        drops: any sample may turn out to be dropped when it is read.
        any_index: a new sample's index may lie anywhere among those of its kind in the window (a shuffled epoch);
            False: after them.
        orders: follow every order of a round's steps; False: one, since only the quota and the held-back step can tell
            them apart.
        short_reads: a window may get fewer samples than it lacks (`window_bytes`).
    """

    name: str
    config: OdbConfig
    world_size: int = 2
    kinds: tuple[Kind, ...]
    samples: int
    drops: bool = False
    any_index: bool = False
    orders: bool = False
    short_reads: bool = False

    def __post_init__(self) -> None:
        if len({kind.length for kind in self.kinds}) < len(self.kinds):
            raise ValueError("kinds of one length: the order of their indices is not in the states")

    @property
    def shared(self) -> bool:
        return self.config.assignment == "shared"

    @property
    def bounds_waiting(self) -> bool:
        """Whether `max_wait` is promised (before the drain)."""
        full_windows = not self.short_reads and not (self.shared and self.drops)
        return self.config.capacity is None and full_windows

    def __str__(self) -> str:
        c = self.config
        mode = "join" if c.join else f"quota {c.quota}"
        per = "in all" if self.shared else "per rank"
        extras = [name for name in ("drops", "any_index", "orders", "short_reads") if getattr(self, name)]
        extras += [f"capacity {c.capacity}"] * (c.capacity is not None) + ["ramp"] * c.ramp
        extras += [f"dummy {c.dummy_tokens}"] * (c.dummy_tokens > 0)
        return (
            f"{self.name}: {self.world_size} ranks, <= {self.samples} samples {per}, lengths "
            f"{'/'.join(map(str, self.kinds))} of budget {c.token_budget}, D {c.depth}, {c.assignment}, {c.alignment}, "
            f"{c.split}, {mode}, max_wait {c.max_wait}, steps_multiple {c.steps_multiple}"
            + "".join(f", {extra}" for extra in extras)
        )


@cache
def sample_of(kind: Kind, index: int) -> SampleMeta:
    """The sample of that kind; its loss tokens differ from its length, so that sums cannot be mixed up."""
    return SampleMeta(index=index, length=kind.length, loss_tokens=kind.length // 2, has_media=kind.media)


@cache
def held_group(space: Space, kinds: tuple[int, ...]) -> Group | None:
    """The group of a held-back step; the same object each time, so that it can be recognised."""
    if not kinds:
        return None
    samples = [sample_of(space.kinds[kind], HELD + i) for i, kind in enumerate(kinds)]
    return make_group(samples, make_budget(space.config), full=False)
