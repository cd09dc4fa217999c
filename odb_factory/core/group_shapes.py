"""Synthetic groups: the shapes of micro-batch that come closest to what a token budget allows at worst."""

from __future__ import annotations

from dataclasses import dataclass

from odb_factory.core.budget import ceil_multiple

SHORT = 32
"""Length of the samples of a group of many short ones (tokens)."""

_MIXED_ROWS = 8
"""Rows of a group of mixed lengths, where a row of its own share of the budget is not longer than any sample."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group to be made up: the observed length of each of its samples."""

    kind: str
    """`long`, `short`, `mixed` or `media`."""
    lengths: tuple[int, ...]
    """Of the samples, shortest first, as groups are collated (tokens)."""
    width: int
    """Row length of the padded micro-batch (tokens)."""
    most_patches: int | None = None
    """Visual patches of all samples together, at most; None: no bound."""

    @property
    def media(self) -> bool:
        """The samples hold as many images as go into their length."""
        return self.kind == "media"

    @property
    def padded_tokens(self) -> int:
        """What the micro-batch costs."""
        return self.width * len(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a run allows a sample and a group beside the budget."""

    longest: int
    """Most tokens of a sample."""
    most_samples: int
    """Most samples in a group."""
    pad_to_multiple_of: int = 1
    dummy_tokens: int = 0
    """Tokens that are appended to the first sample of a group without media; see `Budget`."""
    max_patches: int | None = None
    """Most visual patches in a group of several samples."""
    media: bool = False
    """Samples may hold images."""

    @property
    def widest(self) -> int:
        """Padded tokens of the longest sample alone: no budget below it bounds every step."""
        return ceil_multiple(self.longest + self.dummy_tokens, self.pad_to_multiple_of)

    @property
    def narrowest(self) -> int:
        """Row length of a group of short samples."""
        return min(self.widest, ceil_multiple(max(SHORT, self.dummy_tokens + 1), self.pad_to_multiple_of))


def group_shapes(budget: int, bounds: Bounds) -> list[GroupShape]:
    """The groups to try at a budget: few long samples, many short ones, a mix, and long ones full of images.

    Each fills the budget as far as samples may be long and groups may be large; none is above it, but for budgets that
    do not even hold a row of `bounds.narrowest`.

    Args:
        budget: padded tokens.
        bounds: see `Bounds`.
    """
    short = bounds.narrowest
    shapes = [
        _text("long", bounds.widest, budget, bounds),
        _text("short", short, budget, bounds),
        _mixed(max(short, budget // _MIXED_ROWS), budget, bounds),
    ]
    if bounds.media:
        shapes.append(_media(budget, bounds))
    return list({(*shape.lengths, shape.media): shape for shape in reversed(shapes)}.values())[::-1]


def _fill(width: int, budget: int, bounds: Bounds, widest: int) -> tuple[int, int]:
    """Rows and their length, about `width`, so that little of the budget is left."""
    multiple = bounds.pad_to_multiple_of
    rows = min(bounds.most_samples, max(1, -(-budget // min(width, widest))))
    filling = budget // rows // multiple * multiple
    return rows, max(multiple, min(filling, widest))


def _text(kind: str, width: int, budget: int, bounds: Bounds) -> GroupShape:
    """Rows of the same length; the first one leaves room for what is appended to it."""
    rows, width = _fill(width, budget, bounds, bounds.widest)
    if width < bounds.narrowest:  # more rows than rows of that length fit
        rows, width = max(1, budget // bounds.narrowest), bounds.narrowest
    length = min(width, bounds.longest)
    first = max(1, min(length, width - bounds.dummy_tokens))
    return GroupShape(kind, (first, *[length] * (rows - 1)), width)


def _mixed(width: int, budget: int, bounds: Bounds) -> GroupShape:
    """Lengths from a quarter of the row to the whole of it."""
    shape = _text("mixed", width, budget, bounds)
    rows, longest = len(shape.lengths), max(shape.lengths)
    lengths = [max(1, longest - (rows - 1 - row) * longest * 3 // 4 // rows) for row in range(rows)]
    return GroupShape("mixed", (min(lengths[0], shape.lengths[0]), *lengths[1:]), shape.width)


def _media(budget: int, bounds: Bounds) -> GroupShape:
    widest = ceil_multiple(bounds.longest, bounds.pad_to_multiple_of)
    rows, width = _fill(widest, budget, bounds, widest)
    return GroupShape("media", (min(width, bounds.longest),) * rows, width, bounds.max_patches if rows > 1 else None)
