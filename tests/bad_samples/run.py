"""The worlds, and the bad-input table that they make."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from odb_factory.tools.demo import make_vl_model
from tests.bad_samples.judge import judge_raise, judge_skip
from tests.bad_samples.kinds import kind_names
from tests.bad_samples.worlds import World, run_world
from tests.dist import run_ranks

RANKS = (1, 2)
DEADLINE = 150.0
"""Seconds for a world. It takes some ten, and several times that on cores that are busy with other things."""


@cache
def worlds(ranks: int) -> list[World]:
    """What each of so many ranks saw; run once."""
    with tempfile.TemporaryDirectory(prefix="odb-bad-") as folder:
        model = make_vl_model(Path(folder) / "model")
        return run_ranks(ranks, run_world, model, Path(folder) / "media", deadline=DEADLINE)


def table() -> list[list[str]]:
    """The table: a head, and a line for each kind."""
    head = [f"{policy}, {ranks} rank{'s' * (ranks > 1)}" for policy in ("raise", "skip") for ranks in RANKS]
    lines = [["kind", "reason", *head]]
    for name in kind_names():
        reason = next(kind.reason for kind in worlds(1)[0].kinds if kind.name == name)
        cells = [_say(judge, name, worlds(ranks)) for judge in (judge_raise, judge_skip) for ranks in RANKS]
        lines.append([name, reason, *cells])
    return lines


def _say(judge: Callable[[str, Sequence[World]], str], name: str, of: Sequence[World]) -> str:
    try:
        return judge(name, of)
    except AssertionError as error:
        return f"FAILED: {' '.join(str(error).split())[:300]}"
