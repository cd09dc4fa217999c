"""Synthetic groups: the shapes of micro-batch that come closest to what a token budget allows at worst."""

from __future__ import annotations

from dataclasses import dataclass

from odb_factory.core.budget import ceil_multiple

SHORT = 32
"""Length of the samples of a group of many short ones (tokens)."""

_MIXED_ROWS = 8
"""Rows of a group of mixed lengths, more where rows would be longer than any sample, ..."""

_MIXED_WIDTH = 64
"""... and less where they would be shorter than this (tokens), so that even small groups differ in it."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group to be made up: the observed length of each of its samples."""

    kind: str
    """`long`, `full`, `short`, `mixed`; with images `media` and `full media`."""
    lengths: tuple[int, ...]
    """Of the samples, shortest first, as groups are collated (tokens)."""
    width: int
    """Row length of the padded micro-batch (tokens)."""
    most_patches: int | None = None
    """Visual patches of all samples together, at most; None: no bound."""

    @property
    def family(self) -> str:
        """Shapes that differ in number and length of rows alone, so that one tells what another needs."""
        return {"full": "long", "short": "long", "full media": "media"}.get(self.kind, self.kind)

    @property
    def media(self) -> bool:
        """The samples hold as many images as go into their length."""
        return self.kind.endswith("media")

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
    """The groups to try at a budget.

    Samples as long as may be; a little shorter ones, one row more, so that they fill the budget; many short ones; a
    mix; and the first two once more with images. None is above the budget, but for budgets that do not even hold a row
    of `bounds.narrowest`.

    Args:
        budget: padded tokens.
        bounds: see `Bounds`.
    """
    # with as many samples as there may be, which may need longer rows
    short = max(bounds.narrowest, ceil_multiple(-(-budget // bounds.most_samples), bounds.pad_to_multiple_of))
    short = min(short, bounds.widest)
    mixed = max(2, min(_MIXED_ROWS, budget // _MIXED_WIDTH))
    shapes = [
        _text("long", *_longest(budget, bounds, bounds.widest), bounds),
        _text("full", *_fill(bounds.widest, budget, bounds), bounds),
        _text("short", *_fill(short, budget, bounds), bounds),
        _mixed(*_fill(min(bounds.widest, max(short, budget // mixed)), budget, bounds), bounds),
    ]
    if bounds.media:
        widest = ceil_multiple(bounds.longest, bounds.pad_to_multiple_of)
        shapes += [
            _media("media", *_longest(budget, bounds, widest), bounds),
            _media("full media", *_fill(widest, budget, bounds), bounds),
        ]
    return list({(*shape.lengths, shape.media): shape for shape in reversed(shapes)}.values())[::-1]


def _longest(budget: int, bounds: Bounds, widest: int) -> tuple[int, int]:
    """Rows, and their length: the longest that there is."""
    width = max(min(budget, widest) // bounds.pad_to_multiple_of * bounds.pad_to_multiple_of, bounds.narrowest)
    return max(1, min(bounds.most_samples, budget // width)), width


def _fill(width: int, budget: int, bounds: Bounds) -> tuple[int, int]:
    """Rows, and their length, at most `width`, so that little of the budget is left."""
    most = min(bounds.most_samples, max(1, budget // bounds.narrowest))
    found = []
    for rows in {min(most, max(1, budget // width)), min(most, -(-budget // width))}:
        filling = budget // rows // bounds.pad_to_multiple_of * bounds.pad_to_multiple_of
        found.append((rows, max(bounds.narrowest, min(filling, width))))
    return max(found, key=lambda each: each[0] * each[1])


def _text(kind: str, rows: int, width: int, bounds: Bounds) -> GroupShape:
    """Rows of the same length; the first one leaves room for what is appended to it."""
    length = min(width, bounds.longest)
    first = max(1, min(length, width - bounds.dummy_tokens))
    return GroupShape(kind, (first, *[length] * (rows - 1)), width)


def _mixed(rows: int, width: int, bounds: Bounds) -> GroupShape:
    """Lengths from a quarter of the row to the whole of it."""
    longest = min(width, bounds.longest)
    lengths = [max(1, longest - (rows - 1 - row) * longest * 3 // 4 // rows) for row in range(rows)]
    lengths[0] = max(1, min(lengths[0], width - bounds.dummy_tokens))
    return GroupShape("mixed", tuple(lengths), width)


def _media(kind: str, rows: int, width: int, bounds: Bounds) -> GroupShape:
    most_patches = bounds.max_patches if rows > 1 else None
    return GroupShape(kind, (min(width, bounds.longest),) * rows, width, most_patches)
