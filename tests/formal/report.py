"""Searches over two processes, and what they came to."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator

from tests.formal.checks import Violation
from tests.formal.search import Result, Search
from tests.formal.space import Space

PROCESSES = 2


def run(space: Space) -> Result | str:
    """What the search saw, or the counter-example."""
    try:
        return Search(space).run()
    except Violation as violation:
        return "\n".join([str(violation), *getattr(violation, "__notes__", ())])


def run_all(spaces: Iterable[Space]) -> Iterator[tuple[Space, Result | str]]:
    """`run` of each, in order. Other tests' threads may run in this process, so the others are not forked from it."""
    todo = list(spaces)
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        yield from zip(todo, pool.imap(run, todo), strict=True)


def summed(results: Iterable[Result]) -> Result:
    """The sum of their counts."""
    total = Result()
    for result in results:
        for name in Result.__slots__:
            setattr(total, name, getattr(total, name) + getattr(result, name))
    return total
