"""The probe with two ranks: what is said of ranks that fail, die or hang."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from odb_factory.tools.doctor.probes import ranks
from odb_factory.tools.doctor.ranks import _judge
from odb_factory.tools.doctor.result import Status


def collected(monkeypatch: pytest.MonkeyPatch, *messages: tuple[list[Any], bool]) -> dict[str, Any]:
    """What is made of the messages of each rank, which then ends or hangs."""
    monkeypatch.setattr(ranks, "DEADLINE", 0.5)
    readers, writers = zip(*(multiprocessing.Pipe(duplex=False) for _ in messages), strict=True)
    for writer, (sent, ends) in zip(writers, messages, strict=True):
        for message in sent:
            writer.send(message)
        if ends:
            writer.close()
    return ranks._collect(list(readers))


def test_both_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done = [("gloo", {"met_s": 1}), ("loader", {"steps": 2})]
    report = collected(monkeypatch, (done, True), (done, True))
    assert report["gloo"] == {"ranks": [{"met_s": 1}] * 2}
    assert report["loader"] == {"ranks": [{"steps": 2}] * 2}


def test_one_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo = [("gloo", {})]
    report = collected(monkeypatch, (gloo, False), ([*gloo, ("loader", {})], False))
    assert report["loader"] == {"error": "rank 0 was not done within 0.5 s"}


def test_one_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    report = collected(monkeypatch, ([("gloo", {})], True), ([], True))
    assert report["gloo"] == {"error": "rank 1 died"}
    assert "loader" not in report


def test_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    report = collected(monkeypatch, ([("gloo", {})], False), ([("gloo", {}), ("loader", "no room\nmore")], True))
    assert report["loader"] == {"error": "no room\nmore"}


@pytest.mark.parametrize(
    ("first", "second", "steps", "said"),
    [
        ([0, 1], [2], (2, 2), "of 4 samples 3 were emitted (3 unique)"),
        ([0, 1, 1], [2, 3], (2, 2), "of 4 samples 5 were emitted (4 unique)"),
        ([0, 1], [2, 3], (2, 3), "in {2, 3} steps"),
    ],
)
def test_an_epoch_that_is_not_one(first: list[int], second: list[int], steps: tuple[int, int], said: str) -> None:
    done = [
        {"indices": first, "steps": steps[0], "seconds": 1.0},
        {"indices": second, "steps": steps[1], "seconds": 1.0},
    ]
    check = _judge(4, done)
    assert check.status is Status.FAIL
    assert said in check.found
    assert "report it" in check.remedy
