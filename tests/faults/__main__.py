"""`python -m tests.faults`: runs the whole fault table, prints it, and fails if a cell is not green."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict

from tests import conftest  # noqa: F401  (the environment of all tests)
from tests.faults.cell import Cell
from tests.faults.judge import Verdict, run_cell
from tests.faults.table import CELLS, COLUMNS, NOT_APPLICABLE, ROWS


def main(arguments: list[str]) -> int:
    """Run as the command line says; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--times", type=int, default=1, help="run the table so often, one after the other")
    parser.add_argument("--only", default="", help="cells whose name or phase holds this text")
    parser.add_argument("--show", action="store_true", help="print the errors of green cells, too")
    options = parser.parse_args(arguments)
    cells = [cell for cell in CELLS if options.only in f"{cell.name} ({cell.phase})"]
    if not cells or options.times < 1:
        parser.error("there is nothing to run")
    bad = 0
    for turn in range(options.times):
        begun = time.monotonic()
        verdicts = []
        for number, cell in enumerate(cells, 1):
            verdict = run_cell(cell)
            verdicts.append(verdict)
            print(f"[{number}/{len(cells)}] {_line(verdict)}", flush=True)
            _tell(verdict, options.show)
        bad += sum(bool(verdict.problems) for verdict in verdicts)
        print(f"\nrun {turn + 1} of {options.times}, {time.monotonic() - begun:.0f} s")
        print(table_of(cells, verdicts), flush=True)
    print(f"\n{bad} of {len(cells) * options.times} cells are not green" if bad else "\nall cells are green")
    return 1 if bad else 0


def _line(verdict: Verdict) -> str:
    word = "RED  " if verdict.problems else "green"
    times = ", ".join(f"rank {rank} {seconds:.1f} s" for rank, seconds in sorted(verdict.seconds.items()))
    return f"{word} {verdict.cell.name}: {times or 'none'} (cell {verdict.wall:.1f} s)"


def _tell(verdict: Verdict, show: bool) -> None:
    for problem in verdict.problems:
        print("    " + problem.replace("\n", "\n    "), flush=True)
    for rank, error in verdict.errors.items() if show else ():
        print(f"    rank {rank}: {error.splitlines()[0] if error else 'no error'}", flush=True)


def table_of(cells: list[Cell], verdicts: list[Verdict]) -> str:
    """Fault x phase: for each cell the longest time from the fault to the error; several cells share a field."""
    fields: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell, verdict in zip(cells, verdicts, strict=True):
        seconds = max(verdict.seconds.values(), default=0.0)
        text = "RED" if verdict.problems else f"{seconds:.1f}" if any(verdict.errors.values()) else "ok"
        fields[cell.fault, cell.phase].append(text)
    rows = [["fault (seconds to the last rank's error)", *COLUMNS]]
    for fault in ROWS:
        if any(key[0] == fault for key in fields):
            rows.append([fault, *(" ".join(fields.get((fault, column), ["-"])) for column in COLUMNS)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "-+-".join("-" * width for width in widths))
    notes = [f"- in {fault!r}: {why}" for fault, why in NOT_APPLICABLE.items() if any(k[0] == fault for k in fields)]
    return "\n".join(line.rstrip() for line in (*lines, *notes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
