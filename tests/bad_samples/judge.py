"""What must have come of each loader: each function returns it in words, or raises AssertionError."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from odb_factory.llamafactory.rows import describe_row
from tests.bad_samples.kinds import Kind, Rows
from tests.bad_samples.worlds import (
    BAD_PLACE,
    LATE_BAD,
    LATE_ROWS,
    RAISE_ROWS,
    Outcome,
    World,
    raise_rows,
    skip_rows,
    starving_rows,
)

SOON = 20.0
"""Seconds within which every rank must have ended; the time-out is longer."""


def judge_raise(name: str, worlds: Sequence[World]) -> str:
    """One kind under `raise`, on all ranks."""
    kind, outcomes = _kind(name, worlds), [world.raised[name] for world in worlds]
    rows = raise_rows(kind, worlds[0].media)
    if not kind.bad:
        _check_emitted(outcomes, set(range(RAISE_ROWS)) - {BAD_PLACE})
        _check_dropped(outcomes, rows, {BAD_PLACE: kind})
        return "dropped, counted, named"
    failing = BAD_PLACE % len(worlds)
    head, *trace = outcomes[failing].error.split("\n")
    start = f"SampleError: rank {failing}: sample {BAD_PLACE} could not be read: {describe_row(rows, BAD_PLACE)}: "
    assert head.startswith(start), f"{head!r} does not begin with {start!r}"
    reason = "" if kind.reason == "unreadable" else f"{kind.reason}: "
    assert re.match(f"{reason}.*{kind.cause}", head.removeprefix(start)), head
    assert head.count(f"row {BAD_PLACE}") == 1, head
    assert trace[0].startswith("Traceback"), trace[:2]
    _check_stopped(outcomes, failing)
    return "all stop, named" if len(worlds) > 1 else "stops, named"


def judge_skip(name: str, worlds: Sequence[World]) -> str:
    """One kind among all the others under `skip`, on all ranks."""
    kind = _kind(name, worlds)
    outcomes = [world.skipped[kind.template] for world in worlds]
    rows, places = skip_rows(kind.template, worlds[0].kinds, worlds[0].media)
    (place,) = (index for index, other in places.items() if other.name == name)
    assert [o.error for o in outcomes] == [""] * len(worlds)
    _check_dropped(outcomes, rows, {place: places[place]}, only=False)
    return "skipped, counted, named" if kind.bad else "dropped, counted, named"


def judge_epoch(template: str, worlds: Sequence[World]) -> None:
    """The epoch with all kinds of a template under `skip`."""
    rows, places = skip_rows(template, worlds[0].kinds, worlds[0].media)
    outcomes = [world.skipped[template] for world in worlds]
    _check_emitted(outcomes, set(range(len(rows))) - set(places))
    _check_dropped(outcomes, rows, places)


def judge_starved(worlds: Sequence[World]) -> None:
    """The epoch in which, of two ranks, one has only bad samples."""
    outcomes = [world.starved for world in worlds]
    rows = starving_rows(worlds[0].kinds, worlds[0].media)
    kinds = [kind for kind in worlds[0].kinds if kind.template == "vl"]
    _check_emitted(outcomes, set(range(0, len(rows), 2)))
    _check_dropped(outcomes, rows, {2 * i + 1: kind for i, kind in enumerate(kinds)})
    if len(worlds) > 1:
        assert outcomes[1].fillers == outcomes[1].steps > 0, "rank 1 takes part in every step all the same"


def judge_bound(bound: int | None, worlds: Sequence[World]) -> None:
    """So many bad samples at most, where there are `LATE_BAD`."""
    outcomes = [world.bounds[bound] for world in worlds]
    if bound is None or bound >= len(LATE_BAD):
        _check_emitted(outcomes, set(range(LATE_ROWS)) - set(LATE_BAD))
        assert sum(len(o.dropped) for o in outcomes) == len(LATE_BAD)
        return
    pattern = (
        r"SampleError: rank (\d): (\d) samples of epoch 0 were skipped as bad, more than max_bad_samples "
        rf"\(odb_max_bad_samples\) {bound} allows; fix the data, or raise that number\. The last ones on this rank: "
    )
    found = [re.match(pattern, o.error) for o in outcomes]
    assert all(found), [o.error for o in outcomes]
    assert [int(m[1]) for m in found if m] == list(range(len(worlds)))
    (count,) = {int(m[2]) for m in found if m}  # the same on every rank, so it was noticed in the same round
    assert bound < count <= len(LATE_BAD)
    assert {o.steps for o in outcomes} == {outcomes[0].steps}
    assert outcomes[0].steps > 0, "the bad ones come late"
    examples = [o.error.split("on this rank: ")[1] for o in outcomes]
    assert "corrupt image" in examples[-1]
    assert re.search(r"row (25|27|29|31) of the training split", examples[-1])
    assert examples[:-1] == ["none"] * (len(worlds) - 1)


def judge_machine(name: str, worlds: Sequence[World]) -> None:
    """The machine ran out of something, under `skip`."""
    outcomes, failing = [world.machine[name] for world in worlds], BAD_PLACE % len(worlds)
    cause = {"EMFILE": "Errno 24. Too many open files", "ENOSPC": "Errno 28. No space", "MemoryError": "MemoryError"}
    text = rf"SampleError: rank {failing}: sample {BAD_PLACE} could not be read: .*{cause[name.split(',')[0]]}"
    assert re.match(text, outcomes[failing].error), outcomes[failing].error
    _check_stopped(outcomes, failing)


def _kind(name: str, worlds: Sequence[World]) -> Kind:
    (kind,) = (kind for kind in worlds[0].kinds if kind.name == name)
    return kind


def _check_stopped(outcomes: Sequence[Outcome], failing: int) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.seconds < SOON
        assert outcome.dropped == []
        if rank != failing:
            says = f"ExchangeError: rank {rank}: rank {failing} failed while it prepared data; its own error says why."
            assert outcome.error == says


def _check_emitted(outcomes: Sequence[Outcome], good: set[int]) -> None:
    """The epoch ended well: the same steps on every rank, and each good sample once."""
    assert [o.error for o in outcomes] == [""] * len(outcomes)
    assert {o.steps for o in outcomes} == {outcomes[0].steps}
    assert Counter(i for o in outcomes for i in o.indices) == Counter(good)


def _check_dropped(outcomes: Sequence[Outcome], rows: Rows, places: dict[int, Kind], *, only: bool = True) -> None:
    """Each of `places` was dropped once, on some rank, for its reason and with its name."""
    dropped = {d[0]: d for o in outcomes for d in o.dropped}
    for index, kind in places.items():
        assert index in dropped, f"{kind.name} was not dropped"
        _, reason, detail, bad = dropped[index]
        assert (reason, bad) == (kind.reason, kind.bad)
        start = f"{describe_row(rows, index)}: "
        assert detail.startswith(start), detail
        assert re.search(kind.cause, detail.removeprefix(start)), detail
    if only:
        assert sorted(d[0] for o in outcomes for d in o.dropped) == sorted(places)
        assert {o.global_dropped for o in outcomes} == {len(places)}
