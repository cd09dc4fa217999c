"""Generators by name."""

from __future__ import annotations

from itertools import combinations

from odb_factory.core.seeding import generator


def draw(seed: int, *scope: int | str) -> list[int]:
    """A few numbers of the generator of `scope`."""
    return generator(seed, *scope).sample(range(10**6), 4)


def test_the_same_scope_gives_the_same_numbers_whatever_was_drawn_before() -> None:
    first = draw(3, "draw", 1, 2)
    generator(3, "draw", 1, 3).random()
    assert draw(3, "draw", 1, 2) == first


def test_every_part_of_the_scope_counts() -> None:
    scopes: list[tuple[int, *tuple[int | str, ...]]] = [
        (0, "a", 1),
        (1, "a", 1),
        (0, "b", 1),
        (0, "a", 2),
        (0, "a", 11),
        (0, "a", 1, 1),
        (0, "a"),
    ]
    for a, b in combinations(scopes, 2):
        assert draw(*a) != draw(*b), (a, b)


def test_the_numbers_are_the_same_on_every_machine_and_python_version() -> None:
    """Pinned: `shuffle` is what all of core draws with, and `random` promises sameness for `random()` only."""
    order = list(range(12))
    generator(0, "order", 0).shuffle(order)
    assert order == [1, 9, 8, 6, 7, 10, 11, 3, 0, 4, 2, 5]
