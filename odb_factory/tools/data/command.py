"""`odb-factory data`: downloads a public dataset, converts it for LLaMA-Factory and checks it."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from odb_factory.tools.data.run import Job, prepare
from odb_factory.tools.data.sets import SETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.description = (
        "Fetches the dataset, converts it, checks every image and writes it beside dataset_info.json. Run again after "
        "an interruption, and it continues. Rows that cannot be used are counted by reason and named in "
        "<name>_dropped.jsonl."
    )
    parser.add_argument("set", choices=tuple(SETS), help="which dataset")
    parser.add_argument("--limit", type=int, help="only the first LIMIT rows (default: all)")
    parser.add_argument("--dir", type=Path, default=Path("data"), help="where to put it (default: data)")
    parser.add_argument("--source", type=Path, help="a local copy, a folder as downloaded or its file of rows")


def run(options: argparse.Namespace) -> int:
    """Prepare the dataset; returns the exit status."""
    known = SETS[options.set]
    try:
        report = prepare(Job(known, options.dir, options.limit, options.source))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues where this one stopped", file=sys.stderr)
        return 130
    print("\n".join(summary(known, report, options.dir)))
    return 0


def summary(known: Any, report: dict[str, Any], folder: Path) -> list[str]:
    """The report of a run, as lines."""
    total = sum(report["dropped"].values())
    again = "" if report["new"] else " (from an earlier run)"
    lines = [f"{known.title}: {report['rows']:,} rows read, {report['written']:,} written, {total:,} dropped{again}"]
    lines += [f"  {count:>9,}  {reason}" for reason, count in report["dropped"].items()]
    if total:
        lines.append(f"  each is named in {folder / known.name}_dropped.jsonl")
    if known.has_images:
        lines.append(f"images:   {report['images']:,} files for {report['placeholders']:,} placeholders, all readable")
    lines.append(f"dataset:  {known.name} in {folder / 'dataset_info.json'}")
    elsewhere = "" if folder == Path("data") else f" dataset_dir={shlex.quote(str(folder))}"
    recipe = f"yaml_recipes/{known.recipes}/qwen3vl_2b_full.yaml"
    lines.append(f"next:     FORCE_TORCHRUN=1 llamafactory-cli train {recipe}{elsewhere}")
    return lines
