"""The `odb-factory` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from odb_factory import __version__


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(prog="odb-factory", description="Online Dynamic Batching for LLaMA-Factory.")
    parser.add_argument("--version", action="version", version=f"odb-factory {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="make a tiny model and a small multimodal data set, without any network")
    demo.add_argument("--dir", type=Path, default=Path("odb_demo"), help="where to put them (default: odb_demo)")
    demo.add_argument("--samples", type=int, default=480, help="training samples (default: 480)")
    demo.add_argument("--seed", type=int, default=0, help="seed of model and data (default: 0)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 2 where the input was unusable (one sentence on stderr)."""
    options = build_parser().parse_args(arguments)
    try:
        return _demo(options.dir, options.samples, options.seed)
    except (ValueError, OSError) as error:
        print(f"odb-factory: {error}", file=sys.stderr)
        return 2


def _demo(directory: Path, samples: int, seed: int) -> int:
    from odb_factory.demo.make import make_demo

    paths = make_demo(directory, samples, seed)
    print(f"model:    {paths.model}\ndata set: {paths.data} (odb_demo, odb_demo_text, odb_demo_eval)")
    print("next:     llamafactory-cli train yaml_recipes/quickstart.yaml")
    return 0


if __name__ == "__main__":
    sys.exit(main())
