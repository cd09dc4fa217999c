"""The paper's tables beside what is measured here and what a model of step time predicts from Standard alone."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.rows import Row, RowWriter, hardware_in_words, read_rows

HELP = "the paper's tables: paper, measured here, and predicted from Standard's rows"
MEASURED = Path(__file__).parent.parent / "results" / "paper_measured.jsonl"
WAYS = ("standard", "odb", "sorted", "packing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depth", type=int, default=1024, help="outstanding depth D that is simulated")
    parser.add_argument(
        "--measured",
        type=Path,
        action="append",
        metavar="FILE",
        help="rows of earlier --run; results/paper_measured.jsonl if it is there",
    )
    run = parser.add_argument_group("measure a cell for real, instead of the tables")
    run.add_argument("--run", type=Path, metavar="RECIPE", help="train this recipe, as --as says, and write its rows")
    run.add_argument("--as", dest="ways", nargs="+", choices=WAYS, default=["standard", "odb"], help="ways to train it")
    run.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="fields of the recipe, as on the CLI")
    run.add_argument("--ranks", type=int, help="default: all GPUs, or 1 on a CPU")
    run.add_argument("--deadline", type=float, default=48.0, help="hours that one training may take")


def measure(options: argparse.Namespace, rows: RowWriter) -> None:
    """Either the rows of a real run (`--run`), or those of all tables."""
    if options.run is not None:
        _measure_cell(options, rows)
        return
    earlier = options.measured or ([MEASURED] if MEASURED.exists() else [])
    missing = [file for file in earlier if not file.is_file()]
    if missing:
        raise BenchmarkError(f"there are no rows in {missing[0]}; make them with --run RECIPE --json {missing[0]}.")
    for row in read_rows(earlier):
        _repeat(row, rows)
    _predict(options, rows)


def _measure_cell(options: argparse.Namespace, rows: RowWriter) -> None:
    from benchmarks.paper.cell_run import prepare, run_cell

    job = prepare(options.run, options.set, options.ranks)
    run_cell(
        job,
        list(dict.fromkeys(options.ways)),
        options.set,
        folder=options.json.parent / "paper_runs" / options.run.stem,
        deadline=options.deadline * 3600,
        seed=options.seed,
        rows=rows,
    )


def _repeat(row: Row, rows: RowWriter) -> None:
    """A measured row among this run's, with the hardware, the command and the day that it was measured with.

    Raises:
        BenchmarkError: it is not a row of this benchmark's `--run`.
    """
    if (row.benchmark, row.what) != ("paper", "cell"):
        raise BenchmarkError(
            f"a row {row.benchmark}, {row.what} is no measured cell; give --measured files of `paper --run RECIPE`."
        )
    known = {"hardware": hardware_in_words(row), "command": row.command, "date": row.date}
    values = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    for name in ("benchmark", "command", "versions", "hardware", "date"):
        del values[name]
    rows.add(**values | {"settings": {**row.settings, **known}})


def _predict(options: argparse.Namespace, rows: RowWriter) -> None:
    from benchmarks.paper.ablations import add_ablations
    from benchmarks.paper.cells import cells
    from benchmarks.paper.model import TIME_MODELS, Assumptions, Model, Works
    from benchmarks.paper.predict import add_assumptions, add_cells, add_claims, add_fits, add_quality, add_records
    from benchmarks.paper.sensitivity import MEANS, add_attention, add_open, add_sensitivity

    known = cells()
    standard = [cell for cell in known if cell.may_be_fitted]
    works = Works(options.seed)
    base = Assumptions(depth=options.depth)
    part = dataclasses.replace(base, most_samples=60_000)
    if options.quick:
        base = part = dataclasses.replace(base, most_samples=6_000, depth=min(options.depth, 128))
    print(f"cells: {len(known)}, {len(standard)} of them Standard's", flush=True)
    add_assumptions(works, base, rows)
    models = {
        name: Model(standard, works, dataclasses.replace(base, square_ratio=ratio))
        for name, ratio in TIME_MODELS.items()
    }
    for name, model in models.items():
        add_fits(name, model, rows)
        add_cells(name, model, known, rows)
    add_quality(rows)
    add_records(rows)
    add_claims(rows)
    add_sensitivity(known, works, part, rows, (0.7, 1.5) if options.quick else MEANS)
    add_open(known, works, part, rows)
    add_attention(known, works, part, rows)
    for name, ratio in TIME_MODELS.items():
        models[name] = Model(standard, works, dataclasses.replace(part, square_ratio=ratio))
    add_ablations(models, works, rows, quick=options.quick)
