"""Tables and picture of `first_step`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.rows import Row
from benchmarks.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "First step: stock preprocessing against the online path"

NAMES = {"first step": "up to the first step", "epoch": "one epoch"}
HEAD = ["method", "first step (s)", "/ Standard", "CPU s", "peak RSS (GiB)", "cache (MB)", "decodes", "opens"]


def tables(rows: Sequence[Row]) -> str:
    """A table for each data set: medians over repetitions, ratios within the run."""
    parts = []
    for data, methods in by_data(rows).items():
        first = next(iter(methods.values()))[0]
        images = any("decodes_per_sample" in row.figures for runs in methods.values() for row in runs)
        standard = methods.get("standard")
        lines = [_line(method, runs, standard, images) for method, runs in methods.items()]
        head = HEAD if images else HEAD[:-2]
        per_sample = "; decodes and opens of image files per sample" if images else ""
        text = f"**{data}**, {first.settings.get('samples'):,} samples, {NAMES.get(first.what, first.what)}"
        parts.append(f"{text}{per_sample}:\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def by_data(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Data -> method -> repetitions, in the order of the rows."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault(row.data, {}).setdefault(row.method, []).append(row)
    return found


def median(runs: Sequence[Row], figure: str) -> float:
    """Over repetitions."""
    return statistics.median(float(row.figures[figure]) for row in runs)  # type: ignore[arg-type]


def _line(method: str, runs: list[Row], standard: list[Row] | None, images: bool) -> list[str]:
    seconds = [float(row.figures["first_step_s"]) for row in runs]  # type: ignore[arg-type]
    spread = f" ({min(seconds):.1f} to {max(seconds):.1f})" if len(seconds) > 1 else ""
    ratio = f"{median(runs, 'first_step_s') / median(standard, 'first_step_s'):.2f}" if standard else ""
    cells = [
        method,
        f"{statistics.median(seconds):.1f}{spread}",
        ratio,
        f"{median(runs, 'cpu_s'):.0f}",
        f"{median(runs, 'peak_rss_gib'):.2f}",
        f"{median(runs, 'cache_mb'):,.1f}",
    ]
    if images:
        cells += [f"{median(runs, figure):.2f}" for figure in ("decodes_per_sample", "opens_per_sample")]
    return cells


def plot(rows: Sequence[Row]) -> Figure:
    """Seconds to the first step, a bar for each method."""
    import matplotlib.pyplot as plt

    found = by_data(rows)
    figure, axes = plt.subplots(1, len(found), figsize=(5.5 * len(found), 3), squeeze=False)
    for axis, (data, methods) in zip(axes[0], found.items(), strict=True):
        names = list(methods)[::-1]
        bars = axis.barh(names, [median(methods[name], "first_step_s") for name in names])
        axis.bar_label(bars, fmt="%.0f", padding=2)
        axis.set_xlabel("seconds from the command to the end of the first step")
        axis.set_title(f"{data}, {next(iter(methods.values()))[0].settings.get('samples'):,} samples")
    figure.tight_layout()
    return figure
