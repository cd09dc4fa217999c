"""Tables in Markdown out of the rows of all benchmarks; measures nothing."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks.__main__ import BENCHMARKS
from benchmarks.errors import BenchmarkError
from benchmarks.rows import Row, hardware_in_words, read_rows

HELP = "make REPORT.md out of measured rows"
RESULTS = Path(__file__).parent / "results"
TEXT = Path(__file__).parent / "REPORT.md"

HEAD = """# What was measured

Made by `python -m benchmarks report` out of the rows in `results/`. Each table names the command and the hardware
of its rows.
[README.md](README.md) says what each figure means, how to read it, and what it does not show.
[CHECKS.md](CHECKS.md) has the model check, the faults and the other checks that are no comparison.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with NAME.jsonl of each benchmark")
    parser.add_argument("--out", type=Path, default=TEXT, help="the file that is written")


def main(options: argparse.Namespace) -> None:
    options.out.write_text(render(load(options.results)), encoding="utf-8")
    print(f"Written to {options.out}")


def load(folder: Path) -> dict[str, list[Row]]:
    """Rows by benchmark, in the order of `BENCHMARKS`; those without a file are left out.

    Raises:
        BenchmarkError: there are none at all.
    """
    found = {name: read_rows([folder / f"{name}.jsonl"]) for name in BENCHMARKS if (folder / f"{name}.jsonl").exists()}
    found = {name: rows for name, rows in found.items() if rows}
    if not found:
        raise BenchmarkError(f"{folder} holds no rows; run a benchmark with --json {folder}/NAME.jsonl first.")
    return found


def render(found: dict[str, list[Row]]) -> str:
    """The whole text."""
    parts = [HEAD]
    for name, rows in found.items():
        view = importlib.import_module(f"benchmarks.{name}.view")
        parts.append(f"## {view.TITLE}\n\n{origin(rows)}\n\n{view.tables(rows).strip()}\n")
        if (RESULTS / f"{name}.png").exists():
            parts.append(f"![{view.TITLE}](results/{name}.png)\n")
    return "\n".join(parts)


def origin(rows: list[Row]) -> str:
    """Which commands made the rows, on what, and when."""
    commands = dict.fromkeys(f"`{row.command}`" for row in rows)
    machines = dict.fromkeys(map(hardware_in_words, rows))
    stack = ", ".join(f"{name} {version}" for name, version in rows[-1].versions.items())
    days = sorted({row.date[:10] for row in rows})
    return (
        f"{', '.join(commands)}  \n{'; '.join(machines)}; {stack}; {' to '.join(dict.fromkeys((days[0], days[-1])))}."
    )
