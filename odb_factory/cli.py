"""The `odb-factory` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from odb_factory import __version__
from odb_factory.commands import data, demo, doctor, plan

COMMANDS = {"data": data, "demo": demo, "doctor": doctor, "plan": plan}
"""By name: a module with `HELP`, `add_arguments(parser)` and `run(options) -> exit status`."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(prog="odb-factory", description="Online Dynamic Batching for LLaMA-Factory.")
    parser.add_argument("--version", action="version", version=f"odb-factory {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 2 where the input was unusable (one sentence on stderr)."""
    options = build_parser().parse_args(arguments)
    try:
        return COMMANDS[options.command].run(options)
    except (ValueError, OSError) as error:
        print(f"odb-factory: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
