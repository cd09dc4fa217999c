"""After any stop, in any world: the audits show every sample exactly once an epoch, and nothing was read to skip it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from odb_factory.runtime.state import unpack_bits
from odb_factory.tools.demo.model import make_text_model
from tests.resume.runs import DROPPED, EPOCHS, SIZE, Stage, checkpoints, emitted, reads, run, state_of

pytestmark = pytest.mark.distributed

VALID = Counter(set(range(SIZE)) - DROPPED)

WORLDS = [(1, 1), (2, 2), (2, 1), (1, 2)]

CHANGES = {
    "same": {},
    "depth and workers": {"depth": 5, "workers": 1},
    "accumulation": {"accumulation": 3},
    "budget and assignment": {"budget": 200, "assignment": "static"},
}
"""What the second start changes besides the number of ranks."""

STOPS = ["clean", "kill", "raise", "kill in epoch 2", "clean at the end of epoch 1"]

CELLS = [
    pytest.param(
        stop,
        worlds,
        list(CHANGES)[(row + column) % len(CHANGES)],
        1 + 2 * ((row + column) % 2),
        # each stop, and each pair of worlds, is once among the fast tests
        marks=[] if column == row % len(WORLDS) else pytest.mark.slow,
    )
    for row, stop in enumerate(STOPS)
    for column, worlds in enumerate(WORLDS)
]


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def epoch_ends(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], int]:
    """By number of ranks and accumulation: the update that ends the first epoch."""
    found = {}
    for world in (1, 2):
        for accumulation in (1, 3):
            output = tmp_path_factory.mktemp("whole")
            stage = Stage(world, accumulation=accumulation, arguments={"num_train_epochs": 1})
            found[world, accumulation] = run(stage, text_model, output)[0]["step"]
    return found


@pytest.mark.parametrize(("stop", "worlds", "change", "accumulation"), CELLS)
def test_every_sample_exactly_once(
    text_model: Path,
    tmp_path: Path,
    epoch_ends: dict[tuple[int, int], int],
    stop: str,
    worlds: tuple[int, int],
    change: str,
    accumulation: int,
) -> None:
    before, after = worlds
    end = epoch_ends[before, accumulation]
    at = {"kill in epoch 2": end + 2, "clean at the end of epoch 1": end}.get(stop, 2)
    first = Stage(
        before,
        stop=stop.split()[0],
        at=at,
        accumulation=accumulation,
        arguments={"save_strategy": "steps", "save_steps": 1},
    )
    run(first, text_model, tmp_path)
    assert checkpoints(tmp_path)[-1] == at
    saved = state_of(tmp_path, at)
    epoch = saved["loader"]["epoch"]
    assert epoch == (1 if "epoch" in stop else 0)
    done = unpack_bits(saved["loader"]["done"], SIZE)
    if stop == "clean at the end of epoch 1":
        assert not done.any()
    else:
        assert 0 < done.sum() < SIZE

    second = Stage(after, resume=0, **({"accumulation": accumulation} | CHANGES[change]))
    results = run(second, text_model, tmp_path)

    assert emitted(tmp_path) == dict.fromkeys(range(EPOCHS), VALID)
    summary = results[0]["summary"]
    assert (summary["epochs"], summary["samples"]) == (EPOCHS, EPOCHS * len(VALID))
    assert (summary["unique"], summary["repeated"], summary["left"]) == (len(VALID), 0, 0)
    assert {d["index"] for d in summary["dropped_samples"]} == DROPPED
    read = Counter(reads(tmp_path))
    fillers = {line for line in read if done[line]} if epoch == EPOCHS - 1 else set()
    assert len(fillers) <= after, "but for a filler of a rank without samples, nothing that is done is read"
    assert sum(read.values()) <= SIZE - int(done.sum()) + SIZE * (EPOCHS - 1 - epoch) + after
    for result in results:
        assert result["rates"][-1] == pytest.approx(0.0, abs=1e-9)
        assert result["rates"] == sorted(result["rates"], reverse=True), "the rate goes on falling from where it was"
        assert result["seen"]["epoch"] == EPOCHS
        assert result["seen"]["max_steps"] == result["step"]
