"""The same predictions under other assumptions: how much of a prediction is assumption."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from benchmarks.epochs import StepTime
from benchmarks.paper.cells import RATE, SPEEDUP, Cell
from benchmarks.paper.model import ATTENTION, BUDGET, OURS, TIME_MODELS, Assumptions, Model, Works
from benchmarks.rows import RowWriter

MEANS = (0.7, 1.0, 1.5)
BASE = "as in the tables"


def variants(base: Assumptions, means: Sequence[float] = MEANS) -> dict[str, list[Assumptions]]:
    """What is varied -> the assumptions of each variant; each stands for itself, the others stay."""
    datasets = ("ultrachat", "llava", "sharegpt4o", "mm_mix")
    grid = [dict(zip(datasets, factors, strict=True)) for factors in itertools.product(means, repeat=len(datasets))]

    def changed(name: str, *values: object) -> list[Assumptions]:
        return [dataclasses.replace(base, **{name: value}) for value in values]  # type: ignore[arg-type]

    return {
        BASE: [base],
        f"mean lengths, each by itself x {min(means)} to {max(means)}": changed("means", *grid),
        f"mean lengths, all x {min(means)}, x {max(means)}": changed("means", grid[0], grid[-1]),
        "longest sample x 0.75, x 1.5": changed("longest", 0.75, 1.5),
        f"D {base.depth // 4}": changed("depth", base.depth // 4),
        "Standard's batch 2": changed("batch_size", 2),
        "half, all of one node's constant per sample": changed("per_sample", 0.5, 1.0),
        "2B at 0.15, 0.5 of 8B's cost of a token": changed("small_model", 0.15, 0.5),
        f"budget {BUDGET * 2 // 3}, {BUDGET * 4 // 3} where not known": changed(
            "budget", BUDGET * 2 // 3, BUDGET * 4 // 3
        ),
    }


def add_sensitivity(
    cells: Sequence[Cell], works: Works, base: Assumptions, rows: RowWriter, means: Sequence[float] = MEANS
) -> None:
    """A row for each predicted number of the paper and each thing varied: the least and the most that it becomes."""
    for name, ratio in TIME_MODELS.items():
        _add_sensitivity(name, cells, works, dataclasses.replace(base, square_ratio=ratio), rows, means)


def _add_sensitivity(
    time_model: str,
    cells: Sequence[Cell],
    works: Works,
    base: Assumptions,
    rows: RowWriter,
    means: Sequence[float],
) -> None:
    standard = [cell for cell in cells if cell.may_be_fitted]
    wanted = [c for c in cells if c.low is not None and not c.may_be_fitted and len(c.settings) == 1]
    wanted = [c for c in wanted if c.quantity in (RATE, SPEEDUP)]
    for name, assumptions in variants(base, means).items():
        print(f"sensitivity {time_model}: {name}", flush=True)
        predicted = []
        for assume in assumptions:
            model = Model(standard, works, assume)
            predicted.append([model.predict(cell)[0] for cell in wanted])
        for cell, values in zip(wanted, zip(*predicted, strict=True), strict=True):
            setting = cell.settings[0]
            rows.add(
                what="sensitivity",
                data=setting.dataset,
                method=cell.method,
                settings={
                    "model": setting.model,
                    "nodes": setting.nodes,
                    "source": setting.source,
                    "quantity": cell.quantity,
                    "time_model": time_model,
                    "varied": name,
                    "variants": len(assumptions),
                },
                figures={"paper": cell.low, "low": min(values), "high": max(values)},
            )


def add_open(cells: Sequence[Cell], works: Works, base: Assumptions, rows: RowWriter, points: int = 9) -> None:
    """What each Standard row of 8B leaves open by itself: the speed-up as a function of the constant.

    With the constant given, a row of Standard fixes what a token of its data costs, whatever the mean length is; only
    samples per micro-batch depend on that. Attention is taken as the model's shape has it.
    """
    large = [c for c in cells if c.may_be_fitted and c.settings[0].model == "8B"]
    seconds = {c: c.settings[0].ranks * base.batch_size / float(c.low or 0.0) for c in large}
    most = min(seconds.values())
    for cell in large:
        setting = cell.settings[0]
        given, online = (works.of(setting.dataset, setting.ranks, method, base) for method in ("standard", "odb"))
        _, tokens, squares = given.features()
        for number in range(points):
            constant = 0.9 * most * number / (points - 1)
            per_token = (seconds[cell] - constant) / (tokens + ATTENTION * squares)
            time = StepTime(constant, per_token, ATTENTION * per_token)
            paper = next(c.low for c in cells if c.settings == cell.settings and c.quantity == SPEEDUP)
            rows.add(
                what="open",
                data=setting.dataset,
                method="odb",
                settings={"model": setting.model, "nodes": setting.nodes, "constant_s": round(constant, 4)},
                figures={"paper": paper, "speedup": online.rate(time) / given.rate(time)},
            )


def add_attention(cells: Sequence[Cell], works: Works, base: Assumptions, rows: RowWriter) -> None:
    """Ours over the paper's protocol, 8B on one node, for given costs of attention.

    The paper pairs the ranks' micro-batches by length, ours evens them out by padded tokens and attention, which it
    takes for as costly as `ATTENTION_LENGTH` says, whatever it costs.
    """
    standard = [cell for cell in cells if cell.may_be_fitted]
    for ratio in (0.0, ATTENTION, 2 * ATTENTION, 5 * ATTENTION, 10 * ATTENTION):
        model = Model(standard, works, dataclasses.replace(base, square_ratio=ratio))
        for cell in model.fits["8B, 1 node"].cells:
            setting = cell.settings[0]
            rows.add(
                what="attention",
                data=setting.dataset,
                method=OURS,
                settings={"model": setting.model, "nodes": setting.nodes, "square_ratio": ratio},
                figures={"over_paper": model.rate(setting, OURS) / model.rate(setting, "odb")},
            )
