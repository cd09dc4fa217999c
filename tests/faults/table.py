"""The fault table: which fault, in which phase, and how every rank must end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.faults import cell as at
from tests.faults.cell import PHASES, Cell, End

# --- how a rank ends

GOES_ON = End("")
INTERRUPTED = End("KeyboardInterrupt")
INTERRUPTED_OR_LEFT = End("KeyboardInterrupt|ExchangeError")
"""Python loses a Ctrl-C that comes during a fork (in the hooks of `os.register_at_fork`): such a rank waits in vain."""
IN_THE_STEP = End("TrainingError", "rank {rank} (in step|at step|at between)")
BAD_SAMPLE = End("SampleError", r"^rank {rank}: sample \d+ could not be read: KeyError: 'injected'.*Traceback")
WORKER_DIED = End("SampleError", r"^rank {rank}: reading failed: RuntimeError: DataLoader worker .*(exited|killed)")
BAD_COLLATE = End(
    "CollateError", r"^rank {rank}: the collate function failed on (samples \d|a filler).*ZeroDivisionError: injected"
)
TOLD = End("ExchangeError", r"^rank {rank}: rank {faulty} failed while it prepared data")
_OCCASION = r"the (first exchange|second exchange|index assignment) of round \d+ of epoch \d"
LOST = End(
    "ExchangeError",
    rf"^rank {{rank}} of {{world}} lost the others in {_OCCASION}: rank {{faulty}} ended without a word",
)
LOST_WITH_THE_STORE = End("ExchangeError", rf"^rank {{rank}} of {{world}} lost the others in {_OCCASION}: .*ended")
"""Rank 0 serves the store in which survivors say that they are alive: without it, none knows which rank is gone."""
NOT_MET = End(
    "ExchangeError",
    r"^rank {rank} of {world} could not meet the others "
    r"(at [\w.-]+:\d+ within [\d.]+ s: (rank {faulty} did not come|rank {faulty} came, but|rank 0's trainer, which)"
    r"|through torch\.distributed(: rank {faulty} ended before its loader had started"
    r"| within 6 s \(odb_timeout\): no loader was started on rank {faulty};))",
)
"""At the meeting of the collate processes; or already at that of the trainers, who agree on the place of it.

An interrupted rank ends its first fork after 5 s, which may come before or after the others' time-out.
"""
WAITED = End(
    "ExchangeError",
    r"^rank {rank} waited for more than 6 s \(odb_timeout\) for rank {faulty} in the exchange of round \d+ of epoch"
    r"|^rank {rank} of {world} lost the others in the ",
)
"""The rank that stalls ends by its own time-out at about the same time, which may be noticed first."""


def killed_in(point: str) -> End:
    """The collate process was killed there."""
    return End(
        "CollateError", f"^rank {{rank}}: the collate process was killed by SIGKILL .* during: {announced(point)}"
    )


def nothing_came(point: str) -> End:
    """The collate process stalls there."""
    return End(
        "CollateError",
        rf"^rank {{rank}}: nothing came from the collate process for 6 s .* it was last at: {announced(point)}",
    )


def waited_in(point: str) -> End:
    """The collate process is in a phase that waits for other ranks: its trainer cannot know that it is the cause."""
    return End("ExchangeError", rf"^rank {{rank}} waited for more than 6 s .* for rank \d in {announced(point)}")


def announced(point: str) -> str:
    """What the collate process last announced where it is at `point` (a pattern)."""
    if point == at.STEP:
        return r".*round \d of epoch 0"  # the collate process is some steps ahead
    if point == at.BETWEEN:
        return at.NEXT_EPOCH
    for word in ("first exchange", "second exchange", "index assignment"):
        point = point.replace(word, "exchange")
    return point


# --- the rows

IN_ROUNDS = (at.FILL, at.FIRST, at.SECOND, at.PREFIX, at.COLLATE, at.DRAIN)
BEFORE_THE_MEETING = (at.STARTING, at.UP, at.MEETING)


def _workers() -> Iterator[Cell]:
    for point in (at.FILL, at.LATER_FILL, at.FIRST, at.SECOND, at.PREFIX, at.COLLATE, at.STEP, at.BETWEEN):
        yield Cell(
            fault="exception in a worker", action="raise in the data set", point=point, own=BAD_SAMPLE, others=TOLD
        )
    for point in (at.FILL, at.FIRST, at.COLLATE, at.DRAIN, at.STEP, at.BETWEEN):
        action = "kill a worker from within" if point == at.FILL else "kill a worker"
        yield Cell(fault="SIGKILL of a worker", action=action, point=point, own=WORKER_DIED, others=TOLD, workers=2)
    for point in (at.FILL, at.COLLATE, at.BETWEEN):
        own = End(
            "CollateError", r"nothing came from the collate process for 6 s .* last at: reading samples for round"
        )
        yield Cell(
            fault="data set stalls", action="stall the data set", point=point, own=own, others=WAITED, waits=True
        )


def _collate_process() -> Iterator[Cell]:
    for point in (*BEFORE_THE_MEETING, *IN_ROUNDS, at.STEP, at.BETWEEN):
        alone = point in BEFORE_THE_MEETING
        yield Cell(
            fault="SIGKILL of the collate process",
            action="kill the collate process",
            point=point,
            own=killed_in(point),
            others=NOT_MET if alone else LOST,
            waits=alone,
        )
    for point in (at.FIRST_COLLATE, at.COLLATE, at.DRAIN, at.NEXT_COLLATE):
        yield Cell(
            fault="exception in the collate function",
            action="raise in the collate function",
            point=point,
            own=BAD_COLLATE,
            others=LOST,
        )
    for point in (at.UP, at.MEETING, at.FIRST, at.SECOND, at.PREFIX, at.COLLATE, at.DRAIN, at.NEXT_EPOCH):
        exchanges = point in (at.MEETING, at.FIRST, at.SECOND, at.PREFIX)
        yield Cell(
            fault="collate process stalls",
            action="stall the collate process",
            point=point,
            own=waited_in(point) if exchanges else nothing_came(point),
            others=NOT_MET if point in BEFORE_THE_MEETING else WAITED,
            waits=True,
        )


def _whole_ranks() -> Iterator[Cell]:
    for point in (at.UP, at.MEETING, *IN_ROUNDS, at.STEP, at.BETWEEN):
        alone = point in BEFORE_THE_MEETING
        yield Cell(
            fault="SIGKILL of a whole rank",
            action="kill the rank",
            point=point,
            own=None,
            others=NOT_MET if alone else LOST,
            waits=alone,
        )
    for point in (at.STEP, at.BETWEEN):
        yield Cell(
            fault="trainer stalls",
            action="stall the trainer",
            point=point,
            own=LOST_WITH_THE_STORE,  # it goes on when rank 0 has given up
            others=WAITED,
            waits=True,
        )
    for point in (at.FIRST, at.SECOND, at.PREFIX, at.COLLATE, at.DRAIN, at.STEP, at.BETWEEN):
        yield Cell(
            fault="exception in the training step",
            action="raise in the step",
            point=point,
            own=IN_THE_STEP,
            others=LOST,
        )


def _interrupts() -> Iterator[Cell]:
    for point in (*BEFORE_THE_MEETING, *IN_ROUNDS, at.STEP, at.BETWEEN):
        alone = point in BEFORE_THE_MEETING
        yield Cell(
            fault="SIGINT to one rank",
            action="interrupt",
            point=point,
            own=INTERRUPTED,
            others=NOT_MET if alone else LOST,
            waits=alone,
        )
    for point in (at.UP, at.MEETING, at.FILL, at.SECOND, at.COLLATE, at.STEP, at.BETWEEN):
        yield Cell(
            fault="SIGINT to all ranks",
            action="interrupt",
            point=point,
            own=INTERRUPTED_OR_LEFT if point == at.UP else INTERRUPTED,
            others=INTERRUPTED,
            waits=point == at.UP,
            everywhere=True,
        )
    for point in (at.LATER_FILL, at.FIRST, at.SECOND, at.PREFIX, at.COLLATE, at.DRAIN, at.STEP):
        yield Cell(
            fault="early break on all ranks", action="break", point=point, own=GOES_ON, others=GOES_ON, everywhere=True
        )


def _signals() -> Iterator[Cell]:
    """To all processes of a rank: one whose trainer has a handler goes on, the other one dies."""
    handled = Cell(
        fault="signal to a whole rank that handles it",
        action="signal",
        signal="SIGTERM",
        point=at.STEP,
        own=GOES_ON,
        others=GOES_ON,
    )
    start = (at.FORKED, at.STARTING, at.UP, at.MEETING, at.WORKER_FORKED)
    for point in (*start, *IN_ROUNDS, at.STEP, at.BETWEEN):
        yield replace(handled, point=point)
    for name in ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGABRT"):
        for point in (at.FORKED, at.WORKER_FORKED, at.COLLATE):
            yield replace(handled, signal=name, point=point)
    yield replace(handled, start_method="spawn")
    yield replace(handled, point=at.COLLATE, workers=0)
    yield replace(handled, point=at.COLLATE, world=1, faulty=0, workers=2)
    default = replace(
        handled, fault="signal to a whole rank that does not", handled=False, own=None, others=LOST, point=at.COLLATE
    )
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1"):
        yield replace(default, signal=name)
    yield replace(default, point=at.STEP)
    yield replace(default, point=at.FILL)


def _other_worlds() -> Iterator[Cell]:
    """A lost rank 0 (which serves the store), three ranks (not all of them neighbours), one rank, and spawn."""
    kill = Cell(
        fault="SIGKILL of a whole rank", action="kill the rank", point=at.STEP, own=None, others=LOST_WITH_THE_STORE
    )
    yield replace(kill, faulty=0)
    yield replace(kill, faulty=0, point=at.PREFIX)
    yield replace(kill, faulty=0, point=at.UP, others=NOT_MET, waits=True)
    yield replace(kill, faulty=2, point=at.PREFIX, others=LOST, world=3)
    yield replace(kill, faulty=2, point=at.PREFIX, others=LOST, world=3, workers=0)
    kill = replace(kill, fault="SIGKILL of the collate process", action="kill the collate process", faulty=0)
    yield replace(kill, point=at.SECOND, own=killed_in(at.SECOND))
    yield replace(kill, point=at.MEETING, own=killed_in(at.MEETING), others=NOT_MET, waits=True)
    yield replace(kill, point=at.STEP, own=killed_in(at.STEP), others=LOST, world=3, faulty=1)
    yield replace(kill, point=at.STEP, own=killed_in(at.STEP), others=LOST, world=3, faulty=1, workers=0)
    yield replace(kill, point=at.COLLATE, own=killed_in(at.COLLATE), world=1)
    yield replace(kill, point=at.BETWEEN, own=killed_in(at.BETWEEN), others=LOST, start_method="spawn", faulty=1)
    for cell in _workers():
        if cell.action == "raise in the data set" and cell.point == at.COLLATE:
            yield replace(cell, world=3)
            yield replace(cell, world=1, faulty=0)
    for cell in _interrupts():
        if cell.everywhere and cell.action == "interrupt" and cell.point == at.FILL:
            yield replace(cell, world=1)


CONTROL = Cell(
    fault="no fault", action="nothing", point=at.STEP, own=GOES_ON, others=GOES_ON, everywhere=True, fast=True
)

FAST = {
    ("exception in a worker", at.FILL),
    ("SIGKILL of a worker", at.COLLATE),
    ("SIGKILL of the collate process", at.MEETING),
    ("SIGKILL of the collate process", at.FIRST),
    ("SIGKILL of the collate process", at.DRAIN),
    ("exception in the collate function", at.COLLATE),
    ("collate process stalls", at.SECOND),
    ("SIGKILL of a whole rank", at.UP),
    ("SIGKILL of a whole rank", at.PREFIX),
    ("SIGKILL of a whole rank", at.STEP),
    ("trainer stalls", at.STEP),
    ("exception in the training step", at.COLLATE),
    ("SIGINT to one rank", at.STARTING),
    ("SIGINT to one rank", at.SECOND),
    ("SIGINT to all ranks", at.FILL),
    ("signal to a whole rank that handles it", at.FORKED),
    ("signal to a whole rank that handles it", at.WORKER_FORKED),
    ("signal to a whole rank that does not", at.STEP),
    ("early break on all ranks", at.SECOND),
    ("early break on all ranks", at.STEP),
}
"""What pytest runs of the plain table (two ranks, rank 1 faulty); the whole runs by `python -m tests.faults`."""


def _plain() -> Iterator[Cell]:
    yield CONTROL
    for rows in (_workers, _collate_process, _whole_ranks, _interrupts, _signals):
        for cell in rows():
            yield replace(cell, fast=(cell.fault, cell.point) in FAST)


CELLS = (*_plain(), *_other_worlds())

COLUMNS = tuple(dict.fromkeys(PHASES.values()))
ROWS = tuple(dict.fromkeys(cell.fault for cell in CELLS))

NOT_APPLICABLE = {
    "exception in a worker": "start, meeting: nothing is read yet; drain: nothing is read any more",
    "SIGKILL of a worker": "start, meeting: there are none; killed in the drain, it is missed in the next epoch",
    "data set stalls": "start, meeting, drain: nothing is read; reductions: as in collate, it shows in the next fill",
    "exception in the collate function": "it is called in the collating only",
    "collate process stalls": "before it is up: forked again, see tests/runtime/test_world.py (does not come up)",
    "trainer stalls": "elsewhere the collate process, not the trainer, decides what happens",
    "exception in the training step": "start, meeting, first fill: there is no step yet",
    "signal to a whole rank that does not": "as SIGKILL of a whole rank",
    "early break on all ranks": "start, meeting, first fill: there is no step yet; between epochs: nothing to leave",
}
"""Why a row has holes."""
