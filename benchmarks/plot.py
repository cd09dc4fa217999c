"""Pictures out of the rows of all benchmarks; measures nothing."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks.report import RESULTS, load

HELP = "draw pictures of measured rows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with NAME.jsonl of each benchmark")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the PNGs")


def main(options: argparse.Namespace) -> None:
    """Writes NAME.png for each benchmark that has a picture."""
    import matplotlib

    matplotlib.use("Agg")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in load(options.results).items():
        view = importlib.import_module(f"benchmarks.{name}.view")
        if not hasattr(view, "plot"):
            continue
        figure = view.plot(rows)
        figure.savefig(options.out / f"{name}.png", dpi=110, bbox_inches="tight")
        print(f"Written to {options.out / f'{name}.png'}")
