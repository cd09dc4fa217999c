"""The `odb-factory` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from odb_factory import __version__
from odb_factory.commands import data, demo, doctor, plan

COMMANDS = {"data": data, "demo": demo, "doctor": doctor, "plan": plan}
"""By name: a module with `HELP`, `add_arguments(parser)` and `run(options) -> exit status`.

Where `OVERRIDES` names one of its options, that takes what argparse leaves over of `key=value`.
"""


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
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes the overrides of a recipe only in one piece; those behind an option are left over
    name = getattr(COMMANDS[options.command], "OVERRIDES", None)
    unknown = [text for text in rest if name is None or text.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if name is not None:
        setattr(options, name, [*getattr(options, name), *rest])
    try:
        return COMMANDS[options.command].run(options)
    except (ValueError, OSError) as error:
        print(f"odb-factory: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
