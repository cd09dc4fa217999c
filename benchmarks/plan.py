"""What `odb-factory plan` predicts against what `llamafactory-cli train` then does, by the audit of the runs.

    python -m benchmarks.plan [--real-input DIR]

The demo's quickstart recipe, with and without ODB, is trained for one epoch on one and two ranks. `DIR` is the work
directory of a finished `benchmarks.real_input`, whose two runs on real conversations are compared, too. How far plans
from a part of the rows are off is counted for all of these, and for more of these conversations without a run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.errors import BenchmarkError
from benchmarks.launch import train
from benchmarks.sharegpt import read_conversations, write_dataset
from benchmarks.tables import table
from odb_factory.demo import make_demo
from odb_factory.llamafactory.recipe import load_recipe
from odb_factory.plan.compare import Comparison
from odb_factory.plan.observed import Observed
from odb_factory.plan.pipeline import draw
from odb_factory.plan.planner import DEFAULT_SAMPLES, Plan, make_plan
from odb_factory.plan.prediction import Prediction

ROOT = Path(__file__).resolve().parent.parent
PART = 0.25
"""Share of the rows that a plan from a sample reads."""


@dataclass(frozen=True)
class Run:
    """A finished training of one epoch."""

    data: str
    ranks: int
    recipe: Path
    """Of ODB."""
    odb: Path
    standard: Path
    """Output directories."""


@dataclass(frozen=True)
class Figures:
    """What is compared. `ideal` is missing where the run does not say what each rank ran."""

    steps: int
    samples_per_step: float
    padding: float
    padded_tokens: int
    ideal: float | None

    @classmethod
    def predicted(cls, prediction: Prediction) -> Figures:
        return cls(
            prediction.steps,
            prediction.samples_per_step,
            prediction.padding,
            prediction.padded_tokens,
            prediction.ideal_share,
        )


def audited(run: Run) -> Figures:
    """Of ODB, out of its audit files."""
    audits = [_lines(run.odb / f"odb_audit.rank{rank}.jsonl") for rank in range(run.ranks)]
    steps = list(zip(*audits, strict=True))
    real = sum(sum(line["lengths"]) for step in steps for line in step)
    padded = [[line["padded_tokens"] for line in step] for step in steps]
    total = sum(map(sum, padded))
    samples = sum(len(line["indices"]) for step in steps for line in step)
    ideal = real / (run.ranks * sum(map(max, padded)))
    return Figures(len(steps), samples / len(steps), 1 - real / total, total, ideal)


def counted(run: Run, planned: Prediction) -> Figures:
    """Of Standard, out of the trainer's own counts of steps and padded tokens."""
    state = json.loads((run.standard / "trainer_state.json").read_text(encoding="utf-8"))
    padded, steps = state["num_input_tokens_seen"], state["global_step"]
    return Figures(steps, planned.samples / steps, 1 - planned.tokens / padded, padded, None)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train_demo(work: Path, deadline: float, reuse: bool) -> Iterator[Run]:
    """Make the demo and train its quickstart recipe for an epoch: on one and two ranks, with ODB and without."""
    if not reuse:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        make_demo(work / "demo")
    demo = work / "demo"
    for ranks, name in ((1, "quickstart"), (2, "quickstart_2rank")):
        common = yaml.safe_load((ROOT / "yaml_recipes" / f"{name}.yaml").read_text(encoding="utf-8"))
        common |= {"model_name_or_path": str(demo / "model"), "dataset_dir": str(demo / "data"), "num_train_epochs": 1}
        common |= {"include_num_input_tokens_seen": "all", "logging_steps": 1}
        stock = {key: value for key, value in common.items() if not key.startswith("odb")}
        places = {}
        for method, recipe in (("odb", common), ("standard", stock)):
            place = places[method] = work / f"{name}_{method}"
            file = place.with_suffix(".yaml")
            if reuse and (place / "trainer_state.json").is_file():
                continue
            file.write_text(yaml.safe_dump(recipe | {"output_dir": str(place)}), encoding="utf-8")
            print(f"Training {file.name} ...", file=sys.stderr, flush=True)
            with_cache = {"cache": work / f"cache_{name}_{method}", "console": place.with_suffix(".log")}
            train(file, name=file.stem, ranks=ranks, output_dir=place, deadline=deadline, **with_cache)
        yield Run("demo", ranks, places["odb"].with_suffix(".yaml"), places["odb"], places["standard"])


def real_run(work: Path, odb: str) -> Run:
    """The two runs of a finished `benchmarks.real_input`."""
    recipes = [work / f"{name}.yaml" for name in (odb, "standard")]
    for recipe in recipes:
        if not recipe.is_file():
            raise BenchmarkError(f"{work} holds no {recipe.name}; make it with python -m benchmarks.real_input.")
    outputs = [Path(yaml.safe_load(recipe.read_text(encoding="utf-8"))["output_dir"]) for recipe in recipes]
    for output in outputs:
        if not (output / "trainer_state.json").is_file():
            raise BenchmarkError(f"{output} holds no finished run; make it with python -m benchmarks.real_input.")
    return Run("ShareGPT", len(list(outputs[0].glob("odb_audit.rank*.jsonl"))), recipes[0], *outputs)


HEAD = ["data", "ranks", "batching", "steps", "samples a step", "padding", "padded tokens", "share of ideal time"]


def rows(run: Run, made: Plan) -> list[list[Any]]:
    """Run and plan, side by side."""
    pairs = [
        ("Standard", counted(run, made.standard), Figures.predicted(made.standard)),
        ("ODB", audited(run), Figures.predicted(made.own)),
    ]
    found = []
    for name, real, planned in pairs:
        ideal = "-" if real.ideal is None else f"{real.ideal:.4f}"
        cells = [
            f"{real.steps} / {planned.steps}",
            f"{real.samples_per_step:.3f} / {planned.samples_per_step:.3f}",
            f"{real.padding:.4%} / {planned.padding:.4%}",
            f"{real.padded_tokens:,} / {planned.padded_tokens:,}",
            f"{ideal} / {planned.ideal:.4f}",
        ]
        found.append([run.data, run.ranks, name, *cells])
    return found


PART_HEAD = ["data", "ranks", "batching", "rows read", "steps", "samples a step", "padding", "share of ideal time"]


def part_rows(data: str, whole: Plan, draws: int, count: int) -> list[list[Any]]:
    """Errors of plans from `count` of the rows that `whole` read: the mean of their sizes, and the largest."""
    parts = [_part(whole, count, seed) for seed in range(draws)]
    config = whole.config
    found = []
    for label, true, guesses in (
        ("Standard", whole.standard, [part.standard() for part in parts]),
        ("ODB", whole.own, [part.online(config.token_budget, config.depth) for part in parts]),
    ):
        cells = []
        for field in ("steps", "samples_per_step", "padding", "ideal_share"):
            errors = [abs(getattr(guess, field) - getattr(true, field)) for guess in guesses]
            if field != "padding":
                errors = [error / getattr(true, field) for error in errors]
            unit = " points" if field == "padding" else " %"
            cells.append(f"{100 * sum(errors) / draws:.1f}, at most {100 * max(errors):.1f}{unit}")
        found.append([data, whole.world_size, label, f"{count:,} of {whole.observed.size:,}", *cells])
    return found


def _part(whole: Plan, count: int, seed: int) -> Comparison:
    """As if only `count` rows had been drawn; each sample is processed by itself, so none is processed again."""
    observed = whole.observed
    drawn = set(draw(observed.size, count, seed))
    part = Observed(
        observed.size,
        tuple(meta for meta in observed.metas if meta.index in drawn),
        tuple(drop for drop in observed.dropped if drop.index in drawn),
    )
    config = dataclasses.replace(whole.config, seed=seed)
    return Comparison(part, config, whole.fixed, world_size=whole.world_size, packable=False)


def plan_of_more(run: Run, count: int, ranks: int, place: Path) -> Plan:
    """Of the first `count` conversations of the package that `run` took some of, with its model and recipe."""
    write_dataset(read_conversations(count), place)
    return make_plan(load_recipe(run.recipe, [f"dataset_dir={place}"]), samples=None, world_size=ranks)


def report(runs: list[Run], more: list[Plan], draws: int) -> None:
    """Print both tables."""
    plans = [make_plan(load_recipe(run.recipe), samples=None, world_size=run.ranks) for run in runs]
    print("One epoch, run / planned, all rows read:\n")
    print(table(HEAD, [row for run, made in zip(runs, plans, strict=True) for row in rows(run, made)]))
    parts = [("ShareGPT", made, DEFAULT_SAMPLES) for made in more]
    parts += [(run.data, made, round(PART * made.observed.size)) for run, made in zip(runs, plans, strict=True)]
    print(
        f"\nPlans from a part of the rows, {draws} draws, against the plan from all rows: mean error, and the largest"
    )
    print("(relative; padding in percentage points):\n")
    print(table(PART_HEAD, [row for name, made, count in parts for row in part_rows(name, made, draws, count)]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work-dir", type=Path, default=Path("outputs/plan"), help="for the demo's runs; emptied first"
    )
    parser.add_argument("--reuse", action="store_true", help="keep what an earlier call trained there")
    parser.add_argument("--real-input", type=Path, help="work directory of a finished benchmarks.real_input")
    parser.add_argument("--conversations", type=int, default=6000, help="with --real-input: so many are planned, too")
    parser.add_argument("--odb", default="odb", help="name of its recipe with ODB (default: odb)")
    parser.add_argument("--draws", type=int, default=10, help="plans from a part of the rows")
    parser.add_argument("--deadline", type=float, default=600, help="seconds that a training of the demo may take")
    options = parser.parse_args()
    work = options.work_dir.resolve()
    try:
        runs = [] if options.real_input is None else [real_run(options.real_input.resolve(), options.odb)]
        runs += train_demo(work, options.deadline, options.reuse)
        ranks = (2, 8) if options.real_input is not None else ()
        more = [plan_of_more(runs[0], options.conversations, count, work / "more") for count in ranks]
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
    report(runs, more, options.draws)


if __name__ == "__main__":
    main()
