"""Plans epochs, trains them, and compares; then plans from a part of the rows."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.rows import RowWriter

if TYPE_CHECKING:
    from benchmarks.plan.runs import Run
    from odb_factory.tools.plan.planner import Plan

HELP = "what `odb-factory plan` predicts against what `llamafactory-cli train` then does"

PART = 0.25
"""Share of the rows that a plan from a part of a run's data reads."""
DEMO_SAMPLES = 480
QUICK_SAMPLES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work-dir", type=Path, default=Path("outputs/benchmarks/plan"), help="emptied first")
    parser.add_argument("--conversations", type=int, default=6000, help="so many are planned without a run, too")
    parser.add_argument("--draws", type=int, default=10, help="plans from a part of the rows")
    parser.add_argument("--deadline", type=float, default=600, help="seconds that a training may take")


def measure(options: argparse.Namespace, rows: RowWriter) -> None:
    """Rows of runs and their plans, and of plans from a part of the rows.

    `--quick`: one run of a small demo with ODB on one rank.

    Raises:
        BenchmarkError: a training failed.
    """
    from benchmarks.plan.runs import METHODS, train_demo, train_real
    from benchmarks.work_dir import fresh
    from odb_factory.tools.plan.planner import DEFAULT_SAMPLES, make_plan
    from odb_factory.tools.plan.recipe import load_recipe

    place = fresh(options.work_dir)
    quick = options.quick
    samples, ranks, methods = (QUICK_SAMPLES, (1,), ("odb",)) if quick else (DEMO_SAMPLES, (1, 2), METHODS)
    runs = list(train_demo(place, samples, ranks, methods, options.deadline))
    if not quick:
        runs.append(train_real(place, 2, options.seed, options.deadline))
    for run in runs:
        made = make_plan(load_recipe(run.recipe), samples=None, world_size=run.ranks)
        add_run(rows, run, made, options.seed)
        add_parts(rows, run.data, made, options.draws, round(PART * made.observed.size), options.seed)
    if not quick:
        for count in (2, 8):
            print(f"Planning {options.conversations} conversations for {count} ranks ...", flush=True)
            made = plan_of_more(runs[-1], options.conversations, count, place / "more")
            add_parts(rows, "ShareGPT", made, options.draws, DEFAULT_SAMPLES, options.seed)


def plan_of_more(run: Run, conversations: int, ranks: int, place: Path) -> Plan:
    """The plan of the first `conversations`, whole, with the model and recipe of `run`."""
    from benchmarks.sharegpt import read_conversations, write_dataset
    from odb_factory.tools.plan.planner import make_plan
    from odb_factory.tools.plan.recipe import load_recipe

    write_dataset(read_conversations(conversations), place)
    return make_plan(load_recipe(run.recipe, [f"dataset_dir={place}"]), samples=None, world_size=ranks)


def add_run(rows: RowWriter, run: Run, made: Plan, seed: int) -> None:
    """A row for each method: figures of the run, and those of the plan behind `planned_`."""
    from benchmarks.plan.figures import audited, counted, planned

    pairs = [("odb", audited(run.odb, run.ranks), made.own)]
    if run.standard is not None:
        standard = made.standard
        pairs.insert(0, ("standard", counted(run.standard, samples=standard.samples, tokens=standard.tokens), standard))
    for method, real, prediction in pairs:
        guess = {f"planned_{name}": value for name, value in asdict(planned(prediction)).items()}
        _add(rows, "epoch", run.data, method, made, seed, {}, asdict(real) | guess)


def add_parts(rows: RowWriter, data: str, made: Plan, draws: int, count: int, seed: int) -> None:
    """A row for each method: errors of plans from `count` of the rows."""
    from benchmarks.plan.figures import errors_of_parts

    for method, figures in errors_of_parts(made, draws, count).items():
        settings = {"rows_read": count, "draws": draws}
        _add(rows, "part", data, method, made, seed, settings, figures)


def _add(
    rows: RowWriter,
    what: str,
    data: str,
    method: str,
    made: Plan,
    seed: int,
    settings: dict[str, Any],
    figures: dict[str, Any],
) -> None:
    rows.add(
        what=what,
        data=data,
        method=method,
        ranks=made.world_size,
        depth=made.config.depth if method == "odb" else None,
        budget=made.config.token_budget,
        seed=seed,
        settings={"rows": made.observed.size, **settings},
        figures=figures,
    )
