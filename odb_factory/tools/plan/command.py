"""`odb-factory plan`: predicts, before any training, what ODB gains on a recipe's own data."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from odb_factory.tools.doctor.environment import OTHER_TRAINERS, is_on
from odb_factory.tools.plan import MOST_SEED

OVERRIDES = "overrides"
"""The option that collects `key=value` arguments from anywhere on the command line."""

WOULD_FAIL = 3
"""Exit status if a run of the recipe would fail; 1 would mean that this program failed."""

EXIT_CODES = """exit status:
  0  the plan is made, and no reason was found why a run would fail
  2  the recipe or the command line cannot be used; stderr says why
  3  a run of this recipe would fail: at bad or overlong samples, for want of
     samples, at the checkpoint of resume_from_checkpoint, ...; the plan's last
     lines say at what, in JSON run_would_fail_at"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.epilog = EXIT_CODES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", type=Path, help="a LLaMA-Factory recipe (.yaml) with odb: true")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe fields to change")
    parser.add_argument(
        "--samples",
        type=_count_or_all,
        default=2000,
        metavar="N",
        help="rows to measure, chosen at random, or `all` (default: 2000)",
    )
    parser.add_argument(
        "--world-size", type=_positive, metavar="W", help="ranks to plan for (default: as launched, or 1)"
    )
    parser.add_argument(
        "--seed",
        type=_seed,
        metavar="S",
        help="for choosing rows and for the epoch's order (default: the recipe's)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also plot it")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdigit() or int(text) > MOST_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to {MOST_SEED}")
    return int(text)


def _count_or_all(text: str) -> int | None:
    return None if text == "all" else _positive(text)


def run(options: argparse.Namespace) -> int:
    """Plan and print; returns the exit status."""
    if options.plot is not None:
        _check_plot(options.plot)
    _check_trainer()
    # keep what LLaMA-Factory and its libraries print out of our own output
    with contextlib.redirect_stdout(sys.stderr):
        from odb_factory.tools.plan.recipe import load_recipe

        recipe = load_recipe(options.recipe, options.overrides)

        from odb_factory.tools.plan.observed import RunWouldFail
        from odb_factory.tools.plan.planner import make_plan, ranks_of_environment
        from odb_factory.tools.plan.plot import write_plot
        from odb_factory.tools.plan.schema import as_json, failure_as_json
        from odb_factory.tools.plan.text import as_text

        try:
            plan = make_plan(
                recipe,
                samples=options.samples,
                world_size=options.world_size or ranks_of_environment(),
                seed=options.seed,
            )
        except RunWouldFail as error:
            reason = str(error)
        else:
            reason = ""
            if options.plot is not None:
                write_plot(plan, options.plot)
    if reason:
        print(f"odb-factory: a run would fail: {reason}", file=sys.stderr)
        if options.json:
            print(json.dumps(failure_as_json(recipe.path, reason), indent=2))
        return WOULD_FAIL
    print(json.dumps(as_json(plan), indent=2) if options.json else as_text(plan, terminal=sys.stdout.isatty()))
    return WOULD_FAIL if plan.stops else 0


def _check_trainer() -> None:
    """Raise ValueError if an environment variable would hand the run to another trainer."""
    for name, effect in OTHER_TRAINERS.items():
        if is_on(os.environ, name):
            raise ValueError(f"{name}={os.environ[name]} {effect}, so there is nothing to plan; unset {name}.")


def _check_plot(path: Path) -> None:
    """Raise if the figure could not be written: before the planning, not after it."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot {path}: the figure is a PNG; give a file name that ends in .png.")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"--plot {path}: there is no directory {path.absolute().parent}; make it first.")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise PermissionError(f"--plot {path}: it cannot be written there; name another file.")
