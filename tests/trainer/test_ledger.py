"""What the ledger counts, saves and names, without a run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from odb_factory.core.sample import Dropped
from odb_factory.runtime.messages import StepInfo
from odb_factory.trainer.ledger import MOST_NAMED, NOW, Ledger


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


def ledger_of(*, world_size: int = 1, rank: int = 0) -> Ledger:
    ledger = Ledger(dataset_size=5000, epochs=3, first_guess=1, rank=rank, world_size=world_size)
    ledger.token_budget = 100
    return ledger


def state_of(ledger: Ledger) -> dict[str, Any]:
    """Of a run on one rank, as it comes back from a file."""
    state = ledger.state(ledger.trained, ledger.local, list(ledger.dropped.values()))
    read: dict[str, Any] = json.loads(json.dumps(state))
    return read


def summary_of(ledger: Ledger) -> dict[str, Any]:
    return ledger.summary(ledger.local, ledger.dropped.values())


def test_drops_are_all_counted_and_the_first_ones_named() -> None:
    """In each of three epochs the same ones; a checkpoint holds no more than the names."""
    ledger = ledger_of()
    many = tuple(Dropped(i, "overlong" if i % 2 else "corrupt image", "why", bad=i % 2 == 0) for i in range(3000))
    for epoch in range(3):
        ledger.add([step(0, dropped=many, epoch=epoch)])
    summary = summary_of(ledger)
    assert summary["dropped"] == {"corrupt image": 4500, "overlong": 4500}
    assert summary["bad"] == 4500
    assert [d["index"] for d in summary["dropped_samples"]] == list(range(MOST_NAMED))
    assert summary["dropped_samples"][0] == {"index": 0, "reason": "corrupt image", "detail": "why", "bad": True}
    small = ledger_of(world_size=512)
    assert len(small.dropped) == 0
    small.add_dropped(many)
    assert len(small.dropped) == 10, "512 ranks together name a few thousand at most"


def test_a_state_restores_counts_names_and_what_the_open_epoch_emitted() -> None:
    first = ledger_of()
    for number in range(4):
        first.add([step(number, dropped=(Dropped(9, "broken", "x"),) if number == 1 else ())])
    second = ledger_of()
    second.restore(state_of(first))
    assert (second.updates, second.emitted, second.in_epoch, second.handled) == (4, 4, 5, 5)
    second.add([step(4)])
    assert np.flatnonzero(second.trained == NOW).tolist() == [0, 1, 2, 3, 4]
    second.close_epoch(second.trained)
    summary = summary_of(second)
    assert (summary["steps"], summary["samples"], summary["unique"], second.counts["epochs"]) == (5, 5, 5, 1)
    assert summary["repeated"] == 0
    assert summary["dropped"] == {"broken": 1}
    assert [d["index"] for d in summary["dropped_samples"]] == [9]


def test_a_sample_that_comes_twice_in_an_epoch_is_counted_and_one_of_two_epochs_is_not() -> None:
    ledger = ledger_of()
    for number in (0, 1, 1, 2):
        ledger.add([step(number)])
    ledger.close_epoch(ledger.trained)
    assert (ledger.counts["repeated"], ledger.counts["unique"]) == (1, 3)
    ledger.add([step(1, epoch=1)])
    again = ledger_of()
    again.restore(state_of(ledger))
    again.add([step(7, epoch=1)])
    again.close_epoch(again.trained)
    assert (again.counts["repeated"], again.counts["unique"], again.counts["epochs"]) == (1, 4, 2)


def test_counts_of_single_ranks_go_on_once() -> None:
    first = ledger_of()
    first.add([step(0, dropped=(Dropped(9, "broken", "x"),))])
    ranks = [ledger_of(rank=rank, world_size=2) for rank in range(2)]
    for ledger in ranks:
        ledger.restore(state_of(first))
    assert sum(ledger.local["dropped: broken"] for ledger in ranks) == 1
    assert [ledger.emitted for ledger in ranks] == [1, 1], "what all ranks know, each does"
