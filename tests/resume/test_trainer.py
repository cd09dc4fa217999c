"""What a resumed Trainer shows: learning rate, counts, refusals."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from odb_factory.tools.demo.model import make_text_model
from tests.dist import RankFailure
from tests.resume.runs import DROPPED, SIZE, Stage, audit, checkpoints, emitted, run

pytestmark = pytest.mark.distributed

VALID = Counter(set(range(SIZE)) - DROPPED)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model"))


def handled_after_each_line(lines: list[dict[str, Any]]) -> list[int]:
    """Samples of the run emitted or dropped by each step of one rank; whole epochs count fully."""
    marks: list[int] = []
    handled = 0
    for line, after in zip(lines, [*lines[1:], None], strict=True):
        handled += len(line["indices"]) + len(line.get("dropped", ()))
        if after is None or after["epoch"] != line["epoch"]:
            handled = (line["epoch"] + 1) * SIZE
        marks.append(handled)
    return marks


@pytest.mark.parametrize("warmup", [0, 3], ids=["no warm-up", "warm-up of 3 updates"])
@pytest.mark.parametrize("at", [2, 5])
def test_the_learning_rate_goes_on_where_it_was(text_model: Path, tmp_path: Path, warmup: int, at: int) -> None:
    """Linear decay by samples: after each update the rate is what the samples trained by then say."""
    arguments = {"lr_scheduler_type": "linear", "warmup_steps": warmup}
    run(Stage(1, stop="clean", at=at, arguments=arguments), text_model, tmp_path)
    [result] = run(Stage(1, resume=at, depth=5, arguments=arguments), text_model, tmp_path)
    marks = handled_after_each_line(audit(tmp_path))
    start = marks[warmup - 1] if warmup else 0
    total = 2 * SIZE
    expected = [
        1e-3 * (number + 1) / warmup if number < warmup else 1e-3 * (1 - (mark - start) / (total - start))
        for number, mark in enumerate(marks)
    ]
    assert result["rates"] == pytest.approx(expected[at:], rel=1e-6, abs=1e-12)


def test_counts_go_on_where_they_were(text_model: Path, tmp_path: Path) -> None:
    run(Stage(2, stop="clean", at=3), text_model, tmp_path)
    results = run(Stage(2, resume=3), text_model, tmp_path)
    whole = run(Stage(2), text_model, tmp_path / "whole")
    for result in results:
        assert result["seen"]["tokens"] == whole[0]["seen"]["tokens"], "real tokens of both epochs"
        for key in ("samples", "unique", "repeated", "epochs", "loss_tokens", "tokens", "dropped", "bad", "left"):
            assert result["summary"][key] == whole[0]["summary"][key], key
        steps = len({(line["epoch"], line["step"]) for line in audit(tmp_path)})
        assert result["summary"]["steps"] == steps
        assert result["step"] == max(line["update"] for line in audit(tmp_path))


def test_figures_of_a_resumed_run_are_those_of_the_whole(text_model: Path, tmp_path: Path) -> None:
    run(Stage(2, stop="clean", at=3), text_model, tmp_path)
    results = run(Stage(2, resume=3), text_model, tmp_path)
    lines = audit(tmp_path)
    steps: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in lines:
        steps.setdefault((line["epoch"], line["step"]), []).append(line)
    costs = [[line["padded_tokens"] for line in step] for step in steps.values()]
    for result in results:
        summary = result["summary"]
        assert summary["samples_per_step"] == pytest.approx(sum(len(x["indices"]) for x in lines) / len(steps))
        assert summary["filler_share"] == pytest.approx(sum(x["idle"] for x in lines) / len(lines), abs=1e-6)
        assert summary["imbalance"] == pytest.approx(1 - sum(map(sum, costs)) / (2 * sum(map(max, costs))), abs=1e-6)


def test_updates_of_steady_size_go_on(text_model: Path, tmp_path: Path) -> None:
    """A rank is killed between two micro-batches of an update; that update begins anew, with as many samples."""
    stage = Stage(2, samples_per_update=9, budget=60)
    run(dataclasses.replace(stage, stop="kill", at=2), text_model, tmp_path)
    results = run(dataclasses.replace(stage, resume=2), text_model, tmp_path)
    assert emitted(tmp_path) == {0: VALID, 1: VALID}
    sizes: dict[int, dict[int, int]] = {0: {}, 1: {}}
    for line in audit(tmp_path):
        epoch = sizes[line["epoch"]]
        epoch[line["update"]] = epoch.get(line["update"], 0) + len(line["indices"])
    for epoch in sizes.values():
        assert all(size >= 9 for _, size in sorted(epoch.items())[:-1])
        assert len(epoch) > 3
    assert [result["step"] for result in results] == [sum(map(len, sizes.values()))] * 2


def test_max_steps_ends_a_resumed_run(text_model: Path, tmp_path: Path) -> None:
    """In the middle of an epoch; and a run that has had them all trains no more."""
    run(Stage(1, arguments={"max_steps": 3}), text_model, tmp_path)
    [second] = run(Stage(1, resume=0, arguments={"max_steps": 7}), text_model, tmp_path)
    assert second["step"] == 7
    lines = audit(tmp_path)
    assert [line["update"] for line in lines] == list(range(1, 8))
    for counts in emitted(tmp_path).values():
        assert max(counts.values()) == 1
    [third] = run(Stage(1, resume=0, arguments={"max_steps": 7}), text_model, tmp_path)
    assert third["step"] == 7
    assert audit(tmp_path) == lines


def test_what_a_killed_run_wrote_after_the_checkpoint_is_taken_back(text_model: Path, tmp_path: Path) -> None:
    """The audit of a rank that the resumed run has no more, too; and half a line at its end."""
    run(Stage(2, stop="clean", at=4), text_model, tmp_path)
    with (tmp_path / "odb_audit.rank1.jsonl").open("a") as file:
        file.write('{"update": 5, "ste')
    assert checkpoints(tmp_path) == [1, 2, 3, 4]
    run(Stage(1, resume=2), text_model, tmp_path)
    assert emitted(tmp_path) == {0: VALID, 1: VALID}


def test_a_fresh_run_replaces_the_audits_of_an_older_one(text_model: Path, tmp_path: Path) -> None:
    run(Stage(2, stop="clean", at=2), text_model, tmp_path)
    run(Stage(1, arguments={"num_train_epochs": 1}), text_model, tmp_path)
    assert emitted(tmp_path) == {0: VALID}


def refusal(stage: Stage, model: Path, output: Path) -> str:
    with pytest.raises(RankFailure) as caught:
        run(stage, model, output)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"data_seed": 99}, "the saved state is of a run with another seed (3, here 99)"),
        ({"train_sampling_strategy": "sequential"}, "another order (shuffled or not) (True, here False)"),
        ({"ignore_data_skip": True}, "ignore_data_skip would train on samples twice in an epoch; remove it"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(
    text_model: Path, tmp_path: Path, arguments: dict[str, Any], text: str
) -> None:
    run(Stage(1, stop="clean", at=1), text_model, tmp_path)
    assert text in refusal(Stage(1, resume=1, arguments=arguments), text_model, tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "has no odb_state.json, so it does not say which samples are done: it was saved without odb: true"),
        ("{", "odb_state.json cannot be read"),
        ("{}", "is not a state of this version of odb-factory"),
    ],
)
def test_a_checkpoint_without_a_state_is_refused(
    text_model: Path, tmp_path: Path, content: str | None, text: str
) -> None:
    run(Stage(1, stop="clean", at=1), text_model, tmp_path)
    path = tmp_path / "checkpoint-1" / "odb_state.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert text in refusal(Stage(1, resume=1), text_model, tmp_path)
