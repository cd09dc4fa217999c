"""Runs a cell and says what is wrong with how it ended."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.dist import RankFailure, run_ranks
from tests.faults.cell import LAST, STEP, Cell, End
from tests.faults.rank import Report, is_open, lengths, ports_noted, run_rank
from tests.runtime.helpers import Lengths, check_world, shared_memory_files, wait_until

DEADLINE = 50.0
"""Seconds that a cell has; also the time-out of the trainers' own process group."""


@dataclass
class Verdict:
    """What became of a cell."""

    cell: Cell
    problems: list[str] = field(default_factory=list)
    """Empty: the cell is green."""
    seconds: dict[int, float] = field(default_factory=dict)
    """From the fault to the error, by rank."""
    errors: dict[int, str] = field(default_factory=dict)
    wall: float = 0.0


@cache
def last_round() -> int:
    """The number of the last round of the first epoch of two ranks, from a run without fault."""
    with tempfile.TemporaryDirectory(prefix="odb-fault-") as folder:
        nothing = Cell(fault="no fault", action="nothing", point=STEP, own=End(""), others=End(""))
        end = run_ranks(2, run_rank, nothing, folder, deadline=DEADLINE)[0].after[0].end
    return int(end.rounds) - 1


def run_cell(cell: Cell) -> Verdict:
    """Run the ranks of a cell, and judge."""
    if LAST in cell.point:
        cell = cell.resolved(last_round())
    verdict = Verdict(cell)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="odb-fault-") as folder, _watched(folder, verdict):
        killed = [cell.faulty] if cell.own is None else []
        reports = run_ranks(cell.world, run_rank, cell, folder, deadline=DEADLINE, may_die=killed)
        since = _time_of_the_fault(folder)
        if since is None and cell.action != "nothing":
            verdict.problems.append("the fault never came")
        for rank, report in enumerate(reports):
            released = Path(folder, f"released-{rank}")
            start = float(released.read_text()) if released.exists() else since
            verdict.problems += [f"rank {rank}: {text}" for text in _judge(verdict, rank, report, start)]
        if cell.action in ("nothing", "break", "signal") and cell.own is not None and not verdict.problems:
            _check_epochs(reports, verdict)
    verdict.wall = time.monotonic() - begun
    return verdict


@contextlib.contextmanager
def _watched(folder: str, verdict: Verdict) -> Iterator[None]:
    """Ranks that hang or leave processes behind, open ports and files in shared memory are problems."""
    before = shared_memory_files()
    try:
        yield
    except RankFailure as failure:
        verdict.problems.append(str(failure))
    verdict.problems += [f"port {port} is still open" for port in ports_noted(folder) if is_open(port)]
    wait_until(lambda: not _ours(shared_memory_files() - before), 3.0)
    if left := _ours(shared_memory_files() - before):
        verdict.problems.append(f"left in /dev/shm: {', '.join(sorted(left))}")


def _ours(names: set[str]) -> set[str]:
    """Those that no living process has mapped: all processes of the cell are gone, those of other programs live."""
    inodes = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            inodes[name] = str(os.stat(f"/dev/shm/{name}").st_ino)
    mapped = _mapped() if inodes else set()
    return {name for name, inode in inodes.items() if inode not in mapped}


def _mapped() -> set[str]:
    """Inodes of all files that living processes have mapped; a semaphore's mapping has another name than its file."""
    found: set[str] = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/maps") as file:
            found.update(fields[4] for line in file if len(fields := line.split()) > 5)
    return found


def _time_of_the_fault(folder: str) -> float | None:
    return max((float(path.read_text()) for path in Path(folder).glob("fault-*")), default=None)


def _judge(verdict: Verdict, rank: int, report: Report | None, since: float | None) -> Iterator[str]:
    cell = verdict.cell
    expected = cell.end_of(rank)
    if report is None or expected is None:
        if (report is None) != (expected is None):
            yield f"was to be killed: {expected is None}, was killed: {report is None}"
        return
    verdict.errors[rank] = f"{report.error}: {report.text}".strip(": ")
    if since is not None:
        verdict.seconds[rank] = max(0.0, report.raised - since)
        if report.error and report.ended - since > cell.limit:
            yield f"ended {report.ended - since:.1f} s after the fault, more than {cell.limit:g} s"
    text = expected.text.format(rank=rank, world=cell.world, faulty=cell.faulty)
    if not re.fullmatch(expected.kind, report.error) or not re.search(text, report.text, re.DOTALL):
        yield f"expected {expected.kind or 'no error'} with {text!r}, got {verdict.errors[rank] or 'none'}"
    for what, (before, after) in (("descriptors", report.files), ("threads", report.threads)):
        if after > before:
            yield f"{after - before} {what} more than before the loader was made"
    yield from report.left


def _check_epochs(reports: list[Report], verdict: Verdict) -> None:
    data = Lengths(lengths())
    try:
        for ranks in zip(*(report.after for report in reports), strict=True):
            check_world(ranks, data)
        assert all(len(report.after) == 2 for report in reports), "two epochs"
    except AssertionError as error:
        verdict.problems.append(f"the epochs after the break are wrong: {error}")
