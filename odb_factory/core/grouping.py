"""Greedy grouping of a window under the budget, and splitting of groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from odb_factory.core.budget import Budget, ceil_multiple, padded_work
from odb_factory.core.sample import SampleMeta


@dataclass(frozen=True, slots=True)
class Group:
    """Samples of one rank that become one micro-batch, shortest first; never empty."""

    samples: tuple[SampleMeta, ...]
    cost: int
    """Padded tokens."""
    full: bool
    """The next sample on the walk did not fit, or none could have."""
    work: int
    """`padded_work`: the padded tokens, and what attention adds to them."""

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return sum(s.length for s in self.samples)

    @property
    def loss_tokens(self) -> int:
        """Supervised targets."""
        return sum(s.loss_tokens for s in self.samples)


def make_group(samples: Sequence[SampleMeta], budget: Budget, full: bool) -> Group:
    """A group of `samples` in the order in which they are collated: shortest first, ties by index."""
    ordered = tuple(sorted(samples, key=lambda s: (s.length, s.index)))
    rows, width = len(ordered), budget.padded_length(ordered)
    return Group(ordered, rows * width, full, padded_work(rows, width, budget.attention_length))


class _OpenGroup:
    """Running totals of the group being filled, so that one walk over a window of n samples takes O(n).

    Samples must be added from long to short: then the first one sets the width, the last one takes the dummy.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.samples: list[SampleMeta] = []
        self._patches = 0
        self._has_media = False

    def _exceeds(self, width: int, size: int, patches: int) -> bool:
        budget = self._budget
        return (
            ceil_multiple(width, budget.pad_to_multiple_of) * size > budget.tokens
            or (budget.max_samples is not None and size > budget.max_samples)
            or (budget.max_patches is not None and patches > budget.max_patches)
        )

    def accepts(self, sample: SampleMeta) -> bool:
        if not self.samples:
            return True
        width = self.samples[0].length
        if not (self._has_media or sample.has_media):
            width = max(width, sample.length + self._budget.dummy_tokens)
        return not self._exceeds(width, len(self.samples) + 1, self._patches + sample.patches)

    def add(self, sample: SampleMeta) -> None:
        self.samples.append(sample)
        self._patches += sample.patches
        self._has_media = self._has_media or sample.has_media

    def has_no_room(self) -> bool:
        """Whether even a sample without patches or dummy tokens could not be added any more."""
        return self._exceeds(self.samples[0].length, len(self.samples) + 1, self._patches)


def group_window(window: Sequence[SampleMeta], budget: Budget) -> list[Group]:
    """Partition `window` into groups: walk from long to short, close a group when the next sample would exceed.

    Every sample is in exactly one group; a group of several samples is within the budget (G6); a sample that exceeds it
    alone is a group of one. The result depends on the set of samples only, not on their order.
    """
    groups: list[Group] = []
    current = _OpenGroup(budget)
    for sample in sorted(window, key=lambda s: (-s.length, s.index)):
        if not current.accepts(sample):
            groups.append(make_group(current.samples, budget, full=True))
            current = _OpenGroup(budget)
        current.add(sample)
    if current.samples:
        groups.append(make_group(current.samples, budget, full=current.has_no_room()))
    return groups


def split_balanced(group: Group, budget: Budget) -> tuple[Group, Group]:
    """Two groups of `group` (at least two samples): its shorter and its longer half, each within the budget.

    Falls back to `split_singleton` where a half would exceed the budget (it may need a dummy image that the whole did
    not need).

    Raises:
        ValueError: a group of one sample.
    """
    if len(group.samples) < 2:
        raise ValueError("a group of one sample cannot be split")
    middle = len(group.samples) // 2
    short, long = group.samples[:middle], group.samples[middle:]
    if all(len(part) == 1 or budget.fits(part) for part in (short, long)):
        return make_group(short, budget, False), make_group(long, budget, False)
    return split_singleton(group, budget)


def split_singleton(group: Group, budget: Budget) -> tuple[Group, Group]:
    """Two groups of `group` (at least two samples): its longest sample alone, and the rest (the paper's split).

    The only sample with media is not the one taken out, since the rest could then need a dummy image and exceed the
    budget; with that, the rest is never wider than the whole, so it always fits.
    """
    if len(group.samples) < 2:
        raise ValueError("a group of one sample cannot be split")
    with_media = [s for s in group.samples if s.has_media]
    out = group.samples[-1]
    if len(with_media) == 1 and out is with_media[0]:
        out = group.samples[-2]
    rest = tuple(s for s in group.samples if s is not out)
    return make_group(rest, budget, False), make_group((out,), budget, False)


def split_to(groups: Sequence[Group], count: int, budget: Budget, how: str) -> list[Group]:
    """At least as many as `groups`, exactly `count` groups, of the same samples.

    Args:
        groups: at most `count` groups that hold at least `count` samples together.
        how: `balanced` halves the group with the most work; `singleton` takes one sample out of the largest group.

    Raises:
        ValueError: fewer than `count` samples, or more than `count` groups.
    """
    result = list(groups)
    if len(result) > count or sum(len(g.samples) for g in result) < count:
        raise ValueError(f"{len(result)} groups of {sum(len(g.samples) for g in result)} samples do not make {count}")
    while len(result) < count:
        splittable = [i for i, g in enumerate(result) if len(g.samples) > 1]
        if how == "balanced":
            at = max(splittable, key=lambda i: (result[i].work, -i))
            parts = split_balanced(result[at], budget)
        else:
            at = max(splittable, key=lambda i: (len(result[i].samples), result[i].cost, -i))
            parts = split_singleton(result[at], budget)
        result[at : at + 1] = parts
    return result
