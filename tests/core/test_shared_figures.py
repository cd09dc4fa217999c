"""The shared cursor against static assignment, in a small world. `python -m benchmarks.assignment`: to 512 ranks."""

from __future__ import annotations

import pytest

from benchmarks.assignment import LENGTHS, measure


@pytest.mark.parametrize("kind", LENGTHS)
def test_the_shared_cursor_is_not_worse_than_static_assignment(kind: str) -> None:
    """Means over some epochs: single ones depend on the draw."""
    runs = {how: [measure(kind, 8, 400, how, depth=64, seed=seed) for seed in range(4)] for how in ("static", "shared")}
    ideal = {how: sum(run.ideal for run in rows) for how, rows in runs.items()}
    fillers = {how: sum(run.fillers for run in rows) for how, rows in runs.items()}
    assert ideal["shared"] > ideal["static"] * (0.999 if kind == "nearly equal" else 1.005)
    assert fillers["shared"] <= fillers["static"]
