"""Tables and picture of `quality`: means and spread over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.rows import Row
from benchmarks.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Quality: what is learnt from the same samples"

HEAD = ["method", "seeds", "updates", "/ Standard", "samples per update", "learning rate", "evaluation loss"]


def tables(rows: Sequence[Row]) -> str:
    """Scores by method; learning rates of Standard, where they were tried."""
    parts = []
    scores = by_method(rows)
    if scores:
        tasks = _tasks(rows)
        head = [*HEAD, "exact answers", *(f"of these {task}" for task in tasks)]
        lines = [_line(method, runs, scores.get("standard", []), tasks) for method, runs in scores.items()]
        trained = next((row.settings for row in rows if row.what == "score"), {})
        parts.append(
            f"{trained.get('samples')} samples, {trained.get('epochs')} epochs, {trained.get('held_out')} held-out "
            f"questions, {trained.get('ranks')} ranks, at most {rows[0].budget} padded tokens in a micro-batch; mean "
            f"± standard deviation over seeds:\n\n{table(head, lines)}"
        )
    tuned = sorted(
        (row for row in rows if row.what == "tuning"), key=lambda row: _number(row.settings["learning_rate"])
    )
    if tuned:
        lines = [
            [f"{row.settings['learning_rate']:g}", _loss([row]), *(_share([row], key) for key in _exact(rows))]
            for row in tuned
        ]
        head = ["learning rate", "evaluation loss", "exact answers", *(f"of these {task}" for task in _tasks(rows))]
        parts.append(f"Standard with other learning rates, one seed:\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The scored trainings, in the order of their first row."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.what == "score":
            found.setdefault(row.method, []).append(row)
    return found


def _line(method: str, runs: list[Row], standard: list[Row], tasks: list[str]) -> list[str]:
    scores = [_loss(runs), *(_share(runs, f"exact_{task}") for task in ("match", *tasks))]
    if "updates" not in runs[0].figures:
        return [method, str(len(runs)), "0", "", "", "", *scores]
    updates = _mean(runs, "updates")
    ratio = f"{updates / _mean(standard, 'updates'):.2f}" if standard else ""
    rate = statistics.fmean(_number(row.settings["learning_rate"]) for row in runs)
    return [
        method,
        str(len(runs)),
        f"{updates:.0f}",
        ratio,
        f"{_mean(runs, 'samples_per_update'):.1f}",
        f"{rate:.2g}",
        *scores,
    ]


def _tasks(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row.figures if name.startswith("exact_"))
    return [name.removeprefix("exact_") for name in names if name != "exact_match"]


def _exact(rows: Sequence[Row]) -> list[str]:
    return [f"exact_{task}" for task in ("match", *_tasks(rows))]


def _number(value: Any) -> float:
    return float(value)


def _values(rows: Sequence[Row], key: str) -> list[float]:
    return [_number(row.figures[key]) for row in rows]


def _mean(rows: Sequence[Row], key: str) -> float:
    return statistics.fmean(_values(rows, key))


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _loss(rows: Sequence[Row]) -> str:
    values = _values(rows, "eval_loss")
    return f"{statistics.fmean(values):.3f}" + (f" ± {spread(values):.3f}" if len(values) > 1 else "")


def _share(rows: Sequence[Row], key: str) -> str:
    values = [100 * value for value in _values(rows, key)]
    return f"{statistics.fmean(values):.1f}" + (f" ± {spread(values):.1f}" if len(values) > 1 else "") + " %"


def plot(rows: Sequence[Row]) -> Figure:
    """Evaluation loss and exact answers against updates: a point for each training."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for method, runs in by_method(rows).items():
        runs = [row for row in runs if "updates" in row.figures]
        if runs:
            axes[0].scatter(_values(runs, "updates"), _values(runs, "eval_loss"), label=method)
            axes[1].scatter(_values(runs, "updates"), [100 * v for v in _values(runs, "exact_match")], label=method)
    for axis, title in zip(axes, ("evaluation loss", "exact answers (%)"), strict=True):
        axis.set_xlabel("updates after the same samples")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    figure.tight_layout()
    return figure
