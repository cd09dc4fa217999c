"""`python -m benchmarks NAME [options]`: the one entry to all benchmarks."""

from __future__ import annotations

import argparse
import importlib
import shlex
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.rows import RowWriter

BENCHMARKS = ("balance", "loader", "exchange", "train", "first_step", "quality", "gpu", "paper", "memory", "plan", "v1")
"""Each is a package: `run` has HELP, add_arguments(parser), measure(options, rows); `view` has TITLE, tables, plot."""

READERS = ("report", "plot")
"""Modules that read rows only: HELP, add_arguments(parser) and main(options)."""

OUT = Path("outputs/benchmarks")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status; 2 where what was asked for cannot be done."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure odb-factory and its peers.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    chosen = argv[0] if argv else None
    for name in (*BENCHMARKS, *READERS):
        # only the one that is asked for is imported, but for the overview
        if chosen in (*BENCHMARKS, *READERS) and name != chosen:
            continue
        module = _module(name)
        sub = commands.add_parser(name, help=module.HELP, description=module.HELP)
        if name in BENCHMARKS:
            sub.add_argument(
                "--json", type=Path, default=OUT / f"{name}.jsonl", metavar="FILE", help="rows are written here"
            )
            sub.add_argument("--quick", action="store_true", help="a small version, well under two minutes")
            sub.add_argument("--seed", type=int, default=0)
        module.add_arguments(sub)
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended on the way out
    try:
        if options.name in READERS:
            _module(options.name).main(options)
        else:
            _measure(options.name, options, argv)
    except BenchmarkError as error:
        print(f"benchmarks {options.name}: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(name: str, options: argparse.Namespace, argv: list[str]) -> None:
    rows = RowWriter(name, command_of(argv, options), options.json)
    try:
        _module(name).measure(options, rows)
    finally:
        rows.close()
    print("\n" + _view(name).tables(rows.rows))
    print(f"\n{len(rows.rows)} rows written to {options.json}")


def command_of(argv: list[str], options: argparse.Namespace) -> str:
    """The command as it stands in rows: without places of this machine, which differ on any other."""
    places = {str(value) for value in vars(options).values() if isinstance(value, Path)}
    kept: list[str] = []
    for word in argv:
        if word in places or word.split("=", 1)[-1] in places:
            if kept and kept[-1].startswith("--") and "=" not in word:
                kept.pop()
            continue
        kept.append(word)
    return shlex.join(["python", "-m", "benchmarks", *kept])


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}" if name in READERS else f"benchmarks.{name}.run")


def _view(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}.view")


if __name__ == "__main__":
    raise SystemExit(main())
