"""The searches: families of configurations, and the bounds of their worlds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

from odb_factory.config import OdbConfig
from tests.formal.space import Kind, Space

KINDS = (Kind(2), Kind(3), Kind(9))
"""Of the budget 6: three fit into a group, two do, and one is longer than the budget. Groups of 2s are full or not."""
TWO_KINDS = (Kind(2), Kind(9))
MEDIA_KINDS = (Kind(1), Kind(2, media=True), Kind(3), Kind(9))
"""Of the budget 8, with a dummy image of 4 tokens: 1 1 1 2m fit, but 1 1 do not, nor does any other pair of texts."""

RULES = ("carry", "max")


def make(name: str, config: dict[str, Any], **bounds: Any) -> Space:
    """A space with the defaults of the families below."""
    fields: dict[str, Any] = {"token_budget": 6, "depth": 2, "ramp": False, "assignment": "static", "max_wait": 2}
    fields["attention_length"] = 3  # so that work is not the padded tokens
    return Space(name=name, config=OdbConfig(**fields | config), **{"kinds": KINDS} | bounds)


def _splits(depth: int) -> tuple[str, ...]:
    """The splits that differ: two samples can be split in one way only."""
    return ("balanced", "singleton") if depth > 2 else ("balanced",)


def _static() -> Iterator[Space]:
    depths = ((1, False), (2, False), (3, False), (4, False), (4, True))
    for rule, (depth, ramp) in product(RULES, depths):
        for split in _splits(depth):
            config = {"alignment": rule, "split": split, "depth": depth, "ramp": ramp}
            # so that a window of long samples and a rest of short ones, which waits, fits into each depth
            config |= {"max_wait": 1 if split == "singleton" else 2, "token_budget": 8 if depth == 4 else 6}
            yield make("static", config, samples=6, any_index=True)


def _static_drops() -> Iterator[Space]:
    for rule, depth in product(RULES, (1, 2, 3, 4)):
        for split in _splits(depth):
            config = {"alignment": rule, "split": split, "depth": depth, "steps_multiple": 1 + depth % 2}
            yield make("static drops", config | {"max_wait": 1}, samples=5 if depth < 4 else 4, drops=True)


def _static_capacity() -> Iterator[Space]:
    for rule, (depth, capacity), multiple in product(RULES, ((2, 1), (4, 1), (3, 2), (4, 2)), (1, 2)):
        for split in _splits(depth) if capacity > 1 else ("balanced",):  # one group is never too few
            config = {"alignment": rule, "split": split, "depth": depth, "capacity": capacity}
            yield make("static capacity", config | {"steps_multiple": multiple}, samples=4, any_index=True)


def _static_quota() -> Iterator[Space]:
    for rule, depth, quota in product(RULES, (1, 2, 3, 4), (0.5, 1.0)):
        for split in _splits(depth):
            config = {"alignment": rule, "split": split, "depth": depth, "join": False, "quota": quota}
            config |= {"steps_multiple": 1 + depth % 2}
            yield make("static quota", config, samples={1: 6, 2: 6, 3: 4, 4: 3}[depth], orders=True)


def _shared() -> Iterator[Space]:
    depths = ((1, False), (2, False), (3, False), (4, True))
    for rule, (depth, ramp), capacity in product(RULES, depths, (None, 1)):
        for split in _splits(depth) if capacity is None else ("balanced",):
            config = {"alignment": rule, "split": split, "depth": depth, "ramp": ramp, "assignment": "shared"}
            yield make("shared", config | {"capacity": capacity}, samples=10, any_index=True)


def _shared_drops() -> Iterator[Space]:
    for rule, (depth, ramp), multiple in product(RULES, ((1, False), (2, False), (3, False), (4, True)), (1, 2)):
        for split in _splits(depth):
            config = {"alignment": rule, "split": split, "depth": depth, "ramp": ramp, "assignment": "shared"}
            kinds = KINDS if depth < 3 else TWO_KINDS
            config |= {"steps_multiple": multiple}
            yield make("shared drops", config, samples=9, drops=True, orders=True, kinds=kinds)


def _shared_quota() -> Iterator[Space]:
    for rule, depth, quota in product(RULES, (1, 2, 3), (0.5, 1.0)):
        for split in _splits(depth):
            config = {"alignment": rule, "split": split, "depth": depth, "assignment": "shared", "join": False}
            config |= {"quota": quota, "steps_multiple": 1 + depth % 2}
            yield make("shared quota", config, samples=9, drops=True, orders=True, kinds=TWO_KINDS)


def _media() -> Iterator[Space]:
    for rule, depth, multiple in product(RULES, (2, 3, 4), (1, 2)):
        for split in _splits(depth):
            config = {"alignment": rule, "split": split, "depth": depth, "dummy_tokens": 4, "token_budget": 8}
            yield make("media", config | {"pad_to_multiple_of": multiple}, samples=4, kinds=MEDIA_KINDS)


def _short_reads() -> Iterator[Space]:
    for rule, split, how in product(RULES, _splits(3), ("static", "shared")):
        config = {"alignment": rule, "split": split, "depth": 3, "max_wait": 1, "assignment": how}
        yield make("short reads", config, samples=4 if how == "static" else 9, short_reads=True)


def _three_ranks() -> Iterator[Space]:
    for rule, depth in product(RULES, (1, 2, 3)):
        for split in _splits(depth):
            config = {"alignment": rule, "split": split, "depth": depth}
            yield make("3 ranks", config, world_size=3, samples=4)
            quota = {"join": False, "quota": 0.5}
            yield make("3 ranks", config | quota, world_size=3, samples=3 if depth < 3 else 2, orders=True)
    for rule in RULES:
        for split in _splits(4):
            config = {"alignment": rule, "split": split, "depth": 4}
            yield make("3 ranks", config, world_size=3, samples=6, kinds=TWO_KINDS)
        config = {"alignment": rule, "depth": 1, "assignment": "shared"}
        yield make("3 ranks", config, world_size=3, samples=10, drops=True)
        yield make("3 ranks", config | {"depth": 2}, world_size=3, samples=11)


def _four_ranks() -> Iterator[Space]:
    """From four on, the prefix sum does not run in the order of the ranks."""
    for rule in RULES:
        config = {"alignment": rule, "depth": 1, "assignment": "shared"}
        yield make("4 ranks", config, world_size=4, samples=10, drops=True)
        yield make("4 ranks", config | {"depth": 2}, world_size=4, samples=14, kinds=TWO_KINDS)


class Family(NamedTuple):
    """Searches that belong together."""

    spaces: Callable[[], Iterator[Space]]
    floors: dict[str, int]
    """Less than this (fields of `Result`) means that the search does not look where it should."""


FAMILIES = {
    "static": Family(_static, {"states": 90_000, "waited_longest": 6_000}),
    "static drops": Family(_static_drops, {"states": 50_000, "waited_longest": 1_500}),
    "static capacity": Family(_static_capacity, {"states": 20_000}),
    "static quota": Family(_static_quota, {"states": 25_000, "waited_longest": 400}),
    "shared": Family(_shared, {"states": 60_000, "waited_longest": 500}),
    "shared drops": Family(_shared_drops, {"states": 60_000, "held_back": 7_000, "assigned_without_samples": 150}),
    "shared quota": Family(_shared_quota, {"states": 35_000, "held_back": 2_000, "assigned_without_samples": 150}),
    "media": Family(_media, {"states": 35_000}),
    "short reads": Family(_short_reads, {"states": 50_000}),
    "3 ranks": Family(_three_ranks, {"states": 90_000, "held_back": 1_500, "assigned_without_samples": 5}),
    "4 ranks": Family(_four_ranks, {"states": 16_000, "held_back": 900, "assigned_without_samples": 3}),
}
