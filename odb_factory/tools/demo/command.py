"""`odb-factory demo`: makes a tiny model and a small dataset."""

from __future__ import annotations

import argparse
from pathlib import Path

from odb_factory.tools.demo.make import make_demo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--dir", type=Path, default=Path("odb_demo"), help="where to put them (default: odb_demo)")
    parser.add_argument("--samples", type=int, default=480, help="training samples (default: 480)")
    parser.add_argument("--seed", type=int, default=0, help="seed of model and data (default: 0)")


def run(options: argparse.Namespace) -> int:
    """Make the demo; returns the exit status."""
    paths = make_demo(options.dir, options.samples, options.seed)
    print(f"model:    {paths.model}\ndataset:  {paths.data} (odb_demo, odb_demo_text, odb_demo_eval)")
    print("next:     llamafactory-cli train yaml_recipes/quickstart.yaml")
    return 0
