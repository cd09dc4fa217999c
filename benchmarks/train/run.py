"""Trains the same model on the same data with every way of batching, in turn, several times."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from pathlib import Path
from typing import Any

from benchmarks.batchers import public_is_installed
from benchmarks.errors import BenchmarkError
from benchmarks.launch import available_gib, train
from benchmarks.rows import RowWriter, read_rows
from benchmarks.train.setup import DRIVEN, FULL, METHODS, QUICK, Place, Prepared, Size

HELP = "end to end: whole trainings by every way of batching, same model, data and memory"
DATA = "sharegpt, first exchanges"
QUICK_METHODS = ("standard", "gmt", "odb")
GIB = 6.0
"""Memory that the two ranks and their workers take together, with room."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, metavar="NAME", help=f"some of {', '.join(METHODS)}; default: all"
    )
    parser.add_argument(
        "--missing-in",
        type=Path,
        metavar="FILE",
        help="rows of a run that was cut short: only what they lack is measured",
    )
    parser.add_argument("--repetitions", type=int, help="trainings of each method; default 3, quick 1")
    parser.add_argument("--conversations", type=int, help=f"default {FULL.conversations}, quick {QUICK.conversations}")
    parser.add_argument(
        "--head", type=int, help=f"width of the attention head, which makes attention dear; default {FULL.head}"
    )
    parser.add_argument(
        "--work-dir", type=Path, default=Path("outputs/train"), metavar="DIR", help="for model, data, logs; emptied"
    )
    parser.add_argument("--deadline", type=float, default=400, help="seconds that one training may take")


def measure(options: argparse.Namespace, rows: RowWriter) -> None:
    """A row for each training.

    Raises:
        BenchmarkError: what was asked for cannot be trained, or a training failed.
    """
    from benchmarks.train.figures import held_out_loss
    from benchmarks.train.setup import prepare, statistics_of

    size = size_of(options)
    methods = _methods(options)
    if available_gib() < GIB:
        raise BenchmarkError(f"about {GIB:.0f} GiB of memory are needed; end other programs.")
    place = Place(options.work_dir.resolve())
    print("Making tokenizer, data and model ...", flush=True)
    data = prepare(place, size, options.seed)
    shape = statistics_of(data.train.lengths, size.cutoff)
    print("Lengths: " + ", ".join(f"{name} {value:g}" for name, value in shape.items()), flush=True)
    settings = {
        **dataclasses.asdict(size),
        "lengths_mean": shape["mean"],
        "lengths_cv": shape["cv"],
        "lengths_at_cutoff": shape["share_at_cutoff"],
        "untrained_loss": round(held_out_loss(place.model, data.held_out, size.budget), 4),
    }
    earlier = read_rows([options.missing_in]) if options.missing_in else []
    done = {(row.method, row.settings["repetition"]) for row in earlier}
    count = options.repetitions or (1 if options.quick else 3)
    for repetition in range(1, count + 1):
        for method in methods:
            if (method, repetition) in done:
                continue
            try:
                figures = _run_twice(place, method, size, options.seed, data, options.deadline)
            except BenchmarkError as error:
                if method != "public":
                    raise
                print(f"{repetition}/{count} {method} failed: {error}", flush=True)
                figures = {"failed": str(error).split(";")[0].splitlines()[0]}
            row = rows.add(
                what="training",
                data=DATA,
                method=method,
                ranks=size.ranks,
                depth=size.depth if method in ("bmt", "public", "odb") else None,
                budget=size.budget,
                seed=options.seed,
                settings={**settings, "repetition": repetition},
                figures=figures,
            )
            if "failed" in figures:
                continue
            shown = ("samples_per_s", "padding", "ideal_share", "eval_loss", "runtime_s", "wall_s", "others_share")
            text = ", ".join(f"{name} {row.figures[name]:.3g}" for name in shown)
            print(f"{repetition}/{count} {method}: {text}", flush=True)


def _run_twice(place: Place, method: str, *more: Any) -> dict[str, object]:
    """`run`, once more where it fails: an hour of measuring must not end with one process that dies at its exit."""
    try:
        return run(place, method, *more)
    except BenchmarkError as error:
        print(f"  {method} failed, and is tried once more: {error}", flush=True)
        return run(place, method, *more)


def run(place: Place, method: str, size: Size, seed: int, data: Prepared, deadline: float) -> dict[str, object]:
    """Train with one method; returns its figures."""
    from benchmarks.train.figures import figures_of
    from benchmarks.train.setup import write_recipe

    for made in (place.output(method), place.cache(method)):
        shutil.rmtree(made, ignore_errors=True)
    write_recipe(place, method, size, seed)
    finished = train(
        place.recipe(method),
        name=method,
        ranks=size.ranks,
        output_dir=place.output(method),
        cache=place.cache(method),
        console=place.console(method),
        deadline=deadline,
        driver=("benchmarks.train.driver", method) if method in DRIVEN else (),
    )
    for process in finished.left_behind:
        print(f"  warning: {method} left this process behind: {process}", flush=True)
    return dict(figures_of(method, place.output(method), finished, data, size, seed))


def size_of(options: argparse.Namespace) -> Size:
    """How much is trained.

    Raises:
        BenchmarkError: Standard would train on some conversations twice.
    """
    size = QUICK if options.quick else FULL
    if options.conversations is not None:
        size = dataclasses.replace(size, conversations=options.conversations)
    if options.head is not None:
        if options.head < 2 or options.head % 2:
            raise BenchmarkError("--head must be an even number of at least 2.")
        size = dataclasses.replace(size, head=options.head)
    multiple = size.ranks * size.batch_size
    if size.conversations < 1 or size.conversations % multiple:
        raise BenchmarkError(
            f"--conversations must be a multiple of ranks x batch size = {multiple}, so that Standard trains on each "
            f"exactly once; take {max(1, -(-size.conversations // multiple)) * multiple}."
        )
    return size


def _methods(options: argparse.Namespace) -> list[str]:
    chosen = options.methods or (QUICK_METHODS if options.quick else METHODS)
    if "public" in chosen and not public_is_installed():
        print("public is left out: online-dynamic-batching is not installed (pip install 'odb-factory[bench]').")
        chosen = [method for method in chosen if method != "public"]
    return list(chosen)
