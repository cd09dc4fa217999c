"""The `odb-factory` command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from odb_factory import __version__

COMMANDS = {
    "data": "fetch a public dataset and convert it to LLaMA-Factory's format",
    "demo": "make a tiny model and a small multimodal dataset, without any network",
    "doctor": "check that training would work on this machine, and say what to do where not",
    "plan": "predict padding, steps and memory of a recipe, with and without ODB; no GPU and no model weights",
}
"""By name of a tool: what it does. Its module `command` has `add_arguments(parser)` and `run(options) -> exit status`.

Where that module's `OVERRIDES` names one of its options, that takes what argparse leaves over of `key=value`.
"""


def _load(name: str) -> Any:
    return importlib.import_module(f"odb_factory.tools.{name}.command")


def _build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command; only the tool that is named in the arguments is loaded."""
    parser = argparse.ArgumentParser(prog="odb-factory", description="Online Dynamic Batching for LLaMA-Factory.")
    parser.add_argument("--version", action="version", version=f"odb-factory {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, description in COMMANDS.items():
        subparser = commands.add_parser(name, help=description)
        if name in arguments:
            _load(name).add_arguments(subparser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 2 where the input was unusable (one sentence on stderr)."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = _build_parser(given)
    options, rest = parser.parse_known_args(given)
    command = _load(options.command)
    # argparse takes the overrides of a recipe only in one piece; those behind an option are left over
    name = getattr(command, "OVERRIDES", None)
    unknown = [text for text in rest if name is None or text.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if name is not None:
        setattr(options, name, [*getattr(options, name), *rest])
    try:
        status: int = command.run(options)
    except (ValueError, OSError) as error:
        print(f"odb-factory: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
