"""The audit and the summary, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from odb_factory.core.sample import Dropped
from odb_factory.runtime.messages import StepInfo
from odb_factory.trainer.report import MOST_NAMED, Audit


def step(number: int, *, dropped: tuple[Dropped, ...] = (), epoch: int = 0) -> StepInfo:
    totals: dict[str, Any] = dict.fromkeys(("samples", "loss_tokens", "tokens", "padded_tokens", "work"), 1)
    return StepInfo(
        epoch=epoch,
        step=number,
        round=number,
        idle=False,
        last=False,
        indices=(number,),
        lengths=(4,),
        loss_tokens=1,
        tokens=4,
        padded_tokens=4,
        work=4,
        global_dropped=len(dropped),
        dropped=dropped,
        **{f"global_{name}": value for name, value in totals.items()},
    )


def audit_of(path: Path, *, world_size: int = 1, write_steps: bool = False, keep_updates: int = 0) -> Audit:
    return Audit(
        path,
        rank=0,
        world_size=world_size,
        dataset_size=5000,
        token_budget=100,
        write_steps=write_steps,
        keep_updates=keep_updates,
    )


def test_drops_are_all_counted_and_the_first_ones_named(tmp_path: Path) -> None:
    """In each of three epochs the same ones; a checkpoint holds no more than the names."""
    audit = audit_of(tmp_path)
    many = tuple(Dropped(i, "overlong" if i % 2 else "corrupt image", "why", bad=i % 2 == 0) for i in range(3000))
    for epoch in range(3):
        audit.record(step(0, dropped=many, epoch=epoch), update=epoch + 1)
    summary = audit.summary(dict(audit.local), list(audit.dropped.values()))
    assert summary["dropped"] == {"corrupt image": 4500, "overlong": 4500}
    assert summary["bad"] == 4500
    assert [d["index"] for d in summary["dropped_samples"]] == list(range(MOST_NAMED))
    assert summary["dropped_samples"][0] == {"index": 0, "reason": "corrupt image", "detail": "why", "bad": True}
    assert len(audit_of(tmp_path, world_size=512).dropped) == 0
    small = audit_of(tmp_path, world_size=512)
    small.add_dropped(many)
    assert len(small.dropped) == 10, "512 ranks together name a few thousand at most"


def test_a_state_restores_counts_names_and_what_the_open_epoch_emitted(tmp_path: Path) -> None:
    first = audit_of(tmp_path)
    for number in range(4):
        first.record(step(number, dropped=(Dropped(9, "broken", "x"),) if number == 1 else ()), update=number + 1)
    state = json.loads(json.dumps(first.state(first.counts, dict(first.local), list(first.dropped.values()))))
    second = audit_of(tmp_path)
    second.restore(state)
    second.record(step(4), update=5)
    assert np.flatnonzero(second.counts).tolist() == [0, 1, 2, 3, 4]
    second.close_epoch(second.counts)
    summary = second.summary(dict(second.local), list(second.dropped.values()))
    assert (summary["steps"], summary["samples"], summary["unique"], summary["epochs"]) == (5, 5, 5, 1)
    assert summary["dropped"] == {"broken": 1}
    assert [d["index"] for d in summary["dropped_samples"]] == [9]


def test_a_line_marks_bad_samples(tmp_path: Path) -> None:
    audit = audit_of(tmp_path, write_steps=True)
    audit.record(step(0, dropped=(Dropped(3, "overlong"), Dropped(4, "missing image", bad=True))), update=1)
    audit.close()
    (line,) = [json.loads(line) for line in (tmp_path / "odb_audit.rank0.jsonl").read_text().splitlines()]
    assert line["dropped"] == [[3, "overlong", False], [4, "missing image", True]]
    assert line["update"] == 1
