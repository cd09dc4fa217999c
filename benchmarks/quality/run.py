"""Trains every method on the same samples, for several seeds, and scores what was learnt."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.quality.methods import OWN, Size, recipe
from benchmarks.quality.task import Sample, make_model, make_samples, write_dataset
from benchmarks.rows import RowWriter

HELP = "loss and exact answers on held-out questions after the same samples, for several seeds"

FULL = Size(samples=2560, held_out=400, epochs=3)
QUICK = Size(samples=64, held_out=16, epochs=1, layers=1, hidden=32)
QUICK_METHODS = ("standard", "odb")
RATE = 1.5e-3
"""Learning rate of Standard; the other methods have it, too. Of 0.0008, 0.0015, 0.003 and 0.006 it gave the least loss
in single-process trainings with 16 samples an update; `--tune` tries others in the benchmark itself, and scores them on
questions that are neither trained on nor scored otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each method; --quick: 1")
    parser.add_argument("--methods", nargs="+", choices=tuple(OWN), default=tuple(OWN), metavar="METHOD")
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate of Standard")
    parser.add_argument(
        "--tune", type=float, nargs="+", default=(), metavar="RATE", help="first train Standard with these, too"
    )
    parser.add_argument("--epochs", type=int, help=f"passes over the samples (default: {FULL.epochs})")
    parser.add_argument("--work-dir", type=Path, default=Path("outputs/benchmarks/quality"), help="emptied first")
    parser.add_argument("--deadline", type=float, default=600, help="seconds that a training may take")


def measure(options: argparse.Namespace, rows: RowWriter) -> None:
    """A row for each training, and one for each model before it.

    Raises:
        BenchmarkError: a training failed, or did not train on each sample once an epoch.
    """
    from benchmarks.work_dir import fresh

    size = QUICK if options.quick else FULL
    if options.epochs:
        size = replace(size, epochs=options.epochs)
    methods = QUICK_METHODS if options.quick else options.methods
    if "odb scaled rate" in methods and "odb" not in methods:
        raise BenchmarkError("odb scaled rate takes its learning rate from what odb needs; add odb to --methods.")
    seeds = [options.seed + number for number in range(1 if options.quick else options.seeds)]
    place = fresh(options.work_dir)
    samples, held_out, tuning = make_samples(size.samples, size.held_out, options.seed)
    write_dataset(samples, place / "data")
    for seed in seeds:
        make_model(place / f"model_{seed}", seed=seed, layers=size.layers, hidden=size.hidden)
    bench = Bench(place, size, held_out, rows, options.deadline)
    for rate in options.tune:
        replace(bench, held_out=tuning).train("standard", seeds[0], rate, what="tuning")
    for seed in seeds:
        bench.untrained(seed)
        for method in sorted(methods, key=tuple(OWN).index):
            bench.train(method, seed, options.rate)


@dataclass(frozen=True)
class Bench:
    """The trainings of one invocation."""

    place: Path
    size: Size
    held_out: Sequence[Sample]
    rows: RowWriter
    deadline: float

    def untrained(self, seed: int) -> None:
        """The score of the model before training."""
        self._add("score", "untrained", seed, {"learning_rate": None}, self._score(self.place / f"model_{seed}"))

    def train(self, method: str, seed: int, rate: float, what: str = "score") -> None:
        """Train, score, write the row."""
        from benchmarks.launch import train

        name = f"{method} seed {seed}" if what == "score" else f"{method} rate {rate:g}"
        run = name.replace(" ", "_").replace(".", "_")
        output = self.place / run
        values = recipe(
            self.place, method, self.size, output=output, seed=seed, rate=rate, more_samples=self._more_samples()
        )
        file = output.with_suffix(".yaml")
        file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")  # JSON is YAML
        print(f"Training: {name} ...", flush=True)
        finished = train(
            file,
            name=name,
            ranks=self.size.ranks,
            output_dir=output,
            cache=self.place / "caches" / run,
            console=output.with_suffix(".log"),
            deadline=self.deadline,
        )
        trained = read_training(output, self.size)
        times = {"wall_s": finished.wall_s, "cpu_s": finished.cpu_s, "others_share": finished.others_share}
        figures = trained | times | self._score(output)
        self._add(what, method, seed, {"learning_rate": values["learning_rate"]}, figures)
        print(
            f"  {figures['updates']} updates, loss {figures['eval_loss']:.4f}, exact {figures['exact_match']:.1%} "
            f"({finished.wall_s:.0f} s)",
            flush=True,
        )

    def _more_samples(self) -> float:
        """Samples in an update of ODB / of Standard, in the trainings so far; 1 before any."""
        found = [row.figures["samples_per_update"] for row in self.rows.rows if row.method == "odb"]
        return statistics.fmean(found) / self.size.samples_per_update if found else 1.0  # type: ignore[arg-type]

    def _score(self, model: Path) -> dict[str, float]:
        from benchmarks.quality.score import evaluate

        score = evaluate(model, self.held_out)
        exact = {f"exact_{task}": share for task, share in score.exact.items()}
        return {"eval_loss": score.loss, "exact_match": score.exact_match, **exact}

    def _add(self, what: str, method: str, seed: int, settings: dict[str, Any], figures: dict[str, Any]) -> None:
        self.rows.add(
            what=what,
            data="count and largest",
            method=method,
            ranks=self.size.ranks,
            budget=self.size.budget,
            seed=seed,
            settings=asdict(self.size) | settings,
            figures=figures,
        )


def read_training(output: Path, size: Size) -> dict[str, float]:
    """Updates, samples in an update, training loss and seconds of a finished training.

    Raises:
        BenchmarkError: it was not `size.epochs` epochs.
    """
    state = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))
    results = json.loads((output / "all_results.json").read_text(encoding="utf-8"))
    if round(state["epoch"], 6) != size.epochs:
        raise BenchmarkError(f"{output.name} trained {state['epoch']} epochs instead of {size.epochs}.")
    updates = state["global_step"]
    return {
        "updates": updates,
        "samples_per_update": size.epochs * size.samples / updates,
        "train_loss": results["train_loss"],
        "train_s": results["train_runtime"],
    }
