"""The judge of the fault table sees what is wrong: a table that is always green says nothing."""

from __future__ import annotations

import multiprocessing
import socket
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import cell as at
from tests.faults.cell import Cell, End
from tests.faults.judge import Verdict, _judge, _watched, run_cell
from tests.faults.rank import Report
from tests.faults.table import CONTROL, LOST

CELL = Cell(fault="a test", action="raise", point=at.STEP, own=End("KeyError"), others=LOST)
TEXT = "rank 0 of 2 lost the others in the first exchange of round 3 of epoch 0: rank 1 ended without a word"
GOOD = Report(error="ExchangeError", text=TEXT, raised=101.0, ended=102.0, files=(9, 9), threads=(1, 1))


def problems_of(report: Report | None, rank: int = 0) -> str:
    return "\n".join(_judge(Verdict(CELL), rank, report, 100.0))


def test_a_rank_that_ends_as_it_must_is_no_problem() -> None:
    assert problems_of(GOOD) == ""


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (replace(GOOD, error="RuntimeError"), "expected ExchangeError"),
        (replace(GOOD, text=TEXT.replace("rank 1", "rank 0")), "expected ExchangeError"),
        (replace(GOOD, text="", error=""), "got none"),
        (replace(GOOD, ended=100.1 + CELL.limit), "after the fault, more than 15 s"),
        (replace(GOOD, files=(9, 10)), "1 descriptors more"),
        (replace(GOOD, threads=(1, 3)), "2 threads more"),
        (replace(GOOD, left=["port 1 is open"]), "port 1 is open"),
        (None, "was killed: True"),
    ],
    ids=["class", "rank", "no error", "late", "descriptor", "thread", "port", "killed"],
)
def test_whatever_is_wrong_with_a_rank_is_a_problem(report: Report | None, text: str) -> None:
    assert text in problems_of(report)


def test_an_open_port_and_a_file_in_shared_memory_are_problems(tmp_path: Path) -> None:
    verdict = Verdict(CELL)
    left = Path(f"/dev/shm/odb-test-{uuid.uuid4()}")
    try:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            port = sock.getsockname()[1]
            (tmp_path / f"port-{port}").touch()
            with _watched(str(tmp_path), verdict):
                left.touch()
    finally:
        left.unlink()
    assert verdict.problems == [f"port {port} is still open", f"left in /dev/shm: {left.name}"]


def test_what_another_living_process_has_in_shared_memory_is_none(tmp_path: Path) -> None:
    verdict = Verdict(CELL)
    with _watched(str(tmp_path), verdict):
        kept = multiprocessing.get_context("spawn").Lock()  # a file in /dev/shm as long as it lives
    assert verdict.problems == []
    del kept


@pytest.mark.distributed
def test_a_fault_that_never_comes_is_a_problem() -> None:
    verdict = run_cell(replace(CONTROL, action="kill the collate process", point="nowhere"))
    assert verdict.problems == ["the fault never came"]
