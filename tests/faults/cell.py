"""What a cell of the fault table is: a fault, the phase it comes in, and how each rank must end."""

from __future__ import annotations

from dataclasses import dataclass, replace

SIZE = 96
EPOCHS = 3
"""Epochs that each rank would run: a rank that needed nothing more of the others in this one notices in the next."""

LAST = "LAST"
"""Stands in a point for the number of the last round of the first epoch: `judge` finds it out."""

# Points: what the collate process announces (`Phase`), the occasions of its reductions, and two of the trainer.
FORKED = "forked"
STARTING = "starting"
WORKER_FORKED = "a worker forked"
UP = "waiting for the rendezvous"
MEETING = "the meeting of all ranks"
NEXT_EPOCH = "waiting for the next epoch"
FILL = "reading samples for round 0 of epoch 0"
LATER_FILL = "reading samples for round 1 of epoch 0"
FIRST = "the first exchange of round 1 of epoch 0"
SECOND = "the second exchange of round 1 of epoch 0"
PREFIX = "the index assignment of round 1 of epoch 0"
FIRST_COLLATE = "collating the steps of round 0 of epoch 0"
COLLATE = "collating the steps of round 1 of epoch 0"
DRAIN = "collating the steps of round LAST of epoch 0"
NEXT_COLLATE = "collating the steps of round 0 of epoch 1"
STEP = "step 3"
BETWEEN = "between epochs"

PHASES = {
    FORKED: "start",
    STARTING: "start",
    UP: "start",
    MEETING: "meeting",
    WORKER_FORKED: "first fill",
    FILL: "first fill",
    LATER_FILL: "later fill",
    FIRST: "1st reduction",
    SECOND: "2nd reduction",
    PREFIX: "prefix sum",
    FIRST_COLLATE: "collate",
    COLLATE: "collate",
    DRAIN: "drain",
    NEXT_EPOCH: "between epochs",
    NEXT_COLLATE: "between epochs",
    BETWEEN: "between epochs",
    STEP: "in a step",
}
"""The column of each point."""


@dataclass(frozen=True)
class End:
    """How a rank must end: the class of its error (a pattern), and a pattern that its text must hold."""

    kind: str
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One fault in one phase.

    Args:
        fault: the row of the table.
        action: what `tests.faults.inject` does at the point.
        point: where; `PHASES` has them.
        own: how the faulty rank ends; None: it is killed.
        others: how the others end.
        waits: only the time-out can tell that something is wrong; without this, the error must come at once.
        everywhere: every rank is faulty.
        fast: belongs to the subset that pytest runs.
    """

    fault: str
    action: str
    point: str
    own: End | None
    others: End
    waits: bool = False
    everywhere: bool = False
    world: int = 2
    faulty: int = 1
    workers: int = 1
    start_method: str = "fork"
    signal: str = ""
    """Name of the signal that action `signal` sends to the whole process group of the faulty rank."""
    handled: bool = True
    """The trainer has a handler for it, which lets it go on."""
    fast: bool = False

    @property
    def name(self) -> str:
        """A name of its own, in words."""
        where = f", {self.world} ranks" if self.world != 2 else ""
        which = "" if self.everywhere or self.world == 1 else f", rank {self.faulty}"
        method = "" if self.start_method == "fork" else f", {self.start_method}"
        workers = "" if self.workers else ", no workers"
        if self.signal:
            workers += f", {self.signal}"
        return f"{self.fault} @ {self.point}{which}{where}{method}{workers}"

    def resolved(self, last_round: int) -> Cell:
        """The same cell with that number in the place of `LAST`."""
        number = str(last_round)
        own = self.own and replace(self.own, text=self.own.text.replace(LAST, number))
        return replace(self, point=self.point.replace(LAST, number), own=own)

    @property
    def phase(self) -> str:
        """The column of the table."""
        return PHASES[self.point]

    @property
    def timeout(self) -> float:
        """`odb_timeout`: so long that an error that comes at once cannot come from it, or short where it must."""
        return 6.0 if self.waits else 40.0

    @property
    def limit(self) -> float:
        """Seconds from the fault to the end of every rank: on a machine with three times this load, too."""
        return self.timeout + 9.0 if self.waits else 15.0

    def is_faulty(self, rank: int) -> bool:
        """Whether the fault comes on this rank."""
        return self.everywhere or rank == self.faulty

    def end_of(self, rank: int) -> End | None:
        """How this rank must end."""
        return self.own if self.is_faulty(rank) else self.others
